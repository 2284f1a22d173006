"""The owner of a pool's shared state: one process that has all objects, and their one order.

The owner is a plain data structure, and no two threads use it at once. Keys and values are bytes
here. What waits takes no thread: it is an operation that is answered by the operation that it waits
for, by its deadline, or never if its process has gone.
"""

from __future__ import annotations

import heapq
import itertools
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import msgspec

STATE_MAX = 1 << 30
"""How many bytes all objects of a pool may have together."""
OVERHEAD = 128
"""How many bytes an entry counts besides its own."""
PART_BYTES = 4 << 20
"""How many bytes of a whole dict or set go into one answer."""
COUNT_MAX = (1 << 63) - 1
TIDY_MIN = 32
"""So many deadlines may be kept before those of operations that are over are looked for."""

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
        self.waiters: dict[int, Asked] = {}
        """The operations of the process that wait, by their numbers."""
        self.holds: set[OwnedLock] = set()
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


# No dataclass: its `__init__` would be one Python function more for each operation.
class Asked(msgspec.Struct, eq=False):
    """One operation that a process asks for; it may wait."""

    session: Session
    number: int
    waits: bool = False
    timeout: float | None = None
    """How many seconds a waiting operation waits at most; None for any time."""
    place: OwnedObject | None = None
    """The object that it waits for."""
    line: dict[Asked, None] | None = None
    """The operations that wait for the same, in the order in which they came."""
    payload: Any = None
    over: bool = False
    """Whether it has waited, and was answered or forgotten."""

    def answer(self, value: Any, problem: str = "") -> None:
        """Answer an operation that waits."""
        self.forget()
        self.session.answer(self.number, value, problem)

    def forget(self) -> None:
        """End the waiting without an answer."""
        if self.line is not None:
            self.line.pop(self, None)
        self.over, self.payload = True, None
        self.session.waiters.pop(self.number, None)


class OwnedObject:
    """One object of a pool's shared state; its operations are the methods that begin with `do_`."""

    KIND: ClassVar[str]

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        self.owner, self.name = owner, name
        self.waiting: dict[Asked, None] = {}
        """The operations that wait for this object."""

    def check(self, options: dict[str, Any]) -> None:
        """Refuse options that contradict those the object was made with."""

    def timed_out(self, asked: Asked) -> None:
        """Answer an operation that has waited long enough."""
        asked.answer(None)

    def left(self, asked: Asked) -> None:
        """Note that a waiting operation was cancelled, or that its process is gone."""

    def size(self) -> int:
        """How many bytes the object's contents count."""
        return 0

    def deleted(self) -> None:
        """Note that the object is being removed: what waits for it is refused."""
        self.dismiss(self.waiting)

    def dismiss(self, line: dict[Asked, None]) -> None:
        """Refuse what waits for an object that is being removed."""
        text = f"sky.{self.KIND} {self.name!r} was deleted while this call waited for it"
        for asked in list(line):
            asked.answer(MISUSED, text)


