"""A version as one ordinary safetensors file, put together from its objects while it is sent."""

from __future__ import annotations

from collections.abc import Iterator

from skyward.errors import SerializationError, StoreDamagedError
from skyward.objects import memory
from skyward.store.catalog import manifest_url
from skyward.store.format import tree
from skyward.store.format.layout import Span, tensor_at
from skyward.store.format.manifest import Manifest, View, object_path
from skyward.store.format.safetensors import DTYPES, HEADER_LIMIT, head_of_views
from skyward.store.places.local import LocalFiles

BLOCK = 1 << 20
"""How many bytes are sent at a time."""
_GATHER = 16 << 20
"""A tensor with gaps is packed in blocks of about this size, but at least one row at a time."""
_ROW = 1 << 30
"""The longest row of a tensor with gaps that can be downloaded."""
_ADVICE = "load it with sky.ModelStore(...).load_model instead"


class Download:
    """The file's head, its length, and its bytes in order.

    Every tensor is contiguous and named by its path in the saved value; a tied tensor appears once
    for each name, since safetensors has neither strides nor ties. Plain values are left out.
    """

    def __init__(self, files: LocalFiles, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest
        self._verified: set[int] = set()
        named = self._named()
        self._check_objects()
        about = {"format": "pt", "model": manifest.name, "version": str(manifest.version)}
        self._head, starts = head_of_views(named, about)
        if len(self._head) > HEADER_LIMIT:
            raise self._unfit("its names and shapes alone are too long")
        self._views = [named[name] for name in starts]
        self.size = len(self._head) + sum(view.packed_size for view in self._views)

    def parts(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a range; each region is verified before its first byte is returned."""
        at = 0
        for size, blocks in self._sources():
            first, last = max(start - at, 0), min(stop - at, size)
            if first < last:
                yield from _clipped(blocks, first, last)
            at += size

    def _sources(self) -> Iterator[tuple[int, Iterator[memoryview]]]:
        yield len(self._head), iter([memoryview(self._head)])
        for view in self._views:
            yield view.packed_size, self._blocks(view)

    def _blocks(self, view: View) -> Iterator[memoryview]:
        if view.region is None:
            return
        region = self._region(view.region)
        if view.strides is None:
            yield region[view.offset : view.offset + view.packed_size]
            return
        import torch

        whole = tensor_at(view, torch.frombuffer(region, dtype=torch.uint8))
        row = view.packed_size // view.shape[0]
        step = max(_GATHER // row, 1)
        for at in range(0, len(whole), step):
            rows = whole[at : at + step]
            size = rows.numel() * rows.element_size()
            yield Span(rows, 0, size, True, view.dtype, list(rows.shape)).read()

    def _region(self, index: int) -> memoryview:
        region = self._manifest.regions[index]
        stored = self._manifest.objects[region.object]
        path = object_path(stored.name)
        # Mapping an object again for each tensor is cheap, and a model may have more objects than
        # a process may have mappings.
        view = self._files.view(path)
        if view is None or len(view) != stored.size:
            raise self._damaged(path, "is not as long as it was")
        block = view[region.start : region.start + region.size]
        if index not in self._verified:
            if memory.digests([block])[0].hex() != region.digest:
                raise self._damaged(path, f"the bytes from {region.start} on are not as saved")
            self._verified.add(index)
        return block

    def _named(self) -> dict[str, View]:
        """Every tensor by its dotted path in the saved value."""
        found: dict[str, View] = {}
        views = self._manifest.tensors
        where = manifest_url(self._files, self._manifest)
        # A server need not have torch.
        value = tree.outline(self._manifest.tree, len(views), where, values=False)
        if isinstance(value, tree.Number):
            value = {"tensor": value}
        for name, number in tree.numbers(value, join=_dotted):
            view = views[number]
            if name in found or name == "__metadata__":
                raise self._unfit(f"two things would be called {name[:80]!r}")
            if view.dtype not in DTYPES:
                raise self._unfit(f"{name[:80]!r} is of the dtype {view.dtype}")
            if view.strides is not None and view.packed_size // view.shape[0] > _ROW:
                raise self._unfit(f"{name[:80]!r} has gaps and very long rows")
            found[name] = view
        return found

    def _check_objects(self) -> None:
        """Find a missing object before the first byte is sent."""
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
