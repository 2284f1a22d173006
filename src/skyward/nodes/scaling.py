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
        shrink: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`grow` begins to add nodes and returns at once; `shrink` waits for running tasks."""
        self._nodes, self._options, self._dispatcher = nodes, options, dispatcher
        self._console, self._grow, self._shrink = console, grow, shrink
        self._clock = clock
        self._no_backlog = self._last_busy = clock()
        self._shrinking = False

    def bound(self, nodes: Nodes) -> None:
        """Set new bounds."""
        self._nodes = nodes

    def look(self, count: int, *, coming: int, slots: int) -> None:
        """Grow or shrink if necessary; called at every beat with the numbers of nodes.

        `coming` is how many of the nodes have never been ready, `slots` how many tasks a node runs
        at once.
        """
        if not self._nodes.elastic or self._shrinking:
            return
        now = self._clock()
        backlog = self._dispatcher.backlog
        busy = backlog or any(lane.tasks for lane in self._dispatcher.lanes)
        if not backlog:
            self._no_backlog = now
        if busy:
            self._last_busy = now
        if backlog and now - self._no_backlog > BACKLOG_SECONDS:
            wanted = min(self._nodes.ceiling, count - coming + -(-backlog // slots))
            if wanted > count:
                self._grow(wanted)
        elif not busy and now - self._last_busy > self._options.idle_timeout:
            wanted = max(self._nodes.floor, count - 1)
            if wanted < count:
                self._shrinking = True
                threading.Thread(
                    target=self._work, args=(wanted,), name="skyward-scaling", daemon=True
                ).start()

    def _work(self, count: int) -> None:
        try:
            self._shrink(count)
        except SkywardError as problem:
            self._console.note(f"scaling to {count} nodes failed: {problem}")
        finally:
            self._shrinking = False
