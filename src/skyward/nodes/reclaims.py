"""Reclaims: what happens to a node whose machine the provider takes back."""

from __future__ import annotations

import time
from collections.abc import Callable

from skyward.calls.dispatch import Dispatcher
from skyward.calls.loop import Loop
from skyward.console import Console
from skyward.nodes.devices import DeviceDesk
from skyward.nodes.losses import Losses
from skyward.nodes.node import Node
from skyward.nodes.roster import Roster
from skyward.wire.channel import Channel
from skyward.wire.messages import Reclaim

SPARE_SECONDS = 15.0
"""How long before the machine is gone its tasks are given up, so that others can run them."""
LOOK_SECONDS = 0.1


class Reclaims:
    """Lets the tasks of such a node finish, and has it started again on another machine.

    The methods are called on the loop's thread.
    """

    def __init__(
        self,
        roster: Roster,
        loop: Loop,
        dispatcher: Dispatcher,
        console: Console,
        devices: DeviceDesk,
        losses: Losses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roster, self._loop, self._dispatcher = roster, loop, dispatcher
        self._console, self._devices, self._losses = console, devices, losses
        self._clock = clock

    def heard(self, node: Node, notice: Reclaim) -> None:
        """Take an agent's message that the provider takes its machine back."""
        if node.control is not None:
            deadline = self._clock() + max(0.0, notice.seconds - SPARE_SECONDS)
            self._begin(node, node.control, notice, deadline)

    def _begin(self, node: Node, control: Channel, notice: Reclaim, deadline: float) -> None:
        if self._roster.closed or node.control is not control:
            return
        if node.state == "starting":
            # Its start may succeed or fail as any other; a ready node can be replaced.
            self._loop.later(LOOK_SECONDS, lambda: self._begin(node, control, notice, deadline))
            return
        with self._roster.lock:
            if not node.reclaim(notice.reason):
                return
            lanes = list(node.lanes.values())
        self._console.note(
            f"node {node.index} is taken back in {notice.seconds:.0f} s ({notice.reason}): it gets "
            "no more tasks and is replaced"
        )
        self._console.phase(node.index, "taken back")
        for lane in lanes:
            self._dispatcher.drain(lane)
            self._dispatcher.recall(lane)
        self._look(node, control, deadline)

    def _look(self, node: Node, control: Channel, deadline: float) -> None:
        """Replace the node when it has no tasks any more, or no time for them."""
        if self._roster.closed or node.control is not control or node.state != "reclaimed":
            return
        is_used = self._devices.has_open(node.index) or any(
            lane.tasks for lane in list(node.lanes.values())
        )
        if is_used and self._clock() < deadline:
            self._loop.later(LOOK_SECONDS, lambda: self._look(node, control, deadline))
        else:
            self._losses.lose(node, node.taken_back)
