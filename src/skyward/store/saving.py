"""Saving: hash every tensor, upload those the store lacks, then publish one manifest."""

from __future__ import annotations

import collections
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from skyward import __version__
from skyward.errors import StoreDamagedError, StoreError
from skyward.store import objects, tree
from skyward.store.catalog import Catalog
from skyward.store.files import Files
from skyward.store.layout import Span, lay_out
from skyward.store.manifest import FORMAT, Manifest, Region, StoredObject, View, object_path
from skyward.store.objects import Piece
from skyward.wire import memory

PACK = 64 << 20
"""Tensors are hashed, and small ones stored together, in batches of about this size."""
LARGE = 16 << 20
"""From this size on a tensor is an object of its own."""
GRACE = 24 * 3600.0
"""How long the garbage collector leaves alone what no manifest names."""
_RECENT = 16
"""How many versions of the same model are searched for tensors to reuse."""
_ATTEMPTS = 1000

_log = logging.getLogger("skyward.store")


@dataclass(frozen=True, slots=True)
class _Place:
    object: StoredObject
    start: int
    size: int
    source: tuple[str, int] | None
    """The version whose manifest vouches for the object; None for one written by this save."""


class Saving:
    """One save: what it knows the store to have, and what it has added."""

    def __init__(self, files: Files, catalog: Catalog, name: str) -> None:
        self._files = files
        self._catalog = catalog
        self._name = name
        self._known: dict[str, _Place] = {}
        self._added = 0
        for owner, numbers in catalog.numbers().items():
            for number in numbers[-(_RECENT if owner == name else 1) :]:
                self._learn(owner, number)

    def _learn(self, name: str, version: int) -> None:
        try:
            manifest = self._catalog.remember(name, version)
        except StoreError as problem:
            # Someone else's damage: it costs the reuse of those tensors, not this save.
            _log.warning("not reusing tensors of %r version %d: %s", name, version, problem)
            return
        for region in manifest.regions:
            stored = manifest.objects[region.object]
            place = _Place(stored, region.start, region.size, (name, version))
            self._known[region.digest] = place

    def save(self, value: object, metadata: dict[str, Any], class_path: str | None) -> Manifest:
        """Store a value as the next version."""
        import torch

        shape, tensors = tree.encode(value)
        spans, views = lay_out(tensors)
        lease = f"saves/{uuid.uuid4().hex}.json"
        try:
            places = self._placed(spans, lease)
            return self._catalog.publish(
                self._drafts(shape, views, places, metadata, class_path, torch.__version__),
                self._name,
            )
        finally:
            self._drop(lease)

    def _drop(self, lease: str) -> None:
        try:
            self._files.delete(lease)
        except StoreError as problem:
            # It ends by itself, and the save succeeded or failed for another reason.
            _log.info("a lease stays for a day: %s", problem)

    def _placed(self, spans: Sequence[Span], lease: str) -> list[tuple[str, _Place]]:
        """Where each span is stored, with every reused object safe from the garbage collector.

        The lease names the reused objects before their manifests are looked up once more. A
        collector that does not see the lease has listed the manifests before one could go.
        """
        while True:
            places = self._stored(spans)
            reused = {place.object: place.source for _, place in places if place.source}
            if not reused:
                return places
            named = msgspec.json.encode({"objects": [stored.name for stored in reused]})
            self._files.write(lease, [named])
            lost = self._lost(reused)
            if not lost:
                return places
            self._known = {
                digest: place for digest, place in self._known.items() if place.object not in lost
            }

    def _lost(self, reused: dict[StoredObject, tuple[str, int]]) -> set[StoredObject]:
        gone = {source for source in set(reused.values()) if not self._catalog.has(*source)}
        stored = list(reused)
        with ThreadPoolExecutor(max(self._files.transfers, 1)) as pool:
            sizes = list(pool.map(self._files.size, [object_path(each.name) for each in stored]))
        return {
            each
            for each, size in zip(stored, sizes, strict=True)
            if size != each.size or reused[each] in gone
        }

    def _stored(self, spans: Sequence[Span]) -> list[tuple[str, _Place]]:
        digests: list[str] = []
        pack: list[Piece] = []
        packed: set[str] = set()
        with _Uploads(self._files) as uploads:
            for batch in _batches(spans):
                data = [span.read() for span in batch]
                names = [digest.hex() for digest in memory.digests(data)]
                digests += names
                for name, span, view in zip(names, batch, data, strict=True):
                    if name in self._known or name in packed:
                        continue
                    packed.add(name)
                    piece = Piece(name, span, view)
                    if span.size >= LARGE:
                        uploads.start([piece])
                    else:
                        pack.append(piece)
                if sum(len(piece.data) for piece in pack) >= PACK:
                    uploads.start(pack)
                    pack = []
                del data
            if pack:
                uploads.start(pack)
            for digest, place in uploads.finish():
                self._known[digest] = place
                self._added += place.size
        return [(digest, self._known[digest]) for digest in digests]

    def _drafts(
        self,
        shape: Any,
        views: list[View],
        places: list[tuple[str, _Place]],
        metadata: dict[str, Any],
        class_path: str | None,
        torch_version: str,
    ) -> Iterator[Manifest]:
        numbers: dict[StoredObject, int] = {}
        regions = [
            Region(digest, place.size, numbers.setdefault(place.object, len(numbers)), place.start)
            for digest, place in places
        ]
        first = self._catalog.last_number(self._name) + 1
        for version in range(first, first + _ATTEMPTS):
            yield Manifest(
                format=FORMAT,
                name=self._name,
                version=version,
                created=datetime.now(UTC),
                skyward=__version__,
                torch=str(torch_version),
                class_path=class_path,
                metadata=metadata,
                added=self._added,
                objects=list(numbers),
                regions=regions,
                tensors=views,
                tree=shape,
            )


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


