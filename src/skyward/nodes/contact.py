"""Contact: how the client connects to agents, executors and devices.

Over a network, a connection is a link, which reconnects by itself.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from skyward.staff import Staff
from skyward.wire.channel import Channel
from skyward.wire.connecting import GREETING_SECONDS, Dial, connect
from skyward.wire.dial import PAUSES, Dialer, refused, refused_too_long
from skyward.wire.identity import Credentials
from skyward.wire.messages import Hello, Welcome

P = ParamSpec("P")
T = TypeVar("T")

connecting = Staff("skyward-connect", most=64)
"""The threads that make connections: each takes a few round trips."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do on such a thread what waits; whoever cancels this waits for the end of the work."""
    doing = asyncio.wrap_future(connecting.submit(work, *args, **kwargs))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


class Approach:
    """The attempts to make the first connection to a process of a node."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        credentials: Credentials | None,
        name: str,
        dial: Dial,
        *,
        gone: str = "",
        patience: float = math.inf,
        near_seconds: float = GREETING_SECONDS,
    ) -> None:
        """For `gone` and `patience`, see `Dialer`; a greeting here may take `near_seconds`."""
        self._dialer: Dialer | None = None
        if credentials is not None:
            self._dialer = Dialer(
                endpoint, hello, credentials, name, dial, gone=gone, patience=patience
            )
        self._endpoint, self._hello, self._name = endpoint, hello, name
        self._near_seconds = near_seconds
        self._refused_since: float | None = None
        self._pause, self._longest = PAUSES

    @property
    def is_within_host(self) -> bool:
        """Whether no network is in between, and no firewall."""
        return self._dialer is None

    def attempt(self) -> tuple[Channel, Welcome]:
        """Connect; over a network, the channel outlives its connections."""
        if self._dialer is None:
            return connect(self._endpoint, self._hello, None, self._name, self._near_seconds)
        return self._dialer.open()

    def pause_after(self, problem: BaseException) -> float | None:
        """How long to wait before the next attempt; None if that is hopeless."""
        self._refused_since = refused(problem, self._refused_since)
        impostor = isinstance(problem.__cause__, ssl.SSLCertVerificationError)
        if self._dialer is None or impostor or refused_too_long(self._refused_since):
            return None
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause
