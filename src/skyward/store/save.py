"""Saving a version in three stages: classify the regions, hash them, upload what is new."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata as packages
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.errors import StoreError
from skyward.objects import memory
from skyward.store.catalog import GRACE, Catalog, check_length
from skyward.store.manifest import (
    DTYPES,
    FORMAT,
    ITEM_SIZES,
    Listed,
    Manifest,
    Region,
    StoredObject,
    View,
    head,
    is_distrusted,
    object_identity,
    object_path,
)
from skyward.store.places import Buffer, Draft, Files
from skyward.store.progress import UNWATCHED, Progress
from skyward.store.values import Span, lay_out

if TYPE_CHECKING:
    import torch

_ATTEMPTS = 1000
"""How many version numbers a save tries before it gives up."""
_RECENT = 16
"""How many versions of the same model are searched for tensors to reuse."""
PACK = 48 << 20
"""The size of a batch of regions; a batch is hashed together, and its small regions are packed."""
_BEGINNING = 4096
"""Regions of one length are probably equal if this many of their first bytes are the same."""
_BLOCK = 8 << 20
"""How much of an object is read at a time to compare it."""
_UNKNOWN = "0" * 32
"""Takes the place of a digest where only the length of the head matters."""

_log = logging.getLogger("skyward.store")


class Saving:
    """One save: the regions that the store is known to have, and those that the save has added."""

    def __init__(self, catalog: Catalog, name: str, progress: Progress = UNWATCHED) -> None:
        self._files = catalog.files
        self._catalog = catalog
        self._name = name
        self._progress = progress
        self._inventory = Inventory.of(catalog, name)
        self._added = 0

    def save(
        self,
        tree: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        metadata: dict[str, Any],
        class_path: str | None,
    ) -> Manifest:
        """Store a value as the next version: its tree, and its tensors with paths."""
        spans, views = lay_out(tensors)
        check_length(self._name, len(msgspec.json.encode((tree, metadata, views))))
        counts = [_writes(tensor) for _, tensor in tensors]
        with self._catalog.lease() as name_reused:
            regions = self._stored_under(name_reused, spans)
            for (path, tensor), count in zip(tensors, counts, strict=True):
                if _writes(tensor) != count:
                    raise changed(path)
            drafts = self._drafts(tree, views, regions, metadata, class_path)
            return self._catalog.publish(drafts, self._name)

    def _stored_under(
        self, name_reused: Callable[[Iterable[StoredObject]], None], spans: Sequence[Span]
    ) -> list[tuple[str, Location]]:
        """The digest and location of each span, every reused object named by the lease.

        The save writes the lease first, and then checks the manifests of the reused objects again.
        A collector that does not see the lease has listed the manifests before that check.
        """
        while True:
            regions = self._stored(spans)
            reused = {where.object: where.source for _, where in regions if where.source}
            if not reused:
                return regions
            name_reused(reused)
            lost = self._catalog.lost(reused)
            if not lost:
                return regions
            self._inventory.drop(lost)

    def _stored(self, spans: Sequence[Span]) -> list[tuple[str, Location]]:
        """The three stages: classify, hash, upload."""
        digests: dict[Span, str] = {}
        uploading: set[str] = set()
        self._progress.begin(sum(span.size for span in spans))
        with Uploads(self._files, self._progress) as uploads:
            for batch in classify(spans, self._inventory, self._files):
                for piece in batch.new:
                    uploads.add(piece)
                if any(span not in digests for span in batch.resembled):
                    self._note(uploads.settle(), digests)
                for piece in hashed(batch.unsure):
                    digests[piece.span] = piece.digest
                    if piece.digest in self._inventory or piece.digest in uploading:
                        self._progress.reused(len(piece.data))
                    else:
                        uploading.add(piece.digest)
                        uploads.add(piece)
            self._note(uploads.finish(), digests)
        return [(digests[span], self._inventory[digests[span]]) for span in spans]

    def _note(self, stored: list[StoredRegion], digests: dict[Span, str]) -> None:
        for each in stored:
            digests[each.span] = each.digest
            if self._inventory.add(each.digest, each.location) and each.is_new:
                self._added += each.location.size

    def _drafts(
        self,
        tree: Any,
        views: list[View],
        regions: list[tuple[str, Location]],
        metadata: dict[str, Any],
        class_path: str | None,
    ) -> Iterator[Manifest]:
        """The manifest under one free version number after another."""
        import torch

        numbers: dict[StoredObject, int] = {}
        stored = [
            Region(digest, where.size, numbers.setdefault(where.object, len(numbers)), where.start)
            for digest, where in regions
        ]
        first = self._catalog.last_number(self._name) + 1
        for version in range(first, first + _ATTEMPTS):
            yield Manifest(
                format=FORMAT,
                name=self._name,
                version=version,
                created=datetime.now(UTC),
                skyward=packages.version("skyward-torch"),
                torch=str(torch.__version__),
                class_path=class_path,
                metadata=metadata,
                added=self._added,
                objects=list(numbers),
                regions=stored,
                tensors=views,
                tree=tree,
            )


def _writes(tensor: torch.Tensor) -> int:
    """A number that every write to the tensor changes, as far as torch sees the write."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class Location:
    """Where the bytes of one region are stored."""

    object: StoredObject
    start: int
    size: int
    source: tuple[str, int] | None
    """The version whose manifest names the object; None for an object that this save wrote."""


