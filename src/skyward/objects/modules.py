"""The user's own code: which modules travel by value, and which objects a function refers to.

Each pickle decides this for itself, without a process-wide registry, so that threads cannot disturb
each other.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward.errors import SerializationError

OURS = ("skyward", "skytorch", "cloudpickle")

_MISSING = object()
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...), type(NotImplemented))
_ANNOTATIONS = (types.GenericAlias, types.UnionType)
_GLOBAL_OPS = {
    dis.opmap[name]
    for name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
    if name in dis.opmap
}
_STORES = {dis.opmap[name] for name in ("STORE_GLOBAL", "STORE_NAME") if name in dis.opmap}


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({str(Path(root).resolve()) for root in roots})


@functools.lru_cache(maxsize=4096)
def _is_own_file(file: str) -> bool:
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    if any(path.is_relative_to(root) for root in _installed_roots()):
        return False
    # `pip install --target` installs into any folder, also into one that has the user's files.
    parts = path.parts
    return not any(
        name in _installed_in(folder)
        for folder, name in zip(path.parents, reversed(parts), strict=False)
    )


@functools.cache
def _installed_in(folder: Path) -> frozenset[str]:
    """The files and packages that installers have put there, by what they have left on record."""
    found = set()
    with contextlib.suppress(OSError):
        for record in folder.glob("*.dist-info/RECORD"):
            lines = record.read_text(errors="replace").splitlines()
            found |= {line.partition(",")[0].strip('"').partition("/")[0] for line in lines}
    return frozenset(found)


def is_own(module: str | None) -> bool:
    """Whether a module is the user's own: no installer has installed its file."""
    if not module or module == "__main__" or module.partition(".")[0] in OURS:
        return False
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    return isinstance(file, str) and _is_own_file(file)


def travels_by_value(value: Any) -> bool:
    """Whether a function or class is sent as its definition rather than as its name."""
    module = getattr(value, "__module__", None)
    if module == "__main__" or is_own(module):
        return True
    if not isinstance(module, str):
        return True
    found: Any = sys.modules.get(module)
    if found is None:
        return True
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not value


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The globals that a code object and its nested ones read and assign, and all their names."""
    reads, stores, names = set(), set(), set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opcode in _STORES:
            stores.add(instruction.argval)
        elif instruction.opcode in _GLOBAL_OPS:
            reads.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_reads, inner_stores, inner_names = _global_names(constant)
            # A class body assigns its own names, not the module's.
            reads |= inner_reads - inner_stores
            names |= inner_names
    return frozenset(reads), frozenset(stores), frozenset(names)


@dataclass(slots=True)
class References:
    """The objects that a function's code refers to; `fresh` tells whether one was replaced.

    `fresh` compares by identity, so its answer counts only if no found object can change in place.
    """

    root: Callable[..., Any]
    constant: bool = True
    """Whether every object found can only change by being replaced."""
    module_names: dict[int, set[str]] = field(default_factory=dict)
    """For each of the user's modules, the attributes its referrers name."""
    _checks: list[tuple[Any, str, Any]] = field(default_factory=list)
    _attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    _sizes: list[tuple[Any, int]] = field(default_factory=list)
    _cells: list[tuple[types.CellType, Any]] = field(default_factory=list)

    def fresh(self) -> bool:
        """Whether the function is the same as before: every name refers to the same object."""
        if not self.constant:
            return False
        for names, name, value in self._checks:
            if names.get(name, _MISSING) is not value:
                return False
        for owner, name, value in self._attributes:
            if getattr(owner, name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            if _contents(cell) is not value:
                return False
        for names, size in self._sizes:  # noqa: SIM110, every call asks, and a generator is slower
            if len(names) != size:
                return False
        return True


def references(function: Callable[..., Any]) -> References:
    """Find all objects that a function refers to; raises if it uses an undefined name."""
    found = References(inspect.unwrap(function))
    # The values are kept, not only their ids: a freed value's id would be used again.
    seen: dict[int, Any] = {}
    todo: list[Any] = [function]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        todo += _visit(value, found)
    return found


def _visit(value: Any, found: References) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):
        return _visit_function(value, found) if travels_by_value(value) else ()
    if isinstance(value, type):
        return _visit_class(value, found) if travels_by_value(value) else ()
    if isinstance(value, types.ModuleType):
        if id(value) not in found.module_names and is_own(value.__name__):
            found.constant = False
        return ()
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return tuple(part for part in (value.fget, value.fset, value.fdel) if part is not None)
    # Exact types only: an instance of a subclass may have attributes that change.
    if type(value) in (tuple, frozenset):
        return tuple(value)
    if type(value) in _PLAIN:
        return ()
    if isinstance(value, types.BuiltinFunctionType):
        bound = value.__self__
        return () if bound is None or isinstance(bound, types.ModuleType) else (bound,)
    if hasattr(type(value), "__sky_constant__"):
        return (value.__sky_constant__,)
    if type(value).__module__ == "typing" or isinstance(value, _ANNOTATIONS):
        return ()
    found.constant = False
    return ()


