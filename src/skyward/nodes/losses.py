"""Losses: what happens to a node that is gone, and to its tasks."""

from __future__ import annotations

from skyward.calls.dispatch import Dispatcher
from skyward.calls.loop import Loop
from skyward.calls.prospects import Prospects
from skyward.console import Console
from skyward.errors import NodeLostError, PluginError
from skyward.nodes.devices import DeviceDesk
from skyward.nodes.node import Node
from skyward.nodes.preparing import Preparer
from skyward.nodes.roster import Roster
from skyward.nodes.startup import Startup
from skyward.wire.channel import Channel


class Losses:
    """Fails the tasks of nodes that are gone, and has the nodes started again."""

    def __init__(
        self,
        roster: Roster,
        loop: Loop,
        dispatcher: Dispatcher,
        prospects: Prospects,
        console: Console,
        devices: DeviceDesk,
        preparer: Preparer,
        startup: Startup,
    ) -> None:
        self._roster, self._loop = roster, loop
        self._dispatcher, self._prospects = dispatcher, prospects
        self._console, self._devices = console, devices
        self._preparer, self._startup = preparer, startup

    def control_ended(self, node: Node, control: Channel, problem: BaseException) -> None:
        """Lose a node whose agent's connection has ended for good."""
        if node.control is control:
            self.lose(node, str(problem) if control.resumes else "its agent is gone")

    def plugin_failed(self, node: Node, failure: PluginError) -> None:
        """Lose a node because a plugin's hook failed there, or too often in its workers."""
        if node.state == "starting":
            self._startup.give_up(node, failure)
        else:
            self._console.note(str(failure))
            self.lose(node, str(failure))

    def lose(self, node: Node, reason: str) -> None:
        """Lose a whole node: its tasks fail or are retried, and the node is started again."""
        with self._roster.lock:
            if self._roster.closed:
                return
            served = node.joined
            if node.state == "reclaimed":
                reason = f"its machine was taken back ({node.taken_back})"
            loss = node.lose(reason)
        if loss is None:
            return
        self._console.phase(node.index, "lost")
        self._devices.node_lost(node.index, f"node {node.index} was lost: {reason}")
        if loss.control is not None:
            self._loop.forget(loss.control)
        advice = "call again, or have `retries` do that"
        if node.state == "failed" and served:
            advice = "it was lost too often to be started anew: enter a new Compute"
        if node.state == "failed" and node.failure is not None and node.retries.at is None:
            self._startup.tell_given_up(node, node.failure)
        elif node.state == "lost":
            self._console.note(f"node {node.index} was lost: {reason}; it is started anew")
        for lane in loss.lanes:
            self._loop.forget(lane.channel)
            self._dispatcher.lose(
                lane,
                lambda task: NodeLostError(
                    f"{task.name} lost node {node.index}: {reason}; {advice}"
                ),
            )
            self._preparer.lane_lost(node, lane, reason)
        # Counted last: a caller that sees the count relies on no task being sent there any more.
        self._dispatcher.counts.nodes_lost += 1
        if node.state == "failed":
            self._dispatcher.fail_unrunnable()
            self._preparer.node_failed()
        elif node.state == "lost":
            self._startup.start_again(node)