class Inventory:
    """Stored regions by digest."""

    def __init__(self) -> None:
        self._locations: dict[str, Location] = {}
        self._sizes: set[int] = set()

    @classmethod
    def of(cls, catalog: Catalog, name: str) -> Inventory:
        """The regions of the model's last versions, and of every other model's newest version."""
        found = cls()
        for owner, numbers in catalog.numbers().items():
            for number in reversed(numbers[-(_RECENT if owner == name else 1) :]):
                found._add_version(catalog, owner, number)
        return found

    def _add_version(self, catalog: Catalog, name: str, version: int) -> None:
        try:
            manifest = catalog.remember(name, version)
        except StoreError as problem:
            # If another version is damaged, the save goes on without reusing its tensors.
            _log.warning("not reusing tensors of %r version %d: %s", name, version, problem)
            return
        for region in manifest.regions:
            stored = manifest.objects[region.object]
            if not is_distrusted(stored.name):
                self.add(
                    region.digest, Location(stored, region.start, region.size, (name, version))
                )

    def add(self, digest: str, location: Location) -> bool:
        """Note where a region is stored; returns False if a location is known already."""
        if digest in self._locations:
            return False
        self._locations[digest] = location
        self._sizes.add(location.size)
        return True

    def __contains__(self, digest: str) -> bool:
        return digest in self._locations

    def __getitem__(self, digest: str) -> Location:
        return self._locations[digest]

    def has_size(self, size: int) -> bool:
        """Whether a region of this many bytes is, or was, in the inventory."""
        return size in self._sizes

    def object_names(self) -> set[str]:
        """The names of all objects that hold a region."""
        return {location.object.name for location in self._locations.values()}

    def drop(self, lost: Iterable[StoredObject]) -> None:
        """Forget every region that lies in a lost object."""
        gone = set(lost)
        self._locations = {
            digest: location
            for digest, location in self._locations.items()
            if location.object not in gone
        }


# The first stage separates regions that are certainly new from all others. A region that cannot
# equal a stored one is hashed while it is written, in one pass over its memory. All others are
# hashed first.


@dataclass(frozen=True, slots=True)
class Piece:
    """One region on its way into an object."""

    digest: str
    """Empty until the piece is hashed."""
    span: Span
    data: memoryview


@dataclass(frozen=True, slots=True)
class Classified:
    """One batch of regions, read."""

    new: list[Piece] = field(default_factory=list)
    """Regions that equal no stored region, and no earlier region of the save."""
    unsure: list[Piece] = field(default_factory=list)
    """Regions that may be stored already; only their digests can tell."""
    resembled: list[Span] = field(default_factory=list)
    """New regions that one of `unsure` may equal: their digests are needed first."""


