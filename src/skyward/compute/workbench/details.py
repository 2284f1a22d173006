"""Details of a pool that stays: its nodes, clients, jobs, calls and values, as they are now."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from skyward.compute.workbench.jobs import jobs_of
from skyward.errors import SkywardError
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.occupancy import Occupancy, occupancy
from skyward.nodes.reaching import ReachedPool
from skyward.worker.kept_jobs import JobView

_PROBLEMS = (SkywardError, OSError, EOFError)
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class NodeDetails:
    """A node of the pool."""

    node: KeptNode
    answers: bool
    workers: int = 0
    """How many worker processes it has, for all clients."""


@dataclass(frozen=True, slots=True)
class PoolDetails:
    """A pool that stays."""

    record: KeptPool
    occupancy: Occupancy
    nodes: list[NodeDetails] = field(default_factory=list)
    jobs: list[JobView] = field(default_factory=list)
    """Jobs and calls by name, in the order in which they were made."""


def details_of(record: KeptPool) -> PoolDetails:
    """Ask the nodes of a pool what there is; those that do not answer are marked."""
    now = occupancy(record)
    try:
        pool = None if record.stopped else ReachedPool(record)
    except _PROBLEMS:
        pool = None
    if pool is None:
        return PoolDetails(record, now, [NodeDetails(node, False) for node in record.nodes])
    with pool, ThreadPoolExecutor(_AT_ONCE) as asking:
        nodes = list(asking.map(lambda node: _node(pool, node), record.nodes))
        jobs: list[JobView] = []
        with contextlib.suppress(*_PROBLEMS):
            jobs = jobs_of(pool, record.head)
    return PoolDetails(record, now, nodes, jobs)


def _node(pool: ReachedPool, node: KeptNode) -> NodeDetails:
    try:
        with pool.service(node.index, "about") as about:
            return NodeDetails(node, True, len(about.ask("facts")["executors"]))
    except _PROBLEMS:
        return NodeDetails(node, False)
