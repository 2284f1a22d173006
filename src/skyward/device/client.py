"""A sky device as the client holds it: an index, and the sockets behind it."""

from __future__ import annotations

from collections.abc import Callable

from skyward.device.core import core
from skyward.device.pump import plain_socket
from skyward.wire.channel import Channel


class Device:
    """One opened device."""

    def __init__(self, connect: Callable[[str], Channel], kind: str, node: int) -> None:
        self._where = f"{kind} of node {node}"
        channels = [connect(role) for role in ("device-ops", "device-bulk")]
        self._ends = [plain_socket(channel) for channel in channels]
        self.index = core().open(
            *(end.fileno() for end in self._ends),
            shares_memory=all(channel.shares_memory for channel in channels),
            on_cpu=kind.startswith("cpu"),
        )

    def close(self, why: str) -> None:
        """End it; whoever uses its tensors later is told why."""
        core().close(self.index, f"sky:{self.index} ({self._where}) is gone: {why}")
        for end in self._ends:
            end.close()
