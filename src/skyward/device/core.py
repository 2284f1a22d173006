"""The process's client core: loaded, and known to PyTorch, on first use."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from skyward.device import module, recovery
from skyward.device.libraries import Choice, Patch, Patches, huggingface
from skyward.device.libraries import torch as own_patches
from skyward.device.library import Core, DeviceStats
from skyward.errors import ConfigurationError

__all__ = ["Core", "DeviceStats", "core", "device_stats"]

_core: Core | None = None
_lock = threading.Lock()


def core() -> Core:
    """The process's core, loaded and registered on first use."""
    global _core
    with _lock:
        if _core is None:
            made = Core()
            recovery.explain_errors(made)
            module.install(made)
            made.register()
            _patch_libraries(made)
            _core = made
        return _core


def _patch_libraries(core: Core) -> None:
    """Patch the libraries that are imported, and the others when they are."""
    choice = Choice(core)
    patches: dict[str, Patch] = {
        name: partial(patch, choice=choice)
        for library in (own_patches, huggingface)
        for name, patch in library.PATCHES.items()
    }
    Patches(patches).install()


def device_stats(device: Any) -> DeviceStats:
    """The numbers of a sky device so far: operations, bytes, waits, cache hits.

    >>> sky.device_stats(device).waits
    """
    return core().stats(index_of(device, "device_stats"))


def index_of(device: Any, asked: str) -> int:
    """The index of a sky device; `asked` is the function that was called with it."""
    import torch

    try:
        wanted = torch.device(device)
    except (TypeError, RuntimeError) as problem:
        raise _no_device(device, asked) from problem
    if wanted.type != "sky":
        raise _no_device(device, asked)
    return core().current if wanted.index is None else wanted.index


def _no_device(device: Any, asked: str) -> ConfigurationError:
    return ConfigurationError(f"{asked}({device!r}): give a device of compute.device()")
