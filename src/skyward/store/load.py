"""Loading: read the regions that a model needs, object by object, and verify every one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.errors import StoreDamagedError
from skyward.objects import memory
from skyward.store.manifest import (
    HEADER_LIMIT,
    Manifest,
    Region,
    StoredObject,
    distrust,
    object_identity,
    object_path,
)
from skyward.store.places import Files
from skyward.store.progress import UNWATCHED, Progress
from skyward.store.values import tensor_at

if TYPE_CHECKING:
    import torch

_HASHED = 64 << 20
"""How many bytes of mapped objects are verified together."""
_SMALL_FETCHED = 1 << 20
_SMALL_MAPPED = 1 << 16
"""Smaller tensors are copied, because each would keep all of its object in memory. The limit for
mapped objects is lower: the kernel drops their pages when memory is short."""

PART = 8 << 20
"""A read is cut into ranges of this size; several ranges are fetched at once."""
TOGETHER = 128 << 20
"""Objects up to this size are read whole if at least half of their bytes are needed."""
AHEAD = 64 << 20
"""How many bytes are fetched ahead while earlier objects are verified and used."""
STREAMS = 8
_HEAD = 64 << 10

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


@dataclass(frozen=True, slots=True)
class _Fetch:
    """An object that is being fetched."""

    path: str
    head: Future[bytes] | None
    """None if the head is the beginning of the only block."""
    blocks: list[tuple[int, memoryview]]
    parts: list[tuple[memoryview, Future[int]]]
    size: int


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
        work: list[_Work] = [
            (
                self._manifest.objects[number],
                [self._manifest.regions[index] for index in indices],
                indices,
            )
            for number, indices in self._by_object(wanted).items()
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

    def _by_object(self, wanted: Iterable[int]) -> dict[int, list[int]]:
        """The regions of each object, by their numbers."""
        found: dict[int, list[int]] = {}
        for index in sorted(set(wanted)):
            found.setdefault(self._manifest.regions[index].object, []).append(index)
        return found

    def _mapped(self, stored: StoredObject, regions: list[Region]) -> list[memoryview] | None:
        path = object_path(stored.name)
        try:
            view = self._files.view(path)
        except FileNotFoundError:
            raise self._damaged(path, "the file is missing") from None
        if view is None:
            return None
        self._check_header(stored, regions, bytes(view[: self._head_end(view, path)]))
        return [view[region.start : region.start + region.size] for region in regions]

    def _fetched(self, work: list[_Work]) -> Iterator[list[_Read]]:
        """The same from a remote store: fetched in parallel, and a bounded amount ahead."""
        pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="skyward-store")
        fetches: deque[_Fetch] = deque()
        waiting = deque(work)

        def start() -> None:
            while waiting:
                stored, regions, _ = waiting[0]
                held = sum(fetch.size for fetch in fetches)
                if fetches and held + _extent(regions) > AHEAD:
                    return
                fetches.append(self._fetch(pool, object_path(stored.name), regions))
                waiting.popleft()

        try:
            start()
            for stored, regions, indices in work:
                head, blocks = self._arrived(fetches.popleft(), regions)
                start()
                self._check_header(stored, regions, head)
                yield [_Read(stored, indices, regions, blocks, False)]
                del blocks
        finally:
            pool.shutdown(cancel_futures=True)

    def _fetch(self, pool: ThreadPoolExecutor, path: str, regions: list[Region]) -> _Fetch:
        end = _extent(regions)
        needed = sum(region.size for region in regions)
        together = 2 * needed >= end and (len(regions) == 1 or end <= TOGETHER)
        blocks = (
            [(0, memory.fresh(end))]
            if together
            else [(region.start, memory.fresh(region.size)) for region in regions]
        )
        head = None if together else pool.submit(self._head, path)
        parts = [
            (part, pool.submit(self._files.read_into, path, start + at, part))
            for start, block in blocks
            for at in range(0, len(block), PART)
            for part in (block[at : at + PART],)
        ]
        return _Fetch(path, head, blocks, parts, sum(len(block) for _, block in blocks))

    def _arrived(self, fetch: _Fetch, regions: list[Region]) -> tuple[bytes, list[memoryview]]:
        """The head of an object and the bytes of its regions, when they are there."""
        needed = sum(region.size for region in regions)
        try:
            for part, count in fetch.parts:
                if count.result() != len(part):
                    raise self._damaged(fetch.path, "the file is too short")
                self._progress.advance(min(len(part), needed))
                needed -= min(len(part), needed)
            if fetch.head is not None:
                return fetch.head.result(), [block for _, block in fetch.blocks]
        except FileNotFoundError:
            raise self._damaged(fetch.path, "the file is missing") from None
        ((_, whole),) = fetch.blocks
        head = bytes(whole[: self._head_end(whole, fetch.path)])
        return head, [whole[region.start : region.start + region.size] for region in regions]

    def _head(self, path: str) -> bytes:
        start = self._files.read(path, 0, _HEAD)
        end = self._head_end(memoryview(start), path)
        return start[:end] if end <= len(start) else self._files.read(path, 0, end)

    def _head_end(self, start: memoryview, path: str) -> int:
        """The length of an object's head, read from the first bytes of the object."""
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > HEADER_LIMIT:
            raise self._damaged(path, "it does not begin with a header")
        return 8 + length

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
        if object_identity(head) != stored.name[:32]:
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
        distrust(stored.name for stored in self._manifest.objects)
        name, version = self._manifest.name, self._manifest.version
        return StoreDamagedError(
            f"{self._files.url}/{path}, part of {name!r} version {version}: {what}; load another "
            "version, or delete the versions that use the file and save the model again"
        )


def _extent(regions: list[Region]) -> int:
    return max(region.start + region.size for region in regions)


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
