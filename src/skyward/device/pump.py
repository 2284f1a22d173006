"""The pump: carries a core's plain socket over TLS connections, and over the loss of one.

The cores know plain sockets only. On one host they get the connection itself; over a network, one
end of a socket pair whose other end a *link* pumps. A link is a byte stream each way that outlives
its connections. Each of the two connections of a channel carries the stream in one direction and,
in the other, how many bytes of it have arrived: that acknowledges them, and it is a sign of life.
What is not acknowledged is kept. When a connection breaks or falls silent, the client makes a new
one, both ends say how far they got, and the stream goes on from there; the cores notice nothing
but the time it takes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable

from skyward.device.route import Route
from skyward.errors import ProtocolError
from skyward.wire.backlog import Backlog
from skyward.wire.channel import Channel

RECORD = 16 << 10
"""The most that one record of TLS holds; after one so full, more is likely to follow."""
SIZE = 8 * RECORD
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A connection without a sign of life for so long is taken for broken."""
COUNT_EVERY = 256 << 10
"""Received bytes after which the other end hears of them before the next beat."""
BACKLOGS = {"device-ops": 8 << 20, "device-bulk": 64 << 20}
"""The two links of a device by role, and how much each sends ahead of the acknowledgements."""
COUNT = struct.Struct("<Q")


class Link:
    """A core's byte stream each way, over one connection after another."""

    def __init__(self, route: Route, limit: int, lost: Callable[[str], None]) -> None:
        self._route = route
        self._lost = lost
        first = route.open(0)
        self.near, self._far = socket.socketpair()
        """The core's end, and ours."""
        self._far.settimeout(BEAT_SECONDS)
        self._backlog = Backlog(limit)
        self._buffer = memoryview(bytearray(SIZE))
        self._undelivered = self._buffer[:0]
        self._received = 0
        self._channel: Channel | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._keeper = threading.Thread(
            target=self._keep, args=first, name="skyward-device-link", daemon=True
        )
        self._keeper.start()

    def close(self) -> None:
        """End the stream for both: the core reads its end, the other side hears no more of us."""
        with self._lock:
            self._ended = True
            if self._channel is not None:
                self._channel.abort()
        self._route.close()
        with contextlib.suppress(OSError):
            self._far.shutdown(socket.SHUT_RDWR)
        # One that is just connecting gives up by itself in seconds; nobody needs to wait for that.
        self._keeper.join(BEAT_SECONDS)
        for end in (self.near, self._far):
            end.close()

    def _keep(self, channel: Channel, arrived: int) -> None:
        try:
            while self._carry(channel, arrived):
                channel, arrived = self._route.open(self._received)
        except Exception as problem:
            # The core's socket stays open: whoever hears of this says why before it is closed.
            if not self._ended:
                self._lost(str(problem) or repr(problem))

    def _carry(self, channel: Channel, arrived: int) -> bool:
        """Pump until the connection breaks; whether the link should go on with another one."""
        with self._lock:
            if self._ended:
                channel.close()
                return False
            self._channel = channel
        inward = threading.Thread(
            target=self._receive, args=(channel,), name="skyward-device-inward", daemon=True
        )
        inward.start()
        try:
            self._backlog.resume(arrived)
            self._send(channel, arrived)
        except ProtocolError:
            raise
        except (OSError, EOFError):
            return not self._ended
        else:
            return False
        finally:
            channel.abort()
            inward.join()
            with self._lock:
                self._channel = None
            channel.close()

    def _send(self, channel: Channel, arrived: int) -> None:
        """Carry what the core sends; returns when the core has left."""
        sender, _ = channel.detach()
        sender.settimeout(BEAT_SECONDS)
        counts = _Counts(sender, arrived)
        backlog, core = self._backlog, self._far.fileno()
        watched = select.poll()
        watched.register(sender, select.POLLIN)
        listening, heard = False, time.monotonic()
        while True:
            if listening is not backlog.has_room:
                listening = not listening
                if listening:
                    watched.register(core, select.POLLIN)
                else:
                    watched.unregister(core)
            pause = 0 if backlog.unsent() else BEAT_SECONDS * 1000
            for ready, _ in watched.poll(pause):
                if ready == core:
                    count = os.readv(core, [backlog.room()])
                    if not count:
                        return
                    backlog.filled(count)
                else:
                    backlog.acknowledge(counts.latest())
                    heard = time.monotonic()
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise TimeoutError("the connection fell silent")
            with contextlib.suppress(TimeoutError):
                while unsent := backlog.unsent():
                    backlog.sent(sender.send(unsent))

    def _receive(self, channel: Channel) -> None:
        """Bring the core what the other side sends, and say how much has come."""
        _, receiver = channel.detach()
        receiver.setblocking(False)
        arrivals = select.poll()
        arrivals.register(receiver, select.POLLIN)
        told, due = self._received, 0.0
        try:
            while not channel.aborted:
                if not self._undelivered:
                    self._take_in(receiver)
                if self._undelivered:
                    with contextlib.suppress(TimeoutError):
                        self._undelivered = self._undelivered[self._far.send(self._undelivered) :]
                else:
                    arrivals.poll(max(0.0, due - time.monotonic()) * 1000)
                now = time.monotonic()
                if now >= due or self._received - told >= COUNT_EVERY:
                    told, due = self._received, now + BEAT_SECONDS
                    receiver.sendall(COUNT.pack(told))
        except (OSError, EOFError):
            # The connection broke, or the core is gone; the sending side finds out which.
            pass
        finally:
            channel.abort()

    def _take_in(self, receiver: socket.socket) -> None:
        """Whatever has come, a buffer at most: several records are one write to the core."""
        count = 0
        with contextlib.suppress(ssl.SSLWantReadError):
            while count <= SIZE - RECORD:
                more = receiver.recv_into(self._buffer[count:])
                if not more and not count:
                    raise EOFError("the other end closed the connection")
                count += more
                if more < RECORD:
                    break
        self._received += count
        self._undelivered = self._buffer[:count]


class _Counts:
    """Reads the counts that come back on a connection we send on."""

    def __init__(self, sender: socket.socket, first: int) -> None:
        self._sender = sender
        self._partial = b""
        self._latest = first

    def latest(self) -> int:
        """The last one to have come, once poll has said that something did."""
        with contextlib.suppress(TimeoutError):
            data = self._sender.recv(4096)
            if not data:
                raise EOFError("the other end closed the connection")
            data = self._partial + data
            whole = len(data) - len(data) % COUNT.size
            if whole:
                (self._latest,) = COUNT.unpack_from(data, whole - COUNT.size)
            self._partial = data[whole:]
        return self._latest
