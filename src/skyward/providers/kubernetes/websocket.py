"""WebSockets to the API server: `exec` without kubectl.

The API server speaks the subprotocol v4.channel.k8s.io: the first byte of every message names its
channel. A library for WebSockets would mask every byte that the client sends. The protocol asks
for a mask so that proxies are not misled by what a browser's script chose to send; these bytes are
TLS of our own, or a command's input inside the API server's TLS. So the mask is zero, and bulk
bytes are not touched.
"""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from collections.abc import Iterator

from skyward.errors import UnreachableError
from skyward.providers.kubernetes.access import Access
from skyward.providers.kubernetes.carrier import Carrier, upgraded

PROTOCOL = "v4.channel.k8s.io"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_NO_MASK = bytes(4)


class WebSocket(Carrier):
    """One WebSocket."""

    def queue(self, channel: int, data: bytes | memoryview) -> None:
        """Queue a message on a channel."""
        self._queue(_BINARY, bytes([channel]), data)

    def _ping(self) -> None:
        self._queue(_PING, b"")

    def _queue(self, kind: int, first: bytes, data: bytes | memoryview = b"") -> None:
        size = len(first) + len(data)
        if size < 126:
            head = struct.pack(">BB", 0x80 | kind, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x80 | kind, 0x80 | 127, size)
        self._append(head + _NO_MASK + first, data)

    def _messages(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        at = 0
        while (found := _frame(data, at)) is not None:
            kind, start, at = found
            if kind in (_BINARY, _TEXT, _CONTINUED):
                # The API server does not split messages: each frame begins with its channel.
                if at > start:
                    yield data[start], data[start + 1 : at]
            elif kind == _PING:
                self._queue(_PONG, bytes(data[start:at]))
            elif kind == _CLOSE:
                self.ended = True
        self._unread = bytes(data[at:])


def _frame(data: memoryview, at: int) -> tuple[int, int, int] | None:
    """The kind, begin and end of the next frame's content; None if it is not all there yet."""
    have = len(data) - at
    if have < 2:
        return None
    kind, size, start = data[at] & 0x0F, data[at + 1] & 0x7F, at + 2
    if size == 126:
        if have < 4:
            return None
        size, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
    elif size == 127:
        if have < 10:
            return None
        size, start = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
    return (kind, start, start + size) if len(data) >= start + size else None


def open_websocket(access: Access, path: str) -> WebSocket:
    """Open a WebSocket at a path of the API server; raises `HandshakeError` for its refusals."""
    key = base64.b64encode(os.urandom(16))
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key.decode(),
        "Sec-WebSocket-Protocol": PROTOCOL,
    }
    end, head, left = upgraded(access, "GET", path, headers)
    if base64.b64encode(hashlib.sha1(key + _GUID).digest()) not in head:
        end.close()
        raise UnreachableError(f"{access.server}: no WebSocket in its answer")
    return WebSocket(end, left)
