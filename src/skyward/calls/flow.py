"""Many calls at once: the caller waits for all of them, or takes their results one by one."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from skyward.calls.answers import Failed
from skyward.calls.task import Task
from skyward.functions import Pending, checked


class Runner(Protocol):
    """What runs the calls: a pool."""

    def prepare(self, pending: Pending[Any], *, keep: bool) -> Task:
        """Encode a call."""

    def submit(self, task: Task) -> None:
        """Send a task to an executor with a free slot, or queue it."""

    def cancel(self, task: Task) -> None:
        """Give a task up."""

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown."""


def not_the_end(problem: BaseException) -> BaseException:
    """The problem, or a RuntimeError for StopIteration, which would end a loop over calls."""
    if not isinstance(problem, StopIteration):
        return problem
    replacement = RuntimeError("the call raised StopIteration")
    replacement.__cause__ = problem
    return replacement


class Crowd:
    """Tasks that a caller waits for together: until all are done, or the first has failed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The count begins with 1 for `wait`, so that it is not 0 before all tasks have joined.
        self._inside = 1
        # A queue and not an event: a Ctrl-C can leave an event's lock locked for good.
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failed: Task | None = None

    def joined(self) -> None:
        """Count one more task to wait for."""
        with self._lock:
            self._inside += 1

    def left(self, task: Task | None) -> None:
        """Note that a task is done."""
        with self._lock:
            self._inside -= 1
            if self._failed is None and task is not None and isinstance(task.answer, Failed):
                self._failed = task
                self._over.put(None)
            if not self._inside:
                self._over.put(None)

    def wait(self) -> Task | None:
        """Wait; returns the first task that failed, if one did."""
        self.left(None)
        self._over.get()
        return self._failed


class Flow(Iterator[Any]):
    """Iterates over the results of calls, with some calls submitted ahead of the consumer.

    When the flow is dropped, it cancels the calls whose results were not taken.
    """

    def __init__(
        self, runner: Runner, pendings: Iterator[Pending[Any]], ordered: bool, ahead: int | None
    ) -> None:
        self._runner, self._pendings, self._ordered, self._ahead = runner, pendings, ordered, ahead
        self._tasks: deque[Task] = deque()
        self._ready: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._open: set[Task] = set()

    def fill(self) -> None:
        """Submit as many calls as may be ahead of the consumer."""
        while self._ahead is None or len(self._open) < self._ahead:
            pending = next(self._pendings, None)
            if pending is None:
                return
            task = self._runner.prepare(checked(pending), keep=True)
            self._open.add(task)
            if self._ordered:
                self._tasks.append(task)
            else:
                # A method of the queue, not of the flow: a task must not keep a dropped flow alive.
                task.when_done(self._ready.put)
            self._runner.submit(task)

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
        self._runner.flush_output(task)
        try:
            return task.wait().get()
        except StopIteration as problem:
            self.close()
            raise not_the_end(problem) from problem
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel the calls whose results were not taken."""
        left, self._open = self._open, set()
        self._pendings = iter(())
        # Results that have arrived may hold memory of a device.
        self._tasks.clear()
        self._ready = queue.SimpleQueue()
        for task in left:
            if task.cancellable:
                self._runner.cancel(task)

    def __del__(self) -> None:
        self.close()
