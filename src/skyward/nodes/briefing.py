"""A briefing: what the client tells a node about the pool and about the other nodes."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from skyward.context import InstanceInfo, Peer
from skyward.errors import ConfigurationError
from skyward.nodes.keeper import identity
from skyward.nodes.node import Node, Roster
from skyward.nodes.spec import PoolSpec
from skyward.wire.identity import Authority, node_name
from skyward.wire.messages import Topology
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
        """`client` is the tenant that this client is, in a pool that stays."""
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
