"""Arrivals: large buffers on their way in; peers can read the bytes that have arrived."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from skyward.objects import memory
from skyward.objects.memory import Blob, BlobStore, Segment

PART = 4 << 20
"""How many bytes are lent at a time at most."""
DROPPED_MAX = 4096
NOTHING = memoryview(b"")


@dataclass(slots=True, eq=False)
class Arrival:
    """One buffer, of which `filled` bytes have arrived."""

    digest: bytes
    length: int
    segment: Segment
    offset: int
    view: memoryview
    number: int
    """The number of the fetch that brings the buffer; 0 if the client sends it."""
    filled: int = 0


class Arrivals:
    """Buffers on their way to this process; a complete buffer is in the process's cache."""

    def __init__(self, cache: BlobStore) -> None:
        self._cache = cache
        self._coming: dict[bytes, Arrival] = {}
        self._dropped: OrderedDict[bytes, None] = OrderedDict()
        """The last `DROPPED_MAX` buffers that the cache has dropped."""
        self._changed = threading.Condition()

    def expect(self, blobs: Sequence[tuple[bytes, int]], number: int = 0) -> list[Arrival]:
        """Make room for these buffers; the caller must call `settle` for each of them later."""
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
        """Note that `total` bytes of these buffers are here; they arrive one after the other."""
        with self._changed:
            for arrival in arrivals:
                arrival.filled = max(0, min(arrival.length, total))
                total -= arrival.length
            self._changed.notify_all()

    def settle(self, arrivals: Iterable[Arrival], *, complete: bool) -> None:
        """Note that these buffers have arrived, or will not arrive."""
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
        """Note that these buffers are no longer kept."""
        with self._changed:
            for digest in digests:
                self._dropped[digest] = None
            while len(self._dropped) > DROPPED_MAX:
                self._dropped.popitem(last=False)
            self._changed.notify_all()

    def awaits(self, digests: Iterable[bytes]) -> bool:
        """Whether one of these buffers is on its way."""
        return bool(self._coming) and any(digest in self._coming for digest in digests)

    def unknown(self, blobs: Sequence[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """The buffers that are neither here nor on their way."""
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
        """Some bytes of a buffer, pinned inside the block; waits up to `seconds` for the first.

        Empty if no byte has arrived, None if the buffer is unknown. Raises `LookupError` if the
        buffer was dropped, or if the fetch that brings it does not have a lower number. A fetch
        waits only for fetches of lower numbers, so executors never wait in a circle.
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
        """The pinned segment that holds a buffer, and the bytes of the buffer that are here."""
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
