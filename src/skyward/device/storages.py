"""How `torch.save` and its kind treat the storages of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PRIORITY = 5
"""Before PyTorch's own packages, which begin with 10."""
ADVICE = '; where no such device is open, give torch.load map_location="cpu"'
"""PyTorch shows the tag of a storage if it does not know the device, and says nothing else."""


def install() -> None:
    """Teach PyTorch's storages and `torch.save` about devices; once per process."""
    import torch

    for method in (_byteswap, _write_file, _set_from_file):
        setattr(torch.UntypedStorage, method.__name__, method)
    torch.serialization.register_package(PRIORITY, _tag, _restore)
    torch.serialization._get_restore_location = _without_advice(
        torch.serialization._get_restore_location
    )


def _tag(storage: Any) -> str | None:
    device = storage.device
    return f"{device}{ADVICE}" if device.type == "sky" else None


def _restore(storage: Any, location: str) -> Any:
    import torch

    bare = location.removesuffix(ADVICE)
    if bare == location:
        return None
    return torch.serialization.default_restore_location(storage, bare)  # type: ignore[no-untyped-call]


def _without_advice(restorer_of: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    """The user's `map_location` sees the name of the device alone, as a key or an argument."""

    def restorer(map_location: Any) -> Any:
        restore = restorer_of(map_location)
        return lambda storage, location: restore(storage, location.removesuffix(ADVICE))

    return restorer


# PyTorch's own take every address for one of the CPU, or lose what keeps its memory alive.


def _byteswap(storage: Any, element_size: int) -> None:
    """Reverse the bytes of each element."""
    import torch

    if storage.device.type != "sky":
        torch._C.StorageBase._byteswap(storage, element_size)  # type: ignore[attr-defined]
        return
    whole = storage.nbytes() // element_size * element_size
    elements = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    elements = elements[:whole].view(-1, element_size)
    elements.copy_(elements.flip(1))


def _write_file(storage: Any, *how: Any, **more: Any) -> None:
    """Write the bytes to a file."""
    import torch

    here = storage.cpu() if storage.device.type == "sky" else storage
    torch._C.StorageBase._write_file(here, *how, **more)  # type: ignore[attr-defined]


def _set_from_file(storage: Any, *how: Any, **more: Any) -> Any:
    """Read the bytes from a file."""
    import torch

    is_sky = storage.device.type == "sky"
    here = torch.UntypedStorage(storage.nbytes()) if is_sky else storage  # type: ignore[no-untyped-call]
    torch._C.StorageBase._set_from_file(here, *how, **more)  # type: ignore[attr-defined]
    return storage if here is storage else storage.copy_(here)
