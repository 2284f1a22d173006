"""The inbox: payloads as they arrive, with the shared memory and the blobs this process keeps."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TypeVar

from skyward.errors import ProtocolError
from skyward.objects import memory, payloads
from skyward.objects.memory import BlobStore, Mapped
from skyward.objects.payloads import Pieces
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.messages import SEGMENT, STREAMED, Buffer, Evicted, Payload, Released
from skyward.worker.arrivals import Arrivals

T = TypeVar("T")


class Inbox:
    """Turns received payloads into the pieces an object is decoded from."""

    def __init__(self, cap: int) -> None:
        self._lock = threading.Lock()
        self._mapped = Mapped()
        self._cache = BlobStore(cap)
        self.arrivals = Arrivals(self._cache)

    def take(
        self, channel: Channel, frame: Frame, payload: Payload
    ) -> tuple[Pieces | None, list[bytes]]:
        """`read`, then `find`."""
        return self.find(channel, payload, self.read(channel, frame, payload))

    def read(self, channel: Channel, frame: Frame, payload: Payload) -> bytearray:
        """Read the body; buffers go to the cache or to shared memory, and the rest is returned."""
        if not payload.buffers and frame.body is not None and not frame.descriptors:
            return frame.body
        payloads.check(frame, payload)
        for (segment, size), descriptor in zip(payload.segments, frame.descriptors, strict=True):
            self._mapped.add(segment, size, descriptor)
        return self._take_body(channel, frame, payload)

    def awaits(self, payload: Payload) -> bool:
        """Whether a buffer of the payload is still on its way from a peer."""
        return bool(payload.buffers) and self.arrivals.awaits(ref.digest for ref in payload.buffers)

    def find(
        self, channel: Channel, payload: Payload, body: bytearray
    ) -> tuple[Pieces | None, list[bytes]]:
        """The pieces of an object whose body has been read, or the digests that are missing."""
        if not payload.buffers:
            return payloads.unpack(payload, body, payloads.nowhere), []
        missing: list[bytes] = []

        def find(ref: Buffer) -> memoryview:
            if ref.where == SEGMENT:
                return self._mapped.view(ref.segment, ref.offset, ref.length)
            blob = self._cache.find(ref.digest)
            if blob is None:
                missing.append(ref.digest)
                return memoryview(b"")
            segment = blob.segment.id
            if blob.length != ref.length:
                self._cache.unpin(segment)
                raise ProtocolError("a digest that stands for two lengths")
            return memory.map_private(
                blob.segment.descriptor,
                blob.offset,
                blob.length,
                lambda: self._cache.unpin(segment),
            )

        with self._lock:
            pieces = payloads.unpack(payload, body, find)
            # After `find`: before it, an object larger than the cap would lose its own blobs.
            self._trim(channel)
        return (None, missing) if missing else (pieces, [])

    def _take_body(self, channel: Channel, frame: Frame, payload: Payload) -> bytearray:
        streamed = [ref for ref in payload.buffers if ref.where == STREAMED]
        if not streamed:
            return payloads.read_body(channel, frame, payload, [])
        arrivals = self.arrivals.expect([(ref.digest, ref.length) for ref in streamed])
        complete = False
        try:
            body = payloads.read_body(
                channel,
                frame,
                payload,
                [arrival.view for arrival in arrivals],
                lambda done: self.arrivals.advance(arrivals, done),
            )
            complete = True
        finally:
            self.arrivals.settle(arrivals, complete=complete)
        return body

    def _trim(self, channel: Channel) -> None:
        self._cache.trim()
        self._cache.retired.clear()
        evicted = _emptied(self._cache.evicted)
        if evicted:
            self.arrivals.drop(evicted)
            channel.send(Evicted(evicted))

    def report_lost(self, channel: Channel, given_up: list[Payload]) -> None:
        """Tell the client which buffers of payloads are neither here nor on their way."""
        refs = [ref for payload in given_up for ref in payload.buffers if ref.where != SEGMENT]
        lost = [digest for digest, _ in self.arrivals.unknown([(r.digest, r.length) for r in refs])]
        if lost:
            self.arrivals.drop(lost)
            channel.send(Evicted(lost))

    def forget(self, channel: Channel, segments: list[int], digests: list[bytes]) -> None:
        """Drop segments and blobs that the client will not refer to again."""
        with self._lock:
            for segment in segments:
                self._mapped.drop(segment)
            for digest in digests:
                self._cache.evict(digest)
            self.arrivals.drop(digests)
            self._cache.retired.clear()
            self._cache.evicted.clear()
        self.send_releases(channel)

    def send_releases(self, channel: Channel) -> None:
        """Tell the client which of its segments nothing here maps any more."""
        if self._mapped.released:
            channel.send(Released(_emptied(self._mapped.released)))


def _emptied(items: deque[T]) -> list[T]:
    taken = []
    with contextlib.suppress(IndexError):
        # A check for emptiness would not do: another thread may take from the deque, too.
        while True:
            taken.append(items.popleft())
    return taken