class OwnedDict(OwnedObject):
    """Values by key, in the order of insertion."""

    KIND = "dict"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._values: dict[bytes, bytes] = {}

    def size(self) -> int:
        return sum(_size(key, value) for key, value in self._values.items())

    def _store(self, key: bytes, value: bytes) -> None:
        old = self._values.get(key)
        before = 0 if old is None else _size(key, old)
        self.owner.take(_size(key, value) - before, self)
        self._values[key] = value

    def _drop(self, key: bytes) -> bytes:
        value = self._values.pop(key)
        self.owner.give(_size(key, value))
        return value

    def do_get(self, asked: Asked, key: bytes) -> bytes | None:
        return self._values.get(key)

    def do_has(self, asked: Asked, key: bytes) -> bool:
        return key in self._values

    def do_set(self, asked: Asked, key: bytes, value: bytes) -> None:
        self._store(key, value)

    def do_update(self, asked: Asked, pairs: list[tuple[bytes, bytes]]) -> None:
        new = sum(_size(*pair) for pair in pairs)
        # All or nothing: that much is taken, and what it replaces given back, at once.
        self.owner.take(new, self)
        self.owner.give(new)
        for key, value in pairs:
            self._store(key, value)

    def do_setdefault(self, asked: Asked, key: bytes, value: bytes) -> bytes:
        if key not in self._values:
            self._store(key, value)
        return self._values[key]

    def do_pop(self, asked: Asked, key: bytes) -> bytes | None:
        return self._drop(key) if key in self._values else None

    def do_popitem(self, asked: Asked) -> tuple[bytes, bytes] | None:
        if not self._values:
            return None
        key = next(reversed(self._values))
        return key, self._drop(key)

    def do_replace(self, asked: Asked, key: bytes, old: bytes | None, new: bytes) -> bool:
        """Store a value if the present one is `old`, or if there is none and `old` is None."""
        if self._values.get(key) != old:
            return False
        self._store(key, new)
        return True

    def do_len(self, asked: Asked) -> int:
        return len(self._values)

    def do_clear(self, asked: Asked) -> None:
        self.owner.give(self.size())
        self._values.clear()

    def do_keys(self, asked: Asked) -> Any:
        return _in_parts(asked, self._values, len)

    def do_items(self, asked: Asked) -> Any:
        pairs = self._values.items()
        return _in_parts(asked, pairs, lambda pair: len(pair[0]) + len(pair[1]))


class OwnedSet(OwnedObject):
    """Elements, each once, in the order of insertion."""

    KIND = "set"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._elements: OrderedDict[bytes, None] = OrderedDict()

    def size(self) -> int:
        return sum(map(_size, self._elements))

    def do_add(self, asked: Asked, element: bytes) -> bool:
        """Add an element; says whether it is new."""
        if element in self._elements:
            return False
        self.owner.take(_size(element), self)
        self._elements[element] = None
        return True

    def do_discard(self, asked: Asked, element: bytes) -> bool:
        if element not in self._elements:
            return False
        del self._elements[element]
        self.owner.give(_size(element))
        return True

    def do_pop(self, asked: Asked) -> bytes | None:
        element = next(iter(self._elements), None)
        if element is not None:
            self.do_discard(asked, element)
        return element

    def do_has(self, asked: Asked, element: bytes) -> bool:
        return element in self._elements

    def do_len(self, asked: Asked) -> int:
        return len(self._elements)

    def do_clear(self, asked: Asked) -> None:
        self.owner.give(self.size())
        self._elements.clear()

    def do_keys(self, asked: Asked) -> Any:
        return _in_parts(asked, self._elements, len)


class OwnedCounter(OwnedObject):
    """One whole number."""

    KIND = "counter"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._value = 0

    def _store(self, value: int) -> int:
        if not isinstance(value, int) or not -COUNT_MAX <= value <= COUNT_MAX:
            raise Refused(
                MISUSED, f"sky.counter {self.name!r}: {value!r} is beyond 63 bits; count less"
            )
        self._value = value
        return value

    def do_add(self, asked: Asked, amount: int) -> int:
        return self._store(self._value + amount)

    def do_get(self, asked: Asked) -> int:
        return self._value

    def do_set(self, asked: Asked, value: int) -> None:
        self._store(value)

    def do_replace(self, asked: Asked, old: int, new: int) -> bool:
        if self._value != old:
            return False
        self._store(new)
        return True


