"""A sky device as the client holds it: an index, and the sockets behind it."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

from skyward.device.core import core
from skyward.device.pump import BACKLOGS, Link
from skyward.device.route import Dial
from skyward.wire.channel import Channel

GRACE_SECONDS = 0.2


class Device:
    """One opened device.

    Connections that break are made anew for up to `patience` seconds; then `lost` is told why, on
    a thread that must not be the one to call `close`.
    """

    def __init__(
        self,
        connect: Callable[[str], Channel],
        kind: str,
        node: int,
        *,
        patience: float,
        lost: Callable[[str], None],
    ) -> None:
        self._where = f"{kind} of node {node}"
        self._ends: list[socket.socket] = []
        with ExitStack() as opened:
            for role, limit in BACKLOGS.items():
                channel = connect(role)
                if channel.shares_memory:
                    opened.callback(channel.close)
                    end, _ = channel.detach()
                else:
                    again = functools.partial(connect, role)
                    link = Link(Dial(channel, again, patience), limit, lost)
                    opened.callback(link.close)
                    end = link.near
                self._ends.append(end)
            self.index = core().open(
                *(end.fileno() for end in self._ends),
                shares_memory=channel.shares_memory,
                on_cpu=kind.startswith("cpu"),
            )
            self._opened = opened.pop_all()

    def close(self, why: str) -> None:
        """End it; whoever uses its tensors later is told why."""
        reason = f"sky:{self.index} ({self._where}) is gone: {why}"
        closing = threading.Thread(target=core().close, args=(self.index, reason), daemon=True)
        closing.start()
        # Whoever waits for a reply holds the core's lock until it hears of the end.
        closing.join(GRACE_SECONDS)
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        closing.join()
        self._opened.close()
