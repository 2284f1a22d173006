"""A task as the client sees it: what is to run, where it is, and what came of it."""

from __future__ import annotations

import contextlib
import linecache
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skyward.errors import RemoteError, SkywardError, TaskCancelledError
from skyward.wire import objects
from skyward.wire.blobs import Blob
from skyward.wire.messages import Failure
from skyward.wire.objects import Encoded

if TYPE_CHECKING:
    from skyward.pool.lane import Lane
    from skyward.pool.streams import Arrivals, RemoteIterator

Pieces = tuple[memoryview, list[memoryview], list[tuple[int, int]]]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Parcel:
    """An encoded object with its large buffers named, and held where that is needed."""

    encoded: Encoded
    blobs: list[Blob] = field(default_factory=list)
    """The large buffers as held in shareable memory; empty if they are sent from where they are."""
    digests: list[bytes] = field(default_factory=list)
    large: list[memoryview] = field(default_factory=list)
    by_value: Callable[[], Parcel] | None = None
    """The same without references to a device's memory, for an executor that cannot open it."""

    @property
    def heavy(self) -> bool:
        """Whether sending it may move many bytes through a socket."""
        return bool(self.large) or self.encoded.size > 1 << 18


@dataclass(slots=True, eq=False)
class Definition:
    """Something workers keep under a key: a function's code, or data from `put`."""

    key: bytes
    parcel: Parcel
    frozen: bool


class Task:
    """One call on its way to a worker and back."""

    __slots__ = (
        "_finished",
        "cancelled",
        "code",
        "counted",
        "deadline",
        "done",
        "handles",
        "id",
        "inputs",
        "lane",
        "name",
        "on",
        "on_done",
        "order",
        "outcome",
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
        code: Definition,
        parcel: Parcel,
        handles: list[Definition],
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
        """Which of the tasks sent to its lane it is."""
        self.lane: Lane | None = None
        self.stream: Arrivals | None = None
        self.timer: Any = None
        self.deadline: float | None = None
        self.done = False
        self.cancelled = False
        self.counted = False
        """Whether it is among those that succeeded, failed or were cancelled."""
        self.wrote = False
        self.outcome: Outcome[Any] | None = None
        self.on_done: Callable[[Task], None] | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    @property
    def cancellable(self) -> bool:
        """Whether there may be something left to cancel: it is not done, or a stream."""
        return not self.done or self.stream is not None

    def finish(self, outcome: Outcome[Any]) -> bool:
        """Record what came of it, once; the first outcome stays."""
        if self.done:
            return False
        self.done = True
        self.outcome = outcome
        if self.timer is not None and not isinstance(outcome, Streaming):
            self.timer.cancel()
            self.timer = None
        self._finished.release()
        if self.on_done is not None:
            self.on_done(self)
        return True

    def wait(self) -> Outcome[Any]:
        """Block until there is an outcome; a signal handler's exception comes through."""
        with self._finished:
            pass
        assert self.outcome is not None
        return self.outcome


class Outcome(Generic[T]):
    """What came of a task; `get` returns it or raises it, decoding on the caller's thread."""

    def get(self) -> T:
        """The value, or the exception raised."""
        raise NotImplementedError


class Value(Outcome[Any]):
    """The function returned; not yet decoded."""

    __slots__ = ("_pieces", "_where")

    def __init__(self, pieces: Pieces, where: str) -> None:
        self._pieces = pieces
        self._where = where

    def get(self) -> Any:
        """Decode the value."""
        try:
            return objects.decode(*self._pieces)
        except SkywardError:
            raise
        except Exception as problem:
            raise RemoteError(
                f"the result of {self._where} arrived but cannot be rebuilt here "
                f"({type(problem).__name__}: {problem}); return plain data, or install here what "
                "it is made of",
                type_name=type(problem).__qualname__,
            ) from problem


class Streaming(Outcome[Any]):
    """The function returned an iterator, whose items are on their way."""

    __slots__ = ("_open",)

    def __init__(self, open: Callable[[], RemoteIterator]) -> None:
        self._open = open

    def get(self) -> Any:
        """The iterator; the caller alone holds it, so that dropping it ends the stream."""
        return self._open()


class Failed(Outcome[Any]):
    """There is no value, and this is why."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make

    @classmethod
    def because(cls, problem: BaseException) -> Failed:
        """A failure known here."""
        return cls(lambda: problem)

    def get(self) -> Any:
        """Raise."""
        raise self._make()


def remote_failure(failure: Failure, pieces: Pieces | None, name: str, where: str) -> Failed:
    """The exception a task raised, as it was there, with where it was."""

    def make() -> BaseException:
        if failure.cancelled:
            return TaskCancelledError(f"{name} was cancelled on {where}")
        text = remote_traceback(failure)
        problem: BaseException | None = None
        if pieces is not None:
            with contextlib.suppress(Exception):
                portable = objects.decode(*pieces)
                problem = portable.rebuild()
        if not isinstance(problem, Exception):
            problem = RemoteError(
                f"{failure.type_name}: {failure.text}"
                + (_EXIT_HINT if failure.type_name == "SystemExit" else ""),
                type_name=failure.type_name,
                remote_traceback=text,
            )
        problem.add_note(f"raised by {name} on {where}; remote traceback:\n{text}".rstrip())
        if isinstance(problem, ModuleNotFoundError):
            problem.add_note(
                f"the module {problem.name!r} is missing on {where}; install it there, for example "
                f"with sky.Image(pip=[{problem.name!r}]), or send it with sky.Image(includes=[...])"
            )
        return problem

    return Failed(make)


_EXIT_HINT = " (the function called sys.exit; the worker goes on)"


def remote_traceback(failure: Failure) -> str:
    """The remote frames with source lines: the worker's, or ours where it had no file."""
    lines = []
    for file, number, function, source in failure.frames:
        lines.append(f'  File "{file}", line {number}, in {function}')
        source = source or linecache.getline(file, number).strip()
        if source:
            lines.append(f"    {source}")
    lines.append(f"{failure.type_name}: {failure.text}" if failure.text else failure.type_name)
    return "\n".join(lines)
