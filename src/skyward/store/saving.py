"""Saving: hash every tensor, upload those the store lacks, then publish one manifest."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from skyward import __version__
from skyward.errors import StoreDamagedError, StoreError
from skyward.store import objects, tree, untouched
from skyward.store.catalog import Catalog, check_length
from skyward.store.files import Draft, Files, Part
from skyward.store.layout import Span, lay_out
from skyward.store.manifest import FORMAT, Manifest, Region, StoredObject, View, object_path
from skyward.store.objects import Piece
from skyward.store.progress import UNWATCHED, Progress
from skyward.wire import memory

if TYPE_CHECKING:
    import torch

PACK = 48 << 20
"""Tensors are hashed, and small ones stored together, in batches of about this size."""
GRACE = 24 * 3600.0
"""How long the garbage collector leaves alone what no manifest names."""
_RECENT = 16
"""How many versions of the same model are searched for tensors to reuse."""
_ATTEMPTS = 1000
_TASTE = 4096
"""Tensors that begin with the same bytes, this many, may well be the same."""

_BLOCK = 8 << 20
"""What is read at a time of an object that is compared."""

_log = logging.getLogger("skyward.store")


@dataclass(frozen=True, slots=True)
class _Place:
    object: StoredObject
    start: int
    size: int
    source: tuple[str, int] | None
    """The version whose manifest vouches for the object; None for one written by this save."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A span that is stored; its bytes, which may be a copy, are not kept."""

    span: Span
    digest: str
    place: _Place
    is_new: bool
    """Not left over from a save that was interrupted."""


