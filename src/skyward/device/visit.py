"""A visit: the connections of one client to the device process, from its arrival to its end."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from skyward.device.peers import Peers
from skyward.device.pump import BACKLOGS, ON_ONE_HOST, Pump
from skyward.wire.channel import Channel
from skyward.wire.handshake import Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello

ARRIVAL_SECONDS = 300.0
"""How long a client may take to connect: it may compile its own core meanwhile."""


class NobodyCameError(Exception):
    """The client did not connect, or left before it had connected."""


class Visit:
    """Listens for one client alone: the next one has other endpoints."""

    def __init__(
        self, where: str, pool: str, credentials: Credentials | None, peers: Peers, patience: float
    ) -> None:
        """`patience` is how long the process waits for a client whose connection was lost."""
        self._arrived: dict[str, queue.SimpleQueue[Channel | None]] = {
            role: queue.SimpleQueue() for role in BACKLOGS
        }
        self._free = set(BACKLOGS)
        self._lock = threading.Lock()
        self._peers, self._patience = peers, patience
        self.on_one_host = credentials is None
        """Whether the client is on this host, with sockets that the core uses itself."""
        self._held: list[Channel | Pump] = []
        self._ends: list[socket.socket] = []
        self._over = False
        # It stays open: a client that lost its connection comes again, and other devices' processes
        # do.
        self._listener = Listener(where, pool, credentials, self._accept)
        self.endpoint = self._listener.endpoint

    def _accept(self, channel: Channel, hello: Hello) -> None:
        if self._peers.is_peer(hello):
            self._peers.accept(channel, hello)
            return
        # A link of another session is closed.
        with self._lock:
            is_first = hello.role in self._free
            self._free.discard(hello.role)
        if is_first:
            self._arrived[hello.role].put(channel)
        else:
            channel.close()

    def begin(self, lost: Callable[[str], None]) -> tuple[int, list[int]]:
        """Wait for the client; returns the core's sockets for operations and for bytes.

        `lost` is called when a connection over a network is lost for good. It may call `leave`.
        """
        roles = ON_ONE_HOST if self.on_one_host else tuple(BACKLOGS)
        channels = {role: self._next(role) for role in roles}
        with self._lock:
            for role, channel in channels.items():
                if self.on_one_host:
                    self._held.append(channel)
                    self._ends.append(channel.detach()[0])
                else:
                    pump = Pump(channel, BACKLOGS[role], lost, patience=self._patience)
                    self._held.append(pump)
                    self._ends.append(pump.near)
            over = self._over
        if over:
            self.leave()
        ops, *bulk = (end.fileno() for end in self._ends)
        return ops, bulk

    def _next(self, role: str) -> Channel:
        patience = max(self._patience, ARRIVAL_SECONDS)
        try:
            channel = self._arrived[role].get(timeout=None if self.on_one_host else patience)
        except queue.Empty:
            raise NobodyCameError(f"the client did not connect within {patience:g} s") from None
        if channel is None:
            raise NobodyCameError("the client left before it had connected")
        return channel

    def leave(self) -> None:
        """Have the core see the end of the client's connections; from any thread."""
        with self._lock:
            self._over = True
            ends = list(self._ends)
        for waiting in self._arrived.values():
            waiting.put(None)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, and listen no more."""
        self._listener.close()
        with self._lock:
            ends, self._ends = self._ends, []
        for each in self._held:
            each.close()
        for end in ends:
            end.close()
        for waiting in self._arrived.values():
            while not waiting.empty():
                if (channel := waiting.get()) is not None:
                    channel.close()
