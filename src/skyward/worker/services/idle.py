"""Idle: tells other nodes of the pool for how many seconds nobody has used this one."""

from __future__ import annotations

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.services import ServedNode


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer until the other node leaves."""
    answer(channel, {"idle": lambda _: node.tenants.idle_seconds})
