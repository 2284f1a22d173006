"""Loading: read the regions that a model needs, object by object, and verify every one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.errors import StoreDamagedError
from skyward.objects import memory
from skyward.store.format import objects
from skyward.store.format.layout import tensor_at
from skyward.store.format.manifest import Manifest, Region, StoredObject, object_path
from skyward.store.loading.fetching import fetched, head_end
from skyward.store.places.files import Files
from skyward.store.progress import UNWATCHED, Progress

if TYPE_CHECKING:
    import torch

_HASHED = 64 << 20
"""How many bytes of mapped objects are verified together."""
_SMALL_FETCHED = 1 << 20
_SMALL_MAPPED = 1 << 16
"""Smaller tensors are copied, because each would keep all of its object in memory. The limit for
mapped objects is lower: the kernel drops their pages when memory is short."""

_Work = tuple[StoredObject, list[Region], list[int]]
"""An object, the regions to read from it, and their numbers in the manifest."""


@dataclass(frozen=True, slots=True)
class _Read:
    """The regions to read from an object, and their bytes."""

    stored: StoredObject
    indices: list[int]
    regions: list[Region]
    blocks: list[memoryview]
    mapped: bool

    @property
    def size(self) -> int:
        return sum(region.size for region in self.regions)


class Loading:
    """The regions of one version, read and verified."""

    def __init__(self, files: Files, manifest: Manifest, progress: Progress = UNWATCHED) -> None:
        self._files = files
        self._manifest = manifest
        self._progress = progress
        self._verified: set[int] = set()

    def begin(self, wanted: Iterable[int]) -> None:
        """Tell the progress how many bytes the load has."""
        self._progress.begin(self.size(wanted))

    def size(self, wanted: Iterable[int]) -> int:
        """How many bytes these regions have."""
        return sum(self._manifest.regions[index].size for index in set(wanted))

    def verify(self, wanted: Iterable[int]) -> None:
        """Verify regions before `regions` reads them, if that needs no second download."""
        for group in self._groups(wanted, mapped_only=True):
            self._check(group)

    def regions(self, wanted: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Each region as flat bytes of its own; holds few fetched bytes at a time."""
        for group in self._groups(wanted):
            self._check(group)
            for read in group:
                yield from zip(read.indices, _flats(read), strict=True)

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Every tensor of the version, on a device."""
        import torch

        views = self._manifest.tensors
        wanted = [view.region for view in views if view.region is not None]
        self.begin(wanted)
        flats = {index: flat.to(device) for index, flat in self.regions(wanted)}
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        return [
            tensor_at(view, nothing if view.region is None else flats[view.region])
            for view in views
        ]

    def _groups(self, wanted: Iterable[int], mapped_only: bool = False) -> Iterator[list[_Read]]:
        """The objects to read; mapped objects in groups that are hashed together."""
        by_object: dict[int, list[int]] = {}
        for index in sorted(set(wanted)):
            by_object.setdefault(self._manifest.regions[index].object, []).append(index)
        work: list[_Work] = [
            (
                self._manifest.objects[number],
                [self._manifest.regions[index] for index in indices],
                indices,
            )
            for number, indices in by_object.items()
        ]
        group: list[_Read] = []
        for stored, regions, indices in work:
            blocks = self._mapped(stored, regions)
            if blocks is None:  # a place maps all of its files or none
                if not mapped_only:
                    yield from self._fetched(work)
                return
            group.append(_Read(stored, indices, regions, blocks, True))
            if sum(read.size for read in group) >= _HASHED:
                yield group
                group = []
        if group:
            yield group

    def _mapped(self, stored: StoredObject, regions: list[Region]) -> list[memoryview] | None:
        path = object_path(stored.name)
        try:
            view = self._files.view(path)
        except FileNotFoundError:
            raise self._damaged(path, "the file is missing") from None
        if view is None:
            return None
        self._check_header(stored, regions, bytes(view[: head_end(view, path, self._damaged)]))
        return [view[region.start : region.start + region.size] for region in regions]

    def _fetched(self, work: list[_Work]) -> Iterator[list[_Read]]:
        wanted = [(stored, regions) for stored, regions, _ in work]
        arriving = fetched(self._files, wanted, self._damaged, self._progress.advance)
        for (stored, regions, indices), (head, blocks) in zip(work, arriving, strict=True):
            self._check_header(stored, regions, head)
            yield [_Read(stored, indices, regions, blocks, False)]

    def _check(self, group: list[_Read]) -> None:
        unchecked = [read for read in group if not self._verified.issuperset(read.indices)]
        for read in unchecked:
            if any(
                len(block) != each.size
                for block, each in zip(read.blocks, read.regions, strict=True)
            ):
                raise self._damaged(object_path(read.stored.name), "the file is too short")
        found = iter(memory.digests([block for read in unchecked for block in read.blocks]))
        for read in unchecked:
            for region, digest in zip(read.regions, found, strict=False):
                if digest.hex() != region.digest:
                    at = f"the bytes from {region.start} on"
                    path = object_path(read.stored.name)
                    raise self._damaged(path, f"{at} are not what was saved")
            self._verified.update(read.indices)
            if read.mapped:
                self._progress.advance(read.size)

    def _check_header(self, stored: StoredObject, regions: list[Region], head: bytes) -> None:
        path = object_path(stored.name)
        if objects.identity(head) != stored.name[:32]:
            raise self._damaged(path, "its header is not what was saved")
        try:
            table = msgspec.json.decode(head[8:], type=dict[str, dict[str, Any]])
            for region in regions:
                first, last = table[region.digest]["data_offsets"]
                if (len(head) + first, last - first) != (region.start, region.size):
                    raise self._damaged(path, "its header and the manifest disagree")
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError):
            raise self._damaged(path, "its header and the manifest disagree") from None

    def _damaged(self, path: str, what: str) -> StoreDamagedError:
        objects.distrust(stored.name for stored in self._manifest.objects)
        name, version = self._manifest.name, self._manifest.version
        return StoreDamagedError(
            f"{self._files.url}/{path}, part of {name!r} version {version}: {what}; load another "
            "version, or delete the versions that use the file and save the model again"
        )


def _flats(read: _Read) -> Iterator[torch.Tensor]:
    """A storage for each region, without a copy where that is safe."""
    import torch

    small = _SMALL_MAPPED if read.mapped else _SMALL_FETCHED
    taken: set[int] = set()
    for region, block in zip(read.regions, read.blocks, strict=True):
        flat = torch.frombuffer(block, dtype=torch.uint8)
        # Equal tensors are stored once, but each gets its own memory; and torch's kernels expect
        # addresses that are multiples of the element's size.
        shared = region.start in taken
        taken.add(region.start)
        if shared or region.size < small or flat.data_ptr() % memory.ALIGNMENT:
            flat = flat.clone()
        yield flat
