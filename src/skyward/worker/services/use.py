"""Use: a node of the pool that is in use holds a connection here, so that node 0 does not end."""

from __future__ import annotations

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.services import ServedNode


def serve(node: ServedNode, channel: Channel) -> None:
    """Count as use of the node until the other one leaves."""
    answer(channel, {"stay": lambda _: None})
