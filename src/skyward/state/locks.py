"""Shared locks, barriers and events."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from skyward.errors import ConfigurationError, StateLostError
from skyward.state.reaching import worker_count
from skyward.state.shared import SharedObject

LEASE_SECONDS = 30.0
LEASE_MIN = 10.0
"""A holder shows that it is there every 5 s, so a shorter lease would end by chance."""


class BarrierTimeoutError(TimeoutError, threading.BrokenBarrierError):
    """The others did not come in time; a `threading.BrokenBarrierError`."""


class SharedLock(SharedObject):
    """A lock that the whole pool shares; made by `sky.lock(name)`.

    It is held by a process, and free when that process ends, or is out of reach for `lease`
    seconds: the next holder then sees `abandoned`. It is not reentrant. `timeout` is for the `with`
    block.

    >>> with sky.lock("download", timeout=600) as lock:
    ...     if lock.abandoned: ...
    """

    KIND = "lock"

    def __init__(
        self,
        name: str,
        timeout: float | None = None,
        *,
        lease: float = LEASE_SECONDS,
        on: Any = None,
    ) -> None:
        super().__init__(name, on=on)
        self._check_timeout(timeout)
        if not isinstance(lease, int | float) or not lease >= LEASE_MIN:
            raise ConfigurationError(
                f"sky.lock({name!r}, lease={lease!r}): give {LEASE_MIN:g} s or more"
            )
        self._timeout, self._lease = timeout, float(lease)
        self._token: int | None = None
        self._abandoned = False

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Hold the lock; waits for it, and raises `TimeoutError` if it is not free in time.

        Without `blocking`, returns whether it was free.
        """
        if blocking:
            granted = self._wait("acquire", self._lease, timeout=timeout, undo=_release)
        else:
            granted = self._call("acquire", self._lease, undo=_release)
        if granted is not None:
            self._token, self._abandoned = granted
            return True
        if not blocking:
            return False
        holder = self.owner
        raise TimeoutError(
            f"{self!r} was not free for {timeout:g} s"
            + (f"; it is held by {holder}" if holder else "")
        )

    def release(self) -> None:
        """Let the lock go; `StateLostError` if this process was silent for its lease."""
        if self._token is None:
            raise RuntimeError(f"{self!r} is not held through this handle, so it cannot release it")
        token, self._token = self._token, None
        if not self._call("release", token):
            raise StateLostError(
                f"{self!r} is not held any more: contact to this process was lost for longer than "
                f"its lease of {self._lease:g} s, and another may have held it since; check what "
                "the lock protects, and give it a longer lease"
            )

    @property
    def abandoned(self) -> bool:
        """Whether the holder before this one was lost while it held the lock."""
        return self._abandoned

    @property
    def token(self) -> int | None:
        """The number of this holding, which grows with each; None if the handle holds nothing.

        What the lock protects can refuse the token of an earlier holder.
        """
        return self._token

    @property
    def owner(self) -> str | None:
        """Who holds the lock now, in words; None if it is free."""
        found: str | None = self._call("owner")
        return found

    def locked(self) -> bool:
        """Whether somebody holds the lock now."""
        return self.owner is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return _lock, (self.name, self._timeout, self._lease)

    def __enter__(self) -> Self:
        self.acquire(timeout=self._timeout)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SharedBarrier(SharedObject):
    """A barrier that the whole pool shares; made by `sky.barrier(name, parties=None)`.

    Without `parties`, it is for all workers of the pool. If one that waits there gives up or is
    lost, all others get a `threading.BrokenBarrierError`, as those who come later until `reset`.

    >>> sky.barrier("epoch").wait(timeout=60)
    """

    KIND = "barrier"

    def __init__(
        self, name: str, parties: int | None = None, *, n: int | None = None, on: Any = None
    ) -> None:
        """`n` is another name of `parties`."""
        super().__init__(name, on=on)
        if n is not None:
            if parties is not None:
                raise ConfigurationError(
                    f"sky.barrier({name!r}, parties={parties!r}, n={n!r}): these are two names of "
                    "one number; give one of them"
                )
            parties = n
        is_number = isinstance(parties, int) and not isinstance(parties, bool)
        if parties is not None and not (is_number and parties > 0):
            raise ConfigurationError(
                f"sky.barrier({name!r}, parties={parties!r}): give a whole number above 0, or "
                "leave it out for all workers of the pool"
            )
        self._parties = parties

    def _options(self) -> dict[str, Any]:
        return {"parties": self._parties or worker_count(self._on)}

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all have come; returns this one's number, from 0 to parties - 1."""
        found = self._wait("wait", timeout=timeout)
        if isinstance(found, int):
            return found
        if found is None:
            parties, *_ = self._call("facts")
            raise BarrierTimeoutError(
                f"{self!r}: not all {parties} came in {timeout:g} s; the barrier is broken now: "
                "`reset` it before it is used again"
            )
        raise threading.BrokenBarrierError(f"{self!r} is broken: {found}; `reset` it to use it")

    def abort(self) -> None:
        """Break the barrier: those who wait, and those who come, get a `BrokenBarrierError`."""
        self._call("abort")

    def reset(self) -> None:
        """Make the barrier usable again; those who wait get a `BrokenBarrierError`."""
        self._call("reset")

    @property
    def parties(self) -> int:
        """How many must come."""
        return int(self._call("facts")[0])

    @property
    def n_waiting(self) -> int:
        """How many wait now."""
        return int(self._call("facts")[1])

    @property
    def broken(self) -> bool:
        """Whether the barrier is broken."""
        return bool(self._call("facts")[2])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self._parties)


class SharedEvent(SharedObject):
    """An event that the whole pool shares; made by `sky.event(name)`.

    >>> sky.event("weights ready").wait(timeout=60)
    """

    KIND = "event"

    def set(self) -> None:
        """Say that it has happened: all who wait go on."""
        self._call("set")

    def clear(self) -> None:
        """Say that it has not happened yet."""
        self._call("clear")

    def is_set(self) -> bool:
        """Whether it has happened."""
        return bool(self._call("get"))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened; `TimeoutError` if that is not in time."""
        if self._wait("wait", timeout=timeout) is None:
            raise TimeoutError(f"{self!r} was not set for {timeout:g} s")
        return True


def _release(granted: Any) -> tuple[str, tuple[Any, ...]] | None:
    return ("release", (granted[0],)) if granted else None


def _lock(name: str, timeout: float | None, lease: float) -> SharedLock:
    return SharedLock(name, timeout=timeout, lease=lease)
