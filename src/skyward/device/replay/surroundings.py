"""What a function reaches besides its arguments: models, optimisers, numbers it keeps.

A replay does not run Python. So whatever it reaches has to be as it was when it was recorded, or to
change in a way that is known.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

NODES_MOST = 300_000
"""A function that reaches more objects is not followed further."""
SCALARS = (int, float, bool, str, bytes, type(None))
OPAQUE = frozenset({"torch", "numpy", "skyward", "builtins", "threading", "logging", "_thread"})
"""Objects of these libraries are not looked into, but for those of torch that have a state."""
HIDDEN = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class Place:
    """Where something is kept: an attribute, or an item of a container."""

    container: Any
    key: Any
    path: str

    def __repr__(self) -> str:
        return self.path

    def get(self) -> Any:
        return self.container[self.key]

    def set(self, value: Any) -> None:
        self.container[self.key] = value

    def __hash__(self) -> int:
        return hash((_home(self.container), self.path))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Place)
            and _home(self.container) == _home(other.container)
            and self.path == other.path
        )


@dataclass
class Surroundings:
    """Everything that a function reaches, as it is now."""

    numbers: dict[Place, Any] = field(default_factory=dict)
    """Numbers, truths and texts."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """By their paths; a gradient has the path of its tensor, and `.grad`."""
    owners: dict[str, Any] = field(default_factory=dict)
    """Of each gradient: its tensor."""
    schedulers: list[Any] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    """The groups of parameters of optimisers."""
    containers: list[Any] = field(default_factory=list)
    is_whole: bool = True

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Surroundings:
        """Look at what a function reaches."""
        found = cls()
        walk = _Walk(found)
        walk.all(function)
        return found

    def guards(self, loose: set[Place]) -> Guards:
        """What has to be as it is now; but for some numbers."""
        free: dict[object, set[Any]] = {}
        for place in loose:
            free.setdefault(_home(place.container), set()).add(place.key)
        return Guards(self.containers, free)


class Guards:
    """Whether containers are as they were: with the same numbers, and the very same objects."""

    def __init__(self, containers: list[Any], free: dict[object, set[Any]]) -> None:
        self._sized = containers
        self._sizes = [*map(len, containers)]
        self._numbers: list[_Kept] = []
        self._objects: list[_Kept] = []
        for each in containers:
            pairs = each.items() if isinstance(each, dict) else enumerate(each)
            numbers: list[Any] = []
            objects: list[Any] = []
            for key, value in pairs:
                if key not in free.get(_home(each), ()):
                    (numbers if isinstance(value, SCALARS) else objects).append(key)
            for keys, kept in ((numbers, self._numbers), (objects, self._objects)):
                if keys:
                    # Of more than one key, `itemgetter` gives a tuple.
                    get = itemgetter(*keys, keys[0])
                    kept.append((each, get, get(each)))

    def hold(self) -> bool:
        """Whether all is as it was."""
        if [*map(len, self._sized)] != self._sizes:
            return False
        try:
            for container, get, before in self._numbers:
                if get(container) != before:
                    return False
            for container, get, before in self._objects:
                if not all(map(is_, get(container), before)):
                    return False
        except (KeyError, IndexError):
            return False
        return True


_Kept = tuple[Any, Callable[[Any], Any], Any]


class _Walk:
    """Follows objects from one to the next, each once."""

    def __init__(self, found: Surroundings) -> None:
        import torch

        self._found, self._torch = found, torch
        self._seen: set[int] = set()
        self._stateful = (
            torch.nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
            torch.amp.GradScaler,
        )
        self._todo: list[tuple[Any, str]] = []

    def all(self, function: Any) -> None:
        """Follow everything."""
        self._todo.append((function, ""))
        while self._todo:
            if len(self._seen) > NODES_MOST:
                self._found.is_whole = False
                return
            self._look(*self._todo.pop())

    def _look(self, value: Any, path: str) -> None:
        if isinstance(value, SCALARS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, self._torch.Tensor):
            self._tensor(value, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self._todo += [(value.__self__, path), (value.__func__, path)]
        elif isinstance(value, functools.partial):
            self._todo += [(value.func, path), *self._items(value.args, path)]
            self._todo += self._items(value.keywords, path)
        elif isinstance(value, dict | list):
            self._container(value, path)
        elif isinstance(value, tuple | set | frozenset):
            self._todo += self._items(value, path)
        elif isinstance(value, types.CellType):
            self._todo.append((value.cell_contents, path))
        else:
            self._object(value, path)

    def _tensor(self, tensor: Any, path: str) -> None:
        self._found.tensors[path] = tensor
        if tensor.is_leaf and tensor.requires_grad:
            self._found.owners[f"{path}.grad"] = tensor
            if tensor.grad is not None:
                self._found.tensors[f"{path}.grad"] = tensor.grad

    def _function(self, function: types.FunctionType, path: str) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            read = functools.partial(getattr, cell, "cell_contents")
            write = functools.partial(setattr, cell, "cell_contents")
            self._variable(_Variable(id(cell), read, write), content, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._todo.append((value, path))
        if not _is_of_library(function.__module__):
            for name in _names_in(function.__code__):
                if name in function.__globals__:
                    value = function.__globals__[name]
                    read = functools.partial(function.__globals__.__getitem__, name)
                    write = functools.partial(function.__globals__.__setitem__, name)
                    home = id(function.__globals__), name
                    self._variable(_Variable(home, read, write), value, name)

    def _variable(self, variable: _Variable, value: Any, name: str) -> None:
        self._found.containers.append(variable)
        self._note(variable, 0, value, name)

    def _container(self, container: Any, path: str) -> None:
        self._found.containers.append(container)
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for number, (key, value) in enumerate(pairs):
            here = f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[{number}]"
            self._note(container, key, value, here)

    def _note(self, container: Any, key: Any, value: Any, path: str) -> None:
        if isinstance(value, SCALARS):
            self._found.numbers[Place(container, key, path)] = value
        else:
            self._todo.append((value, path))

    def _object(self, value: Any, path: str) -> None:
        is_known = isinstance(value, self._stateful)
        if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
            return
        if not is_known and type(value).__module__.partition(".")[0] in OPAQUE:
            return
        attributes = vars(value)
        if isinstance(attributes, types.MappingProxyType):
            return
        if isinstance(value, self._torch.optim.lr_scheduler.LRScheduler):
            # It is a part of what is replayed, and changes as it likes.
            self._found.schedulers.append(value)
            self._todo.append((value.optimizer, f"{path}.optimizer"))
            return
        if isinstance(value, self._torch.optim.Optimizer):
            self._found.groups += value.param_groups
        self._found.containers.append(attributes)
        for key, item in attributes.items():
            if key in HIDDEN and is_known:
                self._found.containers.append(item)
                for name, each in item.items():
                    self._note(item, name, each, f"{path}.{name}")
            else:
                self._note(attributes, key, item, f"{path}.{key}")

    def _items(self, values: Any, path: str) -> list[tuple[Any, str]]:
        pairs = values.items() if isinstance(values, dict) else enumerate(values)
        return [(value, f"{path}[{key!r}]") for key, value in pairs]


class _Variable:
    """A variable outside of a function, as a container of one item."""

    def __init__(self, home: object, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.home, self._read, self._write = home, read, write

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._read()

    def __getitem__(self, key: int) -> Any:
        return self._read()

    def __setitem__(self, key: int, value: Any) -> None:
        self._write(value)


def _home(container: Any) -> object:
    """What a container is, also when it was made anew."""
    return container.home if isinstance(container, _Variable) else id(container)


def _is_of_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    if root in OPAQUE:
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or root in sys.stdlib_module_names


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that code may look up, also within functions in it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)
