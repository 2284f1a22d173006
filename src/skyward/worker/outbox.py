"""The outbox: results laid out for sending, large ones in shared memory lent to the client."""

from __future__ import annotations

from skyward.objects import memory, payloads
from skyward.objects.encoding import Encoded
from skyward.wire.messages import SEGMENT, STREAMED, Buffer, Payload

LENT_MAX = 128
"""How many lent segments are kept for reuse at most; each keeps a descriptor open."""

Sendable = tuple[Payload, list[bytes | memoryview], list[memory.Segment]]


class Outbox:
    """Lays out encoded objects, and takes shared memory back when the client is done with it."""

    def __init__(self, cap: int) -> None:
        self._arena = memory.Arena(cap)
        self._lent: dict[int, memory.Segment] = {}

    def pack(self, encoded: Encoded, shares_memory: bool) -> Sendable:
        """The payload and the body for an object, and the segments whose descriptors are sent."""
        if not encoded.buffers:
            length = encoded.pickle_length
            return Payload(length, inline=length), encoded.pieces, []
        segments: list[memory.Segment] = []
        streamed: list[memoryview] = []

        def large(buffers: list[memoryview]) -> list[Buffer]:
            if not shares_memory:
                streamed.extend(buffers)
                return [Buffer(len(buffer), STREAMED) for buffer in buffers]
            offsets, size = memory.aligned([len(buffer) for buffer in buffers])
            segment = self._arena.allocate(size)
            segment.write(list(zip(offsets, buffers, strict=True)))
            segments.append(segment)
            return [
                Buffer(len(buffer), SEGMENT, b"", segment.id, at)
                for at, buffer in zip(offsets, buffers, strict=True)
            ]

        packed = payloads.pack(encoded, large)
        packed.payload.segments = [(segment.id, segment.size) for segment in segments]
        return packed.payload, packed.body + streamed, segments

    def sent(self, segments: list[memory.Segment]) -> None:
        """Note that the descriptors were sent; keeps some of the segments for reuse."""
        for segment in segments:
            if len(self._lent) < LENT_MAX:
                self._lent[segment.id] = segment
            else:
                segment.close()

    def returned(self, segment_ids: list[int]) -> None:
        """Take back segments that the client does not map any more."""
        for segment_id in segment_ids:
            segment = self._lent.pop(segment_id, None)
            if segment is not None:
                self._arena.recycle(segment)
