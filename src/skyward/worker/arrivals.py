"""Arrivals: large buffers on their way in, which peers can have before they are complete."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from skyward.wire import memory
from skyward.wire.blobs import Blob, BlobStore
from skyward.wire.memory import Segment

PART = 4 << 20
"""The most that is lent at a time."""
DROPPED_MAX = 4096
NOTHING = memoryview(b"")


@dataclass(slots=True, eq=False)
class Arrival:
    """One buffer, of which so many bytes have come."""

    digest: bytes
    length: int
    segment: Segment
    offset: int
    view: memoryview
    number: int
    """That of the fetch it comes by; 0 from the client."""
    filled: int = 0


class Arrivals:
    """What is on its way to this process; what has come is kept in its cache."""

    def __init__(self, cache: BlobStore) -> None:
        self._cache = cache
        self._coming: dict[bytes, Arrival] = {}
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        """What was here and is not any more, as far back as is remembered."""
        self._changed = threading.Condition()

    def expect(self, blobs: Sequence[tuple[bytes, int]], number: int = 0) -> list[Arrival]:
        """Make room for these; each is `settled` in the end."""
        offsets, size = memory.aligned([length for _, length in blobs])
        segment = self._cache.arena.allocate(size)
        whole = memoryview(segment.shared())
        arrivals = [
            Arrival(digest, length, segment, at, whole[at : at + length], number)
            for at, (digest, length) in zip(offsets, blobs, strict=True)
        ]
        with self._changed:
            for arrival in arrivals:
                self._cache.pin(segment)
                self._coming[arrival.digest] = arrival
                self._dropped.pop(arrival.digest, None)
            self._changed.notify_all()
        return arrivals

    def advance(self, arrivals: Iterable[Arrival], total: int) -> None:
        """Of these, which come one after the other, so many bytes are there."""
        with self._changed:
            for arrival in arrivals:
                arrival.filled = max(0, min(arrival.length, total))
                total -= arrival.length
            self._changed.notify_all()

    def settle(self, arrivals: Iterable[Arrival], *, complete: bool) -> None:
        """They have come, or will not."""
        with self._changed:
            for arrival in arrivals:
                if complete:
                    self._cache.add(
                        Blob(arrival.digest, arrival.segment, arrival.offset, arrival.length)
                    )
                if self._coming.get(arrival.digest) is arrival:
                    del self._coming[arrival.digest]
                self._cache.unpin(arrival.segment.id)
            self._changed.notify_all()

    def drop(self, digests: Iterable[bytes]) -> None:
        """These are no longer kept."""
        with self._changed:
            for digest in digests:
                self._dropped[digest] = None
            while len(self._dropped) > DROPPED_MAX:
                self._dropped.popitem(last=False)
            self._changed.notify_all()

    def awaits(self, digests: Iterable[bytes]) -> bool:
        """Whether one of these is on its way."""
        return bool(self._coming) and any(digest in self._coming for digest in digests)

    def unknown(self, blobs: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """Those that are neither here nor on their way."""
        with self._changed:
            return [
                (digest, length)
                for digest, length in dict(blobs).items()
                if digest not in self._coming and not self._cache.has(digest)
            ]

    @contextlib.contextmanager
    def lent(
        self, digest: bytes, length: int, start: int, number: int, seconds: float
    ) -> Iterator[memoryview | None]:
        """Some bytes of a buffer, which stay as they are meanwhile; waits so long for the first.

        Empty if none has come, None if nothing is known of that buffer. `LookupError` when there
        is nothing to wait for: it was dropped, or comes by a fetch of no lower number.
        """
        deadline = time.monotonic() + seconds
        view: memoryview | None
        with self._changed:
            while True:
                segment, view = self._there(digest, length, start, number)
                left = deadline - time.monotonic()
                if view or left <= 0:
                    break
                self._changed.wait(left)
        try:
            yield view
        finally:
            if segment is not None:
                self._cache.unpin(segment.id)

    def _there(
        self, digest: bytes, length: int, start: int, number: int
    ) -> tuple[Segment | None, memoryview | None]:
        """What there is of a buffer, and its memory, pinned."""
        arrival = self._coming.get(digest)
        if arrival is not None:
            if arrival.length != length or (number and arrival.number >= number):
                raise LookupError
            if arrival.filled <= start:
                return None, NOTHING
            self._cache.pin(arrival.segment)
            return arrival.segment, arrival.view[start : min(arrival.filled, start + PART)]
        blob = self._cache.find(digest)
        if blob is not None and blob.length == length:
            return blob.segment, blob.view()[start : start + PART]
        if blob is not None:
            self._cache.unpin(blob.segment.id)
            raise LookupError
        if digest in self._dropped:
            raise LookupError
        return None, None
