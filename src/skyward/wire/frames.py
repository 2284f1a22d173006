"""Frames: a sixteen-byte header, a small MessagePack part, and raw bytes after it.

`docs/wire.md` describes the layout; a test compares that page with this module.
"""

from __future__ import annotations

import struct

import msgspec

from skyward.errors import ProtocolError

HEADER = struct.Struct("<BBHIQ")
"""kind (u8), attached descriptors (u8), protocol (u16), length of meta (u32), of body (u64)."""

PROTOCOL = 2

GREETING_LIMIT = 4096
"""The largest frame that is read from an unauthenticated peer: only one, without a body."""

META_LIMIT = 16 << 20
BODY_LIMIT = 1 << 44
INLINE_BODY = 1 << 20
"""A larger body is not buffered; the reader reads it straight into its final place."""

DESCRIPTOR_LIMIT = 64


# No dataclass: its `__init__` would be one Python function more for each frame.
class Frame(msgspec.Struct, gc=False):
    """One received frame; `body` is None while a large body still waits on the socket."""

    kind: int
    meta: bytes
    body: bytearray | None
    body_length: int
    descriptors: tuple[int, ...] = ()


def header(kind: int, meta_length: int, body_length: int, descriptors: int = 0) -> bytes:
    """The sixteen bytes in front of every frame."""
    return HEADER.pack(kind, descriptors, PROTOCOL, meta_length, body_length)


class FrameDecoder:
    """Cuts a byte stream into frames; checks every length before it uses it.

    `feed` takes bytes from the socket; `next` returns a frame or None. After a frame whose body is
    larger than `INLINE_BODY`, the caller first reads the body, with `take` and from the socket.
    """

    def __init__(self, meta_limit: int = META_LIMIT, body_limit: int = BODY_LIMIT) -> None:
        self.meta_limit = meta_limit
        self.body_limit = body_limit
        self._data = bytearray()
        self._at = 0
        self.at_boundary = True
        """Whether the next byte from the socket is the first of a frame."""
        self._descriptors: list[int] = []

    def accept_large(self) -> None:
        """Lift the limits: the peer has proven its identity."""
        self.meta_limit, self.body_limit = META_LIMIT, BODY_LIMIT

    @property
    def buffered(self) -> int:
        """How many bytes are held but not yet consumed."""
        return len(self._data) - self._at

    @property
    def missing(self) -> int:
        """How many bytes, at least, the next frame still lacks."""
        have = self.buffered
        if have < HEADER.size:
            return HEADER.size - have
        *_, meta_length, body_length = HEADER.unpack_from(self._data, self._at)
        inline = int(body_length) if body_length <= INLINE_BODY else 0
        return int(HEADER.size + meta_length + inline - have)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes from the socket."""
        if self._at == len(self._data):
            self._data.clear()
            self._at = 0
        elif self._at > 1 << 20:
            del self._data[: self._at]
            self._at = 0
        self._data += data
        self.at_boundary = False

    def attach(self, descriptors: list[int]) -> None:
        """Add file descriptors that came with the bytes."""
        self._descriptors += descriptors
        if len(self._descriptors) > 4 * DESCRIPTOR_LIMIT:
            raise ProtocolError(f"{len(self._descriptors)} file descriptors no frame has claimed")

    def next(self) -> Frame | None:
        """The next whole frame, or None if more bytes are needed."""
        have = len(self._data) - self._at
        if have < HEADER.size:
            return None
        kind, count, protocol, meta_length, body_length = HEADER.unpack_from(self._data, self._at)
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"a frame of protocol {protocol}, this end speaks {PROTOCOL}; "
                "install the same skyward version on both ends"
            )
        if meta_length > self.meta_limit:
            raise ProtocolError(
                f"a frame announces {meta_length} bytes of meta; the limit is {self.meta_limit}"
            )
        if body_length > self.body_limit:
            raise ProtocolError(
                f"a frame announces {body_length} bytes of body; the limit is {self.body_limit}"
            )
        if count > DESCRIPTOR_LIMIT:
            raise ProtocolError(f"a frame announces {count} descriptors of {DESCRIPTOR_LIMIT}")
        inline = body_length if body_length <= INLINE_BODY else 0
        if have < HEADER.size + meta_length + inline:
            return None
        if count > len(self._descriptors):
            raise ProtocolError(
                f"a frame announces {count} descriptors, {len(self._descriptors)} came with it"
            )
        start = self._at + HEADER.size
        end = start + meta_length
        meta = bytes(self._data[start:end])
        body = self._data[end : end + inline] if inline == body_length else None
        self._at = end + inline
        # The body of a larger frame may have come in part.
        self.at_boundary = self._at == len(self._data) and body is not None
        if not count:
            return Frame(kind, meta, body, body_length)
        attached = tuple(self._descriptors[:count])
        del self._descriptors[:count]
        return Frame(kind, meta, body, body_length, attached)

    def take(self, into: memoryview) -> int:
        """Move already buffered bytes of a large body into place; returns how many."""
        count = min(len(into), self.buffered)
        into[:count] = self._data[self._at : self._at + count]
        self._at += count
        self.at_boundary = self._at == len(self._data)
        return count

    def drain_descriptors(self) -> list[int]:
        """The descriptors that no frame has claimed, for the owner to close."""
        left, self._descriptors = self._descriptors, []
        return left
