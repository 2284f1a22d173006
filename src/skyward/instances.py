"""Instances: the objects of the user's classes that live in this process, by key.

The functions here run as tasks of an executor, which keeps the objects between calls.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from skyward.errors import InstanceLostError

_kept: dict[str, Any] = {}
_making: dict[str, bool] = {}
"""The objects that are being made, and whether each is still wanted."""
_lock = threading.Lock()
_locks: dict[str, threading.RLock] = {}
"""Of the objects that have places of their own: a task of this process may call them, too."""
_closed: deque[str] = deque(maxlen=1000)
"""The objects that were closed last."""


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


def called(key: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of an object, or close it, as a task elsewhere asks."""
    if method == "close":
        return close(key)
    kind = type(_find(key))
    if method.startswith("_") or not isinstance(_declared(kind, method), types.FunctionType):
        # Rare: this look takes several microseconds.
        method_of(kind, method)
    return call(key, method, *args, **kwargs)


def has(key: str) -> bool:
    """Whether an object is in this process."""
    return key in _kept


def is_apart(key: str) -> bool:
    """Whether an object has a place of its own."""
    return key in _locks


def close(key: str, /) -> None:
    """Forget an object; if its class has a method `close`, that is called before."""
    instance = _kept.pop(key, None)
    _locks.pop(key, None)
    _closed.append(key)
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


def method_of(kind: type, name: str) -> Callable[..., Any]:
    """The method of a class, which must be callable from outside."""
    found = inspect.getattr_static(kind, name, None)
    if name.startswith("_") and name != "__call__":
        raise AttributeError(
            f"{name!r} of {kind.__qualname__} is the object's own, and not reachable from outside; "
            "write a method without an underscore"
        )
    is_method = isinstance(found, staticmethod | classmethod) or callable(found)
    if found is None or not is_method or inspect.isclass(found):
        raise AttributeError(
            f"{kind.__qualname__} has no method {name!r}; the object lives on a node, so that only "
            "its methods are reachable: write one that returns what you need"
        )
    method: Callable[..., Any] = getattr(kind, name)
    return method


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
        raise lost(key, "") from None


def lost(key: str, what: str) -> InstanceLostError:
    """The error for a call of an object that is not here any more; `what` tasks elsewhere call."""
    name = key.partition(" ")[0]
    if key in _closed:
        return InstanceLostError(f"this {name} was closed; make another one")
    if what:
        return client_has_left(what)
    return InstanceLostError(f"the object of {name} is not in this process any more; make it again")


def client_has_left(what: str) -> InstanceLostError:
    """The error for a call of an object that is gone with its client."""
    return InstanceLostError(
        f"{what} cannot be called: the client that made the object has left the pool, and the "
        "object is gone with it; make another one"
    )
