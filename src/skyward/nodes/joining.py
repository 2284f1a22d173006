"""Joining: all nodes are told of nodes that are about to be ready; these are ready then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from skyward.console import Console
from skyward.nodes.briefing import Briefing
from skyward.nodes.node import Node


class Joining:
    """Makes nodes known that have come together, all at once.

    Many nodes may come at the same time, and all others must be told of each of them.
    """

    def __init__(self, briefing: Briefing, console: Console, ready: Callable[[Node], None]) -> None:
        """`ready` is called with each node that has become ready."""
        self._briefing, self._console, self._ready = briefing, console, ready
        self._nodes: deque[tuple[Node, int]] = deque()
        self._telling = threading.Lock()

    def add(self, node: Node, executors: int) -> None:
        """Note a node that is about to be ready, with the number of its executors."""
        self._nodes.append((node, executors))

    def tell(self) -> None:
        """Tell all nodes; if another thread does, it goes on with those that came meanwhile."""
        while self._nodes and self._telling.acquire(blocking=False):
            try:
                joined = [self._nodes.popleft() for _ in range(len(self._nodes))]
                self._briefing.tell_all()
                for node, executors in joined:
                    self.become_ready(node, executors)
            finally:
                self._telling.release()

    def become_ready(self, node: Node, executors: int) -> None:
        """Make a node ready if so many of its executors are prepared."""
        if node.become_ready(executors):
            self._console.phase(node.index, "ready")
            self._ready(node)
