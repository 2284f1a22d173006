"""A version as one ordinary safetensors file, put together from its objects while it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyward.errors import SerializationError, StoreDamagedError
from skyward.store import tree
from skyward.store.layout import SAFETENSORS, Span, tensor_at
from skyward.store.loading import manifest_place
from skyward.store.local import LocalFiles
from skyward.store.manifest import ITEM_SIZES, Manifest, View, object_path
from skyward.store.objects import HEADER_LIMIT, framed
from skyward.wire import memory

BLOCK = 1 << 20
"""What is handed on at a time."""
_GATHER = 16 << 20
"""How much of a tensor with gaps is put in order at a time."""
_ROW = 1 << 30
"""And how much at least: one row of it, up to this size."""
_ADVICE = "load it with sky.ModelStore(...).load_model instead"


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    view: View
    size: int


class Download:
    """The file's head, its length, and its bytes in order.

    Every tensor is written out contiguous and under its path in the saved value, tied ones once
    for each name, since the format knows neither strides nor ties. Plain values are left out.
    """

    def __init__(self, files: LocalFiles, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest
        self._verified: set[int] = set()
        self._tensors = self._named()
        self._check_objects()
        self._head = self._header()
        self.size = len(self._head) + sum(tensor.size for tensor in self._tensors)

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range, each region's verified before the first of them is given out."""
        at = 0
        for size, blocks in self._sources():
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                yield from _clipped(blocks, first, last)
            at += size

    def _sources(self) -> Iterator[tuple[int, Iterator[memoryview]]]:
        yield len(self._head), iter([memoryview(self._head)])
        for tensor in self._tensors:
            yield tensor.size, self._blocks(tensor)

    def _blocks(self, tensor: _Tensor) -> Iterator[memoryview]:
        view = tensor.view
        if view.region is None:
            return
        region = self._region(view.region)
        if view.strides is None:
            yield region[view.offset : view.offset + tensor.size]
            return
        import torch

        whole = tensor_at(view, torch.frombuffer(region, dtype=torch.uint8))
        row = tensor.size // view.shape[0]
        step = max(_GATHER // row, 1)
        for at in range(0, len(whole), step):
            rows = whole[at : at + step]
            size = rows.numel() * rows.element_size()
            yield Span(rows, 0, size, True, view.dtype, list(rows.shape)).read()

    def _region(self, index: int) -> memoryview:
        region = self._manifest.regions[index]
        stored = self._manifest.objects[region.object]
        path = object_path(stored.name)
        # Mapped anew for each tensor, which is cheap, and gone with it: a model may have more
        # objects than a process may have mappings.
        view = self._files.view(path)
        if view is None or len(view) != stored.size:
            raise self._damaged(path, "is not as long as it was")
        block = view[region.start : region.start + region.size]
        if index not in self._verified:
            if memory.digests([block])[0].hex() != region.digest:
                raise self._damaged(path, f"the bytes from {region.start} on are not as saved")
            self._verified.add(index)
        return block

    def _named(self) -> list[_Tensor]:
        found: dict[str, _Tensor] = {}
        views = self._manifest.tensors
        where = manifest_place(self._files, self._manifest)
        # A server need not have torch.
        value = tree.outline(self._manifest.tree, len(views), where, values=False)
        if isinstance(value, tree.Number):
            value = {"tensor": value}
        for name, number in tree.numbers(value, join=_dotted):
            view = views[number]
            if name in found or name == "__metadata__":
                raise self._unfit(f"two things would be called {name[:80]!r}")
            if view.dtype not in SAFETENSORS:
                raise self._unfit(f"{name[:80]!r} is of the dtype {view.dtype}")
            size = ITEM_SIZES[view.dtype]
            for extent in view.shape:
                size *= extent
            if view.strides is not None and size // view.shape[0] > _ROW:
                raise self._unfit(f"{name[:80]!r} has gaps and very long rows")
            found[name] = _Tensor(name, view, size)
        # As safetensors itself orders them, so that each begins at a multiple of its element.
        return sorted(found.values(), key=lambda each: (-ITEM_SIZES[each.view.dtype], each.name))

    def _header(self) -> bytes:
        about = {"format": "pt", "model": self._manifest.name}
        about["version"] = str(self._manifest.version)
        table: dict[str, Any] = {"__metadata__": about}
        at = 0
        for tensor in self._tensors:
            table[tensor.name] = {
                "dtype": SAFETENSORS[tensor.view.dtype],
                "shape": tensor.view.shape,
                "data_offsets": [at, at + tensor.size],
            }
            at += tensor.size
        head = framed(table)
        if len(head) > HEADER_LIMIT:
            raise self._unfit("its names and shapes alone are too long")
        return head

    def _check_objects(self) -> None:
        """What is missing is found before the first byte is promised."""
        for stored in self._manifest.objects:
            path = object_path(stored.name)
            if self._files.size(path) != stored.size:
                raise self._damaged(path, "is missing or not as long as it was")

    def _unfit(self, what: str) -> SerializationError:
        return SerializationError(f"{self._title} is no safetensors file: {what}; {_ADVICE}")

    def _damaged(self, path: str, what: str) -> StoreDamagedError:
        return StoreDamagedError(f"{self._title} is damaged: {path} {what}; take another version")

    @property
    def _title(self) -> str:
        return f"{self._manifest.name!r} version {self._manifest.version}"


def _dotted(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _clipped(blocks: Iterator[memoryview], first: int, last: int) -> Iterator[memoryview]:
    at = 0
    for block in blocks:
        part = block[max(first - at, 0) : max(last - at, 0)]
        for start in range(0, len(part), BLOCK):
            yield part[start : start + BLOCK]
        at += len(block)
        if at >= last:
            return
