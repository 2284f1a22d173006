"""The third stage of a save: write regions to objects, a bounded number of objects at a time."""

from __future__ import annotations

import collections
import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from skyward.errors import StoreError
from skyward.objects import memory
from skyward.store.format import objects
from skyward.store.format.layout import Span
from skyward.store.format.manifest import StoredObject, object_path
from skyward.store.format.objects import Piece
from skyward.store.places.files import Buffer, Draft, Files
from skyward.store.progress import Progress
from skyward.store.saving.classification import PACK
from skyward.store.saving.hashing import hashed
from skyward.store.saving.inventory import Location
from skyward.store.saving.leases import GRACE

_BLOCK = 8 << 20
"""How much of an object is read at a time to compare it."""


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
        pieces = sorted(pieces, key=objects.alignment, reverse=True)
        head, starts = objects.header(pieces)
        size = len(head) + sum(len(piece.data) for piece in pieces)
        name = _left_over(self._files, head, size, pieces, starts) if pieces[0].digest else None
        is_new = name is None
        if name is not None:
            self._progress.reused(size - len(head))
        else:
            draft = self._files.draft()
            if draft is None:
                name = _upload(self._files, head, pieces)
            else:
                with draft as file:
                    pieces, name = _write_draft(file, pieces, starts)
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
    name = objects.new_name(objects.identity(head))
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
    head, _ = objects.header(written)
    name = objects.new_name(objects.identity(head))
    file.publish(object_path(name), head)
    return written, name


def _left_over(
    files: Files, head: bytes, size: int, pieces: list[Piece], starts: list[int]
) -> str | None:
    """The same object from an interrupted save, too young to be collected soon."""
    identity = objects.identity(head)
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
