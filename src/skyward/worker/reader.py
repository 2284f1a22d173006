"""The reader: reads the client's frames, between tasks on the main thread, else on its own.

Handing a task from a reading thread to a running one costs as much as a short task itself (a
wake-up and two lock hand-overs, 40-60 us measured), so the thread that runs tasks also reads while
it is idle. A second thread reads only while a task takes long, or waits for the client.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

LASTS_SECONDS = 0.01
"""After a task has run for so long, the second thread begins to read."""
PAUSE_SECONDS = 0.5
"""After so long without a new task, the second thread sleeps until there is one."""

T = TypeVar("T")


class TaskReader(Generic[T]):
    """Two threads take turns to read: the thread that holds the lock reads. Tasks are queued."""

    def __init__(
        self, read_one: Callable[[], None], elsewhere: Callable[[], bool] = lambda: False
    ) -> None:
        """`elsewhere` says whether a third thread may put a task at any time."""
        self._read_one = read_one
        self._elsewhere = elsewhere
        self._tasks: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._hurry = threading.Event()
        self._begun = 0
        self._running = False
        self._handed_over = False
        """Whether the main thread waits for a task, and leaves reading to the second thread."""
        self._asleep = False
        threading.Thread(target=self._stand_by, name="skyward-reader", daemon=True).start()

    def put(self, task: T) -> None:
        """Queue a task; the thread that reads calls this."""
        self._tasks.put(task)

    def next(self) -> T:
        """The next task; reads until there is one, unless the second thread reads."""
        self._running = False
        while True:
            # No other thread takes tasks; and an exception would take longer than this look.
            if not self._tasks.empty():
                task = self._tasks.get()
                break
            if self._turn.acquire(blocking=False):
                try:
                    while self._tasks.empty() and not self._elsewhere():
                        self._read_one()
                finally:
                    self._turn.release()
                if not self._tasks.empty():
                    continue
            # Even if the second thread reads now: it may be about to stop.
            self._handed_over = True
            self._hurry.set()
            task = self._tasks.get()
            self._handed_over = False
            break
        self._begun += 1
        self._running = True
        if self._asleep:
            self._asleep = False
            self._hurry.set()
        return task

    def hurry(self) -> None:
        """Have the second thread read now: the running task is about to wait for the client."""
        self._hurry.set()

    def _stand_by(self) -> None:
        seen, seen_at = self._begun, time.monotonic()
        while True:
            hurried = self._hurry.wait(LASTS_SECONDS)
            self._hurry.clear()
            now = time.monotonic()
            if self._begun != seen and not hurried:
                seen, seen_at = self._begun, now
            elif (self._running or self._handed_over) and self._turn.acquire(blocking=False):
                try:
                    # Read while this task runs, even if other tasks wait: the client may cancel the
                    # task, or send credit. Then read until the next task, and return the turn.
                    begun = self._begun
                    while self._tasks.empty() or (self._running and self._begun == begun):
                        self._read_one()
                finally:
                    self._turn.release()
                seen, seen_at = self._begun, time.monotonic()
            elif now - seen_at > PAUSE_SECONDS:
                self._asleep = True
                if not self._running:
                    self._hurry.wait()
                    self._hurry.clear()
                self._asleep = False
                seen, seen_at = self._begun, time.monotonic()