def _visit_function(function: types.FunctionType, found: References) -> Iterator[Any]:
    reads, stores, names = _global_names(function.__code__)
    space = function.__globals__
    found._attributes.append((function, "__code__", function.__code__))
    for name in ("__defaults__", "__kwdefaults__"):
        value = getattr(function, name)
        found._attributes.append((function, name, value))
        if name == "__kwdefaults__" and value:
            found.constant = False
        if value:
            yield from value if isinstance(value, tuple) else value.values()
    attributes = function.__dict__
    found._sizes.append((attributes, len(attributes)))
    for name, value in attributes.items():
        if name != "__wrapped__":
            found.constant = False
        found._checks.append((attributes, name, value))
        yield value
    for name in sorted(reads):
        value = space.get(name, _MISSING)
        if value is _MISSING:
            defined = hasattr(builtins, name) or name in stores or "NameError" in names
            # Only in the function that is sent: a helper may have a name that it never uses.
            if defined or function is not found.root:
                found._checks.append((space, name, _MISSING))
                continue
            raise SerializationError(
                f"{function.__qualname__} uses {name!r}, which is not defined in "
                f"{function.__module__} ({_where(function, name)}); define or import it before "
                "the call"
            )
        found._checks.append((space, name, value))
        if isinstance(value, types.ModuleType):
            yield from _visit_module(value, names, found)
        yield value
    for cell in function.__closure__ or ():
        value = _contents(cell)
        found._cells.append((cell, value))
        if isinstance(value, types.ModuleType):
            yield from _visit_module(value, names, found)
        if value is not _MISSING:
            yield value


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _visit_module(
    module: types.ModuleType, names: Iterable[str], found: References
) -> Iterator[Any]:
    if not is_own(module.__name__):
        return
    space = vars(module)
    found._sizes.append((space, len(space)))
    wanted = found.module_names.setdefault(id(module), set())
    for name in names:
        if name in space and name not in wanted:
            wanted.add(name)
            value = space[name]
            found._checks.append((space, name, value))
            if isinstance(value, types.ModuleType):
                yield from _visit_module(value, names, found)
            yield value


def name_modules(function: types.FunctionType, wanted: dict[int, set[str]]) -> None:
    """Note which attributes of the user's modules a function names."""
    reads, _, names = _global_names(function.__code__)
    values = [function.__globals__.get(name) for name in reads]
    values += [_contents(cell) for cell in function.__closure__ or ()]
    for value in values:
        if isinstance(value, types.ModuleType):
            for _ in _visit_module(value, names, References(function, module_names=wanted)):
                pass


def _visit_class(kind: type, found: References) -> Iterator[Any]:
    space = vars(kind)
    found._sizes.append((space, len(space)))
    for name, value in space.items():
        if name in ("__dict__", "__weakref__", "__module__", "__doc__", "__annotations__"):
            continue
        if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            continue
        found._checks.append((space, name, value))
        yield value
    yield from kind.__bases__


def _where(function: types.FunctionType, name: str) -> str:
    line = function.__code__.co_firstlineno
    for instruction in dis.get_instructions(function.__code__):
        if instruction.argval == name and instruction.opcode in _GLOBAL_OPS:
            position = instruction.positions
            line = (position.lineno if position else None) or line
            break
    return f"{function.__code__.co_filename}:{line}"
