"""Many calls at once: the caller waits for all of them, or takes their results one by one."""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeVar, overload

from skyward.calls.task import Failed, Task, not_the_end
from skyward.errors import ConfigurationError
from skyward.functions import ArrivalSignal, Pending, apart, checked, taken

T = TypeVar("T")


class Runner(Protocol):
    """What runs the calls: the dispatcher."""

    def prepare(self, pending: Pending[Any], *, keep: bool) -> Task:
        """Encode a call."""

    def submit(self, task: Task) -> None:
        """Send a task to an executor with a free slot, or queue it."""

    def cancel(self, task: Task) -> None:
        """Give a task up."""

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown."""


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
        taken(self._over)
        return self._failed


class Flow(Iterator[T]):
    """Iterates over the results of calls, with some calls submitted ahead of the consumer.

    Both `for` and `async for` take them. When the flow is dropped, it cancels the calls whose
    results were not taken.
    """

    def __init__(
        self,
        runner: Runner,
        pendings: Iterator[Pending[Any]],
        ordered: bool,
        ahead: int | None,
    ) -> None:
        self._runner, self._pendings = runner, pendings
        self._ordered, self._ahead = ordered, ahead
        self._tasks: deque[Task] = deque()
        self._ready: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._open: set[Task] = set()
        self._arrived = ArrivalSignal()

    def fill(self) -> None:
        """Submit as many calls as may be ahead of the consumer."""
        while self._ahead is None or len(self._open) < self._ahead:
            pending = next(self._pendings, None)
            if pending is None:
                return
            task = self._runner.prepare(checked(pending), keep=True)
            self._open.add(task)
            # Not methods of the flow: a task must not keep a dropped flow alive.
            if self._ordered:
                self._tasks.append(task)
                task.when_done(self._arrived.tell)
            else:
                task.when_done(functools.partial(_arrive, self._ready, self._arrived))
            self._runner.submit(task)

    def __next__(self) -> T:
        task = self._pop()
        self._runner.flush_output(task)
        return self._value(task)

    def _pop(self) -> Task:
        """Wait for the next task that is done, and take it; StopIteration if there is none."""
        if not self._open:
            raise StopIteration
        if self._ordered:
            task = self._tasks.popleft()
            task.wait()
        else:
            task = taken(self._ready)
        self._open.discard(task)
        self.fill()
        return task

    def _put_back(self, task: Task) -> None:
        """Have `_pop` find a task again."""
        self._open.add(task)
        if self._ordered:
            self._tasks.appendleft(task)
        else:
            self._ready.put(task)
        self._arrived.tell()

    def _value(self, task: Task) -> T:
        try:
            value: T = task.wait().get()
            return value
        except StopIteration as problem:
            self.close()
            raise not_the_end(problem) from problem
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._open:
            await self._arrived.until(self._has_next)
        try:
            task = self._pop()
        except StopIteration:
            raise StopAsyncIteration from None
        try:
            if task.wrote or task.logged:
                await apart(functools.partial(self._runner.flush_output, task))
        except BaseException:
            self._put_back(task)
            raise
        return self._value(task)

    def _has_next(self) -> bool:
        if not self._open:
            return True  # it was closed
        return self._tasks[0].done if self._ordered else not self._ready.empty()

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
        self._arrived.tell()

    def __del__(self) -> None:
        self.close()


def _arrive(ready: queue.SimpleQueue[Task], arrived: ArrivalSignal, task: Task) -> None:
    ready.put(task)
    arrived.tell()


class Results(Flow[T]):
    """The results of `compute.map`: one by one, or as a list.

    Results that were taken one by one are not kept. `results[0]` waits for all of them and keeps
    them: then they can be used as a list.

    >>> for score in compute.map(evaluate, range(1000)): ...
    >>> compute.map(evaluate, range(10))[0]
    """

    def __init__(
        self,
        runner: Runner,
        pendings: Iterator[Pending[Any]],
        ordered: bool,
        ahead: int | None,
        count: int | None,
    ) -> None:
        """`count` is how many results there will be, if that is known."""
        super().__init__(runner, pendings, ordered, ahead)
        self._count = count
        self._taken = 0
        self._all_taken = False
        self._kept: list[T] | None = None

    def __iter__(self) -> Iterator[T]:
        if self._kept is not None:
            return iter(self._kept)
        if self._all_taken and self._taken:
            # A second loop would find nothing, and not say so.
            raise self._gone()
        return self

    def _pop(self) -> Task:
        if self._kept is not None:
            raise TypeError("the results are a list by now; write next(iter(results))")
        try:
            return super()._pop()
        except StopIteration:
            self._all_taken = True
            raise

    def _value(self, task: Task) -> T:
        value = super()._value(task)
        self._taken += 1
        return value

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError(
                "how many results there will be is not known, since an argument of map has no "
                "length; write results = list(compute.map(...))"
            )
        return self._count

    def __bool__(self) -> bool:
        return self._count is None or self._count > 0

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: Any) -> Any:
        if self._kept is None:
            if self._taken:
                raise self._gone()
            kept: list[T] = []
            for result in self:
                kept.append(result)
            self._kept = kept
        return self._kept[index]

    def __eq__(self, other: object) -> bool:
        return self[:] == other if isinstance(other, list) else self is other

    __hash__ = Flow.__hash__

    def __repr__(self) -> str:
        if self._kept is not None:
            return repr(self._kept)
        many = "results" if self._count is None else f"{self._count} results"
        return f"<{many} of map; list(...) waits for them>"

    def _gone(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._taken} results of map were taken one by one and are not kept; write "
            "results = list(compute.map(...)) to use them again"
        )