class OwnedQueue(OwnedObject):
    """Items in the order in which they came, and who waits for one or for room."""

    KIND = "queue"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._room = options.get("maxsize") or math.inf
        self._items: deque[bytes] = deque()
        self._putting: dict[Asked, None] = {}
        """The operations that wait for room."""

    def check(self, options: dict[str, Any]) -> None:
        wanted = options.get("maxsize")
        if wanted and wanted != self._room:
            there = "no limit" if self._room == math.inf else f"maxsize={self._room}"
            raise Refused(
                MISUSED,
                f"sky.queue({self.name!r}, maxsize={wanted}): the queue is there, with {there}; "
                "leave maxsize out, or use another name",
            )

    def size(self) -> int:
        return sum(map(_size, self._items))

    def deleted(self) -> None:
        super().deleted()
        self.dismiss(self._putting)

    def do_put(self, asked: Asked, item: bytes) -> Any:
        """Append an item; None if there is no room, or was none in time."""
        if self._hand_over(item):
            return True
        if len(self._items) < self._room:
            self._append(item)
            return True
        return self.owner.wait(asked, self, self._putting, item)

    def _hand_over(self, item: bytes) -> bool:
        """Give an item to the first that waits for one, if there is one."""
        getter = next(iter(self.waiting), None)
        if getter is not None:
            getter.answer([item])
        return getter is not None

    def _append(self, item: bytes) -> None:
        self.owner.take(_size(item), self)
        self._items.append(item)

    def do_get(self, asked: Asked) -> Any:
        """Take the first item, in a list; None if there is none, or was none in time."""
        if not self._items:
            return self.owner.wait(asked, self, self.waiting)
        item = self._items.popleft()
        self.owner.give(_size(item))
        self._fill()
        return [item]

    def _fill(self) -> None:
        """Take the item of one that waits for room."""
        putter = next(iter(self._putting), None)
        if putter is not None and len(self._items) < self._room:
            try:
                self._append(putter.payload)
            except Refused as problem:
                putter.answer(problem.code, str(problem))
            else:
                putter.answer(True)

    def do_unget(self, asked: Asked, item: bytes) -> None:
        """Take an item back that was taken for a caller who did not get it."""
        if not self._hand_over(item):
            self.owner.take(_size(item), self)
            self._items.appendleft(item)

    def do_facts(self, asked: Asked) -> tuple[int, int]:
        """How many items there are, and how many there can be, 0 for any number."""
        return len(self._items), 0 if self._room == math.inf else int(self._room)


class OwnedLock(OwnedObject):
    """Who holds a lock, and who waits for it."""

    KIND = "lock"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self.session: Session | None = None
        """The process that holds the lock."""
        self.lease = 0.0
        """After so many seconds without a word of the process, the lock is free again."""
        self.granted = 0.0
        """When the process got the lock: what it said while it waited is no part of the lease."""
        self._token = 0
        """The number of the last holding."""
        self._abandoned = False
        """Whether the last holder was lost while it held the lock."""

    def deleted(self) -> None:
        if self.session is not None:
            self.session.holds.discard(self)
        super().deleted()

    def do_acquire(self, asked: Asked, lease: float) -> Any:
        """Hold the lock: its token, and whether the holder before was lost; None if not in time."""
        if self.session is None:
            return self._grant(asked.session, lease)
        return self.owner.wait(asked, self, self.waiting, lease)

    def _grant(self, session: Session, lease: float) -> tuple[int, bool]:
        self.session, self.lease, self.granted = session, lease, time.monotonic()
        session.holds.add(self)
        self.owner.watches = True
        self._token += 1
        abandoned, self._abandoned = self._abandoned, False
        return self._token, abandoned

    def do_release(self, asked: Asked, token: int) -> bool:
        """Let the lock go; False if it is not held with this token."""
        if self.session is None or self._token != token:
            return False
        self._free()
        return True

    def abandon(self) -> None:
        """Free the lock, because its holder is gone."""
        self._abandoned = True
        self._free()

    def _free(self) -> None:
        assert self.session is not None
        self.session.holds.discard(self)
        self.session = None
        following = next(iter(self.waiting), None)
        if following is not None:
            following.answer(self._grant(following.session, following.payload))

    def do_owner(self, asked: Asked) -> str | None:
        return None if self.session is None else self.session.who


