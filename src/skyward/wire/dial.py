"""Dialing: how a client comes to a link's connections, the first and the ones after a loss."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time

import msgspec

from skyward.errors import SkywardError
from skyward.wire.channel import Channel
from skyward.wire.identity import (
    GREETING_SECONDS,
    Credentials,
    Dial,
    SessionUnknownError,
    connect_one,
    connect_pair,
    context_for,
    direct,
)
from skyward.wire.link import Link
from skyward.wire.messages import Hello, Welcome
from skyward.wire.records import Pair
from skyward.wire.ways import LinkLost

REFUSED_SECONDS = 2.0
"""A host that refuses connections for so long has no such process any more."""
PAUSES = (0.02, 1.0)
"""The first and the longest pause between two attempts to connect."""
WIDE = 4
"""How many connections a large write is spread over."""


def refused(problem: BaseException, since: float | None) -> float | None:
    """Since when every attempt was refused, after this one has failed; None if it was not.

    Counted from the first refusal on: what came before it may have been an attempt of seconds.
    """
    if not isinstance(problem, ConnectionRefusedError):
        return None
    return time.monotonic() if since is None else since


def refused_too_long(since: float | None) -> bool:
    """Whether nobody can be expected to listen there any more."""
    return since is not None and time.monotonic() - since > REFUSED_SECONDS


class Dialer:
    """Connects one link, again and again if need be."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        credentials: Credentials,
        name: str,
        dial: Dial = direct,
        *,
        gone: str = "",
    ) -> None:
        """With `gone`, a host that refuses connections ends the link, and this is why."""
        self._endpoint, self._name, self._dial = endpoint, name, dial
        self._hello = msgspec.structs.replace(hello, session=secrets.token_hex(16))
        self._context = context_for(endpoint, credentials)
        self._gone = gone
        self._pid = 0

    def open(self, seconds: float = GREETING_SECONDS) -> tuple[Channel, Welcome]:
        """The first connection; may be tried again after it failed."""
        pair, welcome = self._connect(0, seconds)
        self._pid = welcome.pid
        return Channel.over(Link(pair, self._again, widen=self._widen)), welcome

    def _again(self, received: int, ended: threading.Event) -> Pair:
        """The next connection, for a link that has received so much, unless it ends first."""
        refused_since: float | None = None
        pause, longest = PAUSES
        while not ended.is_set():
            try:
                pair, welcome = self._connect(received, GREETING_SECONDS)
            except SessionUnknownError as problem:
                raise LinkLost("the process there does not know this connection") from problem
            except (OSError, EOFError, SkywardError) as problem:
                refused_since = refused(problem, refused_since)
                if self._gone and refused_too_long(refused_since):
                    raise LinkLost(self._gone) from problem
            else:
                if welcome.pid == self._pid:
                    return pair
                pair.close()
                raise LinkLost("another process has taken its place")
            ended.wait(pause)
            pause = min(2 * pause, longest)
        raise LinkLost("it was closed")

    def _connect(self, received: int, seconds: float) -> tuple[Pair, Welcome]:
        self._hello.attempt += 1
        self._hello.received = received
        sender, receiver, welcome = connect_pair(
            self._endpoint, self._hello, self._context, self._name, seconds, self._dial
        )
        pair = Pair(sender, receiver, welcome.received)
        pair.attempt = self._hello.attempt
        return pair, welcome

    def _widen(self, pair: Pair) -> None:
        """Have more connections join a pair, as many as can be made."""
        hello = msgspec.structs.replace(self._hello, attempt=pair.attempt)
        with contextlib.suppress(OSError, EOFError, SkywardError):
            for number in range(1, WIDE):
                for direction in ("send", "receive"):
                    if pair.broken:
                        return
                    hello.aside, hello.direction = number, direction
                    end, _, _ = connect_one(
                        self._endpoint,
                        hello,
                        self._context,
                        self._name,
                        GREETING_SECONDS,
                        self._dial,
                    )
                    pair.add(number, end, to_send=direction == "send")
