"""What a function reaches besides its arguments: models, optimisers, numbers it keeps.

A replay does not run Python. So whatever the function reaches has to be as it was when it was
recorded, or to change in a way that is known.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

NODES_MOST = 300_000
"""A function that reaches more objects is not followed further."""
ARRAY_MOST = 64 << 10
"""Arrays on the host of more bytes are not compared in each call."""
SCALARS = (int, float, bool, str, bytes, type(None))
OPAQUE = frozenset({"torch", "numpy", "skyward", "builtins", "threading", "logging", "_thread"})
"""Objects of these libraries are not looked into, but for those of torch that have a state."""
INDIFFERENT = ("builtins", "abc", "typing", "torch.nn.modules.module", "torch.optim.optimizer")
"""Modules of libraries whose classes do not use what the user's classes count."""
HIDDEN = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class Spot:
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
        return hash((home(self.container), self.path))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Spot)
            and home(self.container) == home(other.container)
            and self.path == other.path
        )


@dataclass
class Surroundings:
    """Everything that a function reaches, as it is now."""

    numbers: dict[Spot, Any] = field(default_factory=dict)
    """Numbers, truths and texts."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """By their paths; a gradient has the path of its tensor, and `.grad`."""
    owners: dict[str, Any] = field(default_factory=dict)
    """Of each gradient: its tensor."""
    schedulers: list[Any] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)
    """The groups of parameters of optimisers."""
    devices: set[int] = field(default_factory=set)
    """The indices of devices that are named."""
    functions: list[types.FunctionType] = field(default_factory=list)
    """Those of the user's."""
    foreign: list[str] = field(default_factory=list)
    """The paths of objects that code of libraries works with."""
    containers: dict[object, tuple[Any, str]] = field(default_factory=dict)
    """What has items, with its path, by what it is."""
    moving: set[object] = field(default_factory=set)
    """Those that schedulers change as they like."""
    problem: str = ""
    """What is reached and cannot be followed."""

    @classmethod
    def of(
        cls, function: Callable[..., Any], arguments: Iterable[Any], but: Iterable[Spot] = ()
    ) -> Surroundings:
        """Look at what a function reaches, and its arguments; but for what is in some places."""
        found = cls()
        walk = _Walk(found, {(home(each.container), each.key) for each in but})
        walk.all(function, arguments)
        return found

    def is_of_group(self, place: Spot, groups: Iterable[Any]) -> bool:
        """Whether it is a number in one of these groups of parameters."""
        return any(_holder(place)[0] is each for each in groups)

    def counts_for_itself(self, place: Spot) -> bool:
        """Whether only the user's code works with what is there."""
        return not place.path.startswith(
            tuple(f"{each}{sign}" for each in self.foreign for sign in ".[")
        )

    def guards(self, loose: set[Spot]) -> Guards:
        """What has to be as it is now; but for some numbers."""
        free: dict[object, set[Any]] = {}
        for place in loose:
            free.setdefault(home(place.container), set()).add(place.key)
            container, key = _holder(place)
            free.setdefault(home(container), set()).add(key)
        kept = [each for home, each in self.containers.items() if home not in self.moving]
        return Guards(kept, free)


class Guards:
    """Whether containers are as they were: the very same objects, or numbers that are equal."""

    def __init__(self, containers: list[tuple[Any, str]], free: dict[object, set[Any]]) -> None:
        self._sized = [each for each, _ in containers]
        # One variable is one item at all times.
        self._counted = [each for each in self._sized if not isinstance(each, _Variable | _Items)]
        self._sizes = [*map(len, self._sized)]
        self._counts = [*map(len, self._counted)]
        self._paths = [path for _, path in containers]
        self._kept: list[tuple[Any, list[Any], list[Any]]] = []
        for each in self._sized:
            keys = list(each) if isinstance(each, dict) else range(len(each))
            loose = free.get(home(each), ())
            wanted = [key for key in keys if key not in loose]
            self._kept.append((each, wanted, [each[key] for key in wanted]))
        self._are_identical = _identical(self._kept)

    def hold(self) -> bool:
        """Whether all is as it was."""
        if [*map(len, self._counted)] != self._counts:
            return False
        try:
            if self._are_identical():
                return True
            for container, keys, before in self._kept:
                now = (
                    list(container)
                    if isinstance(container, _Items)
                    else [container[k] for k in keys]
                )
                if len(now) != len(before) or not all(map(same, now, before)):
                    return False
        except (KeyError, IndexError):
            return False
        return True

    def differences(self) -> Iterator[tuple[Any, Any, str]]:
        """The containers and keys that are another object now, and where that is."""
        for size, path, (container, keys, before) in zip(
            self._sizes, self._paths, self._kept, strict=True
        ):
            if len(container) != size:
                yield container, None, path
                continue
            for key, former in zip(keys, before, strict=True):
                try:
                    now = container[key]
                except (KeyError, IndexError):
                    yield container, None, path
                    continue
                if not same(now, former):
                    is_variable = isinstance(container, _Variable)
                    yield container, key, path if is_variable else f"{path}[{key!r}]"