class OwnedBarrier(OwnedObject):
    """Who waits for the others."""

    KIND = "barrier"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._parties: int = options["parties"]
        self._broken = ""
        """Why the barrier is broken; empty if it is not."""

    def check(self, options: dict[str, Any]) -> None:
        if options["parties"] != self._parties:
            raise Refused(
                MISUSED,
                f"sky.barrier({self.name!r}, parties={options['parties']}): the barrier is there, "
                f"with parties={self._parties}; give that number, or use another name",
            )

    def deleted(self) -> None:
        self._break("it was deleted")

    def do_wait(self, asked: Asked) -> Any:
        """Wait for the others: the number of the waiter, or why the barrier is broken."""
        if self._broken:
            return self._broken
        if len(self.waiting) + 1 < self._parties:
            return self.owner.wait(asked, self, self.waiting)
        for number, other in enumerate(list(self.waiting)):
            other.answer(number)
        return self._parties - 1

    def timed_out(self, asked: Asked) -> None:
        asked.answer(None)
        self._break("one that waited there did not wait any longer")

    def left(self, asked: Asked) -> None:
        self._break(f"{asked.session.who}, which waited there, was cancelled or ended")

    def _break(self, why: str) -> None:
        self._broken = why
        for asked in list(self.waiting):
            asked.answer(why)

    def do_abort(self, asked: Asked) -> None:
        self._break("it was aborted")

    def do_reset(self, asked: Asked) -> None:
        self._break("it was reset")
        self._broken = ""

    def do_facts(self, asked: Asked) -> tuple[int, int, bool]:
        """How many must come, how many wait, and whether the barrier is broken."""
        return self._parties, len(self.waiting), bool(self._broken)


class OwnedEvent(OwnedObject):
    """Whether something has happened, and who waits for it."""

    KIND = "event"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._is_set = False

    def do_set(self, asked: Asked) -> None:
        self._is_set = True
        for other in list(self.waiting):
            other.answer(True)

    def do_clear(self, asked: Asked) -> None:
        self._is_set = False

    def do_get(self, asked: Asked) -> bool:
        return self._is_set

    def do_wait(self, asked: Asked) -> Any:
        return True if self._is_set else self.owner.wait(asked, self, self.waiting)


KINDS: dict[str, type[OwnedObject]] = {
    kind.KIND: kind
    for kind in (
        OwnedDict,
        OwnedSet,
        OwnedCounter,
        OwnedQueue,
        OwnedLock,
        OwnedBarrier,
        OwnedEvent,
    )
}


def _size(*parts: bytes) -> int:
    return sum(map(len, parts)) + OVERHEAD


def _in_parts(asked: Asked, entries: Iterable[Any], length: Any) -> Any:
    """Answer with all entries of this moment, in as many answers as their bytes need."""
    parts = list(_cut(entries, length))
    for part in parts[:-1]:
        asked.session.answer(asked.number, part, more=True)
    return parts[-1]


def _cut(entries: Iterable[Any], length: Any) -> Iterator[list[Any]]:
    part: list[Any] = []
    room = PART_BYTES
    for entry in entries:
        if part and length(entry) > room:
            yield part
            part, room = [], PART_BYTES
        part.append(entry)
        room -= length(entry)
    yield part


