"""Executors: connected to as their agents announce them, watched, and buried when they end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from skyward.console import Console
from skyward.errors import PoolStartError, SkywardError, WorkerDiedError
from skyward.pool.contact import Contacts, reach
from skyward.pool.dispatch import Dispatcher
from skyward.pool.lane import Lane
from skyward.pool.loop import Loop
from skyward.pool.node import Node
from skyward.pool.preparing import Preparer
from skyward.pool.relays import Relays
from skyward.spec import Worker
from skyward.wire import messages
from skyward.wire.blobs import Mapped
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.identity import Credentials, host_and_port, node_name
from skyward.wire.messages import ExecutorDown, ExecutorUp, Hello, Kill, Prepared

LAST_RESULTS_SECONDS = 1.0
"""How long a dead executor's connection is read on before its tasks count as lost."""


class Executors:
    """The lanes of a pool's nodes."""

    def __init__(
        self,
        pool_id: str,
        worker: Worker,
        loop: Loop,
        dispatcher: Dispatcher,
        console: Console,
        contacts: Contacts,
        *,
        credentials: Credentials | None,
        versions: dict[str, str],
        clustered: bool,
        lock: threading.RLock,
        is_closed: Callable[[], bool],
        per_node: Callable[[Node], int],
        fail: Callable[[Node, PoolStartError], None],
    ) -> None:
        """`lock` guards the nodes' states; `fail` gives a node up that cannot start."""
        self.preparer: Preparer
        self._id, self._worker = pool_id, worker
        self._loop, self._dispatcher, self._console = loop, dispatcher, console
        self._contacts = contacts
        self._credentials, self._versions = credentials, versions
        self._relays = Relays() if clustered else None
        self._lock = lock
        self._is_closed, self._per_node, self._fail = is_closed, per_node, fail

    def up(self, node: Node, up: ExecutorUp) -> None:
        """Connect to one that has been announced; takes as long as that does."""
        hello = Hello(self._id, "data", versions=self._versions, pid=os.getpid())
        control = node.control
        try:
            channel, _ = reach(
                node.route(up.endpoint),
                hello,
                self._credentials,
                node_name(self._id, node.index),
                node.dial,
                persist=lambda: not self._is_closed() and node.control is control is not None,
            )
        except (OSError, EOFError, SkywardError) as problem:
            if not self._is_closed() and node.state == "starting":
                self._fail(
                    node,
                    PoolStartError(
                        f"node {node.index}: its worker cannot be reached, though its agent can: "
                        f"{problem}; if a firewall is in between, let all ports through, or use "
                        "sky.SSH(..., direct=False), which takes that of SSH alone"
                    ),
                )
            elif not self._is_closed():
                # A new one takes its place, and is tried in turn.
                node.tell(Kill(up.worker, up.slot, up.pid, f"it was unreachable: {problem}"))
            return
        self._add_lane(node, up, channel)

    def _add_lane(self, node: Node, up: ExecutorUp, channel: Channel) -> None:
        worker = self._worker
        capacity = worker.concurrency if worker.executor == "thread" else 1
        lane = Lane(
            node=node.index,
            worker=up.worker,
            slot=up.slot,
            capacity=capacity,
            window=capacity,
            pid=up.pid,
            channel=channel,
            store=self._dispatcher.packer.store,
            kill=lambda reason: node.kill(lane, reason),
            port=up.port,
            peer=_among(up.endpoint, node.machine.address),
            certified=node_name(self._id, node.index),
            relays=self._relays,
            open=False,
        )
        lane.mapped = Mapped(lambda: self._dispatcher.releasing.append(lane))
        with self._lock:
            if self._is_closed() or node.state in ("lost", "stopped"):
                channel.close()
                return
            node.lanes[up.worker, up.slot] = lane
        self._contacts.watch_lane(lane, lambda reason: self._bury(node, lane, reason))
        self._loop.watch(
            channel,
            lambda frame: self._on_data(node, lane, frame),
            lambda problem: self._lane_lost(node, lane, problem),
        )
        self.preparer.lane_up(node, lane)

    def _on_data(self, node: Node, lane: Lane, frame: Frame) -> None:
        if frame.kind == Prepared.KIND:
            prepared = messages.decode_as(Prepared, frame.kind, frame.meta)
            self.preparer.lane_prepared(node, lane, prepared.problem)
        else:
            self._dispatcher.receive(lane, frame)

    def ready(self, node: Node, lane: Lane) -> None:
        """An executor can be given tasks; with the last one, the node is ready."""
        self._dispatcher.add(lane, usable=node.state != "draining" and not lane.replaced)
        processes = 1 if self._worker.executor == "thread" else self._worker.concurrency
        expected = self._per_node(node) * processes
        with self._lock:
            prepared = sum(other.prepared for other in node.lanes.values())
            if node.state != "starting" or prepared != expected:
                return
            node.state = "ready"
            node.ready_since = time.monotonic()
            node.lost_since, node.waited_for = None, False
        node.ready.set()
        self._console.phase(node.index, "ready")

    def _lane_lost(self, node: Node, lane: Lane, problem: BaseException) -> None:
        """The connection ended; why, the agent will say, if it is not gone itself."""
        if lane.lost or self._is_closed():
            return
        self._dispatcher.drain(lane)
        resumes = lane.channel.resumes
        lane.close()
        if resumes:
            # Its process waits for us to come back, which we will not.
            node.kill(lane, f"its connection was given up: {problem}")
        if lane.end_reason:
            self._bury(node, lane, lane.end_reason)
            return
        # The agent's report follows within moments; without one, the link itself broke.
        self._loop.later(2.0, lambda: self._bury(node, lane, "its connection was lost"))

    def down(self, node: Node, down: ExecutorDown) -> None:
        """One has ended, as its agent says."""
        lane = node.lanes.get((down.worker, down.slot))
        if lane is not None and lane.pid == down.pid:
            # Results it sent before it died come before the end of its connection, unless a
            # process it left behind keeps that open.
            lane.end_reason = down.reason
            over = lane.lost or lane.channel.exhausted
            seconds = 0.0 if over else LAST_RESULTS_SECONDS
            self._loop.later(seconds, lambda: self._bury(node, lane, down.reason))
        if not down.restarting:
            failure = PoolStartError(
                f"node {node.index} worker {down.worker} cannot run: {down.reason}"
            )
            if node.state == "starting":
                self._fail(node, failure)
            else:
                self._console.note(str(failure))
        elif node.state == "starting" and lane is None:
            self._console.note(f"node {node.index}: worker {down.worker}: {down.reason}")

    def _bury(self, node: Node, lane: Lane, reason: str) -> None:
        """An executor is gone for good."""
        with self._lock:
            if node.lanes.get((lane.worker, lane.slot)) is not lane:
                return
            del node.lanes[lane.worker, lane.slot]
        if lane.tasks:
            self._dispatcher.counts.workers_died += 1
        self.preparer.lane_lost(node, lane, reason)
        self._loop.forget(lane.channel)
        self._dispatcher.lose(
            lane,
            lambda task: WorkerDiedError(f"{task.name} lost its worker on {lane.where}: {reason}"),
        )


def _among(endpoints: str, address: str) -> str:
    """Of the places where an executor listens, the one at its node's address for the others."""
    wanted = address.removeprefix("[").removesuffix("]")
    places = (each for each in endpoints.split() if each.startswith("tcp:"))
    return next((each for each in places if host_and_port(each)[0] == wanted), "")
