"""What a link receives: records of the other end's stream, and its counts of ours."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable

from skyward.errors import ProtocolError
from skyward.wire.outgoing import Outgoing
from skyward.wire.records import ASIDE, IS_COUNT, RECORD, RECORD_MAX, WIDE_MIN, Pair
from skyward.wire.ways import Ways

COUNT_EVERY = 1 << 20
"""Bytes received after which the other end hears of them."""


class Disconnected(Exception):
    """There is no connection to read from now, and the reader does not wait for one."""


class Incoming:
    """The stream from the other end to here. One thread at a time reads."""

    def __init__(self, ways: Ways, outgoing: Outgoing) -> None:
        self._ways = ways
        self._outgoing = outgoing
        self._blocking = True
        self._told = 0

    def fileno(self) -> int:
        """The descriptor to wait on, until the connection is lost."""
        return self._ways.reading.receiver.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Whether reads wait: for bytes, and for the next connection."""
        self._blocking = blocking
        self._ways.reading.receiver.setblocking(blocking)

    def pending(self) -> int:
        """Bytes that can be read although no selector sees them."""
        receiver = self._ways.reading.receiver
        return receiver.pending() if isinstance(receiver, ssl.SSLSocket) else 0

    def receive(self, buffer: memoryview) -> memoryview:
        """Read some bytes, and where in the buffer they are.

        `EOFError` when the link is over. Without waiting, `BlockingIOError` when nothing is there,
        and `Disconnected` when nothing can be.
        """
        self._ways.reader = threading.get_ident()
        while True:
            pair, part = self._ways.reading, buffer[:0]
            try:
                if pair.left:
                    part = buffer[: pair.receiver.recv_into(buffer, min(pair.left, len(buffer)))]
                    pair.left -= len(part)
                    ended = not part
                elif pair.head:
                    ended = not self._next_record(pair, aside=False)
                else:
                    # With one call for both, as a small record comes in one piece.
                    part = buffer[: pair.receiver.recv_into(buffer)]
                    ended = not part
                    part = self._without_heads(pair, part)
            except (BlockingIOError, ssl.SSLWantReadError):
                raise BlockingIOError from None
            except ProtocolError as problem:
                self._ways.end(str(problem))
                ended = True
            except OSError:
                ended = True
            if part and self._took(pair, len(part)):
                return part
            if ended or part:
                self._next(pair)

    def _without_heads(self, pair: Pair, data: memoryview) -> memoryview:
        """The parts of the stream in what was read from the beginning of a record on."""
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
                self._begin_record(pair, aside=False)
                parts += bytes(data[: pair.left])
                taken = min(pair.left, len(data))
                data = data[taken:]
                pair.left -= taken
        return memoryview(parts)

    def fill(self, view: memoryview, told: Callable[[int], None] = lambda done: None) -> None:
        """Read until the view is full; says now and then how much of it is."""
        done = 0
        if len(view) >= WIDE_MIN:
            self._ways.consider_widening(self._ways.reading)
        while done < len(view):
            pair, at, goal = self._ways.reading, done, min(done + COUNT_EVERY, len(view))
            try:
                while at < goal and (pair.left or self._next_record(pair, aside=True)):
                    count = pair.source.recv_into(view[at : at + pair.left])
                    if not count:
                        break
                    at += count
                    pair.left -= count
            except ProtocolError as problem:
                self._ways.end(str(problem))
            except OSError:
                pass
            taken = at > done and self._took(pair, at - done)
            if taken:
                done = at
                told(done)
            if not taken or at < goal:
                self._next(pair)

    def _next_record(self, pair: Pair, *, aside: bool) -> bool:
        """Read on to the next part of the stream; False when the connection has ended.

        With `aside`, that part may come over another connection.
        """
        while not pair.left:
            data = pair.receiver.recv(RECORD.size - len(pair.head))
            if not data:
                return False
            pair.head += data
            if len(pair.head) == RECORD.size:
                self._begin_record(pair, aside=aside)
        return True

    def _begin_record(self, pair: Pair, *, aside: bool) -> None:
        (value,) = RECORD.unpack(pair.head)
        pair.head = b""
        if value & IS_COUNT:
            self._outgoing.heard_count(value & ~IS_COUNT)
            return
        number, length = value >> ASIDE, value & ((1 << ASIDE) - 1)
        if not 0 < length <= RECORD_MAX:
            raise ProtocolError(f"a record of {length} bytes; the limit is {RECORD_MAX}")
        if number and not aside:
            raise ProtocolError(f"a frame begins on connection {number}")
        pair.receive_from(number)
        pair.left = length

    def _took(self, pair: Pair, count: int) -> bool:
        """Whether these bytes count; says now and then how many have come."""
        if not self._ways.took(pair, count):
            return False
        if self._ways.received - self._told >= COUNT_EVERY:
            self._told = self._ways.received
            self._outgoing.tell_count()
        return True

    def _next(self, pair: Pair) -> None:
        """Nothing more comes on this connection: on to the next one."""
        self._ways.retire(pair)
        if not self._blocking:
            if self._ways.ended:
                raise EOFError(self._ways.why)
            raise Disconnected
        with self._ways.changed:
            while self._ways.current is None and not self._ways.ended:
                self._ways.changed.wait()
        if self._ways.ended:
            raise EOFError(self._ways.why)
        self._adopt()

    def ready(self, again: Callable[[], None]) -> bool:
        """Whether there is something to read from; else `again` is called, once, when there is."""
        with self._ways.changed:
            if self._ways.current is None and not self._ways.ended:
                self._ways.again = again
                return False
        self._adopt()
        return True

    def _adopt(self) -> None:
        with self._ways.lock:
            pair, before = self._ways.current, self._ways.reading
            if pair is None or pair is before:
                return
            self._ways.reading = pair
        before.close_receivers()
        pair.receiver.setblocking(self._blocking)
        self._told = self._ways.received
