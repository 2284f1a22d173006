"""A link: a byte stream each way between two processes that outlives its connections.

A link uses two connections at a time, one for each direction. They are TLS connections, or plain
ones where a provider's own transport is private. Each connection carries records. A record is a
part of the stream, or a count: how many bytes of the other stream have arrived. The sender keeps
the bytes that have not been counted. When a connection breaks, the sender sends these bytes again
on the next one, from where the other end stopped receiving. Only the client connects; the new
connection tells the worker that the old one is over. No bytes ever travel against a connection's
direction: bytes that a dying process has not read would make its kernel reset the connection, and
the results still on their way would be lost.

Between machines that are far apart, stripes join the pair for large writes: see `Pair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from skyward.staff import Staff
from skyward.wire.link.connections import Connections, LinkLost
from skyward.wire.link.incoming import Incoming
from skyward.wire.link.outgoing import Outgoing
from skyward.wire.link.pair import Pair

redialing = Staff("skyward-redial", most=128)
"""The threads that make new connections; after an outage, all links of a pool need one at once."""


class Link:
    """One end of a link. Any thread may write; one thread at a time reads."""

    def __init__(
        self,
        pair: Pair,
        dial: Callable[[Connections], Iterator[Pair | float]] | None = None,
        attempt: int = 1,
        add_stripes: Callable[[Connections, int], None] | None = None,
    ) -> None:
        """`dial` makes the next pair: it yields the pair, or how many seconds to wait before its
        next attempt. `add_stripes` connects stripes for a pair. Only the client gives these two.
        """
        self.first = pair
        self._dial = dial
        self.connections = Connections(pair, attempt, add_stripes)
        self.outgoing = Outgoing(self.connections)
        self.incoming = Incoming(self.connections, self.outgoing, self._lost)

    def install(self, pair: Pair, attempt: int) -> None:
        """Use this pair from now on, and send the bytes that waited for it."""
        if self.connections.install(pair, attempt):
            self.outgoing.go_on()

    def _lost(self) -> None:
        if self._dial is not None:
            attempts = self._dial(self.connections)
            redialing.run(lambda: self._redial(attempts))

    def _redial(self, attempts: Iterator[Pair | float]) -> None:
        try:
            found = next(attempts)
        except LinkLost as problem:
            self.connections.end(str(problem))
            return
        if isinstance(found, Pair):
            self.install(found, self.connections.attempt)
        else:
            redialing.later(found, lambda: self._redial(attempts))
