"""A task as the client sees it: the call, the executor that has it, and the answer."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar

from skyward.calls.kept import KeptResult, ResultTensors
from skyward.calls.loop import Borrower, Timer
from skyward.calls.packer import NamedParcel, Parcel
from skyward.calls.scheduler import Load
from skyward.calls.spans import CallTrace
from skyward.errors import RemoteError, SkywardError, TaskError, TaskTimeoutError
from skyward.functions import LOOK_SECONDS, ArrivalSignal, Future, taken
from skyward.objects import encoding
from skyward.objects.payloads import Pieces, raised
from skyward.wire.messages import NEVER, Failure

WINDOW = 16
"""How many items the worker may be ahead of the consumer."""

E = TypeVar("E", bound=TaskError)
StreamItem = tuple[Pieces, ResultTensors | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a task is in its code, as its node's agent sees it."""

    text: str
    """The standing in words, for an error: what the task does, and its innermost frames."""
    place: str = ""
    """The innermost line of the user's code, such as "train.py:12 in step: loss.backward()"."""
    collective: str = ""
    """The collective operation that the task waits in, such as "all_reduce"."""


class Task:
    """One call on its way to an executor and back."""

    __slots__ = (
        "_finished",
        "_on_done",
        "answer",
        "apart",
        "awaits",
        "borrower",
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
        "kept",
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
        "stream",
        "timeout",
        "timer",
        "together",
        "trace",
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
    ) -> None:
        self.id = task_id
        self.name = name
        self.code = code
        self.parcel = parcel
        self.handles = handles
        self.inputs = inputs
        self.on: int | None = None
        """The node that the task must run on; None for any."""
        self.worker: tuple[int, int] | None = None
        """The node and the worker that the task must run on; None for any."""
        self.pinned: Load[Task] | None = None
        """The executor that has the object whose method the task calls."""
        self.timeout: float | None = None
        self.retries = 0
        self.kept: KeptResult | None = None
        """Where the tensors of the result are kept; None if they come to the client."""
        self.trace: CallTrace | None = None
        """The call's spans; None if the program makes no traces."""
        self.debugged = NEVER
        """When the task opens a debugger."""
        self.awaits: Sequence[Future[Any]] = ()
        """The futures among the arguments, until they are done."""
        self.depth = 0
        """How many tasks have started one another to start this one, and may wait for it."""
        self.apart = ""
        """The object with a place of its own that the task belongs to; empty if there is none."""
        self.cell: Context | None = None
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
        self.borrower: Borrower | None = None
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
        if self.borrower is not None:
            self.borrower.wake()
        if self._on_done is not None:
            self._on_done(self)
        return True

    def wait(self) -> Answer:
        """Wait for the answer; an exception raised by a signal handler ends the wait."""
        while not self._finished.acquire(timeout=LOOK_SECONDS):
            if self.answer is not None:
                return self.answer  # a Ctrl-C right after `acquire` has left the lock locked
        self._finished.release()
        assert self.answer is not None
        return self.answer


class Answer:
    """The outcome of a task; `get` decodes it on the caller's thread."""

    def get(self) -> Any:
        """Return the value, or raise the exception."""
        raise NotImplementedError


class Value(Answer):
    """The value that the function returned, not yet decoded."""

    __slots__ = ("_kept", "_load", "_name", "_pieces")

    def __init__(
        self, pieces: Pieces, name: str, load: Load[Any], kept: ResultTensors | None = None
    ) -> None:
        """`name` is that of the function, and `load` that of the executor: errors tell both."""
        self._pieces, self._name, self._load = pieces, name, load
        self._kept = kept

    @property
    def pieces(self) -> Pieces:
        """The value as it came."""
        return self._pieces

    @property
    def place(self) -> str:
        """The function and where it ran, in words."""
        return f"{self._name} on {self._load.where}"

    def get(self) -> Any:
        """Decode the value; once, if its tensors are kept on a device."""
        # Whoever still has the task must not keep tensors that the caller has dropped.
        kept, self._kept = self._kept, None
        try:
            return encoding.decode(*self._pieces, kept)
        except SkywardError:
            raise
        except Exception as problem:
            raise cannot_rebuild(self.place, problem) from problem

    def discard(self) -> None:
        """Free what the value holds on a device: the caller does not want the value any more."""
        if self._kept is not None:
            self._kept.discard()


def cannot_rebuild(place: str, problem: Exception) -> RemoteError:
    """The error for a result that has arrived and cannot be decoded; `place` is its call."""
    return RemoteError(
        f"the result of {place} arrived but cannot be rebuilt here ({type(problem).__name__}: "
        f"{problem}); return plain data, or install here what it is made of",
        type_name=type(problem).__qualname__,
    )


