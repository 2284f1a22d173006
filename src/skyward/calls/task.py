"""A task as the client sees it: the call, the executor that has it, and the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from typing import Any

from skyward.calls.answers import Answer, Streaming
from skyward.calls.loop import Timer, Waiter
from skyward.calls.parcels import NamedParcel, Parcel
from skyward.calls.scheduler import Load
from skyward.calls.standing import Standing
from skyward.calls.staying import Staying
from skyward.calls.streams import StreamItems
from skyward.calls.tracing import CallTrace
from skyward.future import Future
from skyward.wire.messages import NEVER


class Task:
    """One call on its way to an executor and back."""

    __slots__ = (
        "_finished",
        "_on_done",
        "answer",
        "apart",
        "awaits",
        "cancelled",
        "cell",
        "code",
        "counted",
        "debugged",
        "depth",
        "done",
        "due",
        "given",
        "handles",
        "id",
        "inputs",
        "load",
        "logged",
        "name",
        "on",
        "order",
        "overdue",
        "parcel",
        "pinned",
        "ran",
        "retries",
        "sent",
        "standing",
        "staying",
        "stream",
        "timeout",
        "timer",
        "together",
        "trace",
        "waiter",
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
        pinned: Load[Task] | None = None,
        timeout: float | None = None,
        retries: int = 0,
        staying: Staying | None = None,
        trace: CallTrace | None = None,
        cell: Context | None = None,
        debugged: int = NEVER,
        awaits: Sequence[Future[Any]] = (),
        apart: str = "",
    ) -> None:
        self.id = task_id
        self.name = name
        self.code = code
        self.parcel = parcel
        self.handles = handles
        self.inputs = inputs
        self.on = on
        self.worker = worker
        self.pinned = pinned
        self.timeout = timeout
        self.retries = retries
        self.staying = staying
        """Where the tensors of the result stay; None if they come to the client."""
        self.trace = trace
        """The call's spans; None if the program makes no traces."""
        self.debugged = debugged
        """When the task opens a debugger."""
        self.awaits = awaits
        """The futures among the arguments, until they are done."""
        self.depth = 0
        """How many tasks have started one another to start this one, and may wait for it."""
        self.apart = apart
        """The object with a place of its own that the task belongs to; empty if there is none."""
        self.cell = cell
        """The cell of a notebook that gets the task's output; None outside of notebooks."""
        self.waiting = False
        self.order = 0
        self.sent = 0
        """The task's number among the tasks sent to its executor."""
        self.load: Load[Task] | None = None
        """The load of the executor that the task was given to, if any."""
        self.stream: StreamItems | None = None
        self.timer: Timer | None = None
        self.due = 0.0
        """When the task's time is over, on the clock of `Timeouts`."""
        self.overdue = False
        """Whether the task's time is over: a result that comes now comes too late."""
        self.standing: Standing | None = None
        """Where the task was when its time was over."""
        self.together: Sequence[Task] = ()
        """The tasks of the same broadcast, until it is over."""
        self.done = False
        self.cancelled = False
        self.counted = False
        """Whether `Counts` counts the task as succeeded, failed or cancelled."""
        self.ran = 0.0
        """How many seconds the function itself ran, once it is known."""
        self.given = 0.0
        """When an executor was given the task, if anybody listens to events."""
        self.wrote = self.logged = False
        """Whether anything was printed, and whether numbers were logged."""
        self.answer: Answer | None = None
        self.waiter: Waiter | None = None
        """What the caller waits with while it would read the answer itself."""
        self._on_done: Callable[[Task], None] | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    @property
    def cancellable(self) -> bool:
        """Whether cancelling has an effect: the task is not done, or it is a stream."""
        return not self.done or self.stream is not None

    @property
    def assigned(self) -> bool:
        """Whether the task was given to an executor, and not taken back."""
        return self.load is not None

    @property
    def on_executor(self) -> bool:
        """Whether an executor has the task, or a thread is sending it."""
        return self.load is not None and self.id in self.load.tasks

    def when_done(self, action: Callable[[Task], None]) -> None:
        """Have a function called when the task is done; call this before `submit`."""
        self._on_done = action

    def finish(self, answer: Answer) -> bool:
        """Record the answer; the first answer stays. Returns whether this is the first."""
        if self.done:
            return False
        self.done = True
        self.answer = answer
        if self.timer is not None and not isinstance(answer, Streaming):
            self.timer.cancel()
            self.timer = None
        self._finished.release()
        if self.waiter is not None:
            self.waiter.wake()
        if self._on_done is not None:
            self._on_done(self)
        return True

    def wait(self) -> Answer:
        """Wait for the answer; an exception raised by a signal handler ends the wait."""
        with self._finished:
            pass
        assert self.answer is not None
        return self.answer
