"""Answers: the outcome of a task, as a value, a stream of values, or a failure."""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from skyward.calls.scheduler import Load
from skyward.calls.staying import ArrivedTensors
from skyward.errors import RemoteError, SkywardError, TaskCancelledError
from skyward.objects import encoding
from skyward.objects.exceptions import add_note
from skyward.objects.payloads import Pieces
from skyward.wire.messages import Failure

_EXIT_HINT = " (the function called sys.exit; the worker goes on)"


class Answer:
    """The outcome of a task; `get` decodes it on the caller's thread."""

    def get(self) -> Any:
        """Return the value, or raise the exception."""
        raise NotImplementedError


class Value(Answer):
    """The value that the function returned, not yet decoded."""

    __slots__ = ("_load", "_name", "_pieces", "_stayed")

    def __init__(
        self, pieces: Pieces, name: str, load: Load[Any], stayed: ArrivedTensors | None = None
    ) -> None:
        """`name` is that of the function, and `load` that of the executor: errors tell both."""
        self._pieces, self._name, self._load = pieces, name, load
        self._stayed = stayed

    @property
    def pieces(self) -> Pieces:
        """The value as it came."""
        return self._pieces

    @property
    def place(self) -> str:
        """The function and where it ran, in words."""
        return f"{self._name} on {self._load.where}"

    def get(self) -> Any:
        """Decode the value; once, if its tensors stay on a device."""
        # Whoever still has the task must not keep tensors that the caller has dropped.
        stayed, self._stayed = self._stayed, None
        try:
            return encoding.decode(*self._pieces, stayed)
        except SkywardError:
            raise
        except Exception as problem:
            raise cannot_rebuild(self.place, problem) from problem

    def discard(self) -> None:
        """Free what the value holds on a device: the caller does not want the value any more."""
        if self._stayed is not None:
            self._stayed.discard()


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

    def make() -> BaseException:
        if failure.cancelled:
            return TaskCancelledError(f"{name} was cancelled on {where}")
        text = remote_traceback(failure)
        problem: BaseException | None = None
        why = ""
        if failure.unsent:
            why = f" (the exception itself cannot be sent: {failure.unsent})"
        elif failure.type_name == "SystemExit":
            why = _EXIT_HINT
        if pieces is not None:
            try:
                portable = encoding.decode(*pieces)
                problem = portable.rebuild()
            except Exception as unknown:
                why = (
                    " (the exception itself cannot be rebuilt here: "
                    f"{type(unknown).__name__}: {unknown})"
                )
        if not isinstance(problem, Exception):
            problem = RemoteError(
                f"{failure.type_name}: {failure.text}{why}",
                type_name=failure.type_name,
                remote_traceback=text,
            )
        add_note(problem, f"raised by {name} on {where}; remote traceback:\n{text}".rstrip())
        if isinstance(problem, ModuleNotFoundError):
            add_note(
                problem,
                f"the module {problem.name!r} is missing on {where}; install it there, for "
                f"example with sky.Image(pip=[{problem.name!r}]), or send it with "
                "sky.Image(includes=[...])",
            )
        return problem

    summary = f"{failure.type_name}: {failure.text}"
    return Failed(make, lambda: summary, Raised(failure, pieces, name, where))


def remote_traceback(failure: Failure) -> str:
    """The remote frames with source lines; if the worker has no file, from the client's file."""
    lines = []
    for file, number, function, source in failure.frames:
        lines.append(f'  File "{file}", line {number}, in {function}')
        source = source or linecache.getline(file, number).strip()
        if source:
            lines.append(f"    {source}")
    lines.append(f"{failure.type_name}: {failure.text}" if failure.text else failure.type_name)
    return "\n".join(lines)