class Streaming(Answer):
    """The function returned an iterator, whose items arrive one by one."""

    __slots__ = ("_open",)

    def __init__(self, open: Callable[[], Iterator[Any]]) -> None:
        self._open = open

    def get(self) -> Any:
        """A new iterator; only the caller refers to it, so the stream ends when it is dropped."""
        return self._open()


class StreamItems:
    """The items of a stream that have arrived and that the consumer has not taken yet.

    The task refers to this object and not to the iterator: if the user drops the iterator, it is
    freed, and the stream ends.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[StreamItem | Answer | None] = queue.SimpleQueue()
        self._arrived = ArrivalSignal()
        self.granted = WINDOW
        """How many items the worker was permitted to send, altogether."""
        self.waits_at = -1
        """How many of these the worker had sent when it said that it waits for more."""
        self.wanted = True
        """Whether the stream has not ended, and its consumer has not closed it."""
        self.ended = False
        self.closed = False
        """Whether the stream ended because its consumer closed it."""
        self.problem: Answer | None = None
        """The exception that ended the stream, if any."""
        self._on_end: Callable[[], None] | None = None

    @property
    def held_up(self) -> bool:
        """Whether the worker waits until the consumer takes items."""
        return self.wanted and self.waits_at == self.granted

    @property
    def unread(self) -> int:
        """How many items the consumer has not taken yet."""
        return self._queue.qsize()

    def put(self, pieces: Pieces, kept: ResultTensors | None) -> None:
        """Add an item that has arrived, and the tensors of it that are kept on a device."""
        self._add((pieces, kept))

    def end(self, problem: Answer | None) -> None:
        """End the stream; `problem` is the exception that ended it, if any."""
        if not self.ended:
            self.closed, self.problem = not self.wanted, problem
            self.ended = True
        self.wanted = False
        self._add(problem)
        if self._on_end is not None:
            self._on_end()

    def when_ended(self, action: Callable[[], None]) -> None:
        """Have a function called when the stream has ended, maybe more than once."""
        self._on_end = action
        if self.ended:
            action()

    def _add(self, item: StreamItem | Answer | None) -> None:
        self._queue.put(item)
        self._arrived.tell()

    def get(self) -> StreamItem | Answer | None:
        """Wait for an item, or for the end of the stream: its exception, or None."""
        return taken(self._queue)

    async def arrive(self) -> None:
        """Let other coroutines run until `get` need not wait."""
        await self._arrived.until(lambda: not self._queue.empty())


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of a function, as its worker told it."""

    failure: Failure
    pieces: Pieces | None
    name: str
    where: str


class Failed(Answer):
    """The task failed."""

    __slots__ = ("_make", "_summary", "at", "problem", "raised")

    def __init__(
        self,
        make: Callable[[], BaseException],
        summary: Callable[[], str],
        raised: Raised | None = None,
        problem: BaseException | None = None,
    ) -> None:
        self._make, self._summary = make, summary
        self.raised = raised
        """The exception as a worker has told it; None if the client made it."""
        self.problem = problem
        """The exception that the client made; None if a worker has told it."""
        self.at = time.monotonic()
        """When the client knew of the failure."""

    @classmethod
    def because(cls, problem: BaseException) -> Failed:
        """A failure with an exception that the client made."""
        return cls(lambda: problem, lambda: f"{type(problem).__name__}: {problem}", problem=problem)

    @property
    def summary(self) -> str:
        """The type and the message of the exception."""
        return self._summary()

    def get(self) -> Any:
        """Raise the exception."""
        raise self._make()


def remote_failure(failure: Failure, pieces: Pieces | None, name: str, where: str) -> Failed:
    """The exception that a task raised, with a note that has its node and remote traceback."""
    summary = f"{failure.type_name}: {failure.text}"
    make = functools.partial(raised, failure, pieces, name, where)
    return Failed(make, lambda: summary, Raised(failure, pieces, name, where))


def not_the_end(problem: BaseException) -> BaseException:
    """The problem, or a RuntimeError for StopIteration, which would end a loop over calls."""
    if not isinstance(problem, StopIteration):
        return problem
    replacement = RuntimeError("the call raised StopIteration")
    replacement.__cause__ = problem
    return replacement


def timeout_error(task: Task) -> TaskTimeoutError:
    """The error of a task whose time is over; it says where the task was, if that is known."""
    where = f" on {task.load.where}" if task.load is not None else ""
    text = f"{task.name} ran longer than its timeout of {task.timeout:g} s{where}; "
    return standing_at(task, TaskTimeoutError, f"{text}the remote work was cancelled")


def standing_at(task: Task, kind: type[E], text: str) -> E:
    """An error of that kind, which says where the task was, if that is known."""
    standing = task.standing
    if standing is None:
        return kind(text)
    error = kind(f"{text}; {standing.text}")
    error.place, error.collective = standing.place, standing.collective
    return error
