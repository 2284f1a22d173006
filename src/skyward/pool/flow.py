"""Many calls at once: waited for together, or taken as they come with only so many ahead."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from skyward.functions import Pending, checked
from skyward.pool.pool import Pool
from skyward.pool.task import Failed, Task


def not_the_end(problem: BaseException) -> BaseException:
    """A call's own StopIteration must not end an iteration over calls, nor be lost in a loop."""
    if not isinstance(problem, StopIteration):
        return problem
    replacement = RuntimeError("the call raised StopIteration")
    replacement.__cause__ = problem
    return replacement


class Crowd:
    """Tasks waited for together: until all have left, or the first one failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 1  # the one who waits, so that it is not over before it has begun
        # A queue and not an event: a Ctrl-C can leave an event's lock locked for good.
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failed: Task | None = None

    def joined(self) -> None:
        """One more to wait for."""
        with self._lock:
            self._inside += 1

    def left(self, task: Task | None) -> None:
        """One is done."""
        with self._lock:
            self._inside -= 1
            if self._failed is None and task is not None and isinstance(task.outcome, Failed):
                self._failed = task
                self._over.put(None)
            if not self._inside:
                self._over.put(None)

    def wait(self) -> Task | None:
        """Wait; returns the first that failed, if one did."""
        self.left(None)
        self._over.get()
        return self._failed


class Flow(Iterator[Any]):
    """Results of many calls, some ahead of the consumer; dropping it cancels what is left."""

    def __init__(
        self, pool: Pool, pendings: Iterator[Pending[Any]], ordered: bool, ahead: int | None
    ) -> None:
        self._pool, self._pendings, self._ordered, self._ahead = pool, pendings, ordered, ahead
        self._tasks: deque[Task] = deque()
        self._ready: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._open: set[Task] = set()

    def fill(self) -> None:
        """Submit as many calls as may be ahead."""
        while self._ahead is None or len(self._open) < self._ahead:
            pending = next(self._pendings, None)
            if pending is None:
                return
            task = self._pool.prepare(checked(pending), keep=True)
            self._open.add(task)
            if self._ordered:
                self._tasks.append(task)
            else:
                # The queue and not a method: a task must not keep a dropped flow alive.
                task.on_done = self._ready.put
            self._pool.submit(task)

    def __next__(self) -> Any:
        if not self._open:
            raise StopIteration
        if self._ordered:
            task = self._tasks.popleft()
            task.wait()
        else:
            task = self._ready.get()
        self._open.discard(task)
        self.fill()
        self._pool.flush_output(task)
        try:
            return task.wait().get()
        except StopIteration as problem:
            self.close()
            raise not_the_end(problem) from problem
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not been taken."""
        left, self._open = self._open, set()
        self._pendings = iter(())
        for task in left:
            if task.cancellable:
                self._pool.cancel(task)

    def __del__(self) -> None:
        self.close()
