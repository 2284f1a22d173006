"""A briefing: what the client tells a node about the pool, and when its workers prepare.

A worker enters the plugins' hooks before it gets its first task. The workers of a distributed
plugin are prepared together, as one group. A process joins only one group: when a member is lost,
or the pool's size changes, each other member is replaced when it is idle, and the new workers form
a new group. Until then, a member whose task waits for tasks that it has started runs these: they
would wait for the new group, and the new group for them.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence

from skyward.calls.dispatch import Dispatcher
from skyward.calls.lane import Lane
from skyward.calls.loop import Loop
from skyward.calls.task import Task
from skyward.console import Console
from skyward.context import InstanceInfo, Peer
from skyward.errors import ConfigurationError, PluginError
from skyward.nodes.kept import identity
from skyward.nodes.node import Node, Roster
from skyward.nodes.spec import PoolSpec, Preparations
from skyward.wire.handshake import Authority, node_name
from skyward.wire.messages import Prepare, Topology
from skyward.worker.config import AgentConfig

TTL_GRACE_SECONDS = 15.0
"""How long after the pool's time to live an agent ends itself: usually the client ends it."""


class Briefing:
    """Writes the briefing of every node, from the pool's state at that moment."""

    def __init__(
        self,
        pool_id: str,
        spec: PoolSpec,
        authority: Authority | None,
        roster: Roster,
        *,
        clustered: bool,
        client: str = "",
    ) -> None:
        """`client` is the tenant that this client is, in a kept pool."""
        self._client = client
        self._id = pool_id
        self._spec = spec
        self._authority = authority
        self._roster = roster
        self._clustered = clustered
        self._head_port = _free_port()
        self._telling = threading.Lock()
        self._peers: tuple[Peer, ...] = ()
        self._began = time.monotonic()

    def agent_config(self, node: Node, blob_cap: int) -> AgentConfig:
        """The configuration that a node's agent starts with."""
        worker = self._spec.worker
        per_node = self.workers_on(node)
        credentials = None
        if self._authority is not None:
            issued = self._authority.issue(node_name(self._id, node.index))
            credentials = (issued.authority, issued.certificate, issued.key)
        return AgentConfig(
            pool=self._id,
            node=node.index,
            address="",
            folder="",
            workers=per_node,
            slots=worker.concurrency,
            threads=worker.executor == "thread",
            compute_pool=[self.compute_pool(node, index) for index in range(per_node)],
            visible=[
                str(index) if worker.per_node == "accelerator" else "" for index in range(per_node)
            ],
            env=dict(self._spec.request.image.env),
            search_path=[path or os.getcwd() for path in sys.path],
            working_directory=os.getcwd(),
            orphan_timeout=self._spec.options.orphan_timeout,
            ttl=self._ttl_left(),
            client_pid=0,
            credentials=credentials,
            blob_cap=blob_cap,
            plugged=bool(self._spec.preparations),
            hooks_first=bool(self._spec.preparations.for_nodes),
            own_directory=any(not folder.root for folder in self._spec.folders),
            private=node.host.address if self._clustered else "",
            client=self._client,
            identity=identity() if self._client else {},
        )

    def _ttl_left(self) -> float | None:
        ttl = self._spec.request.ttl
        if ttl is None:
            return None
        return max(0.0, self._began + ttl - time.monotonic()) + TTL_GRACE_SECONDS

    def workers_on(self, node: Node) -> int:
        """How many workers a node has."""
        per_node = self._spec.worker.per_node
        if per_node != "accelerator":
            return per_node
        if not node.host.accelerators:
            raise ConfigurationError(
                f"Worker(per_node='accelerator'): node {node.index} has no accelerator; give a "
                "number of workers instead"
            )
        return node.host.accelerators

    def compute_pool(self, node: Node, worker: int, group: list[Node] | None = None) -> str:
        """The value of `instance_info` on a worker, in a group of these nodes or of all nodes."""
        nodes = self._roster.members(but_also=node) if group is None else group
        place = nodes.index(node) if node in nodes else node.index
        return self._compute_pool(node, worker, nodes, self._peers_of(nodes), place)

    def _peers_of(self, nodes: list[Node]) -> tuple[Peer, ...]:
        """The nodes with their addresses; the same object as before if nothing has changed."""
        peers = tuple(Peer(each.index, each.host.address) for each in nodes)
        if peers != self._peers:
            self._peers = peers
        return self._peers

    def _compute_pool(
        self, node: Node, worker: int, nodes: list[Node], peers: tuple[Peer, ...], place: int
    ) -> str:
        return InstanceInfo(
            node=node.index,
            worker=worker,
            total_nodes=len(nodes),
            workers_per_node=self.workers_on(node),
            head_addr=nodes[0].host.address if nodes else "127.0.0.1",
            head_port=self._head_port,
            accelerators=node.host.accelerators,
            accelerator=node.host.accelerator,
            peers=peers if self._spec.options.cluster else (),
            job_id=self._id,
            hostname=node.host.hostname,
            place=place,
            state=self._state_for(node),
        ).to_json()

    def _state_for(self, node: Node) -> str:
        """Where a node's processes reach the agent of node 0, which has the shared state."""
        owner = self._roster.get(0)
        if owner is None or not owner.host.endpoint:
            return ""
        if owner is not node and not self._spec.options.cluster:
            return ""
        return " ".join(owner.host.routes.for_peers(owner.host.endpoint))

    def tell_all(self) -> None:
        """Tell every worker that nodes have come or gone."""
        # One thread at a time, so that the last message to a worker has the latest state.
        with self._telling:
            # Found once for all: each node is told of each other one.
            nodes = self._roster.members()
            peers = self._peers_of(nodes)
            for place, node in enumerate(nodes):
                for worker in range(self.workers_on(node)):
                    told = self._compute_pool(node, worker, nodes, peers, place)
                    message = Topology(worker, told)
                    node.tell(message)
                    for lane in list(node.lanes.values()):
                        if lane.worker == worker and not lane.lost:
                            lane.tell(message)

    def meet_at(self, port: int) -> None:
        """Set the port at which the workers of a group meet on the first node."""
        self._head_port = port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# Preparing workers.


