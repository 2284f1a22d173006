"""The roster: which nodes a pool has, and whether it is closed."""

from __future__ import annotations

import threading

from skyward.nodes.node import Node


class Roster:
    """The nodes of a pool, in the order of their indexes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards this list and the states of its nodes."""
        self.nodes: list[Node] = []
        self.closed = False
        self.needed = 1
        """With fewer nodes the pool is of no use."""
        self._serves = False

    def need(self, count: int) -> None:
        """Say without how many nodes the pool is of no use."""
        self.needed = count

    def add(self, nodes: list[Node]) -> None:
        """Nodes have been asked for."""
        with self.lock:
            self.nodes = [*self.nodes, *nodes]

    def remove(self, nodes: list[Node]) -> None:
        """Nodes have left."""
        with self.lock:
            self.nodes = [node for node in self.nodes if node not in nodes]

    def get(self, index: int) -> Node | None:
        """The node of that index."""
        return next((node for node in self.nodes if node.index == index), None)

    def begin_serving(self) -> None:
        """Enough nodes are ready for the pool to be used."""
        self._serves = True

    @property
    def serves(self) -> bool:
        """Whether enough nodes have been ready for the pool to be used."""
        return self._serves

    def close(self) -> None:
        """Nothing is started any more."""
        with self.lock:
            self.closed = True

    def members(self, but_also: Node | None = None) -> list[Node]:
        """The nodes that know of each other.

        While a pool starts, these are all nodes; later those that have been ready, and `but_also`,
        which is about to be.
        """
        with self.lock:
            return [
                node
                for node in self.nodes
                if node.joined or node is but_also or (not self._serves and node.failure is None)
            ]

    @property
    def coming(self) -> list[Node]:
        """The nodes that have never been ready."""
        return [node for node in self.nodes if not node.joined]
