"""Scaling: how many nodes an elastic pool should have, by its waiting tasks and idle nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skyward.calls.dispatch import Dispatcher
from skyward.console import Console
from skyward.errors import SkywardError
from skyward.spec import Nodes, Options

BACKLOG_SECONDS = 1.0
"""How long tasks must wait before the pool starts another node."""


class Scaler:
    """Grows a pool while tasks wait, and shrinks it after `idle_timeout`, within its bounds."""

    def __init__(
        self,
        nodes: Nodes,
        options: Options,
        dispatcher: Dispatcher,
        console: Console,
        *,
        grow: Callable[[int], bool],
        shrink: Callable[[Callable[[int], int]], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`grow` begins to add nodes and returns at once.

        `shrink` waits for running tasks, and for a resize by the user; only then it asks, with the
        number of nodes, how many are to stay, and returns how many there are then.
        """
        self._nodes, self._options, self._dispatcher = nodes, options, dispatcher
        self._console, self._grow, self._shrink = console, grow, shrink
        self._clock = clock
        self._no_backlog = self._last_busy = clock()
        self._there = 0
        self._shrinking = False

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

    def look(self, count: int, *, coming: int, slots: int) -> None:
        """Grow or shrink if necessary; called at every beat with the numbers of nodes.

        `coming` is how many of the nodes have never been ready, `slots` how many tasks a node runs
        at once.
        """
        if not self._nodes.elastic:
            return
        now = self._clock()
        backlog = self._dispatcher.backlog
        busy = backlog or any(lane.tasks for lane in self._dispatcher.lanes)
        if not backlog or count - coming > self._there:
            # A node that has just become ready may not have got its tasks yet.
            self._no_backlog = now
        self._there = count - coming
        if busy:
            self._last_busy = now
        if self._shrinking:
            return
        if backlog and (not count or now - self._no_backlog > BACKLOG_SECONDS):
            wanted = min(self._nodes.ceiling, count - coming + -(-backlog // slots))
            if wanted > count:
                self._grow(wanted)
        elif not busy and self.target(count) < count:
            self._shrinking = True
            threading.Thread(target=self._work, name="skyward-scaling", daemon=True).start()

    def _work(self) -> None:
        try:
            if self._shrink(self.target) == 0:
                self._console.note("the pool has no nodes now; the next call starts one")
        except SkywardError as problem:
            self._console.note(f"an idle node could not be removed: {problem}")
        finally:
            self._shrinking = False
