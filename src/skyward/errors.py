"""Errors, with one root: every error says what happened, where, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self


class SkywardError(Exception):
    """The root of all errors that Skyward itself raises."""


class ConfigurationError(SkywardError, ValueError):
    """An argument that cannot work, refused before anything is created."""


class NoDeviceError(ConfigurationError, RuntimeError):
    """There is no such torch device, or it did not start; PyTorch raises a RuntimeError, too."""


class DeviceError(SkywardError, RuntimeError):
    """A sky device cannot do what was asked.

    Errors of the device are of this class, except those that PyTorch raises as a class of their own
    on any device, such as IndexError, NotImplementedError and torch.OutOfMemoryError.
    """

    _told: ClassVar[re.Pattern[str]] = re.compile(
        r"sky:(\d+) (?:\([^)]*\) )?(is gone|misses ranks): "
    )
    _explain: ClassVar[dict[str, Callable[[int, str], str]]] = {}
    _explained: ClassVar[dict[tuple[int, str], str]] = {}

    def __init__(self, text: str = "", *more: object) -> None:
        told = self._told.match(text)
        if told is not None and told[2] in self._explain:
            # Looked for once, when the first error says it: the tensors may be dropped later.
            index, what = int(told[1]), told[2]
            if (index, what) not in self._explained:
                self._explained[index, what] = ""
                self._explained[index, what] = self._explain[what](index, text)
            text += self._explained[index, what]
        super().__init__(text, *more)

    @classmethod
    def explain_with(cls, what: str, explain: Callable[[int, str], str]) -> None:
        """Add to errors of a device what this function says to its index and the error's text.

        `what` is "is gone", or "misses ranks" for a mesh with ranks that do not come.
        """
        cls._explain[what] = explain

    @classmethod
    def forget(cls, index: int) -> None:
        """Note that a new device has this index."""
        for key in [key for key in cls._explained if key[0] == index]:
            cls._explained.pop(key, None)

    @classmethod
    def leave_unexplained(cls, index: int) -> None:
        """Note that a device ends because its user wants it to: nothing is lost."""
        cls._explained[index, "is gone"] = ""


class ImageError(SkywardError):
    """The environment that an `Image` describes cannot be made."""


class SerializationError(SkywardError, TypeError):
    """A value, or an object that it refers to, cannot be sent; the message names the path to it."""


class BlobStoreFullError(SkywardError, OSError):
    """There is no room left where large values are staged for the workers."""


class StoreError(SkywardError):
    """The model store cannot do what was asked; the message names the file and the next step."""


class StoreDamagedError(StoreError):
    """A file of the store is not the file that was written; none of its bytes were used."""


class StoreFullError(StoreError, OSError):
    """There is no room left where the store keeps its files; nothing was published."""


class ModelNotFoundError(StoreError, LookupError):
    """The store has no model of that name, or not that version of it."""


class ModelMismatchError(StoreError, ValueError):
    """The stored version does not fit the model; the message lists every difference."""


class PoolError(SkywardError):
    """The pool as a whole cannot do what was asked."""


class PoolClosedError(PoolError, RuntimeError):
    """The pool has not been entered, or has been left."""


class PoolStartError(PoolError):
    """A node did not start; the message has the node's output."""

    leaves_machine: bool = False
    """Whether a machine may be left all the same: the journal keeps it, and `sky down` ends it."""


class UnreachableError(PoolStartError, ConnectionError):
    """A machine is out of reach; the message says where it is and what to try."""


class UnavailableError(PoolStartError):
    """The provider sells no such machine now: capacity, quota, price, permission, credentials."""

    passing: bool = True
    """Whether it may help to try again later, though the user changes nothing."""


class HostKeyError(PoolStartError):
    """A host showed another key than the one on record; no data was sent to it."""


class LoginError(PoolStartError):
    """A host refused the login; the message names the user and the keys that were tried."""


class PluginError(PoolError):
    """A plugin's hook failed; the message has the plugin, the hook, the node and the traceback."""


class StateLostError(PoolError):
    """The owner of a shared object is gone or out of reach, and maybe what the object held."""


class StateFullError(PoolError):
    """The shared state of a pool has as many bytes as it may."""


class VersionMismatchError(PoolStartError):
    """Client and worker have versions that cannot exchange functions or data."""


class AuthenticationError(PoolError, ConnectionError):
    """The other end could not prove that it belongs to this pool."""


class ProtocolError(SkywardError, ConnectionError):
    """Bytes arrived that no well-behaved peer sends."""


class TaskError(SkywardError):
    """A task has no result, though its function did not raise an exception."""

    place: str = ""
    """The line of the user's code that the task was at; empty if that is not known."""
    collective: str = ""
    """The collective operation that the task waited in, such as "all_reduce"."""


class TaskTimeoutError(TaskError, TimeoutError):
    """A task ran longer than its `timeout`; the remote work was cancelled."""


class TaskCancelledError(TaskError):
    """A task was cancelled before it produced its result."""


class DeadlockError(TaskError, RuntimeError):
    """A call would wait for ever: streams hold all workers, and whoever could read them waits."""


class WorkerDiedError(TaskError):
    """The process running the task ended: a signal, `os._exit`, or the memory killer."""


class NodeLostError(TaskError):
    """The whole node running the task is gone or has stopped answering."""


class InstanceLostError(TaskError):
    """An object of a `@sky.cls` class is gone: with its worker or its node, or closed."""


class DebuggerError(SkywardError, RuntimeError):
    """A debugger cannot be opened; the message says what to set or to call."""


class RemoteError(TaskError):
    """A remote exception whose own type could not be rebuilt here."""

    def __init__(self, message: str, *, type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"type_name": self.type_name, "remote_traceback": self.remote_traceback}
        return type(self), self.args, state


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one worker of a broadcast: its value or its exception."""

    node: int
    worker: int
    value: Any = None
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """Whether the worker returned."""
        return self.error is None


class BroadcastError(SkywardError, ExceptionGroup[Exception]):
    """At least one worker of a broadcast failed; `outcomes` holds every worker's result.

    The first of `exceptions` is the failure that came first, and the message names its rank.
    """

    outcomes: tuple[Outcome, ...]

    def __new__(
        cls, message: str, errors: Sequence[Exception], outcomes: Sequence[Outcome]
    ) -> Self:
        self = super().__new__(cls, message, errors)
        self.outcomes = tuple(outcomes)
        return self

    def __init__(
        self, message: str, errors: Sequence[Exception], outcomes: Sequence[Outcome]
    ) -> None:
        super().__init__(message, errors)

    def derive(self, errors: Sequence[Exception]) -> BroadcastError:  # type: ignore[override]
        return BroadcastError(self.message, errors, self.outcomes)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.exceptions, self.outcomes)
