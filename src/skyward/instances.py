"""Instances: the objects of the user's classes that live in this process, by key.

The functions here run as tasks of an executor, which keeps the objects between calls.
"""

from __future__ import annotations

import threading
from typing import Any

from skyward.errors import InstanceLostError

_kept: dict[str, Any] = {}
_making: dict[str, bool] = {}
"""The objects that are being made, and whether each is still wanted."""
_lock = threading.Lock()
_locks: dict[str, threading.RLock] = {}
"""Of the objects that have places of their own: a task of this process may call them, too."""


def make(key: str, kind: type, /, *args: Any, **kwargs: Any) -> None:
    """Make an object and keep it, unless it is freed meanwhile by another thread."""
    with _lock:
        _making[key] = True
    made = None
    try:
        made = kind(*args, **kwargs)
    finally:
        with _lock:
            if _making.pop(key) and made is not None:
                _kept[key] = made


def make_apart(key: str, kind: type, /, *args: Any, **kwargs: Any) -> None:
    """Make an object that has a place of its own."""
    _locks[key] = threading.RLock()
    try:
        make(key, kind, *args, **kwargs)
    finally:
        if key not in _kept:
            _locks.pop(key, None)


def call(key: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an object."""
    if key in _locks:
        with _locks[key]:
            return _call(key, method, args, kwargs)
    return _call(key, method, args, kwargs)


def _call(key: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    instance = _find(key)
    found = _declared(type(instance), method)
    if getattr(type(found), "__sky_function__", False):
        # A `@sky.function` in the class: here it runs.
        return found.local(instance, *args, **kwargs)
    return getattr(instance, method)(*args, **kwargs)


def has(key: str) -> bool:
    """Whether an object is in this process."""
    return key in _kept


def close(key: str, /) -> None:
    """Forget an object; if its class has a method `close`, that is called before."""
    instance = _kept.pop(key, None)
    _locks.pop(key, None)
    if callable(closing := getattr(instance, "close", None)):
        closing()


def free(key: str, /) -> None:
    """Forget an object that nobody refers to any more."""
    with _lock:
        if key in _making:
            _making[key] = False
        # Its own code may run when it ends: not under the lock.
        freed = _kept.pop(key, None)
        _locks.pop(key, None)
    del freed


def free_all() -> None:
    """Forget all objects: the client that made them has left."""
    _kept.clear()
    _locks.clear()


def _declared(kind: type, name: str) -> Any:
    """What a class has under a name; a descriptor as it is."""
    # `inspect.getattr_static` would take several microseconds of every call.
    for each in kind.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    return None


def _find(key: str) -> Any:
    try:
        return _kept[key]
    except KeyError:
        raise InstanceLostError(
            f"the object of {key.partition(' ')[0]} is not in this process any more; make it again"
        ) from None
