"""Capacity: the workers of a pool, and how many tasks they run at once."""

from __future__ import annotations

from skyward.nodes.briefing import Briefing
from skyward.nodes.node import Node
from skyward.nodes.roster import Roster
from skyward.nodes.spec import PoolSpec


class Capacity:
    """Counts the workers, executors and slots of a pool."""

    def __init__(self, spec: PoolSpec, roster: Roster, briefing: Briefing) -> None:
        self._spec, self._roster, self._briefing = spec, roster, briefing

    def workers(self) -> list[tuple[int, int]]:
        """Every (node, worker) that serves or will come back, in rank order."""
        return [
            (node.index, worker)
            for node in self._roster.nodes
            if node.joined
            for worker in range(self._briefing.workers_on(node))
        ]

    def slots(self) -> int:
        """How many tasks the pool can run at once."""
        return max(1, len(self.workers()) * self._spec.worker.concurrency)

    def slots_of_a_node(self) -> int:
        """How many tasks a node runs at once, or probably will, before there is one."""
        there = len(self._roster.nodes) - len(self._roster.coming)
        if there:
            return -(-self.slots() // there)
        return self._workers_of_a_node() * self._spec.worker.concurrency

    def executors_on(self, node: Node) -> int:
        """How many executors a node has."""
        return self._briefing.workers_on(node) * self._processes

    def executors_of_a_node(self) -> int:
        """How many executors a node will probably have, before there is one."""
        return self._workers_of_a_node() * self._processes

    def _workers_of_a_node(self) -> int:
        per_node, accelerator = self._spec.worker.per_node, self._spec.accelerator
        if per_node != "accelerator":
            return per_node
        return 1 if accelerator is None else accelerator.count

    @property
    def _processes(self) -> int:
        """How many executors a worker has."""
        worker = self._spec.worker
        return 1 if worker.executor == "thread" else worker.concurrency
