"""Scaling: how many nodes an elastic pool should have, by its waiting tasks and idle nodes."""

from __future__ import annotations

import time
from collections.abc import Callable

from skyward.calls.dispatch import Dispatcher
from skyward.spec import Nodes, Options

BACKLOG_SECONDS = 1.0
"""How long tasks must wait before the pool starts another node."""


class Scaler:
    """Says when a pool grows, because tasks wait, and shrinks after `idle_timeout`."""

    def __init__(
        self,
        nodes: Nodes,
        options: Options,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._options, self._dispatcher = nodes, options, dispatcher
        self._clock = clock
        self._no_backlog = self._last_busy = clock()
        self._there = 0

    def bound(self, nodes: Nodes) -> Nodes:
        """Set new bounds, and return the old ones; the idle time counts from now."""
        old, self._nodes = self._nodes, nodes
        self.keep()
        return old

    def keep(self) -> None:
        """Count the idle time from now: the user has just said how many nodes there should be."""
        self._last_busy = self._clock()

    def target(self, count: int) -> int:
        """How many of so many nodes are to stay: one less when all have been idle for long."""
        if self._clock() - self._last_busy <= self._options.idle_timeout:
            return count
        return min(count, max(self._nodes.floor, count - 1))

    def may_grow(self, count: int) -> bool:
        """Whether a pool with so many nodes gets more while tasks wait."""
        return self._nodes.elastic and count < self._nodes.ceiling

    def look(self, count: int, *, coming: int, slots: int) -> int:
        """How many nodes a pool with so many should have; called at every beat.

        `coming` is how many of the nodes have never been ready, `slots` how many tasks a node runs
        at once. Before it shrinks, the pool asks `target`: that may take a while.
        """
        if not self._nodes.elastic:
            return count
        now = self._clock()
        backlog = self._dispatcher.backlog
        busy = backlog or any(lane.tasks for lane in self._dispatcher.lanes)
        if not backlog or count - coming > self._there:
            # A node that has just become ready may not have got its tasks yet.
            self._no_backlog = now
        self._there = count - coming
        if busy:
            self._last_busy = now
        if backlog and (not count or now - self._no_backlog > BACKLOG_SECONDS):
            return max(count, min(self._nodes.ceiling, count - coming + -(-backlog // slots)))
        return count if busy else self.target(count)
