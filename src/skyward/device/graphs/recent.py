"""A mapping that keeps what was used last, and forgets the rest."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """At most `limit` entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key) -> Value | None:
        """The value of a key, if it is known; it counts as used."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry, for which the one that was used longest ago may have to go."""
        self._entries[key] = value
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
