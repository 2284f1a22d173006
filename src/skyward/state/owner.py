"""The owner of a pool's shared state: one process that has all objects, and their one order.

The owner is a plain data structure, and no two threads use it at once. What waits takes no thread:
it is a `Waiter`, answered by the operation that it waits for, by its deadline, or never if its
process has gone.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

STATE_MAX = 1 << 30
"""How many bytes all objects of a pool may have together."""
OVERHEAD = 128
"""How many bytes an entry counts besides its own."""
TIDY_MIN = 32
"""So many operations may wait in a line before those that are over are looked for there."""

FULL = "full"
MISUSED = "misused"

WAITING: Any = object()
"""What an operation returns that is answered later."""


class Refused(Exception):
    """The owner does not perform an operation; `code` says what kind of refusal it is."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class Session(ABC):
    """One process that uses the state, as the owner sees it."""

    def __init__(self) -> None:
        self.who = "a process"
        self.process = ""
        """Names the process, over all of its connections."""
        self.waiters: dict[int, Waiter] = {}
        self.holds: set[Holding] = set()
        """The locks that the process holds."""
        self.heard = time.monotonic()
        """When the process last sent something."""

    @abstractmethod
    def answer(
        self, number: int, value: Any = None, problem: str = "", *, more: bool = False
    ) -> None:
        """Answer the process's question of that number; never waits.

        With `more`, further answers to the same question follow.
        """


@dataclass(slots=True)
class Asked:
    """One operation that a process asks for."""

    session: Session
    number: int
    waits: bool = False
    timeout: float | None = None
    """How many seconds a waiting operation waits at most; None for any time."""


@dataclass(slots=True, eq=False)
class Waiter:
    """An operation that waits."""

    session: Session
    number: int
    place: OwnedObject
    payload: Any
    over: bool = False
    """Whether it has been answered or forgotten."""

    def answer(self, value: Any) -> None:
        """Answer the operation; it waits no more."""
        self.forget()
        self.session.answer(self.number, value)

    def forget(self) -> None:
        """End the waiting without an answer."""
        self.over = True
        self.payload = None
        self.session.waiters.pop(self.number, None)


@dataclass(slots=True, eq=False)
class Holding:
    """A lock that a process holds."""

    session: Session
    token: int
    lease: float
    """After so many seconds without a word of the process, the lock is free again."""
    abandon: Callable[[], None] = field(repr=False)
    """Frees the lock, because its holder is gone."""


class Line:
    """The operations that wait for one thing, in the order in which they came."""

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()
        self._tidy_at = TIDY_MIN

    def append(self, waiter: Waiter) -> None:
        """Have an operation wait at the end."""
        if len(self._waiters) >= self._tidy_at:
            self._waiters = deque(self)
            self._tidy_at = max(TIDY_MIN, 2 * len(self._waiters))
        self._waiters.append(waiter)

    def next(self) -> Waiter | None:
        """Take the first that still waits; None if none does."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.over:
                return waiter
        return None

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for waiter in self._waiters if not waiter.over)

    def __len__(self) -> int:
        """How many places are taken, also by operations that are over."""
        return len(self._waiters)


class OwnedObject:
    """One object of a pool's shared state; its operations are the methods that begin with `do_`."""

    KIND: ClassVar[str]

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        self.owner, self.name, self.options = owner, name, options

    def check(self, options: dict[str, Any]) -> None:
        """Refuse options that contradict those the object was made with."""

    def wait(self, asked: Asked, payload: Any = None) -> Waiter:
        """Have an operation wait; the caller keeps the waiter, and returns `WAITING`."""
        return self.owner.wait(asked, self, payload)

    def timed_out(self, waiter: Waiter) -> None:
        """Answer an operation that has waited long enough."""
        waiter.answer(None)

    def left(self, waiter: Waiter) -> None:
        """Note that a waiting operation was cancelled, or that its process is gone."""

    def size(self) -> int:
        """How many bytes the object's contents count."""
        return 0

    def deleted(self) -> None:
        """Note that the object is being removed."""

    def dismiss(self, waiters: Iterable[Waiter]) -> None:
        """Refuse operations that wait for an object that is being removed."""
        for waiter in waiters:
            if not waiter.over:
                waiter.forget()
                text = f"sky.{self.KIND} {self.name!r} was deleted while this call waited for it"
                waiter.session.answer(waiter.number, MISUSED, text)