def _identical(kept: list[tuple[Any, list[Any], list[Any]]]) -> Callable[[], bool]:
    """A function that finds whether containers have the very objects that they had.

    It is compiled: a model has thousands, which take a third of the time then.
    """
    space: dict[str, Any] = {}
    checks = []
    for number, (container, keys, before) in enumerate(kept):
        if isinstance(container, _Items):
            # They are made for each look.
            space[f"c{number}"], space[f"v{number}"] = container, before
            checks.append(f"same([*c{number}], v{number})")
            continue
        space[f"c{number}"] = container
        for at, (key, value) in enumerate(zip(keys, before, strict=True)):
            name = f"{number}_{at}"
            space[f"k{name}"], space[f"v{name}"] = key, value
            checks.append(f"c{number}[k{name}] is v{name}")
    space["same"] = lambda now, before: len(now) == len(before) and all(map(is_, now, before))
    body = "\n".join(f"    if not ({each}): return False" for each in checks)
    exec(f"def identical():\n{body}\n    return True", space)
    # Not a circle: what it holds goes with the program.
    found: Callable[[], bool] = space.pop("identical")
    return found


def _holder(place: Spot) -> tuple[Any, Any]:
    """The container that has the number, or that has its tuple, and the key there."""
    within = place.container.within if isinstance(place.container, _Variable) else None
    return within or (place.container, place.key)


def same(now: Any, before: Any) -> bool:
    """Whether it is the same object, or a number, truth or text that cannot be told from it."""
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple:
        return len(now) == len(before) and all(map(same, now, before))
    if type(now) is not type(before) or not isinstance(now, SCALARS):
        return False
    if isinstance(now, float):
        return now == before and math.copysign(1, now) == math.copysign(1, before)
    return bool(now == before)


