"""Dialing: how a client makes a link's connections, the first one and one after each loss."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterator

import msgspec

from skyward.errors import SkywardError
from skyward.wire.channel import Channel
from skyward.wire.handshake import (
    AGAIN_SECONDS,
    Dial,
    SessionUnknownError,
    connect_one,
    connect_pair,
    context_for,
    direct,
)
from skyward.wire.identity import Credentials
from skyward.wire.link.connections import Connections, LinkLost
from skyward.wire.link.link import Link
from skyward.wire.link.pair import Pair
from skyward.wire.messages import Hello, Welcome

REFUSED_SECONDS = 2.0
"""If a host refuses connections for so long, the process that listened there has ended."""
PAUSES = (0.02, 1.0)
"""The first and the longest pause between two attempts to connect."""
CONNECTIONS = 4
"""How many connections a large write is spread over: the main one and its stripes."""


def refused(problem: BaseException, since: float | None) -> float | None:
    """When the refusals began: `since`, or now; None if this problem is no refusal.

    The time counts from the first refusal, since the attempt before it may have taken seconds.
    """
    if not isinstance(problem, ConnectionRefusedError):
        return None
    return time.monotonic() if since is None else since


def refused_too_long(since: float | None) -> bool:
    """Whether the refusals have lasted so long that the listening process must have ended."""
    return since is not None and time.monotonic() - since > REFUSED_SECONDS


class Dialer:
    """Connects one link, and reconnects it after each loss."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        credentials: Credentials,
        name: str,
        dial: Dial = direct,
        *,
        gone: str = "",
        patience: float = math.inf,
    ) -> None:
        """If `gone` is given, refused connections end the link, with `gone` as the reason.

        The link also ends if no new connection can be made within `patience` seconds.
        """
        self._endpoint, self._name, self._dial = endpoint, name, dial
        self._hello = msgspec.structs.replace(hello, session=secrets.token_hex(16))
        self._context = context_for(endpoint, credentials)
        self._gone, self._patience = gone, patience
        self._pid = 0

    def open(self, seconds: float = AGAIN_SECONDS) -> tuple[Channel, Welcome]:
        """Make the first connection; after a failure, the caller may try again."""
        pair, welcome = self._connect(0, seconds)
        self._pid = welcome.pid
        return Channel.over(Link(pair, self._again, add_stripes=self._add_stripes)), welcome

    def _again(self, connections: Connections) -> Iterator[Pair | float]:
        """Make the next connection of a link, unless it ends.

        After each attempt that fails, yields how many seconds to wait; at last, yields the pair.
        """
        refused_since: float | None = None
        received, started = connections.received, time.monotonic()
        pause, longest = PAUSES
        while not connections.ended:
            try:
                pair, welcome = self._connect(received, AGAIN_SECONDS)
            except SessionUnknownError as problem:
                raise LinkLost("the process there does not know this connection") from problem
            except (OSError, EOFError, SkywardError) as problem:
                refused_since = refused(problem, refused_since)
                if self._gone and refused_too_long(refused_since):
                    raise LinkLost(self._gone) from problem
                if connections.ending and refused_since is not None:
                    raise LinkLost("its process was told to end") from problem
                if time.monotonic() - started > self._patience:
                    raise LinkLost(
                        f"its connection was lost, and a new one could not be made within "
                        f"{self._patience:g} s ({problem})"
                    ) from problem
            else:
                if welcome.pid == self._pid:
                    yield pair
                    return
                pair.close()
                raise LinkLost("another process has taken its place")
            yield pause
            pause = min(2 * pause, longest)
        raise LinkLost("it was closed")

    def _connect(self, received: int, seconds: float) -> tuple[Pair, Welcome]:
        self._hello.attempt += 1
        self._hello.received = received
        sender, receiver, welcome = connect_pair(
            self._endpoint, self._hello, self._context, self._name, seconds, self._dial
        )
        return Pair(sender, receiver, welcome.received, self._hello.attempt), welcome

    def _add_stripes(self, pair: Pair) -> None:
        """Connect stripes for a pair, as many as can be made."""
        hello = msgspec.structs.replace(self._hello, attempt=pair.attempt)
        with contextlib.suppress(OSError, EOFError, SkywardError):
            for number in range(1, CONNECTIONS):
                for direction in ("send", "receive"):
                    if pair.broken:
                        return
                    hello.stripe, hello.direction = number, direction
                    end, _, _ = connect_one(
                        self._endpoint,
                        hello,
                        self._context,
                        self._name,
                        AGAIN_SECONDS,
                        self._dial,
                    )
                    pair.add_stripe(number, end, to_send=direction == "send")
