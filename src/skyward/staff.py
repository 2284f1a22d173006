"""A staff: threads that run actions, as many as there is work for and at most so many.

A thread that has had nothing to do for a second ends. So a process that has started a thousand
nodes keeps none of the threads that started them.
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

IDLE_SECONDS = 1.0
"""How long a thread without work waits for some."""

P = ParamSpec("P")
T = TypeVar("T")

_staffs: weakref.WeakSet[Staff] = weakref.WeakSet()


class Staff(ThreadPoolExecutor):
    """Runs actions on daemon threads; an event loop can have it as its default executor."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._reset()
        _staffs.add(self)

    def _reset(self) -> None:
        self._actions: deque[Callable[[], None]] = deque()
        self._timed: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._present = self._busy = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on a thread; the future has its result."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as problem:
                future.set_exception(problem)
            else:
                future.set_result(result)

        with self._changed:
            self._actions.append(run)
            self._provide_thread()
        return future

    def run(self, action: Callable[[], None]) -> None:
        """Run an action on a thread; an exception, which is an error of Skyward's, is shown."""
        with self._changed:
            self._actions.append(action)
            self._provide_thread()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action after so many seconds; until then, it takes no thread of its own."""
        with self._changed:
            heapq.heappush(self._timed, (time.monotonic() + seconds, next(self._count), action))
            self._provide_thread()

    def allow(self, most: int) -> None:
        """Have at most so many threads from now on; those that are busy finish their work."""
        with self._changed:
            self._most = most
            if self._actions:
                self._provide_thread()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: threads without work end by themselves."""

    def _provide_thread(self) -> None:
        # A thread that has just been started is not busy, though it does not wait yet.
        enough = self._present - self._busy >= len(self._actions) + bool(self._timed)
        if enough or self._present >= self._most:
            # The last one allowed may wait for the time of an action, and can do another first.
            self._changed.notify()
        else:
            self._present += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception:
                traceback.print_exc(file=sys.stderr)
            with self._changed:
                self._busy -= 1
            # It may have a connection or a node, which nobody may want any more.
            del action

    def _next(self) -> Callable[[], None] | None:
        """Wait for an action; None if this thread is not needed any more."""
        idle_until = time.monotonic() + IDLE_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                while self._timed and self._timed[0][0] <= now:
                    self._actions.append(heapq.heappop(self._timed)[2])
                if self._actions:
                    self._busy += 1
                    action = self._actions.popleft()
                    if self._actions or self._timed:
                        # For actions that have come due together, and for the next one.
                        self._provide_thread()
                    return action
                # One thread waits for the action that is due next.
                until = min(self._timed[0][0], idle_until) if self._timed else idle_until
                if now >= idle_until and (not self._timed or self._present - self._busy > 1):
                    self._present -= 1
                    return None
                if now >= idle_until:
                    until = self._timed[0][0]
                self._changed.wait(until - now)


def _forget_threads() -> None:
    for staff in list(_staffs):
        staff._reset()


os.register_at_fork(after_in_child=_forget_threads)
