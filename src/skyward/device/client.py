"""A sky device as the client holds it: an index, and the sockets behind it."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import ExitStack

from skyward.device.core import core
from skyward.device.pump import BACKLOGS, Link
from skyward.device.route import Dial
from skyward.wire.channel import Channel


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
        core().close(self.index, f"sky:{self.index} ({self._where}) is gone: {why}")
        self._opened.close()
