"""A visit: the connections of one client to the device process, from its arrival to its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from skyward.device import ranks
from skyward.device.meeting import BACKLOGS, ON_ONE_HOST
from skyward.device.peers import TERMS as PEER_TERMS
from skyward.device.peers import Peers
from skyward.wire.channel import Channel
from skyward.wire.handshake import Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello
from skyward.wire.native import Terms

ARRIVAL_SECONDS = 300.0
"""How long a client may take to connect: it may compile its own core meanwhile."""


class NobodyCameError(Exception):
    """The client did not connect, or left before it had connected."""


class Visit:
    """Listens for one client alone: the next one has other endpoints."""

    def __init__(
        self,
        where: str,
        pool: str,
        credentials: Credentials | None,
        peers: Peers,
        patience: float,
        ticket: str,
    ) -> None:
        """`patience` is how long the process waits for a client whose connection was lost.

        With `ticket`, the rank above this one in a mesh may come in the client's place.
        """
        self._ticket = ticket
        self._arrived: dict[str, queue.SimpleQueue[Channel | None]] = {
            role: queue.SimpleQueue() for role in BACKLOGS
        }
        self._free = set(BACKLOGS)
        self._lock = threading.Lock()
        self._peers, self._patience = peers, patience
        self._only_here = credentials is None
        """Whether no client can come from another host."""
        self.on_one_host = self._only_here
        """Whether the client is on this host, with sockets that the core uses itself."""
        self._held: list[Channel] = []
        self._over = False
        # It stays open: a client that lost its connection comes again, and other devices' processes
        # do.
        terms = None if credentials is None else self._terms
        self._listener = Listener(where, pool, credentials, self._accept, terms=terms)
        self.endpoint = self._listener.endpoint

    def _terms(self, hello: Hello) -> Terms:
        role = ranks.role_of(hello, self._ticket)
        if not role and self._peers.is_peer(hello):
            return PEER_TERMS
        return Terms(BACKLOGS.get(role or hello.role, 0), self._patience)

    def _accept(self, channel: Channel, hello: Hello) -> None:
        role = ranks.role_of(hello, self._ticket)
        if not role and self._peers.is_peer(hello):
            self._peers.accept(channel, hello)
            return
        role = role or hello.role
        # A link of another session is closed.
        with self._lock:
            is_first = role in self._free
            self._free.discard(role)
        if is_first:
            self._arrived[role].put(channel)
        else:
            channel.close()

    def begin(self, lost: Callable[[str], None]) -> tuple[int, ...]:
        """Wait for the client; returns the core's ways: for operations, and then for bytes.

        `lost` is called when a connection over a network is lost for good. It may call `leave`.
        """
        first = self._next(ON_ONE_HOST[0])
        # In a pool with a network, the rank of a mesh above this one may be on this host.
        self.on_one_host = first.shares_memory
        roles = ON_ONE_HOST if self.on_one_host else tuple(BACKLOGS)
        channels = [first, *(self._next(role) for role in roles[1:])]
        with self._lock:
            self._held = channels
            over = self._over
        if over:
            self.leave()
        if self.on_one_host:
            return tuple(channel.detach()[0].fileno() for channel in channels)
        for channel in channels:
            channel.native_link.on_end(lost)
        return tuple(channel.native_link.address for channel in channels)

    def _next(self, role: str) -> Channel:
        patience = max(self._patience, ARRIVAL_SECONDS)
        try:
            channel = self._arrived[role].get(timeout=None if self._only_here else patience)
        except queue.Empty:
            raise NobodyCameError(f"the client did not connect within {patience:g} s") from None
        if channel is None:
            raise NobodyCameError("the client left before it had connected")
        return channel

    def leave(self) -> None:
        """Have the core see the end of the client's connections; from any thread."""
        with self._lock:
            self._over = True
            held = list(self._held)
        for waiting in self._arrived.values():
            waiting.put(None)
        for channel in held:
            channel.abort()

    def close(self) -> None:
        """Close the connections, and listen no more."""
        self._listener.close()
        for held in self._held:
            held.close()
        for waiting in self._arrived.values():
            while not waiting.empty():
                if (channel := waiting.get()) is not None:
                    channel.close()
