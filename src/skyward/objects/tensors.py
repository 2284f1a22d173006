"""Tensors on the wire: dtype, shape, strides and raw storage, without torch's pickle format.

A storage that several tensors share is sent once, and only the part that they cover. If the
receiver can open a storage in place, only a description of the storage is sent.
"""

from __future__ import annotations

import ctypes
import pickle
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


class Openings:
    """The storages on sky devices in an object that is being encoded.

    The receiver opens them in place. The pickle has their numbers; how to open each is known when
    the pickle is made, and goes beside it in a buffer.
    """

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._devices: dict[torch.device, int] = {}
        self._gap = bytearray()

    def add(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage that the object has not named before."""
        self.storages.append(storage)
        return len(self.storages) - 1

    def number_of(self, device: torch.device) -> int:
        """The number of a device."""
        return self._devices.setdefault(device, len(self._devices))

    def fill(self, buffers: list[memoryview], descriptions: Sequence[bytes]) -> None:
        """Put how each storage is opened into the buffer that the pickle has for it."""
        found: dict[torch.device, bytes] = {}
        for storage, description in zip(self.storages, descriptions, strict=True):
            found.setdefault(storage.device, description)
        whole = list(descriptions), [found.get(device) for device in self._devices]
        for at, buffer in enumerate(buffers):
            if buffer.obj is self._gap:
                buffers[at] = memoryview(pickle.dumps(whole, 5))

    def __reduce__(self) -> Reduced:
        return _openings, (pickle.PickleBuffer(self._gap),)


class StorageBook:
    """The storages in an object that is being encoded, and the part of each that is needed."""

    def __init__(self, openings: Openings | None = None) -> None:
        self.refs: list[StorageRef] = []
        """The storages whose bytes travel."""
        self._by_id: dict[int, StorageRef] = {}
        self._openings = openings

    def reference(self, storage: torch.UntypedStorage) -> StorageRef:
        """The one reference to this storage."""
        ref = self._by_id.get(storage._cdata)
        if ref is None:
            ref = self._by_id[storage._cdata] = self.new_reference(storage)
        return ref

    def new_reference(self, storage: torch.UntypedStorage) -> StorageRef:
        """The reference to a storage that the object has not named before."""
        if self._openings is not None and storage.device.type == "sky":
            return OpenedRef(self._openings, storage)
        ref = StorageRef(len(self.refs), storage)
        self.refs.append(ref)
        return ref

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

    def __init__(self, index: int, storage: torch.UntypedStorage) -> None:
        self.index = index
        self.storage = storage
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
        device = self.storage.device
        return _storage, (self.index, str(device) if device.type != "cpu" else "")


class OpenedRef(StorageRef):
    """Stands for a storage on a sky device that the receiver opens in place."""

    def __init__(self, openings: Openings, storage: torch.UntypedStorage) -> None:
        super().__init__(openings.add(storage), storage)
        self._openings = openings

    def cover(self, tensor: torch.Tensor) -> None:
        """Do nothing: all of the storage is there."""

    def __reduce__(self) -> Reduced:
        return _opened, (self._openings, self.index)


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
    plain = tensor
    if tensor.is_conj() or tensor.is_neg():
        plain = tensor.detach().resolve_conj().resolve_neg()
    ref = book.reference(plain.untyped_storage())
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


def reduce_device(device: torch.device, openings: Openings | None) -> Reduced:
    """How a sky device is rebuilt: as the device that its tensors are on at the receiver."""
    return _device, ((openings, openings.number_of(device)) if openings is not None else ())


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


Opening = tuple[list[bytes], list[bytes | None]]
"""The descriptions of storages, and one of each device, as the receiver has them."""


def _openings(content: memoryview) -> Opening:
    found: Opening = pickle.loads(content)
    return found


def _opened(openings: Opening, number: int) -> tuple[torch.UntypedStorage, int]:
    description = openings[0][number]
    storage = references.storage(description)
    opened = getattr(_decoding, "opened", None)
    if opened is not None:
        opened.append((storage, description))
    return storage, 0


def _device(openings: Opening | None = None, number: int = 0) -> torch.device:
    import torch

    description = None if openings is None else openings[1][number]
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
    start = 0 if 0 in shape else offset - first // kind.itemsize
    tensor = torch.empty(0, dtype=kind, device=storage.device).set_(storage, start, shape, strides)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    if attributes:
        tensor.__dict__.update(attributes)
    return tensor
