"""Tensors on the wire: dtype, shape, strides and raw storage, without torch's pickle format.

A storage that several tensors share is sent once, and only the part that they cover. If the
receiver can open a storage in place, only a description of the storage is sent.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from skyward.errors import SerializationError
from skyward.objects import references
from skyward.objects.memory import ALIGNMENT

if TYPE_CHECKING:
    import torch

Reduced = tuple[Any, ...]


class Descriptions:
    """The descriptions by which the receiver opens storages in place."""

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage] = (),
        opened: Sequence[tuple[bytes, torch.UntypedStorage]] = (),
    ) -> None:
        """`opened` has for each storage a description, and the storage that it describes."""
        pairs = [
            (storage, description)
            for storage, (description, _) in zip(storages, opened, strict=True)
        ]
        self.storages = dict(opened)
        self.of_storage = {storage._cdata: description for storage, description in pairs}
        self.on_device = {storage.device: description for storage, description in pairs}
        """The description of one storage on each device."""


class StorageBook:
    """The storages in an object that is being encoded, and the part of each that is needed."""

    def __init__(self, described: Descriptions) -> None:
        self.refs: list[StorageRef] = []
        """The storages whose bytes travel."""
        self._by_id: dict[int, StorageRef] = {}
        self._described = described

    def reference(self, storage: torch.UntypedStorage) -> StorageRef:
        """The one reference to this storage."""
        ref = self._by_id.get(storage._cdata)
        if ref is None:
            ref = self._by_id[storage._cdata] = self.new_reference(storage)
        return ref

    def new_reference(self, storage: torch.UntypedStorage) -> StorageRef:
        """The reference to a storage that the object has not named before."""
        description = self._described.of_storage.get(storage._cdata)
        ref = StorageRef(len(self.refs), storage, description)
        if description is None:
            self.refs.append(ref)
        return ref

    def on_devices(self) -> list[torch.UntypedStorage]:
        """The storages on sky devices; the receiver may be able to open them."""
        return [ref.storage for ref in self.refs if ref.storage.device.type == "sky"]

    def buffers(self) -> tuple[list[memoryview], list[tuple[int, int]]]:
        """The buffers to send, and for each its (first byte, size of the whole storage)."""
        views, places = [], []
        for ref in self.refs:
            first, last = (ref.first, ref.last) if ref.last else (0, 0)
            views.append(_bytes_of(ref.storage, first, last))
            places.append((first, ref.storage.nbytes()))
        return views, places


class StorageRef:
    """Stands for a storage inside the pickle; its bytes travel beside it."""

    def __init__(
        self, index: int, storage: torch.UntypedStorage, description: bytes | None
    ) -> None:
        self.index = index
        self.storage = storage
        self.description = description
        self.first = storage.nbytes()
        self.last = 0

    def cover(self, tensor: torch.Tensor) -> None:
        """Widen the part that travels so that it holds this tensor's elements."""
        count = tensor.numel()
        if not count:
            return
        size = tensor.element_size()
        reach = count - 1
        if not tensor.is_contiguous():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((n - 1) * step for n, step in pairs if n > 1)
        start = int(tensor.storage_offset()) * size
        # Aligned, so that the receiver's tensors are too.
        self.first = min(self.first, start - start % ALIGNMENT)
        self.last = max(self.last, start + (int(reach) + 1) * size)

    def __reduce__(self) -> Reduced:
        if self.description is not None:
            return _opened, (self.description,)
        device = self.storage.device
        return _storage, (self.index, str(device) if device.type != "cpu" else "")


def _bytes_of(storage: torch.UntypedStorage, first: int, last: int) -> memoryview:
    import torch

    if last <= first:
        return memoryview(b"")
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[first:last]
    return _raw_view(flat.cpu())


def _raw_view(flat: torch.Tensor) -> memoryview:
    block = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    block.tensor = flat  # type: ignore[attr-defined]  # keeps the memory alive
    return memoryview(block).cast("B")


