"""Records: what a link's connections carry, and the pair of them that it goes over for a while."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading

RECORD = struct.Struct("<Q")
"""In front of every record: the length of a part of the stream, or a count, with `IS_COUNT`."""
IS_COUNT = 1 << 63
ASIDE = 32
"""From this bit on: over which connection that part comes, if not the one this is said on."""
RECORD_MAX = 4 << 20
WIDE_MIN = 8 << 20
"""Larger writes go over several connections, between machines that are far apart."""
JOINED = (16 << 10) - RECORD.size
"""So much of a record goes out in one piece with its beginning: what TLS seals at a time."""
ASIDE_SECONDS = 10.0
"""How long a connection is waited for that the other end says it has."""
ROOM_MILLISECONDS = 500
"""How long connections are waited for to take bytes, before it is looked whether they are there."""
MIN_RTT_AT = 148
"""Where Linux has it, in microseconds, in what it tells of a connection (`struct tcp_info`)."""
FAR_SECONDS = 0.001
"""Nearer than this, one connection carries whatever a processor can seal."""
LAST_WORDS_SECONDS = 1.0
"""How much longer a connection is read from when its twin has failed."""


class Pair:
    """The two connections that carry a link for a while, and others aside for large writes.

    One connection carries no more than its window a round trip, and less with every packet lost.
    So a large write is spread over several: each part of the stream is announced on the main
    connection, in order, and may come over another one.
    """

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
        self.source = receiver
        """Over which connection that part comes."""
        self._room = select.poll()
        self._room.register(sender, select.POLLOUT)
        self._out: dict[int, socket.socket] = {0: sender}
        self._in: dict[int, socket.socket] = {0: receiver}
        self._aside = threading.Condition()
        self._last = -1
        self.attempt = 0
        """Which of the link's pairs it is."""
        self.widened = False
        """Whether more connections were asked for."""

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
        with self._aside:
            self.broken = True
            ends = [*self._out.values(), *self._in.values()]
            self._aside.notify_all()
        for end in ends:
            _shut(end)

    def close(self) -> None:
        """Give the sockets back."""
        self.cut()
        self.close_senders()
        self.close_receivers()

    def close_senders(self) -> None:
        """Nobody sends on them any more."""
        with self._aside:
            for end in self._out.values():
                end.close()

    def close_receivers(self) -> None:
        """Nobody reads from them any more."""
        with self._aside:
            for end in self._in.values():
                end.close()

    # Connections aside.

    @property
    def is_far(self) -> bool:
        """Whether a round trip is so long that one connection may not be enough."""
        return _round_trip(self.sender) >= FAR_SECONDS

    @property
    def is_wide(self) -> bool:
        """Whether there is more than one connection to send on."""
        return len(self._out) > 1

    def add(self, number: int, end: socket.socket, *, to_send: bool) -> None:
        """One more connection, to send on or to receive on."""
        with self._aside:
            if self.broken:
                end.close()
                return
            ends = self._out if to_send else self._in
            if number in ends:
                end.close()
                return
            ends[number] = end
            self._aside.notify_all()

    def roomiest(self) -> tuple[int, socket.socket]:
        """A connection that takes bytes now, or the first that does; in turns."""
        while True:
            with self._aside:
                if self.broken:
                    raise ConnectionError("the connection was lost")
                ends = {end.fileno(): (number, end) for number, end in self._out.items()}
                poll = select.poll()
                for descriptor in ends:
                    poll.register(descriptor, select.POLLOUT)
            # Not for ever: they may be closed meanwhile, and their numbers be another file's.
            ready = sorted(descriptor for descriptor, _ in poll.poll(ROOM_MILLISECONDS))
            if ready:
                self._last = next((each for each in ready if each > self._last), ready[0])
                return ends[self._last]

    def receive_from(self, number: int) -> None:
        """The next part of the stream comes over this connection, which may not be here yet."""
        with self._aside:
            if number:
                self._aside.wait_for(lambda: number in self._in or self.broken, ASIDE_SECONDS)
            if number not in self._in:
                raise ConnectionError(f"connection {number} did not come")
            self.source = self._in[number]


def _round_trip(end: socket.socket) -> float:
    """Seconds of the shortest round trip that the kernel has seen; 0 where it does not tell.

    The shortest: a busy machine, or a full buffer, is not far away.
    """
    if sys.platform != "linux" or end.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    try:
        information = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_AT + 4)
    except OSError:
        # It was closed, which whoever uses it will notice.
        return 0.0
    if len(information) < MIN_RTT_AT + 4:
        return 0.0
    return float(struct.unpack_from("I", information, MIN_RTT_AT)[0]) / 1e6


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # On the plain socket underneath: unwrapping TLS would wait for the peer.
        socket.socket.shutdown(end, socket.SHUT_RDWR)