IDLE_LOOK_SECONDS = 0.02
GATHER_SECONDS = 10.0
"""How much longer a group waits for missing nodes when as many are ready as the pool needs."""
ATTEMPTS = 3
"""How often a worker's preparation may fail before its node counts as lost."""
HELD_SECONDS = 3.0
"""After so long, the user is told which tasks keep a new group from forming."""
HELD_NAMED = 4
"""How many of them are named."""


class Preparer:
    """Decides when each worker is told to prepare."""

    def __init__(
        self,
        preparations: Preparations,
        loop: Loop,
        roster: Roster,
        briefing: Briefing,
        dispatcher: Dispatcher,
        console: Console,
    ) -> None:
        self._loop, self._roster, self._briefing = loop, roster, briefing
        self._dispatcher, self._console = dispatcher, console
        self.together = preparations.together
        self._for_nodes = preparations.for_nodes
        self._for_processes = preparations.for_processes
        self._attempts = 0
        """How often workers were prepared since the last time that all of them were ready."""
        self._gathering = False
        """Whether a timer runs that will form a group without the missing nodes."""
        self._waits_for_all = True
        self._group_name = ""
        """Names the group of workers that was formed last, and says how many there are."""
        self._ends_next = False
        """Whether the group ends at the next broadcast."""
        self._lock = threading.RLock()

    # Nodes.

    def node_up(self, node: Node) -> None:
        """Prepare a node whose agent is connected."""
        if self._for_nodes:
            node.tell(Prepare("", self._for_nodes))
        else:
            self.node_prepared(node, "")

    def node_prepared(self, node: Node, problem: str) -> None:
        """Take an agent's answer: it has entered the hooks, or a hook failed."""
        if problem:
            node.plugin_failed(PluginError(f"node {node.index}: {problem}"))
            return
        node.enter_hooks()
        for lane in list(node.lanes.values()):
            self.lane_up(node, lane)

    # Workers.

    def lane_up(self, node: Node, lane: Lane) -> None:
        """Prepare an executor, after it has connected and its node is prepared."""
        if not node.prepared:
            return
        if not self._for_processes:
            self._usable(node, lane)
        elif not self.together and lane.preparation.group:
            lane.preparation.begin()
            self._usable(node, lane)
        elif not self.together:
            self._tell(node, lane)
        else:
            self._group()

    def lane_prepared(self, node: Node, lane: Lane, problem: str) -> None:
        """Take an executor's answer: it has entered the hooks, or a hook failed."""
        if not problem:
            self._usable(node, lane)
            return
        failure = PluginError(f"{lane.where}: {problem}")
        with self._lock:
            if not self.together:
                self._attempts += 1
            give_up = self._attempts >= ATTEMPTS or node.state == "starting"
        if give_up:
            node.plugin_failed(failure)
        else:
            lane.kill(str(failure))

    def _usable(self, node: Node, lane: Lane) -> None:
        with self._lock:
            if lane.lost or not lane.preparation.finish():
                return
            # First the number, since each of many nodes comes here once.
            if self._attempts and all(map(self._is_prepared, self._roster.nodes)):
                self._attempts = 0
        node.executor_ready(lane)

    def _tell(self, node: Node, lane: Lane, group: list[Node] | None = None) -> None:
        with self._lock:
            if not lane.preparation.begin():
                return
        told = self._briefing.compute_pool(node, lane.worker, group)
        lane.tell(Prepare(told, self._for_processes))

    # Groups.

    def _workers(self, node: Node) -> list[Lane]:
        """The connected workers of a node, in rank order."""
        count = self._briefing.workers_on(node)
        found = (node.lanes.get((worker, 0)) for worker in range(count))
        return [lane for lane in found if lane is not None]

    def _is_complete(self, node: Node) -> bool:
        if node.control is None or not node.prepared:
            return False
        return len(self._workers(node)) == self._briefing.workers_on(node)

    def _is_prepared(self, node: Node) -> bool:
        """Whether all workers of a node are prepared, or the node is missing for now."""
        if not node.joined and node.state != "starting":
            return True
        return self._is_complete(node) and all(w.preparation.done for w in self._workers(node))

    def _complete(self) -> list[Node]:
        """The nodes whose workers are all connected."""
        with self._roster.lock:
            return [node for node in self._roster.nodes if self._is_complete(node)]

    def _group(self) -> None:
        """Form a group if every worker is connected and none belongs to an earlier group.

        The group waits for a node that has never been ready only while the pool has too few nodes,
        and `GATHER_SECONDS` longer.
        """
        with self._lock, self._roster.lock:
            if self._roster.closed:
                return
            complete = self._complete()
            missing = [n for n in self._roster.nodes if n.is_expected and n not in complete]
            missing = [n for n in missing if n.joined or n.state == "starting"]
            if missing and (
                self._waits_for_all
                or len(complete) < self._roster.needed
                or any(node.joined for node in missing)
            ):
                self._gather(complete)
                return
            lanes = [(node, lane) for node in complete for lane in self._workers(node)]
            if not lanes:
                return
            if any(lane.preparation.begun for _, lane in lanes):
                self.regroup()
                return
            former = {lane.preparation.group for _, lane in lanes}
            if former != {""} and former != {_group_name(former, len(lanes))}:
                # Some belong to a group that an earlier client has formed, and that is no longer.
                for _, lane in lanes:
                    if lane.preparation.group:
                        lane.preparation.begin()
                self.regroup()
                return
            self._briefing.meet_at(lanes[0][1].port)
            if former != {""}:
                self._group_name = former.pop()
                for _, lane in lanes:
                    lane.preparation.begin()
            else:
                self._attempts += 1
                self._group_name = f"{secrets.token_hex(8)}:{len(lanes)}"
                for node, lane in lanes:
                    self._tell(node, lane, complete)
                return
        for node, lane in lanes:
            self._usable(node, lane)

    def entered_by(self, node: Node) -> str:
        """Names the hooks that all executors of a node have entered; empty if some have not.

        In a group, all workers of all nodes must have.
        """
        if not self._for_processes:
            return ""
        nodes = [each for each in self._roster.nodes if each.joined] if self.together else [node]
        if not all(map(self._is_prepared, nodes)):
            return ""
        if any(lane.preparation.replaced for each in nodes for lane in each.lanes.values()):
            return ""
        return self._group_name if self.together else "each"

    def _gather(self, complete: list[Node]) -> None:
        """Start the timer that forms a group of the connected workers."""
        if self._gathering or len(complete) < self._roster.needed:
            return
        self._gathering = True

        def over() -> None:
            self._waits_for_all = False
            self._group()

        self._loop.later(GATHER_SECONDS, over)

    def node_failed(self) -> None:
        """Form a group without a node that has failed, if all others are there."""
        if self.together and self._for_processes:
            self._group()

    def lane_lost(self, node: Node, lane: Lane, reason: str) -> None:
        """Handle the loss of a worker; if it was a member of a group, the group ends."""
        preparation = lane.preparation
        if preparation.begun and not preparation.done and not preparation.replaced:
            self.lane_prepared(node, lane, f"its process ended in a plugin's hook: {reason}")
        if self.together and preparation.begun:
            self.regroup()

    def regroup(self) -> None:
        """Replace every member of the group, each when it is idle; tasks then wait for new ones."""
        self._ends_next = False
        if not self.together or self._roster.closed:
            return
        with self._roster.lock:
            lanes = [(n, lane) for n in self._roster.nodes for lane in n.lanes.values()]
        ends = False
        for node, lane in lanes:
            if not lane.preparation.begun:
                continue
            with self._lock:
                first = lane.preparation.replace()
            if first:
                ends = True
                self._dispatcher.drain(lane, nested=True)
                self._replace_when_idle(node, lane)
        if ends:
            self._loop.later(HELD_SECONDS, self._tell_held)

    def leave(self, tasks: Sequence[Task], *, at_next_broadcast: bool) -> bool:
        """End the group that tasks of a broadcast have run in; False if it is over."""
        loads = {task.load for task in tasks}
        if all(lane.load not in loads or lane.preparation.replaced for lane in self._lanes()):
            return False
        if at_next_broadcast:
            self._ends_next = True
        else:
            self.regroup()
        return True

    def begin_broadcast(self) -> bool:
        """Form a new group if that was put off until the next broadcast; returns whether it was."""
        put_off = self._ends_next
        if put_off:
            self.regroup()
        return put_off

    def stranded(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks that cannot run: in the former group no more, and in a new one not with others.

        Others of them run in the former group; or a task of it, which has to end before there is a
        new group, waits for them.
        """
        former = {lane.load for lane in self._lanes() if lane.preparation.replaced}
        left = [task for task in tasks if not task.done]
        split = any(task.on_executor and task.load in former for task in left)
        return [task for task in left if former and not task.on_executor and (split or task.depth)]

    def _lanes(self) -> list[Lane]:
        with self._roster.lock:
            return [lane for node in self._roster.nodes for lane in node.lanes.values()]

    def _tell_held(self) -> None:
        """Say which tasks keep a new group from forming."""
        held = [
            f"{task.name} on {lane.where}"
            for lane in self._lanes()
            if lane.preparation.replaced and not lane.lost
            for task in lane.load.started()
        ]
        if held and not self._roster.closed:
            more = f" and {len(held) - HELD_NAMED} more" if len(held) > HELD_NAMED else ""
            self._console.note(
                "the workers form a new group, in which other calls run, after the end of "
                f"{', '.join(held[:HELD_NAMED])}{more}"
            )

    def _replace_when_idle(self, node: Node, lane: Lane) -> None:
        if lane.lost:
            return
        if lane.tasks:
            self._loop.later(IDLE_LOOK_SECONDS, lambda: self._replace_when_idle(node, lane))
            return
        node.kill(lane, "the group of workers is made anew")


def _group_name(former: set[str], workers: int) -> str:
    """The name of the group that so many workers form, if they have entered hooks as one group."""
    return next((each for each in former if each.endswith(f":{workers}")), "")
