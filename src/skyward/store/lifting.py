"""Lifting: the node of a torch device saves tensors itself, from the device's own memory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.errors import ConfigurationError, StoreError
from skyward.functions import function
from skyward.store.catalog import Catalog
from skyward.store.errands import Errands, Refusal
from skyward.store.files import Address, Files
from skyward.store.layout import plain_tensor
from skyward.store.manifest import Manifest
from skyward.store.saving import Saving
from skyward.wire import references

if TYPE_CHECKING:
    import torch

_ALONG = 16 << 20
"""Tensors of this machine, such as an optimiser's step counts, go along up to this size."""
_SMALL = 64 << 10
"""Storages below this are gathered in one: each that another process opens costs a descriptor."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Title:
    """What a version says of itself."""

    name: str
    metadata: dict[str, Any]
    class_path: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor on the device: which of the opened storages it lies in, and how."""

    piece: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def save_from_device(
    address: Address,
    files: Files,
    title: Title,
    shape: Any,
    tensors: Sequence[tuple[str, torch.Tensor]],
) -> Manifest | None:
    """Let the node save what is on its device; None: that has to be done from here."""
    far = {tensor.device for _, tensor in tensors if tensor.device.type == "sky" and tensor.numel()}
    if len(far) != 1:
        return None
    plain = [(path, plain_tensor(path, tensor)) for path, tensor in tensors]
    near = [tensor.untyped_storage() for _, tensor in plain if tensor.device.type != "sky"]
    along = {storage._cdata: storage.nbytes() for storage in near}
    if any(storage.device.type != "cpu" for storage in near) or sum(along.values()) > _ALONG:
        return None
    errands = Errands(address, files, far.pop())
    if not errands.possible:
        return None
    pieces = _Pieces()
    parts = [
        (path, pieces.part(tensor) if tensor.device.type == "sky" else tensor)
        for path, tensor in plain
    ]
    storages = pieces.gathered()  # to be kept until the node is done
    memory = errands.export(storages)
    if memory is None:
        return None
    # A file that only we know of: who finds it is at the same place, not one of the same name.
    mark = f"tmp/{uuid.uuid4().hex}"
    files.write(mark, [b"is the store of this name the same one?\n"])
    try:
        saved = errands.run(_save(address, mark, title, shape, parts, memory))
    finally:
        files.delete(mark)
    return None if isinstance(saved, Refusal) else saved


class _Pieces:
    """The storages of tensors on a device, small ones gathered in one."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._large: list[torch.UntypedStorage] = []
        self._small: list[torch.UntypedStorage] = []
        self._end = 0

    def part(self, tensor: torch.Tensor) -> Part:
        """Where to find a tensor."""
        storage = tensor.untyped_storage()
        piece, start = self._place(storage) if tensor.numel() else (0, 0)
        offset = start // tensor.element_size() + int(tensor.storage_offset())
        return Part(piece, tensor.dtype, offset, tuple(tensor.shape), tuple(tensor.stride()))

    def _place(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        key = storage.data_ptr()
        if key not in self._places:
            if storage.nbytes() < _SMALL:
                self._small.append(storage)
                self._places[key] = (0, self._end)
                self._end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            else:
                self._large.append(storage)
                self._places[key] = (len(self._large), 0)
        return self._places[key]

    def gathered(self) -> list[torch.UntypedStorage]:
        """The storages by number; the first is that of the small ones."""
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
def _save(
    address: Address,
    mark: str,
    title: Title,
    shape: Any,
    parts: list[tuple[str, Part | torch.Tensor]],
    memory: list[bytes],
) -> Manifest | Refusal:
    import torch

    try:
        files = address.open()
        if files.size(mark) is None:
            return Refusal("store", "a file written there is not here")
    except (StoreError, ConfigurationError, ImportError) as problem:
        return Refusal("store", f"{type(problem).__name__}: {problem}")
    try:
        storages = [references.storage(description) for description in memory]
    except references.UnreachableError as problem:
        return Refusal("memory", str(problem))

    def tensor(part: Part | torch.Tensor) -> torch.Tensor:
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
