"""Records: what a link's connections carry, and the pair of them that it goes over for a while."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

RECORD = struct.Struct("<Q")
"""In front of every record: the length of a part of the stream, or a count, with `IS_COUNT`."""
IS_COUNT = 1 << 63
RECORD_MAX = 4 << 20
JOINED = (16 << 10) - RECORD.size
"""So much of a record goes out in one piece with its beginning: what TLS seals at a time."""
LAST_WORDS_SECONDS = 1.0
"""How much longer a connection is read from when its twin has failed."""


class Pair:
    """The two connections that carry a link for a while."""

    def __init__(self, sender: socket.socket, receiver: socket.socket, arrived: int = 0) -> None:
        self.sender, self.receiver = sender, receiver
        self.arrived = arrived
        """How much of our stream the other end had when they were made."""
        self.broken = False
        self.has_room = False
        """Whether a small write is known not to wait."""
        self.left = 0
        """Of the part of the stream that is being received, how much is still to come."""
        self.head = b""
        """What has come of what is in front of the next record."""
        self._room = select.poll()
        self._room.register(sender, select.POLLOUT)

    def writable(self) -> bool:
        """Whether a small write would not wait."""
        return bool(self._room.poll(0))

    def write(self, part: memoryview, head: bytes = b"") -> None:
        """Send bytes of the stream, with the beginning of a record in front of them if given."""
        self.has_room = False
        if head:
            self.send(b"".join((head, part[:JOINED])))
            part = part[JOINED:]
        if part:
            self.sender.sendall(part)

    def send(self, data: bytes) -> None:
        """Send what TLS can seal at once."""
        sent = self.sender.send(data)
        if sent < len(data):
            self.sender.sendall(data[sent:])

    def fail(self) -> None:
        """Nothing more can be sent. What a process sent before it died may still be coming."""
        if not self.broken:
            self.broken = True
            _shut(self.sender)
            cutter = threading.Timer(LAST_WORDS_SECONDS, self.cut)
            cutter.daemon = True
            cutter.start()

    def cut(self) -> None:
        """Make everybody who uses them fail; what has arrived can still be read."""
        self.broken = True
        _shut(self.sender)
        _shut(self.receiver)

    def close(self) -> None:
        """Give the sockets back."""
        self.cut()
        self.sender.close()
        self.receiver.close()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # On the plain socket underneath: unwrapping TLS would wait for the peer.
        socket.socket.shutdown(end, socket.SHUT_RDWR)
