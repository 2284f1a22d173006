"""Blobs: large buffers named by their content, in memory that other processes can map."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.errors import ProtocolError
from skyward.objects import memory
from skyward.objects.memory import Arena, Segment

BLOB_MIN = 256 << 10
"""Smaller buffers travel in the frame's body."""

SOURCES_MAX = 1024

SEGMENTS_MAX = 256
"""Each segment takes a file descriptor on both sides."""


@dataclass(slots=True, eq=False)
class Blob:
    """One buffer's content, kept in a segment of this process."""

    digest: bytes
    segment: Segment
    offset: int
    length: int

    def view(self) -> memoryview:
        """The bytes, for sending."""
        return memoryview(self.segment.shared())[self.offset : self.offset + self.length]


class BlobStore:
    """The blobs of this process; above the cap, the least recently used blobs are evicted.

    A segment is reused only when it has no blob and is not pinned. It is pinned as long as this
    process or another one maps it.
    """

    def __init__(self, cap: int, folder: str | None = None) -> None:
        self.cap = cap
        self.arena = Arena(cap, folder)
        self.retired: deque[int] = deque()
        """Segments without blobs, which other processes should unmap."""
        self.evicted: deque[bytes] = deque()
        self._blobs: OrderedDict[bytes, Blob] = OrderedDict()
        self._in_segment: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._segments: dict[int, Segment] = {}
        self._size = 0
        self._lock = threading.RLock()

    def place(
        self, buffers: Sequence[memoryview], names: Sequence[bytes] | None = None
    ) -> list[Blob]:
        """Keep these contents; copies only new ones. The caller must unpin the blobs.

        `names` are the digests of the contents, if they are known already.
        """
        names = memory.digests(buffers) if names is None else names
        with self._lock:
            blobs: dict[bytes, Blob] = {}
            for name in names:
                known = self._find(name)
                if known is not None:
                    blobs[name] = known
                    self.pin(known.segment)
        new = {
            name: buffer for name, buffer in zip(names, buffers, strict=True) if name not in blobs
        }
        if new:
            offsets, size = memory.aligned([len(buffer) for buffer in new.values()])
            segment: Segment | None = None
            try:
                segment = self.arena.allocate(size)
                segment.write(list(zip(offsets, new.values(), strict=True)))
            except BaseException:
                if segment is not None:
                    segment.close()
                for held in blobs.values():
                    self.unpin(held.segment.id)
                raise
            self.pin(segment)
            for (name, buffer), offset in zip(new.items(), offsets, strict=True):
                blobs[name] = self.add(Blob(name, segment, offset, len(buffer)), pinned=True)
            # Another thread may have placed the same contents: then this segment is free again.
            self.unpin(segment.id)
        for name in _repeated(names):
            self.pin(blobs[name].segment)
        self._shrink()
        return [blobs[name] for name in names]

    def place_new(self, buffers: Sequence[memoryview]) -> list[Blob]:
        """Like `place`, for contents that are probably new: hashes them while it copies them."""
        offsets, size = memory.aligned([len(buffer) for buffer in buffers])
        segment = self.arena.allocate(size)
        try:
            names = segment.write_hashing(list(zip(offsets, buffers, strict=True)))
        except BaseException:
            segment.close()
            raise
        self.pin(segment)
        blobs = [
            self.add(Blob(name, segment, offset, len(buffer)), pinned=True)
            for name, offset, buffer in zip(names, offsets, buffers, strict=True)
        ]
        # If all contents were kept already, the segment is free again.
        self.unpin(segment.id)
        self._shrink()
        return blobs

    def add(self, blob: Blob, *, pinned: bool = False) -> Blob:
        """Keep a blob whose bytes are in their segment already."""
        with self._lock:
            known = self._find(blob.digest)
            kept = known or blob
            if known is None:
                self._blobs[blob.digest] = blob
                self._segments[blob.segment.id] = blob.segment
                self._in_segment[blob.segment.id] = self._in_segment.get(blob.segment.id, 0) + 1
                self._size += blob.length
            if pinned:
                self.pin(kept.segment)
            return kept

    def find(self, digest: bytes) -> Blob | None:
        """The blob of that content, pinned for the caller; None if it is not kept."""
        with self._lock:
            blob = self._find(digest)
            if blob is not None:
                self.pin(blob.segment)
            return blob

    def has(self, digest: bytes) -> bool:
        """Whether that content is kept."""
        return digest in self._blobs

    def evict(self, digest: bytes) -> int | None:
        """Drop one blob, whatever the cap.

        Returns the blob's segment if that has no other blob; then only pins keep the segment.
        """
        with self._lock:
            blob = self._blobs.pop(digest, None)
            if blob is None:
                return None
            self._drop(digest, blob)
            return None if blob.segment.id in self._in_segment else blob.segment.id

    def _find(self, digest: bytes) -> Blob | None:
        blob = self._blobs.get(digest)
        if blob is not None:
            self._blobs.move_to_end(digest)
        return blob

    def pin(self, segment: Segment) -> None:
        """Keep a segment's bytes unchanged until `unpin`."""
        with self._lock:
            self._segments[segment.id] = segment
            self._pins[segment.id] = self._pins.get(segment.id, 0) + 1

    def unpin(self, segment_id: int) -> None:
        """Undo one `pin`."""
        with self._lock:
            left = self._pins.get(segment_id, 0) - 1
            if left > 0:
                self._pins[segment_id] = left
            else:
                self._pins.pop(segment_id, None)
                self._reuse(segment_id)

    def trim(self) -> None:
        """Evict blobs until the others fit the cap."""
        self._shrink()

    def _shrink(self) -> None:
        with self._lock:
            while len(self._blobs) > 1 and (
                self._size > self.cap or len(self._in_segment) > SEGMENTS_MAX
            ):
                self._drop(*self._blobs.popitem(last=False))

    def _drop(self, digest: bytes, blob: Blob) -> None:
        self._size -= blob.length
        self.evicted.append(digest)
        left = self._in_segment[blob.segment.id] - 1
        if left:
            self._in_segment[blob.segment.id] = left
        else:
            del self._in_segment[blob.segment.id]
            self.retired.append(blob.segment.id)
            self._reuse(blob.segment.id)

    def _reuse(self, segment_id: int) -> None:
        if segment_id in self._pins or segment_id in self._in_segment:
            return
        segment = self._segments.pop(segment_id, None)
        if segment is not None:
            self.arena.recycle(segment)

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._blobs.clear()
            self._in_segment.clear()
        self.arena.close()


