"""Two threads take turns at reading, and never both believe that it is the other's."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from skyward.worker.reader import TaskReader

Eventually = Callable[..., None]


class LateRelease:
    """A lock that the second thread takes long to give back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        if threading.current_thread().name == "skyward-reader":
            time.sleep(0.05)
        self._lock.release()


class Worker:
    """Does what it reads: sleeps for so long."""

    def __init__(self, elsewhere: Callable[[], bool] = lambda: False) -> None:
        self.frames: queue.Queue[float] = queue.Queue()
        self.done: list[float] = []
        self.reader: TaskReader[float] = TaskReader(self._read, elsewhere)

    def _read(self) -> None:
        self.reader.put(self.frames.get())

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self.reader.next()
            time.sleep(job)
            self.done.append(job)


def test_somebody_reads_on_when_the_other_is_late_to_give_the_turn_back(
    eventually: Eventually,
) -> None:
    worker = Worker()
    worker.reader._turn = LateRelease()  # type: ignore[assignment]
    worker.start()
    # The first lasts, so the second thread reads the next, which is short.
    for job in (0.05, 0.021, 0.0):
        worker.frames.put(job)
        time.sleep(0.03)
    for _ in range(3):
        worker.frames.put(0.0)
        time.sleep(0.1)
    eventually(lambda: len(worker.done) == 6)


def test_a_job_from_another_thread_does_not_wait_for_a_frame(eventually: Eventually) -> None:
    waiting = threading.Event()
    worker = Worker(waiting.is_set)
    worker.start()
    worker.frames.put(0.0)
    eventually(lambda: worker.done == [0.0])
    waiting.set()
    worker.frames.put(0.0)  # what has to wait for something else
    eventually(lambda: len(worker.done) == 2)
    worker.reader.put(0.001)
    eventually(lambda: len(worker.done) == 3)
    waiting.clear()
    worker.frames.put(0.0)
    eventually(lambda: len(worker.done) == 4)
