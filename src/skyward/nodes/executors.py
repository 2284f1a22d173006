"""Executors: the client connects to them, watches them, and fails their tasks when they end."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from skyward.calls.dispatch import Dispatcher
from skyward.calls.lane import Lane
from skyward.calls.loop import Loop
from skyward.calls.relays import Neighbor, Relays
from skyward.calls.scheduler import Load
from skyward.calls.standing import Standing
from skyward.calls.task import Task
from skyward.console import Console
from skyward.errors import PoolStartError, SkywardError, WorkerDiedError
from skyward.nodes.capacity import Capacity
from skyward.nodes.contact import Approach, Contacts, connecting
from skyward.nodes.node import Node
from skyward.nodes.preparing import Preparer
from skyward.nodes.roster import Roster
from skyward.spec import Worker
from skyward.wire.channel import Channel
from skyward.wire.connecting import host_and_port
from skyward.wire.identity import Credentials, node_name
from skyward.wire.messages import ExecutorDown, ExecutorUp, Hello, Kill
from skyward.wire.versions import my_versions

NEAR_SECONDS = 60.0
"""How long an executor on this machine may take to greet: it lives, as its agent has announced it.

It may wait for a processor; there is no second attempt, and with the process its state would go.
"""
MANY = 20
"""For so many executors of a node or more, the console shows how many there are while it starts."""
LAST_RESULTS_SECONDS = 1.0
"""After so long without another byte from a dead executor, its tasks count as lost."""


class Executors:
    """The lanes of a pool's nodes."""

    def __init__(
        self,
        pool_id: str,
        worker: Worker,
        capacity: Capacity,
        roster: Roster,
        loop: Loop,
        dispatcher: Dispatcher,
        console: Console,
        contacts: Contacts,
        preparer: Preparer,
        *,
        credentials: Credentials | None,
        clustered: bool,
        give_up: Callable[[Node, PoolStartError], None],
        look: Callable[[Lane, Task], Standing],
    ) -> None:
        """`give_up` is called with a node that cannot start, and with the reason.

        `look` finds a task on its worker.
        """
        self._id, self._worker, self._roster = pool_id, worker, roster
        self._capacity = capacity
        self._loop, self._dispatcher, self._console = loop, dispatcher, console
        self._contacts, self._preparer = contacts, preparer
        self._credentials, self._versions = credentials, my_versions()
        self._relays = Relays() if clustered else None
        self._give_up, self._look = give_up, look

    def up(self, node: Node, up: ExecutorUp) -> None:
        """Connect to an executor that its agent has announced; waits for the first attempt."""
        near = node.host.routes.near(up.endpoint)
        approach = Approach(
            near or node.host.routes.choose(up.endpoint),
            Hello(self._id, "data", versions=self._versions, pid=os.getpid()),
            None if near else self._credentials,
            node_name(self._id, node.index),
            node.host.routes.dial,
            near_seconds=NEAR_SECONDS,
        )
        self._attempt(node, up, approach, node.control)

    def _attempt(
        self, node: Node, up: ExecutorUp, approach: Approach, control: Channel | None
    ) -> None:
        try:
            channel, _ = approach.attempt()
        except (OSError, EOFError, SkywardError) as problem:
            pause = approach.pause_after(problem)
            persists = not self._roster.closed and node.control is control is not None
            if pause is not None and persists:
                # Not on this thread: many nodes may be out of reach at a time.
                connecting.later(pause, lambda: self._attempt(node, up, approach, control))
            elif not self._roster.closed and node.state == "starting":
                self._give_up(node, self._unreachable(node, approach, problem))
            elif not self._roster.closed:
                # The agent starts a new executor, and the client then connects to that one.
                node.tell(Kill(up.worker, up.slot, up.pid, f"it was unreachable: {problem}"))
            return
        self._add_lane(node, up, channel)

    def _unreachable(self, node: Node, approach: Approach, problem: Exception) -> PoolStartError:
        if approach.is_within_host:
            there, all_of_them = len(node.lanes), self._capacity.executors_on(node)
            return PoolStartError(
                f"node {node.index}: {there} of {all_of_them} worker processes are connected, and "
                f"another does not answer: {problem}; if that is too many for this machine, ask "
                "for fewer with sky.Worker(concurrency=...), or for threads of one process with "
                "executor='thread'"
            )
        return PoolStartError(
            f"node {node.index}: its worker cannot be reached, though its agent can: "
            f"{problem}; if a firewall is in between, let all ports through, or use "
            "sky.SSH(..., direct=False), which takes that of SSH alone"
        )

    def _add_lane(self, node: Node, up: ExecutorUp, channel: Channel) -> None:
        worker = self._worker
        if channel.shares_memory:
            self._dispatcher.packer.share()
        capacity = worker.concurrency if worker.executor == "thread" else 1
        address = _among(up.endpoint, node.host.address)
        lane = Lane(
            Load(node.index, up.worker, up.slot, capacity, open=False),
            channel,
            self._dispatcher.packer.store,
            pid=up.pid,
            port=up.port,
            neighbor=Neighbor(address, node_name(self._id, node.index)),
            relays=self._relays,
            kill=node.kill,
            look=self._look,
            on_release=self._dispatcher.note_release,
            on_prepared=lambda lane, problem: self._preparer.lane_prepared(node, lane, problem),
        )
        lane.preparation.group = up.group
        if self._roster.closed or not node.add_lane(lane):
            channel.close()
            return
        self._show_progress(node)
        self._contacts.watch_lane(lane, lambda reason: self._lose(node, lane, reason))
        self._loop.watch(
            channel,
            functools.partial(self._dispatcher.receive, lane),
            lambda problem: self._lane_lost(node, lane, problem),
        )
        self._preparer.lane_up(node, lane)

    def _show_progress(self, node: Node) -> None:
        """Show how many of a node's executors are there, at every tenth, if they are many."""
        count, expected = len(node.lanes), self._capacity.executors_on(node)
        tenth = count * 10 // expected > (count - 1) * 10 // expected
        if expected >= MANY and count < expected and tenth and node.state == "starting":
            self._console.phase(node.index, f"starting workers: {count} of {expected}")

    def _lane_lost(self, node: Node, lane: Lane, problem: BaseException) -> None:
        """Handle the end of a connection; the agent reports why, unless it is gone, too."""
        if lane.lost or self._roster.closed:
            return
        self._dispatcher.drain(lane)
        resumes = lane.channel.resumes
        lane.close()
        if resumes:
            # The process waits for the client to reconnect, but the client will not reconnect.
            node.kill(lane, f"its connection was given up: {problem}")
        if lane.end_reason:
            self._lose(node, lane, lane.end_reason)
            return
        # The agent's report follows soon; if none comes, the link itself broke.
        self._loop.later(2.0, lambda: self._lose(node, lane, "its connection was lost"))

    def down(self, node: Node, down: ExecutorDown) -> None:
        """Handle the agent's report that an executor has ended."""
        lane = node.lanes.get((down.worker, down.slot))
        if lane is not None and lane.pid == down.pid:
            # Results that the executor sent before it ended come before the end of its connection,
            # unless a process that it left behind keeps the connection open.
            lane.process_ended(down.reason)
            if lane.lost or lane.channel.exhausted:
                self._loop.later(0.0, lambda: self._lose(node, lane, down.reason))
            else:
                self._lose_after_results(node, lane, down.reason)
        if not down.restarting:
            failure = PoolStartError(
                f"node {node.index} worker {down.worker} cannot run: {down.reason}"
            )
            if node.state == "starting":
                self._give_up(node, failure)
            else:
                self._console.note(str(failure))
        elif node.state == "starting" and lane is None:
            self._console.note(f"node {node.index}: worker {down.worker}: {down.reason}")

    def _lose_after_results(self, node: Node, lane: Lane, reason: str) -> None:
        """Remove an executor that is gone once nothing comes of it any more."""
        received = lane.channel.bytes_received

        def look() -> None:
            if lane.lost or lane.channel.bytes_received == received:
                self._lose(node, lane, reason)
            else:
                self._lose_after_results(node, lane, reason)

        self._loop.later(LAST_RESULTS_SECONDS, look)

    def _lose(self, node: Node, lane: Lane, reason: str) -> None:
        """Remove an executor that is gone; its tasks fail or are retried."""
        if not node.remove_lane(lane):
            return
        if lane.tasks:
            self._dispatcher.counts.workers_died += 1
        self._preparer.lane_lost(node, lane, reason)
        self._loop.forget(lane.channel)
        self._dispatcher.lose(
            lane,
            lambda task: WorkerDiedError(f"{task.name} lost its worker on {lane.where}: {reason}"),
        )


def _among(endpoints: str, address: str) -> str:
    """The endpoint of an executor that has its node's address for other nodes."""
    wanted = address.removeprefix("[").removesuffix("]")
    places = (each for each in endpoints.split() if each.startswith("tcp:"))
    return next((each for each in places if host_and_port(each)[0] == wanted), "")
