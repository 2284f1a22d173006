"""What a link receives: records of the other end's stream, and counts of what arrived there."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Sequence

from skyward.errors import ProtocolError
from skyward.wire.link.connections import Connections
from skyward.wire.link.outgoing import Outgoing
from skyward.wire.link.pair import IS_COUNT, RECORD, RECORD_MAX, STRIPE_BIT, STRIPED_MIN, Pair

COUNT_EVERY = 1 << 20
"""How many bytes arrive before this end sends a count of them."""


class NotConnected(Exception):
    """There is no connection to read from now, and the reader does not wait for one."""


class Incoming:
    """The stream from the other end to here. One thread at a time reads."""

    def __init__(
        self, connections: Connections, outgoing: Outgoing, on_lost: Callable[[], None]
    ) -> None:
        """`on_lost` is called when a pair is lost and everything that it brought has been read."""
        self._connections = connections
        self._outgoing = outgoing
        self._on_lost = on_lost
        self._blocking = True
        self._told = 0

    def fileno(self) -> int:
        """The descriptor to wait on; it is good until the connection is lost."""
        return self._connections.reading.receiver.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Choose whether reads wait for bytes and for the next connection."""
        self._blocking = blocking
        self._connections.reading.receiver.setblocking(blocking)

    def pending(self) -> int:
        """Bytes that can be read although no selector sees them."""
        receiver = self._connections.reading.receiver
        return receiver.pending() if isinstance(receiver, ssl.SSLSocket) else 0

    def receive(self, buffer: memoryview) -> memoryview:
        """Read some bytes; returns the part of the buffer, or another one, that holds them.

        `EOFError` when the link has ended. Without waiting, `BlockingIOError` when nothing has
        arrived, and `NotConnected` when nothing can arrive.
        """
        self._connections.reader = threading.get_ident()
        while True:
            pair, part = self._connections.reading, buffer[:0]
            try:
                if pair.left:
                    part = buffer[: pair.receiver.recv_into(buffer, min(pair.left, len(buffer)))]
                    pair.left -= len(part)
                    ended = not part
                elif pair.head:
                    ended = not self._next_record(pair, striped=False)
                else:
                    # One call reads the 8 bytes and the rest: a small record comes in one piece.
                    part = buffer[: pair.receiver.recv_into(buffer)]
                    ended = not part
                    part = self._without_heads(pair, part)
            except (BlockingIOError, ssl.SSLWantReadError):
                raise BlockingIOError from None
            except ProtocolError as problem:
                self._connections.end(str(problem))
                ended, part = True, buffer[:0]
            except OSError:
                ended = True
            if part and self._took(pair, len(part)):
                return part
            if ended or part:
                self._next(pair)

    def _without_heads(self, pair: Pair, data: memoryview) -> memoryview:
        """The bytes of the stream in `data`, which begins with the 8 bytes of a record."""
        if len(data) > RECORD.size:
            (value,) = RECORD.unpack_from(data)
            after = len(data) - RECORD.size
            if after <= value <= RECORD_MAX:
                pair.left, pair.source = value - after, pair.receiver
                return data[RECORD.size :]
        parts = b""
        while data:
            wanted = RECORD.size - len(pair.head)
            pair.head += bytes(data[:wanted])
            data = data[wanted:]
            if len(pair.head) == RECORD.size:
                self._begin_record(pair, striped=False)
                parts += bytes(data[: pair.left])
                taken = min(pair.left, len(data))
                data = data[taken:]
                pair.left -= taken
        return memoryview(parts)

    def fill(
        self, views: Sequence[memoryview], told: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read until the views are full; calls `told` now and then with the bytes read."""
        self._connections.reader = threading.get_ident()
        before = 0
        for view in views:
            self._fill(view, before, told)
            before += len(view)

    def _fill(self, view: memoryview, before: int, told: Callable[[int], None]) -> None:
        done = 0
        if len(view) >= STRIPED_MIN:
            self._connections.consider_stripes(self._connections.reading)
        while done < len(view):
            pair, at = self._connections.reading, done
            goal = min(done + COUNT_EVERY, len(view))
            try:
                while at < goal and (pair.left or self._next_record(pair, striped=True)):
                    count = pair.source.recv_into(view[at : at + pair.left])
                    if not count:
                        break
                    at += count
                    pair.left -= count
            except ProtocolError as problem:
                self._connections.end(str(problem))
            except OSError:
                pass
            taken = at > done and self._took(pair, at - done)
            if taken:
                done = at
                told(before + done)
            if not taken or at < goal:
                self._next(pair)

    def _next_record(self, pair: Pair, *, striped: bool) -> bool:
        """Read up to the next part of the stream; False when the connection has ended.

        With `striped`, a stripe may carry that part.
        """
        while not pair.left:
            data = pair.receiver.recv(RECORD.size - len(pair.head))
            if not data:
                return False
            pair.head += data
            if len(pair.head) == RECORD.size:
                self._begin_record(pair, striped=striped)
        return True

    def _begin_record(self, pair: Pair, *, striped: bool) -> None:
        (value,) = RECORD.unpack(pair.head)
        pair.head = b""
        if value & IS_COUNT:
            self._outgoing.heard_count(value & ~IS_COUNT)
            return
        number, length = value >> STRIPE_BIT, value & ((1 << STRIPE_BIT) - 1)
        if not 0 < length <= RECORD_MAX:
            raise ProtocolError(f"a record of {length} bytes; the limit is {RECORD_MAX}")
        if number and not striped:
            raise ProtocolError(f"a frame begins on stripe {number}")
        pair.receive_from(number)
        pair.left = length

    def _took(self, pair: Pair, count: int) -> bool:
        """Count received bytes, and send the count now and then; False if they do not count."""
        if not self._connections.took(pair, count):
            return False
        self._tell_count()
        return True

    def _tell_count(self) -> None:
        received = self._connections.received
        if received - self._told >= COUNT_EVERY:
            self._told = received
            self._outgoing.tell_count()

    def _next(self, pair: Pair) -> None:
        """Change to the next pair: this one has brought everything."""
        if self._connections.retire(pair):
            self._on_lost()
        if not self._blocking:
            if self._connections.ended:
                raise EOFError(self._connections.why)
            raise NotConnected
        with self._connections.changed:
            while self._connections.current is None and not self._connections.ended:
                self._connections.changed.wait()
        if self._connections.ended:
            raise EOFError(self._connections.why)
        self._adopt()

    def ready(self, again: Callable[[], None]) -> bool:
        """Whether there is a connection to read from; if not, `again` is called when there is."""
        with self._connections.changed:
            if self._connections.current is None and not self._connections.ended:
                self._connections.again = again
                return False
        self._adopt()
        return True

    def _adopt(self) -> None:
        with self._connections.lock:
            pair, before = self._connections.current, self._connections.reading
            if pair is None or pair is before:
                return
            self._connections.reading = pair
        before.close_receivers()
        # Another thread may have closed the link meanwhile; the next read reports that.
        with contextlib.suppress(OSError):
            pair.receiver.setblocking(self._blocking)
        self._told = self._connections.received