def _repeated(names: Sequence[bytes]) -> list[bytes]:
    seen: set[bytes] = set()
    again = []
    for name in names:
        if name in seen:
            again.append(name)
        seen.add(name)
    return again


class Sources:
    """Remembers the contents last sent from each buffer, to notice when the caller changes one.

    Otherwise a buffer that changes between calls would fill the cache with versions that no call
    will use again, each in memory that has to be touched for the first time.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[int, int], tuple[bytes, bytes]] = OrderedDict()
        """For each address and length: the digest of the buffer, and of its first chunk alone."""
        self._lock = threading.Lock()

    def replaced(self, buffers: Sequence[memoryview], names: Sequence[bytes]) -> list[bytes]:
        """The digests of contents that have been replaced in their buffers."""
        stale = []
        with self._lock:
            for buffer, name in zip(buffers, names, strict=True):
                address = memory.address(buffer)
                if address is None:
                    continue
                old = self._last.pop((address, len(buffer)), None)
                self._last[address, len(buffer)] = (name, memory.first_leaf(buffer))
                if old is not None and old[0] != name:
                    stale.append(old[0])
            while len(self._last) > SOURCES_MAX:
                self._last.popitem(last=False)
        return stale

    def surely_new(self, buffers: Sequence[memoryview]) -> list[bytes] | None:
        """The former digests of these buffers if every buffer has surely changed; else None."""
        before = []
        with self._lock:
            for buffer in buffers:
                address = memory.address(buffer)
                if address is None:
                    return None
                old = self._last.get((address, len(buffer)))
                if old is not None and old[1] == memory.first_leaf(buffer):
                    return None
                if old is not None:
                    before.append(old[0])
        return before


class Mapped:
    """Segments of the other process, mapped here piece by piece and released when unused."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.released: deque[int] = deque()
        """Segments that this process maps no more; finalizers append to it, so it has no lock."""
        self._notify = notify
        self._open: dict[int, tuple[int, int]] = {}
        self._counts: dict[int, list[int]] = {}

    def add(self, segment: int, size: int, descriptor: int) -> None:
        """Take over a descriptor received for a segment."""
        if os.fstat(descriptor).st_size < size:
            os.close(descriptor)
            raise ProtocolError(f"a segment said to have {size} bytes has fewer")
        old = self._open.pop(segment, None)
        if old is not None:
            os.close(old[0])
        self._open[segment] = (descriptor, size)
        self._counts.setdefault(segment, [0, 0])

    def view(self, segment: int, offset: int, length: int) -> memoryview:
        """A private copy-on-write view of part of a segment."""
        held = self._open.get(segment)
        if held is None:
            raise ProtocolError(f"a payload names segment {segment}, which is not here")
        descriptor, size = held
        if offset < 0 or length <= 0 or offset + length > size or offset % memory.GRANULE:
            raise ProtocolError(f"bytes {offset}+{length} of a segment of {size}")
        count = self._counts[segment]
        count[0] += 1
        return memory.map_private(descriptor, offset, length, lambda: self._gone(segment, count))

    def _gone(self, segment: int, count: list[int]) -> None:
        count[0] -= 1
        if not count[0] and count[1]:
            self._counts.pop(segment, None)
            self.released.append(segment)
            self._notify()

    def drop(self, segment: int) -> None:
        """Make no new views of a segment; it is released when its last view is freed."""
        held = self._open.pop(segment, None)
        if held is None:
            return
        os.close(held[0])
        count = self._counts[segment]
        count[1] = 1
        if not count[0]:
            self._counts.pop(segment, None)
            self.released.append(segment)
            self._notify()

    def close(self) -> None:
        """Close every descriptor; live views stay valid."""
        for segment in list(self._open):
            self.drop(segment)