def reduce_tensor(tensor: torch.Tensor, book: StorageBook) -> Reduced | None:
    """How a plain dense tensor or parameter is rebuilt; None if torch must pickle it."""
    import torch

    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    if tensor.device.type not in ("cpu", "cuda", "mps", "sky") or isinstance(
        tensor, torch._subclasses.FakeTensor
    ):
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    ref = book.reference(plain.untyped_storage())
    if ref.description is None:
        ref.cover(plain)
    dtype = str(plain.dtype).removeprefix("torch.")
    attributes = dict(tensor.__dict__)
    return _tensor, (
        ref,
        dtype,
        plain.storage_offset(),
        tuple(plain.shape),
        plain.stride(),
        tensor.requires_grad,
        kind is torch.nn.Parameter,
        attributes or None,
    )


def reduce_device(device: torch.device, described: Descriptions) -> Reduced:
    """How a sky device is rebuilt: as the device that its tensors are on at the receiver."""
    return _device, (described.on_device.get(device),)


def is_device(value: object) -> bool:
    """Whether the value is a `torch.device`, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "device") and isinstance(value, torch.device)


def is_tensor(value: object) -> bool:
    """Whether the value is a torch tensor, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


class Shelf:
    """The received storages of one payload, rebuilt as its tensors ask for them."""

    def __init__(self, buffers: list[memoryview], places: list[tuple[int, int]]) -> None:
        self._buffers = buffers
        self._places = places

    def storage(self, index: int, device: str) -> tuple[torch.UntypedStorage, int]:
        """The storage and the first byte of the original that it holds."""
        import torch

        buffer = self._buffers[index]
        first, _ = self._places[index]
        if not len(buffer):
            flat = torch.empty(0, dtype=torch.uint8)
        else:
            flat = torch.frombuffer(buffer, dtype=torch.uint8)
        if device and _available(device):
            flat = flat.to(device)
        return flat.untyped_storage(), first


_decoding = threading.local()


def shelf() -> Shelf | None:
    """The shelf that this thread decodes with."""
    found: Shelf | None = getattr(_decoding, "shelf", None)
    return found


def use_shelf(shelf: Shelf | None) -> Shelf | None:
    """Use this shelf for the objects that this thread decodes now; returns the one before."""
    before: Shelf | None = getattr(_decoding, "shelf", None)
    _decoding.shelf = shelf
    return before


def _available(device: str) -> bool:
    import torch

    kind, _, index = device.partition(":")
    if kind == "cuda":
        return torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count()
    return kind == "mps" and torch.backends.mps.is_available()


def _storage(index: int, device: str) -> tuple[torch.UntypedStorage, int]:
    found = shelf()
    if found is None:
        raise SerializationError(
            "a tensor's pickle was loaded outside of a Skyward payload; store tensors with "
            "torch.save or a ModelStore"
        )
    return found.storage(index, device)


def watch_opened(opened: list[tuple[torch.UntypedStorage, bytes]] | None) -> None:
    """Add to this list every storage of a device that this thread opens from now on."""
    _decoding.opened = opened


def _opened(description: bytes) -> tuple[torch.UntypedStorage, int]:
    storage = references.storage(description)
    opened = getattr(_decoding, "opened", None)
    if opened is not None:
        opened.append((storage, description))
    return storage, 0


def _device(description: bytes | None) -> torch.device:
    import torch

    return torch.device("cpu") if description is None else references.device(description)


def _tensor(
    held: tuple[torch.UntypedStorage, int],
    dtype: str,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any] | None,
) -> torch.Tensor:
    import torch

    storage, first = held
    kind = getattr(torch, dtype)
    if 0 in shape:
        tensor = torch.empty(0, dtype=kind, device=storage.device).set_(storage, 0, shape, strides)
    else:
        tensor = torch.empty(0, dtype=kind, device=storage.device).set_(
            storage, offset - first // kind.itemsize, shape, strides
        )
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    if attributes:
        tensor.__dict__.update(attributes)
    return tensor
