"""A link: a byte stream each way between two processes that outlives its connections.

Under it lie two connections at a time, one a direction: of TLS, or plain ones through a way that is
private already. Each carries records: a part of its stream, or how many bytes of the other stream
have arrived. What has not been counted is kept and, when a connection breaks, sent again on the
next, which begins where the other end stopped receiving. Only the client connects; the worker is
told on the new connection that the old one is over. Nothing ever travels against a connection's
direction: bytes that a dying process has not read would make its kernel reset the connection, and
with it the results that are still to come.

Between machines that are far apart, others join the pair for large writes: see `Pair`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyward.wire.incoming import Incoming
from skyward.wire.outgoing import Outgoing
from skyward.wire.records import Pair
from skyward.wire.ways import Ways


class Link:
    """One end of a link. Any thread may write; one thread at a time reads."""

    def __init__(
        self,
        pair: Pair,
        dial: Callable[[int, threading.Event], Pair] | None = None,
        attempt: int = 1,
        widen: Callable[[Pair], None] | None = None,
    ) -> None:
        """`dial` makes the next connection, given how much was received; the worker has none.

        `widen` adds connections to a pair.
        """
        self.first = pair
        self.ways = ways = Ways(pair, dial, attempt, widen)
        self.outgoing = outgoing = Outgoing(ways)
        self.incoming = Incoming(ways, outgoing)
        ways.on_new = outgoing.go_on
