"""Saving on a node: the node of a torch device saves tensors from the device's memory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.errors import ConfigurationError, StoreError
from skyward.functions import function
from skyward.objects import references
from skyward.objects.memory import rounded_up
from skyward.store.catalog import Catalog
from skyward.store.format.layout import plain_tensor
from skyward.store.format.manifest import Manifest
from skyward.store.on_node.requests import NodeRequests, Refusal
from skyward.store.places.files import Files
from skyward.store.places.opening import Address
from skyward.store.saving import Saving

if TYPE_CHECKING:
    import torch

_SENT_LIMIT = 16 << 20
"""The client sends its own tensors, such as an optimiser's step counts, along up to this size."""
_SMALL = 64 << 10
"""Smaller storages are copied to one: each that another process opens costs a descriptor."""


@dataclass(frozen=True, slots=True)
class Title:
    """The name and description of a version."""

    name: str
    metadata: dict[str, Any]
    class_path: str | None


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor on the device: the number of its storage, and its layout in the storage."""

    piece: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def save_on_node(
    address: Address,
    files: Files,
    title: Title,
    shape: Any,
    tensors: Sequence[tuple[str, torch.Tensor]],
) -> Manifest | None:
    """Have the node save the tensors of its device; None if the client has to save them."""
    devices = {
        tensor.device for _, tensor in tensors if tensor.device.type == "sky" and tensor.numel()
    }
    if len(devices) != 1:
        return None
    plain = [(path, plain_tensor(path, tensor)) for path, tensor in tensors]
    own = [tensor.untyped_storage() for _, tensor in plain if tensor.device.type != "sky"]
    sizes = {storage._cdata: storage.nbytes() for storage in own}
    if any(storage.device.type != "cpu" for storage in own) or sum(sizes.values()) > _SENT_LIMIT:
        return None
    requests = NodeRequests(address, files, devices.pop())
    if not requests.possible:
        return None
    pieces = _SharedStorages()
    parts = [
        (path, pieces.locate(tensor) if tensor.device.type == "sky" else tensor)
        for path, tensor in plain
    ]
    storages = pieces.gathered()  # the memory must stay allocated until the node is done
    memory = requests.export(storages)
    if memory is None:
        return None
    # Only this client knows the name of this file: a node that finds the file has the same store.
    mark = f"tmp/{uuid.uuid4().hex}"
    files.write(mark, [b"is the store of this name the same one?\n"])
    try:
        saved = requests.run(_save_on_node(address, mark, title, shape, parts, memory))
    finally:
        files.delete(mark)
    return None if isinstance(saved, Refusal) else saved


class _SharedStorages:
    """The storages of tensors on a device; small ones are gathered in one."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._large: list[torch.UntypedStorage] = []
        self._small: list[torch.UntypedStorage] = []
        self._end = 0

    def locate(self, tensor: torch.Tensor) -> TensorLocation:
        """Add the storage of a tensor; returns where the tensor lies."""
        storage = tensor.untyped_storage()
        piece, start = self._place(storage) if tensor.numel() else (0, 0)
        offset = start // tensor.element_size() + int(tensor.storage_offset())
        return TensorLocation(
            piece, tensor.dtype, offset, tuple(tensor.shape), tuple(tensor.stride())
        )

    def _place(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        key = storage.data_ptr()
        if key not in self._places:
            if storage.nbytes() < _SMALL:
                self._small.append(storage)
                self._places[key] = (0, self._end)
                self._end += rounded_up(storage.nbytes())
            else:
                self._large.append(storage)
                self._places[key] = (len(self._large), 0)
        return self._places[key]

    def gathered(self) -> list[torch.UntypedStorage]:
        """The storages by number; the first holds the small ones."""
        import torch

        device = (self._small + self._large)[0].device
        gathered = torch.empty(self._end, dtype=torch.uint8, device=device)
        for storage in self._small:
            _, start = self._places[storage.data_ptr()]
            flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            gathered[start : start + len(flat)].copy_(flat)
        return [gathered.untyped_storage(), *self._large]


# On the node.


@function(name="save_model")
def _save_on_node(
    address: Address,
    mark: str,
    title: Title,
    shape: Any,
    parts: list[tuple[str, TensorLocation | torch.Tensor]],
    memory: list[bytes],
) -> Manifest | Refusal:
    import torch

    try:
        files = address.open()
        if files.size(mark) is None:
            return Refusal("store", "a file that the client wrote is missing")
    except (StoreError, ConfigurationError, ImportError) as problem:
        return Refusal("store", f"{type(problem).__name__}: {problem}")
    try:
        storages = [references.storage(description) for description in memory]
    except references.CannotOpenError as problem:
        return Refusal("memory", str(problem))

    def tensor(part: TensorLocation | torch.Tensor) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part
        storage = storages[part.piece]
        empty = torch.empty(0, dtype=part.dtype, device=storage.device)
        if 0 in part.shape:
            return empty.reshape(part.shape)
        return empty.set_(storage, part.offset, part.shape, part.strides)

    saving = Saving(files, Catalog(files), title.name)
    tensors = [(path, tensor(part)) for path, part in parts]
    return saving.save_tree(shape, tensors, title.metadata, title.class_path)
