"""A pump: carries the bytes of a core's plain socket over a link, in both directions.

The cores know plain sockets only. On one host, a core gets the connection itself. Over a network, a
core gets one end of a socket pair, and a pump moves bytes between the other end and a link. The
link outlives its connections. Each pump sends a count every second, so that the other end can tell
a dead connection from a quiet one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from skyward.wire.channel import Channel
from skyward.wire.link.incoming import NotConnected
from skyward.wire.link.pair import RECORD, TLS_RECORD

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""How long a connection may bring no bytes before it counts as broken."""
BACKLOGS = {
    "device-ops": 8 << 20,
    "device-bulk": 16 << 20,
    "device-bulk-1": 16 << 20,
    "device-bulk-2": 16 << 20,
    "device-bulk-3": 16 << 20,
}
"""The links of a device by role, and how many uncounted bytes each may send.

Bulk bytes go over several: one thread encrypts about as much as one connection's other end reads.
"""
ON_ONE_HOST = ("device-ops", "device-bulk")
"""The connections of a device whose process is on the client's host."""
BATCH = 8
"""How many records of TLS the core gets at most in one write."""


class Pump:
    """Moves bytes between a core and a link until one of the two ends."""

    def __init__(
        self,
        channel: Channel,
        window: int,
        lost: Callable[[str], None],
        *,
        patience: float | None = None,
        other: str = "the client",
    ) -> None:
        """The pump calls `lost` with the reason when the link ends; `lost` must not call `close`.

        A link without a connection ends after `patience` seconds, if that is given. `other` says
        who should have come back by then.
        """
        assert channel.link is not None
        self._channel, self._link = channel, channel.link
        self._window, self._lost, self._patience = window, lost, patience
        self._other = other
        self.near, self._far = socket.socketpair()
        """The core's end of the socket pair; `_far` is the pump's end."""
        self._closed = False
        self._buffer = memoryview(bytearray(BATCH * TLS_RECORD))
        self._undelivered: deque[bytes] = deque()
        self._held = 0
        self._is_core_slow = False
        self._threads = [
            threading.Thread(target=target, name=f"skyward-device-{name}", daemon=True)
            for name, target in (("outward", self._send), ("inward", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def sent(self) -> int:
        """How many bytes have gone over the network from here, with what the link and TLS add."""
        return self._link.outgoing.sent

    def close(self) -> None:
        """End the link and both streams of the core, without a call of `lost`."""
        self._closed = True
        self._channel.abort()
        with contextlib.suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(BEAT_SECONDS)
        self._channel.close()
        for end in (self.near, self._far):
            end.close()

    def _send(self) -> None:
        """Send the core's bytes over the link, until the core or the link ends."""
        outgoing, take = self._link.outgoing, self._far.recv_into
        with contextlib.suppress(OSError):
            while True:
                outgoing.wait_for_room(self._window)
                count = take(outgoing.room())
                if not count:
                    return
                outgoing.filled(count)

    def _receive(self) -> None:
        """Pass the other end's bytes to the core, until the core or the link ends."""
        try:
            self._link.incoming.set_blocking(False)
            while True:
                try:
                    self._carry()
                except NotConnected:
                    self._await_connection()
        except (OSError, EOFError) as problem:
            # If the core has ended, this ends the link; a link that has ended keeps its reason.
            self._link.connections.end("its core has ended")
            if not self._closed and isinstance(problem, EOFError):
                self._lost(str(problem))

    def _carry(self) -> None:
        """Read from one pair of connections until it is lost."""
        incoming, core = self._link.incoming, self._far.fileno()
        receiver = incoming.fileno()
        watched = select.poll()
        watched.register(receiver, select.POLLIN)
        self._is_core_slow = False
        heard = beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= beat:
                beat = now + BEAT_SECONDS
                self._link.outgoing.tell_count()
                if now - heard > SILENCE_SECONDS:
                    self._link.connections.reconnect()
            self._watch_core(watched)
            for ready, _ in watched.poll((beat - now) * 1000):
                if ready == core:
                    self._deliver()
                else:
                    heard = time.monotonic()
                    self._take_in()
                    while incoming.pending():
                        self._take_in()

    def _watch_core(self, watched: select.poll) -> None:
        """Have `_deliver` called when a slow core takes bytes again."""
        if self._is_core_slow is not bool(self._undelivered):
            self._is_core_slow = not self._is_core_slow
            if self._is_core_slow:
                watched.register(self._far, select.POLLOUT)
            else:
                watched.unregister(self._far)

    def _take_in(self) -> None:
        """Read the bytes that have come, at most one buffer, and pass them on in one write."""
        incoming, buffer = self._link.incoming, self._buffer
        parts: list[memoryview] = []
        try:
            for at in range(0, len(buffer), TLS_RECORD):
                parts.append(incoming.receive(buffer[at : at + TLS_RECORD]))
                # After a full record, another probably follows.
                if len(parts[-1]) < TLS_RECORD - RECORD.size:
                    break
        except BlockingIOError:
            pass
        finally:
            # Even if the connection has just ended: the other end will not send these bytes again.
            if parts:
                self._pass_on(parts)

    def _pass_on(self, parts: list[memoryview]) -> None:
        sent = 0
        if not self._undelivered:
            with contextlib.suppress(BlockingIOError):
                sent = self._far.sendmsg(parts, (), socket.MSG_DONTWAIT)
        for part in parts:
            if sent < len(part):
                self._undelivered.append(bytes(part[sent:]))
                self._held += len(part) - sent
            sent = max(0, sent - len(part))
        if self._held:
            self._link.incoming.hold(self._held)

    def _deliver(self) -> None:
        """Pass on the bytes that a slow core did not take at once."""
        with contextlib.suppress(BlockingIOError):
            while self._undelivered:
                first = self._undelivered[0]
                sent = self._far.send(first, socket.MSG_DONTWAIT)
                self._held -= sent
                if sent < len(first):
                    self._undelivered[0] = first[sent:]
                else:
                    self._undelivered.popleft()
        self._link.incoming.hold(self._held)

    def _await_connection(self) -> None:
        """Wait for the next pair, at most `patience` seconds."""
        connections, again = self._link.connections, threading.Event()
        while not self._link.incoming.ready(again.set):
            if not again.wait(self._patience):
                connections.end(
                    f"its connection was lost, and {self._other} did not come back within "
                    f"{self._patience:g} s"
                )
            again.clear()
        if connections.ended:
            raise EOFError(connections.why)
