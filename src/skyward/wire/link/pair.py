"""A pair: the two connections that carry a link for a while, and the stripes that join them.

They carry records; the first 8 bytes of a record say what follows.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

from skyward import kernel
from skyward.closing import shut
from skyward.staff import Staff

STRIPE_SECONDS = 10.0
"""How long a reader waits for a stripe that the other end has announced."""
ROOM_MILLISECONDS = 500
"""How long a writer waits for room before it checks whether the connections are still open."""
MIN_RTT_AT = 148
"""Where Linux puts the shortest round trip, in microseconds, in `struct tcp_info`."""
FAR_SECONDS = 0.001
"""If the round trip is shorter, one connection carries all that one processor can encrypt."""
LAST_WORDS_SECONDS = 1.0
"""How long the receiving connection is still read after the sending one has failed."""


cutting = Staff("skyward-cut", most=1)
"""The thread that ends connections after their last words."""


RECORD = struct.Struct("<Q")
"""The first 8 bytes of a record: the length of a part of the stream, or a count with `IS_COUNT`."""
IS_COUNT = 1 << 63
STRIPE_BIT = 32
"""The bits from here on are the number of the stripe that carries the part; 0 is no stripe."""
RECORD_MAX = 4 << 20
STRIPED_MIN = 8 << 20
"""The shortest write that goes over several connections, between machines that are far apart."""
TLS_RECORD = 16 << 10
"""How many bytes TLS encrypts at a time."""
TLS_OVERHEAD = 22
"""What a record of TLS 1.3 adds: a head of 5 bytes, the kind, and a tag of 16."""
JOINED = TLS_RECORD - RECORD.size
"""The most of a part that is sent in one write with the 8 bytes."""


class Pair:
    """The two main connections of a link, and its stripes: further connections for large writes.

    In one round trip, a connection carries no more than its window, and lost packets shrink the
    window. So a large write is spread over several connections. The main connection announces each
    part of the stream, in order; the part itself may come over a stripe.
    """

    def __init__(
        self, sender: socket.socket, receiver: socket.socket, arrived: int = 0, attempt: int = 1
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self.arrived = arrived
        """How many bytes of our stream the other end had received when the pair was made."""
        self.attempt = attempt
        """The number of the pair among those of its link."""
        self.broken = False
        self.has_room = False
        """Whether the kernel is known to take a small write at once."""
        self.left = 0
        """How many bytes of the current part of the stream have not arrived yet."""
        self.head = b""
        """The first bytes of the next record, as long as fewer than 8 have arrived."""
        self.source = receiver
        """The connection that carries the current part."""
        self._room = select.poll()
        self._room.register(sender, select.POLLOUT)
        self._out: dict[int, socket.socket] = {0: sender}
        self._in: dict[int, socket.socket] = {0: receiver}
        self._changed = threading.Condition()
        self._last = -1
        self.stripes_asked = False
        """Whether the client was asked to add stripes."""
        _probe(receiver)

    def writable(self) -> bool:
        """Whether the kernel would take a small write at once."""
        return bool(self._room.poll(0))

    def write(self, part: memoryview, head: bytes = b"") -> None:
        """Send bytes of the stream on the main connection, after `head` if a record begins."""
        self.has_room = False
        if head:
            self.send(b"".join((head, part[:JOINED])))
            part = part[JOINED:]
        if part:
            self.sender.sendall(part)

    def send(self, data: bytes) -> None:
        """Send bytes that TLS encrypts in one piece."""
        sent = self.sender.send(data)
        if sent < len(data):
            self.sender.sendall(data[sent:])

    def fail(self) -> None:
        """Stop sending, and read a little longer: a process may have sent a result and died."""
        if not self.broken:
            self.broken = True
            shut(self.sender)
            cutting.later(LAST_WORDS_SECONDS, self.cut)

    def cut(self) -> None:
        """Make all reads and writes fail, except reads of bytes that have arrived."""
        with self._changed:
            self.broken = True
            ends = [*self._out.values(), *self._in.values()]
            self._changed.notify_all()
        for end in ends:
            shut(end)

    def close(self) -> None:
        """Close all connections."""
        self.cut()
        self.close_senders()
        self.close_receivers()

    def close_senders(self) -> None:
        """Close the connections to send on."""
        with self._changed:
            for end in self._out.values():
                end.close()

    def close_receivers(self) -> None:
        """Close the connections to receive on."""
        with self._changed:
            for end in self._in.values():
                end.close()

    # Stripes.

    @property
    def is_far(self) -> bool:
        """Whether the round trip is so long that one connection may not be enough."""
        return round_trip(self.sender) >= FAR_SECONDS

    @property
    def is_striped(self) -> bool:
        """Whether the pair has stripes to send on."""
        return len(self._out) > 1

    def add_stripe(self, number: int, end: socket.socket, *, to_send: bool) -> None:
        """Add a stripe, to send on or to receive on."""
        with self._changed:
            if self.broken:
                end.close()
                return
            ends = self._out if to_send else self._in
            if number in ends:
                end.close()
                return
            if not to_send:
                _probe(end)
            ends[number] = end
            self._changed.notify_all()

    def roomiest(self) -> tuple[int, socket.socket]:
        """Wait for a connection that takes bytes; returns its number and the connection.

        Connections that are ready at the same time take turns.
        """
        while True:
            with self._changed:
                if self.broken:
                    raise ConnectionError("the connection was lost")
                ends = {end.fileno(): (number, end) for number, end in self._out.items()}
                poll = select.poll()
                for descriptor in ends:
                    poll.register(descriptor, select.POLLOUT)
            # With a limit: other files may get the descriptors of connections that are closed now.
            ready = sorted(descriptor for descriptor, _ in poll.poll(ROOM_MILLISECONDS))
            if ready:
                self._last = next((each for each in ready if each > self._last), ready[0])
                return ends[self._last]

    def receive_from(self, number: int) -> None:
        """Read the next part from this connection; waits until the stripe has joined the pair."""
        with self._changed:
            if number:
                self._changed.wait_for(lambda: number in self._in or self.broken, STRIPE_SECONDS)
            if number not in self._in:
                raise ConnectionError(f"stripe {number} did not come")
            self.source = self._in[number]


def _probe(end: socket.socket) -> None:
    """Have the kernel give up after 10 s a connection to receive on that nobody's kernel answers.

    The end sends nothing, so it is always idle, and the kernel probes it. Nobody probes a sending
    end with bytes under way: Linux gives it up after 15 minutes. Its other end receives.
    """
    # The other end may have reset it by now; the next read reports that.
    with contextlib.suppress(OSError):
        kernel.keep_alive(end, idle=4, every=2, times=3)


def round_trip(end: socket.socket) -> float:
    """Seconds of the shortest round trip that the kernel has seen; 0 where the kernel is silent.

    The shortest is the right one: a busy machine or a full buffer makes the others longer.
    """
    if not kernel.IS_LINUX or end.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    try:
        information = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_AT + 4)
    except OSError:
        # The connection was closed; the next read or write reports that.
        return 0.0
    if len(information) < MIN_RTT_AT + 4:
        return 0.0
    return float(struct.unpack_from("I", information, MIN_RTT_AT)[0]) / 1e6