def classify(spans: Sequence[Span], inventory: Inventory, files: Files) -> Iterator[Classified]:
    """Read the regions of a save in batches, and sort each batch."""
    left_over: set[int] | None = None
    first: dict[tuple[int, bytes], Span] = {}

    def is_new(piece: Piece) -> bool:
        nonlocal left_over
        size = len(piece.data)
        if not files.drafts or size < files.whole or inventory.has_size(size):
            return False
        if left_over is None:
            left_over = _unnamed_sizes(files, inventory)
        return len(object_head([piece])[0]) + size not in left_over

    for batch in _batches(spans):
        found = Classified()
        for span in batch:
            piece = Piece("", span, span.read())
            key = (len(piece.data), bytes(piece.data[:_BEGINNING]))
            if key in first:
                found.resembled.append(first[key])
                found.unsure.append(piece)
            elif is_new(piece):
                first[key] = span
                found.new.append(piece)
            else:
                found.unsure.append(piece)
        yield found


def _unnamed_sizes(files: Files, inventory: Inventory) -> set[int]:
    """The sizes of objects that the inventory does not name: an interrupted save left them."""
    named = inventory.object_names()
    return {
        entry.size for entry in files.list("objects") if entry.path.rpartition("/")[2] not in named
    }


def _batches(spans: Sequence[Span]) -> Iterator[list[Span]]:
    batch: list[Span] = []
    size = 0
    for span in spans:
        batch.append(span)
        size += span.size
        if size >= PACK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# The second stage: the digests of regions, several regions at a time.


def hashed(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, each with the digest of its bytes."""
    digests = memory.digests([piece.data for piece in pieces])
    return [
        replace(piece, digest=digest.hex()) for piece, digest in zip(pieces, digests, strict=True)
    ]


# The third stage writes regions to objects, a bounded number of objects at a time.


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A region that is stored; this record does not keep its bytes."""

    span: Span
    digest: str
    location: Location
    is_new: bool
    """False if an interrupted save had left the object behind."""


class Uploads:
    """Objects that threads write while the caller reads and hashes the next regions."""

    def __init__(self, files: Files, progress: Progress) -> None:
        self._files = files
        self._progress = progress
        self._pool = ThreadPoolExecutor(files.transfers, thread_name_prefix="skyward-store")
        self._running: collections.deque[Future[list[StoredRegion]]] = collections.deque()
        self._done: list[StoredRegion] = []
        self._pack: list[Piece] = []
        """Small pieces that wait until an object is full."""

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, piece: Piece) -> None:
        """Write a piece: a large one to an object of its own, small ones together.

        A piece without a digest is hashed while it is written, and always written alone.
        """
        if not piece.digest or len(piece.data) >= self._files.whole:
            self._start([piece])
            return
        self._pack.append(piece)
        if sum(len(each.data) for each in self._pack) >= PACK:
            self._start_pack()

    def settle(self) -> list[StoredRegion]:
        """Wait for the objects being written; returns the regions stored since the last call."""
        while self._running:
            self._done += self._running.popleft().result()
        done, self._done = self._done, []
        return done

    def finish(self) -> list[StoredRegion]:
        """Write the small pieces that still wait, then settle."""
        if self._pack:
            self._start_pack()
        return self.settle()

    def _start_pack(self) -> None:
        pack, self._pack = self._pack, []
        self._start(pack)

    def _start(self, pieces: list[Piece]) -> None:
        while len(self._running) > self._files.transfers:
            self._done += self._running.popleft().result()
        self._running.append(self._pool.submit(self._write, pieces))

    def _write(self, pieces: list[Piece]) -> list[StoredRegion]:
        pieces = sorted(pieces, key=_alignment, reverse=True)
        head, starts = object_head(pieces)
        size = len(head) + sum(len(piece.data) for piece in pieces)
        name = _left_over(self._files, head, size, pieces, starts) if pieces[0].digest else None
        is_new = name is None
        if name is not None:
            self._progress.reused(size - len(head))
        else:
            if self._files.drafts:
                with self._files.draft() as file:
                    pieces, name = _write_draft(file, pieces, starts)
            else:
                name = _upload(self._files, head, pieces)
            self._progress.advance(size - len(head))
        stored = StoredObject(name, size)
        return [
            StoredRegion(
                piece.span, piece.digest, Location(stored, start, piece.span.size, None), is_new
            )
            for piece, start in zip(pieces, starts, strict=True)
        ]


