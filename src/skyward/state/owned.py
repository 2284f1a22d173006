"""What a pool's shared state holds, as its owner has it: keys and values are bytes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from skyward.state.owner import (
    MISUSED,
    OVERHEAD,
    WAITING,
    Asked,
    Line,
    OwnedObject,
    Owner,
    Refused,
)
from skyward.state.signals import OwnedBarrier, OwnedEvent, OwnedLock

PART_BYTES = 4 << 20
"""How many bytes of a whole dict or set go into one answer."""
COUNT_MAX = (1 << 63) - 1


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
        self.owner.take(_size(key, value) - before, self.KIND, self.name)
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
        self.owner.take(new, self.KIND, self.name)
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
        self._elements: dict[bytes, None] = {}

    def size(self) -> int:
        return sum(map(_size, self._elements))

    def do_add(self, asked: Asked, element: bytes) -> bool:
        """Add an element; says whether it is new."""
        if element in self._elements:
            return False
        self.owner.take(_size(element), self.KIND, self.name)
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
        if not isinstance(value, int) or abs(value) > COUNT_MAX:
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
        self._getters, self._putters = Line(), Line()

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
        self.dismiss((*self._getters, *self._putters))

    def do_put(self, asked: Asked, item: bytes) -> Any:
        """Append an item; None if there is no room, or was none in time."""
        getter = self._getters.next()
        if getter is not None:
            getter.answer([item])
            return True
        if len(self._items) < self._room:
            self._append(item)
            return True
        if not asked.waits:
            return None
        self._putters.append(self.wait(asked, item))
        return WAITING

    def _append(self, item: bytes) -> None:
        self.owner.take(_size(item), self.KIND, self.name)
        self._items.append(item)

    def do_get(self, asked: Asked) -> Any:
        """Take the first item, in a list; None if there is none, or was none in time."""
        if self._items:
            item = self._items.popleft()
            self.owner.give(_size(item))
            self._fill()
            return [item]
        if not asked.waits:
            return None
        self._getters.append(self.wait(asked))
        return WAITING

    def _fill(self) -> None:
        """Take the item of one that waits for room."""
        if len(self._items) < self._room and (putter := self._putters.next()) is not None:
            try:
                self._append(putter.payload)
            except Refused as problem:
                putter.forget()
                putter.session.answer(putter.number, problem.code, str(problem))
            else:
                putter.answer(True)

    def do_unget(self, asked: Asked, item: bytes) -> None:
        """Take an item back that was taken for a caller who did not get it."""
        getter = self._getters.next()
        if getter is not None:
            getter.answer([item])
            return
        self.owner.take(_size(item), self.KIND, self.name)
        self._items.appendleft(item)

    def do_facts(self, asked: Asked) -> tuple[int, int]:
        """How many items there are, and how many there can be, 0 for any number."""
        return len(self._items), 0 if self._room == math.inf else int(self._room)


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