class _Walk:
    """Follows objects from one to the next, each once."""

    def __init__(self, found: Surroundings, but: set[tuple[object, Any]]) -> None:
        import torch

        self._found, self._but, self._torch = found, but, torch
        self._seen: dict[object, Any] = {}
        """With the objects: else another one could come to have the number of one that is gone."""
        self._stateful = (
            torch.nn.Module,
            torch.optim.Optimizer,
            torch.optim.lr_scheduler.LRScheduler,
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            torch.amp.GradScaler,
        )
        self._todo: collections.deque[tuple[Any, str]] = collections.deque()

    def all(self, function: Any, arguments: Iterable[Any]) -> None:
        """Follow everything."""
        self._todo.append((function, ""))
        for number, argument in enumerate(arguments):
            if not isinstance(argument, self._torch.Tensor):
                self._todo.append((argument, f"argument {number}"))
        while self._todo and not self._found.problem:
            if len(self._seen) > NODES_MOST:
                self._found.problem = "too many objects"
            self._look(*self._todo.popleft())

    def _look(self, value: Any, path: str) -> None:
        if isinstance(value, SCALARS) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, self._torch.Tensor):
            self._tensor(value, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self._todo += [(value.__self__, path), (value.__func__, path)]
        elif isinstance(value, functools.partial):
            self._contain(_Items(value, lambda: [value.func, *value.args]), path)
            self._contain(value.keywords, path)
        elif isinstance(value, dict | list):
            self._contain(value, path)
        elif isinstance(value, tuple):
            for number, each in enumerate(value):
                self._todo.append((each, f"{path}[{number}]"))
        elif isinstance(value, set | frozenset | collections.deque):
            self._contain(_Items(value, lambda: [*value]), path)
        elif isinstance(value, types.CellType):
            self._todo.append((value.cell_contents, path))
        elif isinstance(value, self._torch.device):
            if value.type == "sky" and value.index is not None:
                self._found.devices.add(value.index)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, types.ModuleType):
            pass  # `_function` has what it names of one
        elif type(value).__name__ == "ndarray" and type(value).__module__ == "numpy":
            self._array(value, path)
        elif isinstance(value, Iterator):
            self._found.problem = f"{path}, an iterator: take from it outside, and give what it has"
        else:
            self._object(value, path)

    def _array(self, array: Any, path: str) -> None:
        if array.nbytes > ARRAY_MOST or array.dtype.hasobject:
            self._found.problem = (
                f"{path}, an array of NumPy of {array.nbytes} bytes: give it as a tensor"
            )
        else:
            self._contain(_Items(array, lambda: [array.tobytes()]), path)

    def _tensor(self, tensor: Any, path: str) -> None:
        while path in self._found.tensors:
            path += "'"
        self._found.tensors[path] = tensor
        if tensor.is_leaf and tensor.requires_grad:
            self._found.owners[f"{path}.grad"] = tensor
            if tensor.grad is not None:
                self._found.tensors[f"{path}.grad"] = tensor.grad
        if vars(tensor):
            self._contain(vars(tensor), path)

    def _function(self, function: types.FunctionType, path: str) -> None:
        names = tuple(_names_in(function.__code__))
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not bound yet
            read = functools.partial(getattr, cell, "cell_contents")
            write = functools.partial(setattr, cell, "cell_contents")
            self._contain(_Variable(id(cell), read, write), name)
            self._module(content, names, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._todo.append((value, path))
        if is_of_library(function.__module__):
            return
        self._found.functions.append(function)
        self._contain(_Items(function, functools.partial(_own, function)), path)
        for name in names:
            if name in function.__globals__:
                self._variable(function.__globals__, name, name)
                self._module(function.__globals__[name], names, name)

    def _module(self, module: Any, names: Iterable[str], path: str) -> None:
        """What is named of a module of the user's."""
        if isinstance(module, types.ModuleType) and not is_of_library(module.__name__):
            for name in names:
                if name in vars(module):
                    self._variable(vars(module), name, f"{path}.{name}")

    def _variable(self, space: dict[str, Any], name: str, path: str) -> None:
        read = functools.partial(space.__getitem__, name)
        write = functools.partial(space.__setitem__, name)
        self._contain(_Variable((id(space), name), read, write), path)

    def _class(self, kind: type, path: str) -> None:
        """The attributes and the methods of a class of the user's."""
        for each in kind.__mro__:
            if is_of_library(each.__module__) or (id(each), "class") in self._seen:
                continue
            self._seen[(id(each), "class")] = each
            self._contain(_Items(each, functools.partial(_attributes, each)), path)
            for name, value in vars(each).items():
                function = getattr(value, "__func__", None) or getattr(value, "fget", value)
                if isinstance(function, types.FunctionType):
                    self._todo.append((function, path))
                    setter = getattr(value, "fset", None)
                    if isinstance(setter, types.FunctionType):
                        self._todo.append((setter, path))
                elif not name.startswith("__"):
                    read = functools.partial(vars(each).__getitem__, name)
                    write = functools.partial(setattr, each, name)
                    self._contain(_Variable((id(each), name), read, write), f"{path}.{name}")

    def _contain(self, container: Any, path: str) -> None:
        if home(container) in self._found.containers:
            return
        self._found.containers[home(container)] = container, path
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for number, (key, value) in enumerate(pairs):
            here = f"{path}[{key!r}]" if isinstance(key, str | int) else f"{path}[{number}]"
            self._note(container, key, value, path if isinstance(container, _Variable) else here)

    def _note(self, container: Any, key: Any, value: Any, path: str) -> None:
        if (home(container), key) in self._but:
            return
        if isinstance(value, SCALARS):
            if not isinstance(container, _Items):
                self._found.numbers[Spot(container, key, path)] = value
        else:
            self._todo.append((value, path))

    def _object(self, value: Any, path: str) -> None:
        if type(value).__name__ == "FSDPState":
            items = functools.partial(_of_sharding, value)
            self._contain(_Items(value, items), f"what fully_shard keeps for {path}")
            return
        is_known = isinstance(value, self._stateful)
        if not is_known and type(value).__module__.partition(".")[0] in OPAQUE:
            return
        if not is_of_library(type(value).__module__):
            self._class(type(value), path)
        if not all(map(_is_followed, type(value).__mro__)):
            self._found.foreign.append(path)
        for name in {name for each in type(value).__mro__ for name in _slots_of(each)}:
            if hasattr(value, name):
                read = functools.partial(getattr, value, name)
                write = functools.partial(setattr, value, name)
                self._contain(_Variable((id(value), name), read, write), f"{path}.{name}")
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        if isinstance(value, self._stateful[2:4]):
            # It is a part of what is replayed, and changes as it likes.
            self._found.schedulers.append(value)
            self._found.moving.add(id(attributes))
            self._move(value, attributes, path)
        if isinstance(value, self._torch.optim.Optimizer):
            self._found.groups += value.param_groups
            for group in value.param_groups:
                self._pairs(group, path)
        self._found.containers[id(attributes)] = attributes, path
        for key, item in attributes.items():
            if key in HIDDEN and is_known:
                self._found.containers[id(item)] = item, path
                for name, each in item.items():
                    self._note(item, name, each, f"{path}.{name}")
            else:
                self._note(attributes, key, item, f"{path}.{key}")

    def _pairs(self, group: dict[str, Any], path: str) -> None:
        """Numbers in tuples, as Adam's betas: schedulers make these anew."""

        def read(key: str, number: int) -> Any:
            return group[key][number]

        def write(key: str, number: int, value: Any) -> None:
            group[key] = (*group[key][:number], value, *group[key][number + 1 :])

        for key, items in group.items():
            if isinstance(items, tuple) and all(type(each) is float for each in items):
                for number in range(len(items)):
                    name = id(group), key, number
                    reading = functools.partial(read, key, number)
                    writing = functools.partial(write, key, number)
                    variable = _Variable(name, reading, writing, within=(group, key))
                    self._contain(variable, f"{path}.{key}[{number}]")

    def _move(self, scheduler: Any, attributes: dict[str, Any], path: str) -> None:
        """The lists of a scheduler, which makes them anew."""

        def read(key: str, number: int) -> Any:
            return attributes[key][number]

        def write(key: str, number: int, value: Any) -> None:
            attributes[key][number] = value

        for key, items in attributes.items():
            if not isinstance(items, list):
                continue
            self._seen[id(items)] = items
            for number, each in enumerate(items):
                if isinstance(each, SCALARS):
                    name = id(scheduler), key, number
                    self._found.moving.add(name)
                    reading = functools.partial(read, key, number)
                    writing = functools.partial(write, key, number)
                    variable = _Variable(name, reading, writing)
                    self._contain(variable, f"{path}.{key}[{number}]")
                else:
                    self._todo.append((each, f"{path}.{key}[{number}]"))


class _Items:
    """What something has now, as a container that is only looked at."""

    def __init__(self, owner: Any, items: Callable[[], list[Any]]) -> None:
        self.home, self._items = ("items", id(owner)), items

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __getitem__(self, key: int) -> Any:
        return self._items()[key]


class _Variable:
    """A variable outside of a function, or one number of a tuple, as a container of one item."""

    def __init__(
        self,
        home: object,
        read: Callable[[], Any],
        write: Callable[[Any], Any],
        *,
        within: tuple[Any, Any] | None = None,
    ) -> None:
        self.home, self._read, self._write, self.within = home, read, write, within

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self._read()

    def __getitem__(self, key: int) -> Any:
        return self._read()

    def __setitem__(self, key: int, value: Any) -> None:
        self._write(value)


def _of_sharding(state: Any) -> list[Any]:
    """What decides what `fully_shard` does with a module, and the gradients that it has there."""
    found = [state._state_ctx.is_last_backward]
    for group in state._fsdp_param_groups:
        found += [each for each in vars(group).values() if isinstance(each, SCALARS)]
        kept = [group._partial_reduce_output]
        for each in group.fsdp_params:
            found.append(each.sharded_state.name)
            kept += [
                each.unsharded_accumulated_grad,
                getattr(getattr(each, "_unsharded_param", None), "grad", None),
            ]
        found += [id(each) for each in kept if each is not None]
    return found


def _attributes(kind: type) -> list[Any]:
    return [*vars(kind).values()]


def _own(function: types.FunctionType) -> list[Any]:
    """What belongs to a function."""
    return [function.__code__, function.__defaults__, *vars(function).values()]


def home(container: Any) -> object:
    """What a container is, also when it was made anew."""
    return container.home if isinstance(container, _Variable | _Items) else id(container)


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    if is_of_library(kind.__module__):
        return ()
    return tuple(name for name in names if not name.startswith("__"))


def _is_followed(kind: type) -> bool:
    """Whether whole numbers in the attributes of its objects are used by the user's code alone."""
    return not is_of_library(kind.__module__) or kind.__module__ in INDIFFERENT


@functools.cache
def is_of_library(module: str | None) -> bool:
    """Whether a module is not the user's own."""
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


def kind_of(leaf: Any) -> Any:
    """What a program takes for granted of an argument."""
    import torch

    if isinstance(leaf, torch.Tensor):
        kind = leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
        if (own := local(leaf)) is leaf:
            return kind
        return *kind, getattr(leaf, "_spec", None), own.shape, own.stride()
    if type(leaf) is float:
        return float
    # Other objects are what they are; what is in them is looked at in each call.
    return (type(leaf), leaf) if isinstance(leaf, SCALARS) else _Same(leaf)


class _Same:
    """An object, which equals itself alone."""

    def __init__(self, it: Any) -> None:
        self._it = it

    def __hash__(self) -> int:
        return id(self._it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._it is other._it


def is_tensor(leaf: Any) -> bool:
    """Whether it is a tensor of any device."""
    import torch

    return isinstance(leaf, torch.Tensor)


def local(tensor: Any) -> Any:
    """What each rank has of a DTensor; any other tensor is that itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sky(leaf: Any) -> bool:
    """Whether it is a tensor of a device."""
    return is_tensor(leaf) and leaf.device.type == "sky"


def is_on_host(leaf: Any) -> bool:
    """Whether it is a tensor on the host."""
    return is_tensor(leaf) and leaf.device.type == "cpu"
