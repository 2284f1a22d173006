"""A task as the client sees it: what is to run, where it is, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from skyward.calls.answers import Answer, Streaming
from skyward.calls.loop import Timer
from skyward.calls.parcels import NamedParcel, Parcel
from skyward.calls.scheduler import Load
from skyward.calls.streams import StreamItems


class Task:
    """One call on its way to an executor and back."""

    __slots__ = (
        "_finished",
        "_on_done",
        "answer",
        "cancelled",
        "code",
        "counted",
        "deadline",
        "done",
        "handles",
        "id",
        "inputs",
        "load",
        "name",
        "on",
        "order",
        "parcel",
        "retries",
        "sent",
        "stream",
        "timeout",
        "timer",
        "waiting",
        "worker",
        "wrote",
    )

    def __init__(
        self,
        task_id: int,
        name: str,
        code: NamedParcel,
        parcel: Parcel,
        handles: list[NamedParcel],
        inputs: list[Iterator[Any]],
        *,
        on: int | None = None,
        worker: tuple[int, int] | None = None,
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        self.id = task_id
        self.name = name
        self.code = code
        self.parcel = parcel
        self.handles = handles
        self.inputs = inputs
        self.on = on
        self.worker = worker
        self.timeout = timeout
        self.retries = retries
        self.waiting = False
        self.order = 0
        self.sent = 0
        """Which of the tasks sent to its executor it is."""
        self.load: Load[Task] | None = None
        """Of the executor it was given to, if any."""
        self.stream: StreamItems | None = None
        self.timer: Timer | None = None
        self.deadline: float | None = None
        self.done = False
        self.cancelled = False
        self.counted = False
        """Whether `Counts` has it among those that succeeded, failed or were cancelled."""
        self.wrote = False
        self.answer: Answer | None = None
        self._on_done: Callable[[Task], None] | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    @property
    def cancellable(self) -> bool:
        """Whether something may be left to cancel: the task is not done, or it is a stream."""
        return not self.done or self.stream is not None

    @property
    def assigned(self) -> bool:
        """Whether it was given to an executor, and not taken back."""
        return self.load is not None

    @property
    def on_executor(self) -> bool:
        """Whether an executor has it, or is being sent it."""
        return self.load is not None and self.id in self.load.tasks

    def when_done(self, action: Callable[[Task], None]) -> None:
        """Have this called when the task is done; to be said before the task is submitted."""
        self._on_done = action

    def finish(self, answer: Answer) -> bool:
        """Record what came of it, once: the first answer stays. Returns whether this is it."""
        if self.done:
            return False
        self.done = True
        self.answer = answer
        if self.timer is not None and not isinstance(answer, Streaming):
            self.timer.cancel()
            self.timer = None
        self._finished.release()
        if self._on_done is not None:
            self._on_done(self)
        return True

    def wait(self) -> Answer:
        """Wait for the answer; an exception raised by a signal handler ends the wait."""
        with self._finished:
            pass
        assert self.answer is not None
        return self.answer
