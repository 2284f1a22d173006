"""The inbox: payloads as they arrive, with the shared memory and the blobs this process keeps."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from skyward.errors import ProtocolError
from skyward.wire import blobs, memory
from skyward.wire.blobs import Blob, BlobStore, Mapped
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.messages import SEGMENT, STREAMED, Buffer, Evicted, Payload, Released

T = TypeVar("T")
Pieces = tuple[memoryview, list[memoryview], list[tuple[int, int]]]


class Inbox:
    """Turns received payloads into the pieces an object is decoded from."""

    def __init__(self, cap: int) -> None:
        self._mapped = Mapped()
        self._cache = BlobStore(cap)

    def take(
        self, channel: Channel, frame: Frame, payload: Payload
    ) -> tuple[Pieces | None, list[bytes]]:
        """Read the body, keep what is to be kept; None with what is missing if that cannot be."""
        if not payload.buffers and frame.body is not None and not frame.descriptors:
            return blobs.unpack(payload, frame.body, _nowhere), []
        blobs.check(frame, payload)
        for (segment, size), descriptor in zip(payload.segments, frame.descriptors, strict=True):
            self._mapped.add(segment, size, descriptor)
        body = self._take_body(channel, frame, payload)
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

        pieces = blobs.unpack(payload, body, find)
        # Only now: a payload larger than the cap would lose its own blobs before they are found.
        self._trim(channel)
        return (None, missing) if missing else (pieces, [])

    def _take_body(self, channel: Channel, frame: Frame, payload: Payload) -> bytearray:
        streamed = [ref for ref in payload.buffers if ref.where == STREAMED]
        offsets, size = memory.aligned([ref.length for ref in streamed])
        if not streamed:
            return blobs.read_body(channel, frame, payload, [])
        segment = self._cache.arena.allocate(size)
        whole = memoryview(segment.shared())
        places = [whole[at : at + ref.length] for at, ref in zip(offsets, streamed, strict=True)]
        body = blobs.read_body(channel, frame, payload, places)
        self._cache.pin(segment)
        for at, ref in zip(offsets, streamed, strict=True):
            self._cache.add(Blob(ref.digest, segment, at, ref.length))
        self._cache.unpin(segment.id)
        return body

    def _trim(self, channel: Channel) -> None:
        self._cache.trim()
        self._cache.retired.clear()
        if self._cache.evicted:
            channel.send(Evicted(_emptied(self._cache.evicted)))

    def forget(self, channel: Channel, segments: list[int], digests: list[bytes]) -> None:
        """The client will not refer to these again."""
        for segment in segments:
            self._mapped.drop(segment)
        for digest in digests:
            self._cache.evict(digest)
        self._cache.retired.clear()
        self._cache.evicted.clear()
        self.send_releases(channel)

    def send_releases(self, channel: Channel) -> None:
        """Tell the client which of its segments nothing here maps any more."""
        if self._mapped.released:
            channel.send(Released(_emptied(self._mapped.released)))


def _nowhere(ref: Buffer) -> memoryview:
    raise ProtocolError("a buffer that is nowhere")


def _emptied(items: deque[T]) -> list[T]:
    taken = []
    while items:
        taken.append(items.popleft())
    return taken
