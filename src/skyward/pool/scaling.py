"""Scaling: how many nodes an elastic pool should have, from what waits and what idles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skyward.pool.dispatch import Dispatcher
from skyward.spec import Nodes, Options

BACKLOG_SECONDS = 1.0
"""How long tasks wait before another node is worth its start."""


class Scaler:
    """Within the asked-for range: grows while tasks wait, shrinks after `idle_timeout`."""

    def __init__(
        self,
        nodes: Nodes,
        options: Options,
        dispatcher: Dispatcher,
        scale_to: Callable[[int], None],
    ) -> None:
        self._nodes, self._options, self._dispatcher = nodes, options, dispatcher
        self._scale_to = scale_to
        self._no_backlog = self._last_busy = time.monotonic()
        self._at_work = False

    def look(self, count: int) -> None:
        """Called at every beat with the number of nodes there are."""
        if not self._nodes.elastic or self._at_work:
            return
        now = time.monotonic()
        backlog = self._dispatcher.backlog
        busy = backlog or any(lane.tasks for lane in list(self._dispatcher.lanes))
        if not backlog:
            self._no_backlog = now
        if busy:
            self._last_busy = now
        wanted = count
        if backlog and now - self._no_backlog > BACKLOG_SECONDS:
            wanted = min(self._nodes.ceiling, count + 1)
        elif not busy and now - self._last_busy > self._options.idle_timeout:
            wanted = max(self._nodes.floor, count - 1)
        if wanted != count:
            self._at_work = True
            threading.Thread(
                target=self._work, args=(wanted,), name="skyward-scaling", daemon=True
            ).start()

    def _work(self, count: int) -> None:
        try:
            self._scale_to(count)
        finally:
            self._at_work = False