class Owner:
    """All objects of a pool, by kind and name."""

    def __init__(self, kinds: dict[str, type[OwnedObject]], limit: int = STATE_MAX) -> None:
        self.epoch = secrets.token_hex(8)
        """Names this owner: the owner after a loss has another one."""
        self._kinds, self._limit = kinds, limit
        self._objects: dict[tuple[str, str], OwnedObject] = {}
        self._used = 0
        self._absent: list[Session] = []
        self._processes: dict[str, Session] = {}
        """The last session of each process, while it is there or holds locks."""
        self._deadlines: list[tuple[float, int, Waiter]] = []
        self._tidy_at = TIDY_MIN
        self._order = itertools.count()

    def perform(
        self,
        asked: Asked,
        kind: str,
        name: str,
        what: str,
        arguments: list[Any],
        options: dict[str, Any] | None,
    ) -> None:
        """Perform one operation of one object, which is made if it is not there."""
        try:
            found = self._objects.get((kind, name)) or self._make(kind, name, options or {})
            if options:
                found.check(options)
            if what == "delete":
                self._delete(found)
                value: Any = None
            else:
                value = getattr(found, f"do_{what}")(asked, *arguments)
        except Refused as problem:
            asked.session.answer(asked.number, problem.code, str(problem))
            return
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            text = f"sky.{kind} {name!r} has no such operation: {what} ({problem})"
            asked.session.answer(asked.number, MISUSED, text)
            return
        if value is not WAITING:
            asked.session.answer(asked.number, value)

    def _make(self, kind: str, name: str, options: dict[str, Any]) -> OwnedObject:
        made = self._kinds[kind](self, name, options)
        self.take(OVERHEAD + len(name), kind, name)
        self._objects[kind, name] = made
        return made

    def _delete(self, found: OwnedObject) -> None:
        del self._objects[found.KIND, found.name]
        self.give(OVERHEAD + len(found.name) + found.size())
        found.deleted()

    # Memory.

    def take(self, count: int, kind: str, name: str) -> None:
        """Count bytes that an object gets; refuse them if there is no room."""
        if self._used + count > self._limit:
            raise Refused(
                FULL,
                f"sky.{kind} {name!r}: the shared state of this pool has its "
                f"{self._limit / 1e6:.0f} MB; remove what is not used any more (clear, pop, "
                "delete), or keep large data in a store and share its name",
            )
        self._used += count

    def give(self, count: int) -> None:
        """Count bytes that an object has no longer."""
        self._used -= count

    # Waiting.

    def wait(self, asked: Asked, place: OwnedObject, payload: Any) -> Waiter:
        """Keep an operation that waits, until its deadline."""
        waiter = Waiter(asked.session, asked.number, place, payload)
        asked.session.waiters[asked.number] = waiter
        if asked.timeout is not None:
            due = time.monotonic() + asked.timeout
            self._tidy_deadlines()
            heapq.heappush(self._deadlines, (due, next(self._order), waiter))
        return waiter

    def _tidy_deadlines(self) -> None:
        """Forget the deadlines of operations that are over, once they may be the most."""
        if len(self._deadlines) >= self._tidy_at:
            self._deadlines = [each for each in self._deadlines if not each[2].over]
            heapq.heapify(self._deadlines)
            self._tidy_at = max(TIDY_MIN, 2 * len(self._deadlines))

    def cancel(self, session: Session, number: int) -> None:
        """Forget a waiting operation whose caller waits no more; it may be over already."""
        waiter = session.waiters.get(number)
        if waiter is not None:
            waiter.forget()
            waiter.place.left(waiter)

    def expire(self) -> float | None:
        """Answer what has waited long enough; returns the seconds until the next deadline."""
        now = time.monotonic()
        while self._deadlines:
            due, _, waiter = self._deadlines[0]
            if not waiter.over and due > now:
                return due - now
            heapq.heappop(self._deadlines)
            if not waiter.over:
                waiter.place.timed_out(waiter)
        return None

    def free_leases(self, session: Session) -> None:
        """Free the locks of a process that has been silent for longer than their leases."""
        silent = time.monotonic() - session.heard
        for holding in [each for each in session.holds if silent > each.lease]:
            holding.abandon()

    @property
    def absent(self) -> list[Session]:
        """The processes that hold locks, and whose connections have broken."""
        for session in [each for each in self._absent if not each.holds]:
            self._absent.remove(session)
            self._forget(session)
        return self._absent

    def leave(self, session: Session, *, ended: bool) -> None:
        """Forget what a process waits for, and free its locks if it has ended.

        If only its connection broke, the process keeps its locks for their leases.
        """
        for number in list(session.waiters):
            self.cancel(session, number)
        if session.holds and not ended:
            self._absent.append(session)
            return
        for holding in list(session.holds):
            holding.abandon()
        self._forget(session)

    def come(self, session: Session) -> None:
        """Note a process; one that connects again has the locks that it held before."""
        if not session.process:
            return
        before = self._processes.get(session.process)
        self._processes[session.process] = session
        if before is not None and before is not session:
            # The end of its former connection may not have been seen yet.
            for holding in before.holds:
                holding.session = session
            session.holds, before.holds = before.holds, set()

    def _forget(self, session: Session) -> None:
        if self._processes.get(session.process) is session:
            del self._processes[session.process]
