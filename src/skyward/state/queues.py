"""Shared queues."""

from __future__ import annotations

import queue
from typing import Any, Generic, TypeVar, cast

from skyward.errors import ConfigurationError
from skyward.state.shared import SharedObject
from skyward.state.values import decode, encode

T = TypeVar("T")


class EmptyTimeoutError(TimeoutError, queue.Empty):
    """No item came in time; a `queue.Empty`."""


class FullTimeoutError(TimeoutError, queue.Full):
    """There was no room in time; a `queue.Full`."""


class SharedQueue(SharedObject, Generic[T]):
    """A queue that the whole pool shares; made by `sky.queue(name, maxsize=0)`.

    Each item goes to one caller. An item that a process has taken is gone with that process.

    >>> sky.queue("jobs").put(job)
    >>> job = sky.queue("jobs").get(timeout=10)
    """

    KIND = "queue"

    def __init__(self, name: str, maxsize: int = 0, *, on: Any = None) -> None:
        super().__init__(name, on=on)
        if not isinstance(maxsize, int) or isinstance(maxsize, bool) or maxsize < 0:
            raise ConfigurationError(
                f"sky.queue({name!r}, maxsize={maxsize!r}): give a number of items, or 0 for any"
            )
        self._maxsize = maxsize

    def _options(self) -> dict[str, Any] | None:
        return {"maxsize": self._maxsize} if self._maxsize else None

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Append an item; waits for room, and raises `queue.Full` if there is none in time."""
        encoded = encode(item, f"an item of {self!r}")
        if not block:
            if not self._call("put", encoded):
                raise queue.Full(f"{self!r} is full")
        elif not self._wait("put", encoded, timeout=timeout):
            raise FullTimeoutError(f"{self!r} had no room for {timeout:g} s")

    def put_nowait(self, item: T) -> None:
        """Append an item; `queue.Full` if there is no room."""
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the first item; waits for one, and raises `queue.Empty` if none comes in time."""
        if not isinstance(block, bool):
            raise ConfigurationError(f"{self!r}.get({block!r}): write get(timeout={block!r})")
        if block:
            found = self._wait("get", timeout=timeout, undo=_unget)
        else:
            found = self._call("get", undo=_unget)
        if found is not None:
            return cast(T, decode(found[0]))
        if not block:
            raise queue.Empty(f"{self!r} is empty")
        raise EmptyTimeoutError(
            f"{self!r} had no item for {timeout:g} s; catch this as queue.Empty: None may be an "
            "item, so that `get` does not return it for none"
        )

    def get_nowait(self) -> T:
        """Take the first item; `queue.Empty` if there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        """How many items there are now."""
        return int(self._call("facts")[0])

    @property
    def maxsize(self) -> int:
        """How many items there can be; 0 for any number."""
        return int(self._call("facts")[1])

    def empty(self) -> bool:
        """Whether there is no item now."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Whether there is no room now."""
        count, room = self._call("facts")
        return bool(room and count >= room)

    def __len__(self) -> int:
        return self.qsize()

    def __bool__(self) -> bool:
        """A queue is true also if it is empty, as `queue.Queue` is."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self._maxsize)


def _unget(taken: Any) -> tuple[str, tuple[Any, ...]] | None:
    return ("unget", (taken[0],)) if taken else None
