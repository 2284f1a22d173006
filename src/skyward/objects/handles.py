"""Handles: data that is sent to each node once, and then used in any number of calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from skyward.objects import encoding

T = TypeVar("T")


class Handle(Generic[T]):
    """Frozen data that is sent to each node once; made by `put`."""

    __sky_handle__ = True
    fresh = False
    __slots__ = ("__weakref__", "_value", "encoded", "key")

    def __init__(self, value: T) -> None:
        self._value = value
        self.key = uuid.uuid4().bytes
        self.encoded = encoding.encode(value, own_modules=True)

    @property
    def value(self) -> T:
        """The data itself."""
        return self._value

    def __sky_open__(self) -> T:
        """The data: for a call that runs here."""
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self._value,)

    def __repr__(self) -> str:
        text = repr(self._value)
        return f"<sky.put {text if len(text) <= 40 else text[:37] + '...'}>"


def put(value: T) -> T:
    """Declare data frozen: each node gets it once, and any number of calls can use it.

    Pass the handle in place of the data; the function sees the data itself. Neither the client nor
    the function may change the data.

    >>> images = sky.put(images)
    >>> [train(images, lr) > compute for lr in rates]
    """
    return cast(T, value if isinstance(value, Handle) else Handle(value))


def _all(handle: Any) -> bool:
    return True


def opened(values: Any, wanted: Callable[[Any], bool] = _all) -> Any:
    """Arguments with each wanted handle replaced by its data; the same objects if there is none."""
    if getattr(type(values), "__sky_handle__", False):
        return values.__sky_open__() if wanted(values) else values
    if type(values) in (list, tuple):
        items = [opened(value, wanted) for value in values]
        changed = any(new is not old for new, old in zip(items, values, strict=True))
        return type(values)(items) if changed else values
    if type(values) is dict:
        by_key = {key: opened(value, wanted) for key, value in values.items()}
        changed = any(by_key[key] is not value for key, value in values.items())
        return by_key if changed else values
    return values