class Owner:
    """All objects of a pool, by kind and name."""

    def __init__(self, limit: int = STATE_MAX) -> None:
        self.epoch = secrets.token_hex(8)
        """Names this owner: the owner after a loss has another one."""
        self._limit = limit
        self._objects: dict[tuple[str, str], OwnedObject] = {}
        self._used = 0
        self.absent: list[Session] = []
        """The processes that held locks when their connections broke."""
        self._processes: dict[str, Session] = {}
        """The last session of each process, while it is there or holds locks."""
        self.deadlines: list[tuple[float, int, Asked]] = []
        """Of operations that wait, or have waited: when, in which order, which."""
        self.watches = False
        """Whether a process may wait, or hold a lock: then somebody must see whether it is there.

        Who looks says so when there is none any more.
        """
        self._tidy_at = TIDY_MIN
        self._order = itertools.count()

    @property
    def count(self) -> int:
        """How many objects there are."""
        return len(self._objects)

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
        if kind not in KINDS:
            raise Refused(MISUSED, f"there is no sky.{kind} on this pool")
        made = KINDS[kind](self, name, options)
        self.take(OVERHEAD + len(name), made)
        self._objects[kind, name] = made
        return made

    def _delete(self, found: OwnedObject) -> None:
        del self._objects[found.KIND, found.name]
        self.give(OVERHEAD + len(found.name) + found.size())
        found.deleted()

    # Memory.

    def take(self, count: int, by: OwnedObject) -> None:
        """Count bytes that an object gets; refuse them if there is no room."""
        if self._used + count > self._limit:
            raise Refused(
                FULL,
                f"sky.{by.KIND} {by.name!r}: the shared state of this pool has its "
                f"{self._limit / 1e6:.0f} MB; remove what is not used any more (clear, pop, "
                "delete), or keep large data in a store and share its name",
            )
        self._used += count

    def give(self, count: int) -> None:
        """Count bytes that an object has no longer."""
        self._used -= count

    # Waiting.

    def wait(
        self, asked: Asked, place: OwnedObject, line: dict[Asked, None], payload: Any = None
    ) -> Any:
        """Have an operation wait in a line, until its deadline; None if it does not wait."""
        if not asked.waits:
            return None
        asked.place, asked.line, asked.payload = place, line, payload
        line[asked] = None
        self.watches = True
        asked.session.waiters[asked.number] = asked
        if asked.timeout is not None:
            due = time.monotonic() + asked.timeout
            self._tidy_deadlines()
            heapq.heappush(self.deadlines, (due, next(self._order), asked))
        return WAITING

    def _tidy_deadlines(self) -> None:
        """Forget the deadlines of operations that are over, once they may be the most."""
        if len(self.deadlines) >= self._tidy_at:
            self.deadlines = [each for each in self.deadlines if not each[2].over]
            heapq.heapify(self.deadlines)
            self._tidy_at = max(TIDY_MIN, 2 * len(self.deadlines))

    def cancel(self, session: Session, number: int) -> None:
        """Forget a waiting operation whose caller waits no more; it may be over already."""
        asked = session.waiters.get(number)
        if asked is not None and asked.place is not None:
            asked.forget()
            asked.place.left(asked)

    def expire(self) -> float | None:
        """Answer what has waited long enough; returns the seconds until the next deadline."""
        now = time.monotonic()
        while self.deadlines:
            due, _, asked = self.deadlines[0]
            if not asked.over and due > now:
                return due - now
            heapq.heappop(self.deadlines)
            if not asked.over and asked.place is not None:
                asked.place.timed_out(asked)
        return None

    def free_leases(self, session: Session) -> None:
        """Free the locks of a process that has been silent for longer than their leases."""
        now, heard = time.monotonic(), session.heard
        for lock in [e for e in session.holds if now - max(heard, e.granted) > e.lease]:
            lock.abandon()

    def tidy_absent(self) -> None:
        """Forget processes that are absent and hold no lock any more."""
        for session in [each for each in self.absent if not each.holds]:
            self.absent.remove(session)
            self._forget(session)

    def leave(self, session: Session, *, ended: bool) -> None:
        """Forget what a process waits for, and free its locks if it has ended.

        If only its connection broke, the process keeps its locks for their leases.
        """
        for number in list(session.waiters):
            self.cancel(session, number)
        if session.holds and not ended:
            self.absent.append(session)
            return
        for lock in list(session.holds):
            lock.abandon()
        self._forget(session)

    def come(self, session: Session) -> None:
        """Note a process; one that connects again has the locks that it held before."""
        if not session.process:
            return
        before = self._processes.get(session.process)
        self._processes[session.process] = session
        if before is not None and before is not session:
            # The end of its former connection may not have been seen yet.
            for lock in before.holds:
                lock.session = session
            session.holds, before.holds = before.holds, set()

    def _forget(self, session: Session) -> None:
        if self._processes.get(session.process) is session:
            del self._processes[session.process]