class _Uploads:
    """Objects being written behind the hashing's back, a bounded number at a time."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(files.transfers, thread_name_prefix="skyward-store")
        self._running: collections.deque[Future[list[tuple[str, _Place]]]] = collections.deque()
        self._done: list[tuple[str, _Place]] = []

    def __enter__(self) -> _Uploads:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, pieces: list[Piece]) -> None:
        """Write an object, once one of those before it is done."""
        while len(self._running) > self._files.transfers:
            self._done += self._running.popleft().result()
        self._running.append(self._pool.submit(self._write, pieces))

    def finish(self) -> list[tuple[str, _Place]]:
        """Where everything is, when all of it is there."""
        while self._running:
            self._done += self._running.popleft().result()
        return self._done

    def _write(self, pieces: list[Piece]) -> list[tuple[str, _Place]]:
        pieces = sorted(pieces, key=objects.alignment, reverse=True)
        head, starts = objects.header(pieces)
        identity = objects.identity(head)
        size = len(head) + sum(len(piece.data) for piece in pieces)
        name = self._left_over(identity, size, pieces, starts)
        if name is None:
            name = objects.new_name(identity)
            self._files.write(object_path(name), [head, *(piece.data for piece in pieces)])
            self._check_unchanged(pieces, name)
        stored = StoredObject(name, size)
        return [
            (piece.digest, _Place(stored, start, len(piece.data), None))
            for piece, start in zip(pieces, starts, strict=True)
        ]

    def _left_over(
        self, identity: str, size: int, pieces: list[Piece], starts: list[int]
    ) -> str | None:
        """The same object from a save that was interrupted, too young to be collected soon."""
        for entry in self._files.list(f"objects/{identity[:2]}"):
            name = entry.path.rpartition("/")[2]
            if not name.startswith(identity) or entry.size != size:
                continue
            if entry.modified < time.time() - GRACE / 2:
                continue
            try:
                view = self._files.view(entry.path)
            except FileNotFoundError:
                continue
            # A folder's files may have lost their contents in a power failure.
            if view is None or _holds(view, size, pieces, starts):
                return name
        return None

    def _check_unchanged(self, pieces: list[Piece], name: str) -> None:
        shared = [piece for piece in pieces if not piece.span.copied]
        now = memory.digests([piece.data for piece in shared])
        for piece, digest in zip(shared, now, strict=True):
            if digest.hex() != piece.digest:
                self._files.delete(object_path(name))
                raise StoreError(
                    f"a tensor of shape {list(piece.span.tensor.shape)} changed while it was being "
                    "saved; stop training for the save, or save a copy.deepcopy of the model"
                )


def _holds(view: memoryview, size: int, pieces: list[Piece], starts: list[int]) -> bool:
    if len(view) != size:
        return False
    found = memory.digests(
        [view[at : at + len(piece.data)] for piece, at in zip(pieces, starts, strict=True)]
    )
    head, _ = objects.header(pieces)
    return bytes(view[: len(head)]) == head and all(
        digest.hex() == piece.digest for digest, piece in zip(found, pieces, strict=True)
    )


def leased(files: Files, path: str) -> list[str]:
    """The objects that a save in flight reuses."""
    try:
        data = files.read(path, 0, 64 << 20)
        named = msgspec.json.decode(data, type=dict[str, list[str]])["objects"]
    except FileNotFoundError:
        return []
    except (msgspec.MsgspecError, KeyError):
        raise StoreDamagedError(
            f"{files.url}/{path}: not a list of the objects a save uses; "
            "delete the file when no save is running, then collect again"
        ) from None
    return named
