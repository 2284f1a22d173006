"""Shared dicts and sets."""

from __future__ import annotations

from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSet,
    ValuesView,
)
from typing import Any, Generic, TypeVar, cast, overload

from skyward.state.shared import SharedObject
from skyward.state.values import decode, decode_key, encode, encode_key

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
E = TypeVar("E")

BATCH_BYTES = 4 << 20
"""How many bytes of values `update` sends at once."""

_NOTHING: Any = object()


class SharedDict(SharedObject, MutableMapping[K, V], Generic[K, V]):
    """A dict that the whole pool shares; made by `sky.dict(name)`.

    Keys are str, bytes, int, float, bool and None, and tuples of them. A value is a copy: to change
    it in the dict, assign it again, or use `change`.

    >>> scores = sky.dict("scores")
    >>> scores["run 1"] = 0.93
    """

    KIND = "dict"

    def _key(self, key: Any) -> bytes:
        return encode_key(key, repr(self))

    def _value(self, key: Any, value: Any) -> bytes:
        return encode(value, f"the value of {key!r} in {self!r}")

    def __getitem__(self, key: K) -> V:
        found = self._call("get", self._key(key))
        if found is None:
            raise KeyError(key)
        return cast(V, decode(found))

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...
    def get(self, key: K, /, default: Any = None) -> Any:
        """The value of a key, or the default."""
        found = self._call("get", self._key(key))
        return default if found is None else decode(found)

    def __setitem__(self, key: K, value: V) -> None:
        self._call("set", self._key(key), self._value(key, value))

    def __delitem__(self, key: K) -> None:
        if self._call("pop", self._key(key)) is None:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return bool(self._call("has", self._key(key)))

    def __len__(self) -> int:
        return int(self._call("len"))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[K]:
        """The keys of this moment."""
        return iter([decode_key(key) for key in self._call("keys")])

    def items(self) -> ItemsView[K, V]:
        """The keys and values of this moment."""
        return self.copy().items()

    def values(self) -> ValuesView[V]:
        """The values of this moment."""
        return self.copy().values()

    def copy(self) -> dict[K, V]:
        """A plain dict with what this one has now."""
        return {decode_key(key): decode(value) for key, value in self._call("items")}

    @overload
    def pop(self, key: K, /) -> V: ...
    @overload
    def pop(self, key: K, /, default: V | D) -> V | D: ...
    def pop(self, key: K, /, default: Any = _NOTHING) -> Any:
        """Remove a key and return its value: of several callers, one gets it."""
        found = self._call("pop", self._key(key))
        if found is None:
            if default is _NOTHING:
                raise KeyError(key)
            return default
        return decode(found)

    def popitem(self) -> tuple[K, V]:
        """Remove the key that was added last, and return it with its value."""
        found = self._call("popitem")
        if found is None:
            raise KeyError(f"{self!r} is empty")
        return decode_key(found[0]), decode(found[1])

    def clear(self) -> None:
        """Remove everything."""
        self._call("clear")

    def setdefault(self, key: K, default: V = None, /) -> V:  # type: ignore[assignment]
        """The value of a key; if it has none, the default becomes its value: of several, one."""
        encoded = self._value(key, default)
        return cast(V, decode(self._call("setdefault", self._key(key), encoded)))

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Add keys and values, all at once if their values have fewer than 4 MB together."""
        pairs = other.items() if isinstance(other, Mapping) else other
        batch: list[tuple[bytes, bytes]] = []
        size = 0
        for key, value in (*pairs, *more.items()):
            pair = self._key(key), self._value(key, value)
            size += len(pair[1])
            if batch and size > BATCH_BYTES:
                self._call("update", batch)
                batch, size = [], len(pair[1])
            batch.append(pair)
        if batch:
            self._call("update", batch)

    def compare_and_set(self, key: K, expected: V, new: V) -> bool:
        """Replace a value if it is equal to the expected one; says whether it was.

        >>> tasks.compare_and_set("job 7", "waiting", "running")
        """
        encoded, value = self._key(key), self._value(key, new)
        while (found := self._call("get", encoded)) is not None and decode(found) == expected:
            if self._call("replace", encoded, found, value):
                return True
        return False

    def change(self, key: K, function: Callable[[V], V], default: V = _NOTHING) -> V:
        """Replace a value by what a function makes of it, and return that.

        The function runs here. If another process changes the value meanwhile, it runs again.

        >>> sky.dict("best").change("loss", lambda best: min(best, loss), default=loss)
        """
        encoded = self._key(key)
        while True:
            found = self._call("get", encoded)
            if found is None and default is _NOTHING:
                raise KeyError(key)
            new = function(default if found is None else decode(found))
            if self._call("replace", encoded, found, self._value(key, new)):
                return new


class SharedSet(SharedObject, MutableSet[E], Generic[E]):
    """A set that the whole pool shares; made by `sky.set(name)`.

    Elements are what keys of `sky.dict` are.

    >>> sky.set("seen").add_new(url)
    True
    """

    KIND = "set"

    def _element(self, element: Any) -> bytes:
        return encode_key(element, repr(self))

    def add(self, element: E) -> None:
        """Add an element."""
        self._call("add", self._element(element))

    def add_new(self, element: E) -> bool:
        """Add an element; says whether it is new: of several callers, one is told so."""
        return bool(self._call("add", self._element(element)))

    def discard(self, element: E) -> None:
        """Remove an element if it is there."""
        self._call("discard", self._element(element))

    def remove(self, element: E) -> None:
        """Remove an element; `KeyError` if it is not there: of several callers, one removes it."""
        if not self._call("discard", self._element(element)):
            raise KeyError(element)

    def pop(self) -> E:
        """Remove an element and return it: of several callers, one gets it."""
        found = self._call("pop")
        if found is None:
            raise KeyError(f"{self!r} is empty")
        return cast(E, decode_key(found))

    def clear(self) -> None:
        """Remove everything."""
        self._call("clear")

    def __contains__(self, element: object) -> bool:
        return bool(self._call("has", self._element(element)))

    def __len__(self) -> int:
        return int(self._call("len"))

    def __iter__(self) -> Iterator[E]:
        """The elements of this moment."""
        return iter([decode_key(element) for element in self._call("keys")])

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        """The operators of `collections.abc.Set` make plain sets."""
        return frozenset(it)
