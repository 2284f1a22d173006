"""A link: a byte stream each way between two processes that outlives its connections.

A link uses two connections at a time, one a direction: of TLS, or plain ones where a provider's own
transport is private already. Each carries records: a part of its stream, or how many bytes of the
other stream have arrived. The sender keeps what has not been counted and, when a connection breaks,
sends it again on the next one, which begins where the other end stopped receiving. Only the client
connects; the new connection tells the worker that the old one is over. Nothing ever travels against
a connection's direction: bytes that a dying process has not read would make its kernel reset the
connection, and the results that are still to come would be lost.

Between machines that are far apart, stripes join the pair for large writes: see `Pair`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyward.wire.link.connections import Connections, LinkLost
from skyward.wire.link.incoming import Incoming
from skyward.wire.link.outgoing import Outgoing
from skyward.wire.link.pair import Pair


class Link:
    """One end of a link. Any thread may write; one thread at a time reads."""

    def __init__(
        self,
        pair: Pair,
        dial: Callable[[int, threading.Event], Pair] | None = None,
        attempt: int = 1,
        add_stripes: Callable[[Pair], None] | None = None,
    ) -> None:
        """`dial` makes the next pair, given how much was received, unless the event comes first.

        `add_stripes` connects stripes for a pair. The worker has neither.
        """
        self.first = pair
        self._dial = dial
        self.connections = Connections(pair, attempt, add_stripes)
        self.outgoing = Outgoing(self.connections)
        self.incoming = Incoming(self.connections, self.outgoing, self._lost)

    def install(self, pair: Pair, attempt: int) -> None:
        """Use this pair from now on, and send what waits for it."""
        if self.connections.install(pair, attempt):
            self.outgoing.go_on()

    def _lost(self) -> None:
        if self._dial is not None:
            threading.Thread(target=self._redial, name="skyward-redial", daemon=True).start()

    def _redial(self) -> None:
        assert self._dial is not None
        try:
            pair = self._dial(self.connections.received, self.connections.over)
        except LinkLost as problem:
            self.connections.end(str(problem))
        else:
            self.install(pair, self.connections.attempt)
