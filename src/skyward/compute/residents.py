"""Residents: how clients write and read values whose tensors stay in a device's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from skyward.objects import encoding
from skyward.objects.staying import ResidentBook, ResidentTensors
from skyward.worker.values import EncodedValue

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ResidentValue:
    """A value that is to be kept: all but its tensors on the device, and what these are there."""

    encoded: EncodedValue
    numbers: list[int]
    """The storages, as the device's process numbers them."""
    bytes: int
    """How many bytes they have together."""


def encode(value: object, index: int) -> ResidentValue | None:
    """Encode a value for keeping; None if some of it has to be copied to the node's memory.

    Waits for everything issued on the device before, and raises errors of that.
    """
    from skyward.device.core import core

    book = ResidentBook()
    encoded = encoding.encode(value, own_modules=True, what="the value to keep", stays=book)
    if encoded.handles:
        # Only an executor has the data of `sky.put`.
        return None
    storages = [ref.storage for ref in book.staying]
    filled = [storage for storage in storages if storage.nbytes()]
    found = core().residents(index, [storage.data_ptr() for storage in filled]) if filled else []
    numbers = [number for number, _ in found]
    if 0 in numbers or len(set(numbers)) < len(numbers):
        # A slice of a storage, or a lazy clone: the process has no memory for it alone.
        return None
    places = iter(zip(filled, found, strict=True))
    residents = [_resident(next(places)) if each.nbytes() else (0, 0, b"") for each in storages]
    kept = EncodedValue(
        b"".join(encoded.pieces),
        [PickleBuffer(each) for each in encoded.buffers],
        encoded.storages,
        residents,
    )
    return ResidentValue(kept, numbers, sum(storage.nbytes() for storage in filled))


def _resident(
    place: tuple[torch.UntypedStorage, tuple[int, bytes]],
) -> tuple[int, int, bytes]:
    storage, (number, description) = place
    return number, storage.nbytes(), description


def adopted(encoded: EncodedValue, index: int) -> list[torch.UntypedStorage | None]:
    """The storages of a value, over the memory that the device's process has held for them."""
    from skyward.device.core import core

    places = [(number, size) for number, size, _ in encoded.residents if size]
    storages = iter(core().adopt(index, places) if places else ())
    return [next(storages) if size else None for _, size, _ in encoded.residents]


def decode(
    encoded: EncodedValue, index: int, storages: Sequence[torch.UntypedStorage | None]
) -> Any:
    """A value with these storages of the device; None stands for an empty one."""
    import torch

    device = torch.device("sky", index)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    tensors = ResidentTensors(
        device, [empty.new_empty(0).untyped_storage() if s is None else s for s in storages]
    )
    buffers = [memoryview(each) for each in encoded.buffers]
    return encoding.decode(encoded.pickle, buffers, encoded.storages, tensors)
