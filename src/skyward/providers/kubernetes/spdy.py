"""SPDY/3.1 to the API server: port forwarding as kubectl does it.

The containers' runtime removes the mask of a WebSocket byte by byte, even one of zeros, and takes
more than twice the time for it. SPDY has no mask. Where a proxy lets no SPDY through, a WebSocket
serves.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping

from skyward.providers.kubernetes.access import Access
from skyward.providers.kubernetes.carrier import Carrier, upgraded

PROTOCOL = "portforward.k8s.io"
ERROR, DATA = 1, 3
"""The two streams of a forwarded port; those of a client are odd."""
_VERSION = 0x8003
_SYN_STREAM, _RST_STREAM, _PING, _GOAWAY = 1, 3, 6, 7
_FIN = 1
_CONTROL, _CONTENT = struct.Struct(">HHI"), struct.Struct(">II")


class Spdy(Carrier):
    """One SPDY connection."""

    def begin(self, streams: Mapping[int, Mapping[str, str]]) -> None:
        """Begin streams with their headers."""
        # Without SPDY's dictionary, which is optional: its only use is to save a few bytes.
        packer = zlib.compressobj()
        for stream, headers in streams.items():
            block = struct.pack(">I", len(headers))
            for name, value in headers.items():
                for text in (name.lower().encode(), value.encode()):
                    block += struct.pack(">I", len(text)) + text
            packed = packer.compress(block) + packer.flush(zlib.Z_SYNC_FLUSH)
            self._control(_SYN_STREAM, struct.pack(">IIBB", stream, 0, 0, 0) + packed)

    def queue(self, channel: int, data: bytes | memoryview) -> None:
        """Queue bytes for a stream; none are its end."""
        flags = 0 if data else _FIN
        self._append(_CONTENT.pack(channel, flags << 24 | len(data)), data)

    def _ping(self) -> None:
        self._control(_PING, struct.pack(">I", 1))

    def _control(self, kind: int, content: bytes) -> None:
        self._append(_CONTROL.pack(_VERSION, kind, len(content)), content)

    def _messages(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """What streams have sent; an empty message is the end of one."""
        at = 0
        while len(data) - at >= 8:
            first, second = _CONTENT.unpack_from(data, at)
            flags, size = second >> 24, second & 0xFFFFFF
            if len(data) - at - 8 < size:
                break
            content = data[at + 8 : at + 8 + size]
            at += 8 + size
            if not first >> 31:
                if content:
                    yield first, content
                if flags & _FIN:
                    yield first, content[:0]
            else:
                self._answer(first & 0xFFFF, content)
        self._unread = bytes(data[at:])

    def _answer(self, kind: int, content: memoryview) -> None:
        if kind == _PING and not content[3] & 1:
            # The other end's own; the client's pings, which come back, are odd.
            self._control(_PING, bytes(content))
        elif kind in (_GOAWAY, _RST_STREAM):
            self.ended = True


def open_port(access: Access, path: str, port: int) -> Spdy:
    """Forward a port of a pod; raises `HandshakeError` for refusals."""
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "SPDY/3.1",
        "X-Stream-Protocol-Version": PROTOCOL,
        "Content-Length": "0",
    }
    end, _, left = upgraded(access, "POST", path, headers)
    opened = Spdy(end, left)
    about = {"port": str(port), "requestID": "0"}
    opened.begin({ERROR: {**about, "streamType": "error"}, DATA: {**about, "streamType": "data"}})
    opened.queue(ERROR, b"")
    return opened
