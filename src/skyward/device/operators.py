"""Operators of other libraries: which modules register one, and their import on a node.

An operator travels by its name. The client says which modules register it, the likeliest first,
and each module's distribution; the worker imports them until it knows the operator.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PROGRAM = "__main__"
_REGISTERED = re.compile(r"registered at (.+?):\d+")
_BY_TORCH = ("torch.library", "torch._library.", "torch._custom_op", "torch._ops")
"""Where PyTorch registers operators for whoever calls it."""
_REGISTERING = b"5torch7Library"
"""What a compiled library has in it that registers operators: part of the names of C++ symbols."""


def is_foreign(name: str) -> bool:
    """Whether an operator may be another library's."""
    return not name.startswith(("aten::", "prims::", "skyward::", "higher_order::"))


# On the client.


_found: dict[tuple[str, ...], tuple[str, ...]] = {}
"""The modules of operators, by all that PyTorch has noted of each: one may be defined again."""


def modules_of(name: str) -> tuple[str, ...]:
    """The modules that register an operator, the likeliest first.

    After the module comes its distribution, if it has one.
    """
    import torch

    space, _, bare = name.partition("::")
    made, noted = tuple(_decorated(name)), torch._C._dispatch_dump(name)
    if known := _found.get((name, *made, noted)):
        return known
    found = [*made, *_registering(noted)]
    if not found:
        found = sorted(_mentioning(space, bare), key=lambda each: _top(each) != space)
    if space in sys.modules:
        found.append(space)
    modules = tuple(map(_with_distribution, dict.fromkeys(map(_importable, found))))
    _found[(name, *made, noted)] = modules
    return modules


def _tell_modules(name: bytes, text: Any, size: int) -> int:
    """Write which modules register an operator, a line each; called by the client's core."""
    try:
        words, failed = "\n".join(modules_of(name.decode())).encode(), 0
    except Exception as problem:
        words, failed = f"{type(problem).__name__}: {problem}".encode(), 1
    # Those that do not fit are the unlikely ones.
    words = words[: size - 1]
    ctypes.memmove(text, words + b"\0", len(words) + 1)
    return failed


tell_modules = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_uint64
)(_tell_modules)
"""For the client's core, which keeps its address."""


def _decorated(name: str) -> Iterator[str]:
    """The module of the function that was made the operator."""
    from torch._library import custom_ops

    made = custom_ops.OPDEFS.get(name)
    if made is not None:
        yield made._init_fn.__module__


def _registering(noted: str) -> Iterator[str]:
    """The modules whose files PyTorch has noted for an operator and its kernels."""
    files = {file: module for module, file in _files() if file.endswith(".py")}
    for file in _REGISTERED.findall(noted):
        module = files.get(file, "torch.library")
        if not module.startswith(_BY_TORCH):
            yield module


def _mentioning(space: str, bare: str) -> Iterator[str]:
    """The modules whose files have the operator's name in them.

    C++ does not say which library it is in, nor Python who has called `torch.library.define`.
    """
    import torch

    whole = f"{space}::{bare}".encode()
    for module, file in _files():
        if _top(module) in ("torch", "skyward", "__mp_main__"):
            continue
        if file.endswith(".py"):
            if whole in _content(file):
                yield module
        elif _has(file, space, bare):
            yield module
    for library in torch.ops.loaded_libraries:
        if _has(library, space, bare):
            yield from _package_around(library)


def _has(file: str, space: str, bare: str) -> bool:
    content = _content(file)
    return all(part in content for part in (_REGISTERING, space.encode(), bare.encode()))


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


def _files() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield name, file


def _package_around(file: str) -> Iterator[str]:
    """The innermost imported package that has a file in its folder."""
    folders = {
        folder: name for name, module in list(sys.modules.items()) for folder in _path(module)
    }
    for parent in Path(file).resolve().parents:
        if str(parent) in folders:
            yield folders[str(parent)]
            return


def _path(module: Any) -> list[str]:
    # torch.classes answers to any name, with something that is no path.
    path = getattr(module, "__path__", ())
    folders = path if isinstance(path, Iterable) else ()
    return [str(Path(folder).resolve()) for folder in folders if isinstance(folder, str)]


def _importable(module: str) -> str:
    """The name of a module for others; that of `python -m package.module` has two."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if module != PROGRAM or spec is None or spec.name.endswith(PROGRAM):
        return module
    return str(spec.name)


def _with_distribution(module: str) -> str:
    """A module and the distribution to install for it, if there is one."""
    top = _top(module)
    try:
        return f"{module} {metadata.distribution(top).name}"
    except metadata.PackageNotFoundError:
        # Its name may be another. To look into all of them takes half a second, and a module of
        # the user's own is not installed beside any.
        file = Path(getattr(sys.modules.get(top), "__file__", None) or "")
        folder = file.parents[1] if file.name == "__init__.py" else file.parent
        if next(folder.glob("*.dist-info"), None) is None:
            return module
        owners = metadata.packages_distributions().get(top)
        return f"{module} {owners[0]}" if owners else module


def _top(module: str) -> str:
    return module.partition(".")[0]


# On the worker.


def bring(name: str, overload: str, modules: Sequence[str]) -> str:
    """Import modules until an operator is there; returns why it is not.

    Modules are as `modules_of` names them.
    """
    problems = []
    for each in modules:
        if _is_there(name, overload):
            return ""
        module, _, distribution = each.partition(" ")
        problems.append(_import(module, distribution))
    if _is_there(name, overload):
        return ""
    return "; ".join(problems) or (
        "no module that the client has imported registers it; put it into a module that client "
        "and node can import"
    )


def _import(module: str, distribution: str) -> str:
    """Import a module; returns what to do if it does not register the operator."""
    if module == PROGRAM:
        return (
            "the client's program itself registers it, which a node cannot import; put it into a "
            'module of its own, and send that along with sky.Image(includes=["..."])'
        )
    top = _top(module)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name == top:
            advice = (
                f'install it there, for example with sky.Image(pip=["{distribution}"])'
                if distribution
                else "send it along with sky.Image(includes=[...])"
            )
            return f"the node has no {top!r}, which registers it; {advice}"
        return f"{module} registers it, and cannot be imported on the node: {problem}"
    except (Exception, SystemExit) as problem:
        kind = type(problem).__name__
        return f"{module} registers it, and cannot be imported on the node: {kind}: {problem}"
    return (
        f"{module} was imported on the node and does not register it; install the version that "
        "the client has"
    )


def _is_there(name: str, overload: str) -> bool:
    import torch

    space, _, bare = name.partition("::")
    found = getattr(getattr(torch.ops, space), bare, None)
    return found is not None and hasattr(found, overload or "default")
