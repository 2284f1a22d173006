"""The roster: which nodes a pool has, and whether it is closed."""

from __future__ import annotations

import threading

from skyward.nodes.node import Node


class Roster:
    """The nodes of a pool, in the order of their indexes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards the list of nodes and their states."""
        self.nodes: list[Node] = []
        self.closed = False
        self.needed = 1
        """How many nodes the pool needs at least."""
        self._serves = False

    def need(self, count: int) -> None:
        """Set how many nodes the pool needs at least."""
        self.needed = count

    def add(self, nodes: list[Node]) -> None:
        """Add nodes that will be started."""
        with self.lock:
            self.nodes = [*self.nodes, *nodes]

    def remove(self, nodes: list[Node]) -> None:
        """Remove nodes that have left."""
        with self.lock:
            leaving = set(nodes)
            self.nodes = [node for node in self.nodes if node not in leaving]

    def get(self, index: int) -> Node | None:
        """The node of that index."""
        nodes = self.nodes
        if 0 <= index < len(nodes) and nodes[index].index == index:
            # As usual: only a pool from whose middle a node was removed has it elsewhere.
            return nodes[index]
        return next((node for node in nodes if node.index == index), None)

    def begin_serving(self) -> None:
        """Note that enough nodes are ready for the pool to serve."""
        self._serves = True

    @property
    def serves(self) -> bool:
        """Whether enough nodes have been ready for the pool to serve."""
        return self._serves

    def close(self) -> None:
        """Close the pool: no node is started any more."""
        with self.lock:
            self.closed = True

    def members(self, but_also: Node | None = None) -> list[Node]:
        """The nodes that know of each other.

        While a pool starts, these are all nodes. Later, these are the nodes that have been ready,
        and `but_also`, which is about to be ready.
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
