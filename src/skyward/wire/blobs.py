"""Blobs: large buffers named by their content, and how a payload refers to them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.errors import ProtocolError
from skyward.wire import memory
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.memory import Arena, Segment
from skyward.wire.messages import INLINE, STREAMED, Buffer, Payload
from skyward.wire.objects import Encoded

BLOB_MIN = 256 << 10
"""Smaller buffers ride in the frame's body."""

SOURCES_MAX = 1024

SEGMENTS_MAX = 256
"""Each holds a file descriptor on both sides."""

_ALIGN = 64
_PADDING = bytes(_ALIGN)


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
    """Blobs this process holds, least recently used out first once they exceed the cap.

    A segment is reused only when no blob is left in it and nobody has it pinned; everybody who
    maps it, in this process or another, pins it for that time.
    """

    def __init__(self, cap: int, folder: str | None = None) -> None:
        self.cap = cap
        self.arena = Arena(cap, folder)
        self.retired: deque[int] = deque()
        """Segments without blobs, whose mappers should let go."""
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
        """Hold these contents, copying only what is not held yet; the caller must unpin them.

        `names` are their digests, where those are known already.
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
            # Another thread may have placed the same contents meanwhile: then it is free again.
            self.unpin(segment.id)
        for name in _repeated(names):
            self.pin(blobs[name].segment)
        self._shrink()
        return [blobs[name] for name in names]

    def place_new(self, buffers: Sequence[memoryview]) -> list[Blob]:
        """As `place`, for contents that are most likely not held: named while they are copied."""
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
        # Where all of it was held after all, the segment is free again.
        self.unpin(segment.id)
        self._shrink()
        return blobs

    def add(self, blob: Blob, *, pinned: bool = False) -> Blob:
        """Hold a blob whose bytes are in place already."""
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
        """The blob of that content, if it is held; pinned for the caller."""
        with self._lock:
            blob = self._find(digest)
            if blob is not None:
                self.pin(blob.segment)
            return blob

    def has(self, digest: bytes) -> bool:
        """Whether that content is held."""
        return digest in self._blobs

    def evict(self, digest: bytes) -> int | None:
        """Drop one blob, cap or no cap; the segment that only its mappers still keep, if any."""
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
        """Keep a segment's bytes as they are until `unpin`."""
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
        """Evict what exceeds the cap."""
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
    """Remembers what was last sent from where, to tell when new contents replace old ones.

    A buffer that changes between calls would otherwise fill the cache with versions nobody will
    ask for again, each in memory that has to be touched for the first time.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[int, int], tuple[bytes, bytes]] = OrderedDict()
        """By address and length: the digest, and that of the first chunk alone."""
        self._lock = threading.Lock()

    def replaced(self, buffers: Sequence[memoryview], names: Sequence[bytes]) -> list[bytes]:
        """The digests whose buffers now hold something else."""
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
        """What these buffers held before, if none of them can still be what it was; else None."""
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
    """Segments of the other process, mapped here piece by piece and let go when unused."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.released: deque[int] = deque()
        """Segments nothing here maps any more; appended to from finalizers, so lock-free."""
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
        """No new views will be asked for; it is released when the last one dies."""
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


@dataclass(slots=True)
class Packed:
    """A payload ready to send."""

    payload: Payload
    body: list[bytes | memoryview]


def pack(encoded: Encoded, large: Callable[[list[memoryview]], list[Buffer]] | None) -> Packed:
    """Lay out an encoded object; `large` says where the buffers of blob size go, None: inline."""
    body: list[bytes | memoryview] = list(encoded.pieces)
    length = at = encoded.pickle_length
    if not encoded.buffers:
        return Packed(Payload(length, inline=at), body)
    big = [b for b in encoded.buffers if len(b) >= BLOB_MIN] if large is not None else []
    placed = iter(large(big) if large is not None and big else ())
    refs = []
    for buffer in encoded.buffers:
        if large is not None and len(buffer) >= BLOB_MIN:
            refs.append(next(placed))
            continue
        gap = -at % _ALIGN
        if gap:
            body.append(_PADDING[:gap])
        at += gap
        refs.append(Buffer(len(buffer), INLINE, offset=at))
        body.append(buffer)
        at += len(buffer)
    return Packed(Payload(length, refs, encoded.storages, inline=at), body)


def check(frame: Frame, payload: Payload) -> None:
    """Refuse a payload that does not add up, before anything is set aside for it."""
    streamed = sum(ref.length for ref in payload.buffers if ref.where == STREAMED)
    if payload.inline + streamed != frame.body_length:
        problem = "does not account for its body"
    elif len(payload.segments) != len(frame.descriptors):
        problem = f"has {len(payload.segments)} segments, {len(frame.descriptors)} descriptors"
    elif not all(ref.length for ref in payload.buffers if ref.where != INLINE):
        problem = "has an empty buffer outside of its body"
    else:
        return
    for descriptor in frame.descriptors:
        os.close(descriptor)
    raise ProtocolError(f"a payload that {problem}")


def unpack(
    payload: Payload,
    body: bytearray | memoryview,
    find: Callable[[Buffer], memoryview],
) -> tuple[memoryview, list[memoryview], list[tuple[int, int]]]:
    """The pieces `objects.decode` wants; `find` resolves what is not inline."""
    view = memoryview(body)
    if not payload.buffers and not payload.storages and payload.pickle == len(view):
        return view, [], []
    apart = not payload.pickle
    if payload.pickle > len(view) or len(payload.storages) + apart > len(payload.buffers):
        raise ProtocolError("a payload that does not fit its body")
    buffers = []
    for ref in payload.buffers:
        if ref.where != INLINE:
            buffers.append(find(ref))
            continue
        if ref.offset < payload.pickle or ref.offset + ref.length > len(view):
            raise ProtocolError("a buffer outside of its body")
        buffers.append(view[ref.offset : ref.offset + ref.length])
    pickle = buffers.pop(0) if apart else view[: payload.pickle]
    return pickle, buffers, payload.storages


def read_body(
    channel: Channel,
    frame: Frame,
    payload: Payload,
    places: Sequence[memoryview],
    told: Callable[[int], None] = lambda done: None,
) -> bytearray:
    """The inline part of a frame's body; the streamed buffers behind it go to their places.

    Says now and then how much of those is there.
    """
    if payload.inline < 0 or payload.inline + sum(map(len, places)) != frame.body_length:
        raise ProtocolError("a payload that does not account for its body")
    if frame.body is None:
        body = bytearray(payload.inline)
        channel.read_body(
            frame, [memoryview(body), *places], lambda done: told(max(0, done - payload.inline))
        )
        return body
    at = payload.inline
    for place in places:
        place[:] = frame.body[at : at + len(place)]
        at += len(place)
    return frame.body
