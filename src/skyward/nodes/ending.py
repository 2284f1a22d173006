"""Ending: nodes and their machines end, and nothing waits for them any more."""

from __future__ import annotations

import time
from collections.abc import Sequence

from skyward.calls.dispatch import Dispatcher
from skyward.calls.loop import Loop
from skyward.errors import NodeLostError
from skyward.nodes.host import DESTROY_SECONDS
from skyward.nodes.keeper import PoolKeeper
from skyward.nodes.node import Node

LAUNCH_SECONDS = 5.0
"""How long the end of nodes waits for the starts of those that are still starting."""


class Ending:
    """Ends the nodes that a pool gives up."""

    def __init__(self, loop: Loop, dispatcher: Dispatcher, keeper: PoolKeeper) -> None:
        self._loop, self._dispatcher, self._keeper = loop, dispatcher, keeper

    def end(self, nodes: Sequence[Node], seconds: float, *, spare: bool = False) -> None:
        """End nodes in parallel, also if they would stay; agents have so many seconds to end.

        With `spare`, the machines are not removed.
        """
        self._keeper.remove(nodes)
        for node in nodes:
            if spare:
                node.host.keep()
            else:
                node.host.condemn()
        ends = []
        for node in nodes:
            node.stop()
            node.shut_down()
            # An agent without a connection was not told to end, and will not end by itself.
            ends.append(node.host.stop(seconds if node.is_connected else 0))
        problems = []
        for end in ends:
            try:
                end.result()
            except Exception as problem:
                # The other nodes end all the same.
                problems.append(problem)
        until = time.monotonic() + DESTROY_SECONDS
        for node in nodes:
            node.await_removal(until)
        until = time.monotonic() + LAUNCH_SECONDS
        for node in nodes:
            node.await_launch(until)
            self.forget(node)
        if problems:
            raise problems[0]

    def forget(self, node: Node) -> None:
        """Use a node no more: its connections are not read, and tasks that it had fail."""
        if node.control is not None:
            self._loop.forget(node.control)
        for lane in list(node.lanes.values()):
            self._loop.forget(lane.channel)
            self._dispatcher.lose(
                lane,
                lambda task: NodeLostError(
                    f"{task.name} was on node {node.index}, which was stopped; call it again"
                ),
            )