def changed(what: str) -> StoreError:
    """The error for a tensor that another thread wrote to during the save."""
    return StoreError(
        f"{what} changed while it was being saved; "
        "stop training for the save, or save a copy.deepcopy of the model"
    )


def _upload(files: Files, head: bytes, pieces: list[Piece]) -> str:
    """Write an object whose name is known, then check that no tensor changed meanwhile."""
    name = _new_name(head)
    files.write(object_path(name), [head, *(piece.data for piece in pieces)])
    shared = [piece for piece in pieces if not piece.span.copied]
    for piece, now in zip(shared, hashed(shared), strict=True):
        if now.digest != piece.digest:
            files.delete(object_path(name))
            raise changed(f"a tensor of shape {list(piece.span.tensor.shape)}")
    return name


def _write_draft(file: Draft, pieces: list[Piece], starts: list[int]) -> tuple[list[Piece], str]:
    """Write and hash in one pass; the digests of the written bytes decide the object's name."""
    written = []
    for piece, start in zip(pieces, starts, strict=True):
        digest = file.write(start, piece.data).hex()
        if piece.digest not in ("", digest):
            raise changed(f"a tensor of shape {list(piece.span.tensor.shape)}")
        written.append(replace(piece, digest=digest))
    head, _ = object_head(written)
    name = _new_name(head)
    file.publish(object_path(name), head)
    return written, name


def _left_over(
    files: Files, head: bytes, size: int, pieces: list[Piece], starts: list[int]
) -> str | None:
    """The same object from an interrupted save, too young to be collected soon."""
    identity = object_identity(head)
    for entry in files.list(f"objects/{identity[:2]}"):
        name = entry.path.rpartition("/")[2]
        if not name.startswith(identity) or entry.size != size:
            continue
        if entry.modified < time.time() - GRACE / 2:
            continue
        # No load has verified the object: a power failure may have destroyed its contents, and the
        # user may be saving again because a version with this object was damaged.
        with contextlib.suppress(FileNotFoundError):
            view = files.view(entry.path)
            if view is None:
                parts: list[Buffer] = [head, *(piece.data for piece in pieces)]
                is_whole = _reads_back(files, entry.path, parts)
            else:
                is_whole = _holds(view, head, size, pieces, starts)
            if is_whole:
                return name
    return None


def _reads_back(files: Files, path: str, parts: list[Buffer]) -> bool:
    """Whether a file that is as long as these parts consists of them."""
    ahead, end = memoryview(b""), 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            if not ahead:
                ahead = memoryview(files.read(path, end, _BLOCK))
                end += len(ahead)
            count = min(len(rest), len(ahead))
            # Comparing memoryviews would go byte by byte.
            if not count or bytes(rest[:count]) != bytes(ahead[:count]):
                return False
            rest, ahead = rest[count:], ahead[count:]
    return True


def _holds(
    view: memoryview, head: bytes, size: int, pieces: list[Piece], starts: list[int]
) -> bool:
    """Whether a mapped file has this head and these pieces."""
    if len(view) != size or bytes(view[: len(head)]) != head:
        return False
    found = memory.digests(
        [view[at : at + len(piece.data)] for piece, at in zip(pieces, starts, strict=True)]
    )
    return all(digest.hex() == piece.digest for digest, piece in zip(found, pieces, strict=True))


def _alignment(piece: Piece) -> int:
    """The sort key of pieces, largest first: each then begins at a multiple of its element size."""
    item = ITEM_SIZES[piece.span.dtype]
    return item if piece.span.dtype in DTYPES else 1


def object_head(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """The head of an object with these pieces, and where in the object each one begins."""

    def listed(piece: Piece) -> Listed:
        size = len(piece.data)
        dtype = DTYPES.get(piece.span.dtype)
        # As plain bytes if safetensors lacks the dtype.
        return (dtype, piece.span.shape, size) if dtype else ("U8", [size], size)

    return head({piece.digest or _UNKNOWN: listed(piece) for piece in pieces}, {"format": "pt"})


def _new_name(head: bytes) -> str:
    """A name for a new object with this head, never used before."""
    return f"{object_identity(head)}-{os.urandom(4).hex()}"