class Saving:
    """One save: what it knows the store to have, and what it has added."""

    def __init__(
        self, files: Files, catalog: Catalog, name: str, progress: Progress = UNWATCHED
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._name = name
        self._progress = progress
        self._known: dict[str, _Place] = {}
        self._sizes: set[int] = set()
        """Of the regions that are known to be stored."""
        self._left_over: set[int] | None = None
        """The sizes of objects that no manifest seen here names, once they were looked up."""
        self._added = 0
        for owner, numbers in catalog.numbers().items():
            for number in reversed(numbers[-(_RECENT if owner == name else 1) :]):
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
            if region.digest not in self._known and not objects.is_doubted(stored.name):
                place = _Place(stored, region.start, region.size, (name, version))
                self._known[region.digest] = place
                self._sizes.add(region.size)

    def save(self, value: object, metadata: dict[str, Any], class_path: str | None) -> Manifest:
        """Store a value as the next version."""
        shape, tensors = tree.encode(value)
        return self.save_tree(shape, tensors, metadata, class_path)

    def save_tree(
        self,
        shape: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        metadata: dict[str, Any],
        class_path: str | None,
    ) -> Manifest:
        """Store a value that was taken apart, its tensors by number and each with its path."""
        import torch

        spans, views = lay_out(tensors)
        check_length(self._name, len(msgspec.json.encode((shape, metadata, views))))
        states = [_state(tensor) for _, tensor in tensors]
        lease = f"saves/{uuid.uuid4().hex}.json"
        try:
            places = self._placed(spans, lease)
            for (path, tensor), state in zip(tensors, states, strict=True):
                if _state(tensor) != state:
                    raise _changed(path)
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
        streams = self._files.transfers

        def changed(some: list[StoredObject]) -> list[StoredObject]:
            return [each for each in some if self._files.size(object_path(each.name)) != each.size]

        stored = list(reused)
        with ThreadPoolExecutor(streams) as pool:
            found = pool.map(changed, [stored[each::streams] for each in range(streams)])
            lost = {each for some in found for each in some}
        return lost | {each for each in stored if reused[each] in gone}

    def _stored(self, spans: Sequence[Span]) -> list[tuple[str, _Place]]:
        digests: dict[Span, str] = {}
        named: set[str] = set()
        unnamed: set[tuple[int, bytes]] = set()
        pack: list[Piece] = []
        self._progress.begin(sum(span.size for span in spans))
        with _Uploads(self._files, self._progress) as uploads:

            def settle() -> None:
                unnamed.clear()
                for each in uploads.finish():
                    digests[each.span] = each.digest
                    if each.digest not in self._known:
                        self._known[each.digest] = each.place
                        self._sizes.add(each.place.size)
                        self._added += each.place.size if each.is_new else 0

            for batch in _batches(spans):
                doubtful: list[Piece] = []
                for span in batch:
                    piece = Piece("", span, span.read())
                    loaded = untouched.digest(piece.data)
                    if loaded in self._known:
                        digests[span] = loaded
                        self._progress.reused(span.size)
                        continue
                    likeness = (len(piece.data), bytes(piece.data[:_TASTE]))
                    if likeness in unnamed:
                        settle()
                    elif self._is_new(piece):
                        unnamed.add(likeness)
                        uploads.start([piece])
                        continue
                    doubtful.append(piece)
                names = memory.digests([piece.data for piece in doubtful])
                for unhashed, name in zip(doubtful, names, strict=True):
                    piece = replace(unhashed, digest=name.hex())
                    digests[piece.span] = piece.digest
                    if piece.digest in self._known or piece.digest in named:
                        self._progress.reused(len(piece.data))
                        continue
                    named.add(piece.digest)
                    if len(piece.data) >= self._files.whole:
                        uploads.start([piece])
                    else:
                        pack.append(piece)
                if sum(len(piece.data) for piece in pack) >= PACK:
                    uploads.start(pack)
                    pack = []
            if pack:
                uploads.start(pack)
            settle()
        return [(digests[span], self._known[digests[span]]) for span in spans]

    def _is_new(self, piece: Piece) -> bool:
        """Whether nothing stored can be the same, so that it need not be hashed to find out."""
        size = len(piece.data)
        if not self._files.drafts or size < self._files.whole or size in self._sizes:
            return False
        if self._left_over is None:
            named = {place.object.name for place in self._known.values()}
            self._left_over = {
                entry.size
                for entry in self._files.list("objects")
                if entry.path.rpartition("/")[2] not in named
            }
        return len(objects.header([piece])[0]) + size not in self._left_over

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

    def __init__(self, files: Files, progress: Progress) -> None:
        self._files = files
        self._progress = progress
        self._pool = ThreadPoolExecutor(files.transfers, thread_name_prefix="skyward-store")
        self._running: collections.deque[Future[list[_Written]]] = collections.deque()
        self._done: list[_Written] = []

    def __enter__(self) -> _Uploads:
        return self

    def __exit__(self, *failure: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, pieces: list[Piece]) -> None:
        """Write an object, once one of those before it is done.

        A piece without a digest gets it by being written, and is written alone.
        """
        while len(self._running) > self._files.transfers:
            self._done += self._running.popleft().result()
        self._running.append(self._pool.submit(self._write, pieces))

    def finish(self) -> list[_Written]:
        """Where everything is that was not said before, when all of it is there."""
        while self._running:
            self._done += self._running.popleft().result()
        done, self._done = self._done, []
        return done

    def _write(self, pieces: list[Piece]) -> list[_Written]:
        pieces = sorted(pieces, key=objects.alignment, reverse=True)
        head, starts = objects.header(pieces)
        size = len(head) + sum(len(piece.data) for piece in pieces)
        name = self._left_over(head, size, pieces, starts) if pieces[0].digest else None
        is_new = name is None
        if name is not None:
            self._progress.reused(size - len(head))
        else:
            draft = self._files.draft()
            if draft is None:
                name = self._upload(head, pieces)
            else:
                with draft as file:
                    pieces, name = self._draft(file, pieces, starts)
            self._progress.advance(size - len(head))
        stored = StoredObject(name, size)
        return [
            _Written(piece.span, piece.digest, _Place(stored, start, piece.span.size, None), is_new)
            for piece, start in zip(pieces, starts, strict=True)
        ]

    def _upload(self, head: bytes, pieces: list[Piece]) -> str:
        name = objects.new_name(objects.identity(head))
        self._files.write(object_path(name), [head, *(piece.data for piece in pieces)])
        shared = [piece for piece in pieces if not piece.span.copied]
        now = memory.digests([piece.data for piece in shared])
        for piece, digest in zip(shared, now, strict=True):
            if digest.hex() != piece.digest:
                self._files.delete(object_path(name))
                raise _changed(f"a tensor of shape {list(piece.span.tensor.shape)}")
        return name

    def _draft(
        self, file: Draft, pieces: list[Piece], starts: list[int]
    ) -> tuple[list[Piece], str]:
        written = []
        for piece, start in zip(pieces, starts, strict=True):
            digest = file.write(start, piece.data).hex()
            if piece.digest not in ("", digest):
                raise _changed(f"a tensor of shape {list(piece.span.tensor.shape)}")
            written.append(replace(piece, digest=digest))
        head, _ = objects.header(written)
        name = objects.new_name(objects.identity(head))
        file.publish(object_path(name), head)
        return written, name

    def _left_over(
        self, head: bytes, size: int, pieces: list[Piece], starts: list[int]
    ) -> str | None:
        """The same object from a save that was interrupted, too young to be collected soon."""
        identity = objects.identity(head)
        for entry in self._files.list(f"objects/{identity[:2]}"):
            name = entry.path.rpartition("/")[2]
            if not name.startswith(identity) or entry.size != size:
                continue
            if entry.modified < time.time() - GRACE / 2:
                continue
            # Nobody has read it since it was written: a power failure may have taken its
            # contents, and it may be why somebody deletes a damaged version and saves it again.
            with contextlib.suppress(FileNotFoundError):
                view = self._files.view(entry.path)
                if view is None:
                    holds = self._reads_back(entry.path, [head, *(each.data for each in pieces)])
                else:
                    holds = _holds(view, size, pieces, starts)
                if holds:
                    return name
        return None

    def _reads_back(self, path: str, parts: list[Part]) -> bool:
        """Whether a file that is as long as these parts consists of them."""
        ahead, end = memoryview(b""), 0
        for part in parts:
            rest = memoryview(part)
            while rest:
                if not ahead:
                    ahead = memoryview(self._files.read(path, end, _BLOCK))
                    end += len(ahead)
                count = min(len(rest), len(ahead))
                # Comparing views goes byte by byte.
                if not count or bytes(rest[:count]) != bytes(ahead[:count]):
                    return False
                rest, ahead = rest[count:], ahead[count:]
        return True


def _state(tensor: torch.Tensor) -> int:
    """A number that every write to the tensor changes, as far as torch sees them."""
    return 0 if tensor.is_inference() else tensor._version


def _changed(what: str) -> StoreError:
    return StoreError(
        f"{what} changed while it was being saved; "
        "stop training for the save, or save a copy.deepcopy of the model"
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
