"""A carrier: sends bytes over a link straight from the core's memory, and receives into it.

A pump copies bytes through a socket pair, which costs more than their encryption. For long copies
the core tells a carrier addresses instead, and waits until the carrier needs the memory no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
from collections import deque
from collections.abc import Callable

from skyward.device.pump import BEAT_SECONDS, Pump
from skyward.wire.channel import Channel
from skyward.wire.link.outgoing import LINK_WINDOW
from skyward.wire.link.pair import TLS_RECORD

PIECE = struct.Struct("=QQ")
"""What the core asks for: an address, and how many bytes to send from there or receive there."""
DONE = b"\1"
EARLY_MAX = 4 * LINK_WINDOW
"""How many bytes may come that the core has not asked for; an honest other end sends fewer."""
EARLY_MILLISECONDS = 20
"""How long bytes wait for the core to say where they belong, before they are read all the same."""
AT_ONCE = 8
"""How many places are filled before the carrier looks at the clock."""


class MemoryCarrier(Pump):
    """Moves bytes between a core's memory and a link until one of the two ends."""

    def __init__(
        self, channel: Channel, lost: Callable[[str], None], *, patience: float, other: str
    ) -> None:
        self.near_out, self._far_out = socket.socketpair()
        self._places: deque[memoryview] = deque()
        """Where the next bytes belong, as far as the core has said it."""
        self._asked = b""
        self._core_asks = select.poll()
        super().__init__(channel, LINK_WINDOW, lost, patience=patience, other=other)

    def leave_to_core(self) -> None:
        """Close the core's ends here: the core has duplicates, and closes them when it ends."""
        self.near.close()
        self.near_out.close()

    def close(self) -> None:
        """End the link; the core hears of it when this end no longer uses its memory."""
        self._closed = True
        self._channel.abort()
        for end in (self._far, self._far_out):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join(BEAT_SECONDS)
        self._channel.close()

    def _send(self) -> None:
        outgoing = self._link.outgoing
        outgoing.patient = True
        with self._far_out as core, contextlib.suppress(OSError):
            while asked := core.recv(PIECE.size, socket.MSG_WAITALL):
                outgoing.send_parts([_memory(asked)])
                core.sendall(DONE)

    def _receive(self) -> None:
        with self._far:
            super()._receive()

    def _watch_core(self, watched: select.poll) -> None:
        for each in (watched, self._core_asks):
            each.register(self._far, select.POLLIN)

    def _deliver(self) -> None:
        """Take the core's next addresses, and put there what has come before."""
        with contextlib.suppress(BlockingIOError):
            data = self._far.recv(AT_ONCE * PIECE.size, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionError("the core has ended")
            self._asked += data
        whole = len(self._asked) - len(self._asked) % PIECE.size
        for at in range(0, whole, PIECE.size):
            self._places.append(_memory(self._asked[at : at + PIECE.size]))
        self._asked = self._asked[whole:]
        if self._undelivered:
            self._place_early()

    def _place_early(self) -> None:
        while self._undelivered and self._places:
            first = self._undelivered.popleft()
            count = min(len(first), len(self._places[0]))
            self._places[0][:count] = first[:count]
            if count < len(first):
                self._undelivered.appendleft(first[count:])
            self._held -= count
            self._filled(count)
        self._link.incoming.hold(self._held)

    def _take_in(self) -> None:
        incoming = self._link.incoming
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                if not self._places:
                    # Bytes that come early are copied twice: better wait a little.
                    if not self._undelivered:
                        self._core_asks.poll(EARLY_MILLISECONDS)
                    self._deliver()
                if not self._places:
                    # Read all the same: a count may follow that the other direction waits for.
                    self._keep(incoming.receive(self._buffer[:TLS_RECORD]))
                    continue
                self._filled(incoming.receive_into(self._places[0]))

    def _keep(self, part: memoryview) -> None:
        self._undelivered.append(bytes(part))
        self._held += len(part)
        self._link.incoming.hold(self._held)
        if self._held > EARLY_MAX:
            self._link.connections.end(f"it sent {self._held} bytes that nobody has asked for")

    def _filled(self, count: int) -> None:
        if count < len(self._places[0]):
            self._places[0] = self._places[0][count:]
        else:
            self._places.popleft()
            self._far.sendall(DONE)


def _memory(asked: bytes) -> memoryview:
    address, count = PIECE.unpack(asked)
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
