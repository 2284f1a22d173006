"""Libraries that choose devices by themselves use an open sky device: their patches.

A patch is made when its module is imported, or at once if it was imported before. Without an open
device, and where the user has chosen another, the patches change nothing.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from skyward.device.library import Core

if TYPE_CHECKING:
    # Not the module: this package has one of that name.
    from torch import device as torch_device

Patch = Callable[[ModuleType], None]
USERS = {
    "__main__",
    "accelerate",
    "diffusers",
    "peft",
    "safetensors",
    "torch",
    "transformers",
    "trl",
}
"""Packages whose modules may have taken a function out of its module before it was patched."""


class Patches(MetaPathFinder):
    """Applies each patch once, right after its module has run."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._waiting = dict(patches)

    def install(self, *, everywhere: bool = False) -> None:
        """Patch what is imported already, and wait for the rest.

        `everywhere` replaces what the user's own modules took out of a library, too.
        """
        sys.meta_path.insert(0, self)
        for name in list(self._waiting):
            if name in sys.modules:
                self._patch(sys.modules[name])
        _spread(None if everywhere else USERS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is to be patched, as it would be found without us."""
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                self._patch_after(spec)
                return spec
        return None

    def _patch_after(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def run_and_patch(module: ModuleType) -> None:
            # The loader stays what it is: others read sources and resources through it.
            del loader.exec_module
            run(module)
            self._patch(module)

        loader.exec_module = run_and_patch

    def _patch(self, module: ModuleType) -> None:
        patch = self._waiting.pop(module.__name__, None)
        if patch is None:
            return
        try:
            patch(module)
        except AttributeError as problem:
            _warn(f"{module.__name__} has no {problem.name}")


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a function of a module or class by `wrapper(function)`.

    If there is no such function, the library is of a version we do not know: a warning says so.
    """
    found = vars(owner).get(name)
    if found is None:
        _warn(f"{_name(owner)} has no {name}")
        return
    binding = type(found) if isinstance(found, (staticmethod, classmethod)) else None
    original = found.__func__ if binding else found
    new: Any = wrapper(original)
    if not isinstance(new, type):
        functools.update_wrapper(new, original)
    for of_cache in ("cache_clear", "cache_info"):
        if hasattr(original, of_cache):
            setattr(new, of_cache, getattr(original, of_cache))
    setattr(owner, name, binding(new) if binding else new)
    if isinstance(owner, ModuleType):
        _replaced[id(original)] = original, new


_replaced: dict[int, tuple[Any, Any]] = {}
"""What was replaced in its own module, and by what; who imports it later gets the new one."""


def _spread(users: set[str] | None) -> None:
    """Replace it also where it was imported before: in modules of these packages, or in all."""
    for name, module in list(sys.modules.items()):
        if users is None or name.partition(".")[0] in users:
            # Not getattr: a lazy module would import all it has.
            for key, value in list(getattr(module, "__dict__", {}).items()):
                original, new = _replaced.get(id(value), (None, None))
                if original is not None and value is original:
                    setattr(module, key, new)


def wrap_property(owner: Any, name: str, wrapper: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Replace a property, cached or not, by one that computes `wrapper(its function)`."""
    found = vars(owner).get(name)
    if isinstance(found, functools.cached_property):
        cached = functools.cached_property(functools.wraps(found.func)(wrapper(found.func)))
        cached.__set_name__(owner, name)
        setattr(owner, name, cached)
    elif isinstance(found, property):
        setattr(owner, name, property(wrapper(found.fget), found.fset, found.fdel, found.__doc__))
    else:
        _warn(f"{_name(owner)} has no property {name}")


def _name(owner: Any) -> str:
    name = owner.__name__
    return name if isinstance(owner, ModuleType) else f"{owner.__module__}.{name}"


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} in this version: it may not find sky devices by itself; name the device to it",
        stacklevel=3,
    )


class Choice:
    """Follows the user's choice between sky devices and a GPU of this machine."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def device(self) -> torch_device | None:
        """The sky device to use; None if none is open, or if a GPU of this machine is preferred.

        Beside a GPU of this machine, a sky device is used when it is the default device, or when
        `torch.accelerator.set_device_index` or `torch.sky.set_device` has made it the current one.
        """
        import torch

        if self.core.in_bad_fork or not self.core.open_devices:
            return None
        default = torch.get_default_device()
        if default.type == "sky":
            return torch.device(
                "sky", self.core.current if default.index is None else default.index
            )
        if _is_gpu(default.type) or (self.core.chosen is None and _has_gpu()):
            return None
        return torch.device("sky", self.core.current)

    def note(self, index: int) -> None:
        """Remember that the user has made a device the current one."""
        if index in self.core.open_devices:
            self.core.chosen = index

    def is_closed(self, device: torch_device) -> bool:
        """Whether a device that a library remembers is one of ours and gone."""
        return device.type == "sky" and device.index not in self.core.open_devices


def _is_gpu(kind: str) -> bool:
    return kind in ("cuda", "mps", "xpu")


def _has_gpu() -> bool:
    import torch

    return (
        torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()
    )
