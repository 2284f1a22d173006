"""Leaving: a client parts from the nodes of a pool that stays, and they wait for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from skyward.calls.lane import Lane
from skyward.nodes.node import Node
from skyward.wire.channel import Channel
from skyward.wire.messages import Detach

LOOK_SECONDS = 0.005


def leave(nodes: Sequence[Node], entered: Callable[[Node], str], seconds: float) -> None:
    """Part from all executors, then from the agents; each waits for so many seconds at most.

    `entered` names the hooks that a node's executors have entered. An executor that still runs a
    task, or does not answer, is replaced.
    """
    serving = [node for node in nodes if node.control is not None and node.host.stays]
    groups = {node: entered(node) for node in serving}
    lanes = [(node, lane) for node in serving for lane in list(node.lanes.values())]
    deadline = time.monotonic() + seconds
    idle = [(node, lane) for node, lane in lanes if not lane.tasks and not lane.lost]
    for _, lane in idle:
        lane.channel.expect_end()
        lane.tell(Detach())
    parted = _ended([lane.channel for _, lane in idle], deadline)
    left: list[tuple[Node, Lane]] = [
        (node, lane) for node, lane in lanes if lane.channel not in parted
    ]
    for node, lane in left:
        node.kill(lane, "its client left the pool while it ran a task")
    controls = [node.control for node in serving if node.control is not None]
    for control in controls:
        control.expect_end()
    for node in serving:
        # If a member of a group is replaced, the group is of no use to the next client.
        node.tell(Detach("" if left else groups[node]))
    _ended(controls, deadline)


def _ended(channels: list[Channel], deadline: float) -> set[Channel]:
    """Wait until the other ends have closed these channels; returns those that they have."""
    while True:
        ended = {channel for channel in channels if channel.ended}
        if len(ended) == len(channels) or time.monotonic() > deadline:
            return ended
        time.sleep(LOOK_SECONDS)
