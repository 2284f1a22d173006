"""The workbench: what one does with a running pool besides calls: commands, files, jobs, logs."""

from __future__ import annotations

from typing import Protocol

from skyward.wire.channel import ServiceConnection


class Reachable(Protocol):
    """A pool whose agents can be asked."""

    def service(self, node: int, name: str) -> ServiceConnection:
        """A connection to a service of a node's agent; the caller closes it."""
