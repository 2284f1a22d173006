"""A node's watch: what the agent of one node of a kept pool tells of its tasks and its load."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from skyward.errors import SkywardError
from skyward.nodes.reaching import ReachedPool
from skyward.wire.asking import ServiceConnection

AGAIN_SECONDS = 2.0
"""How long to wait before an agent that could not be reached is asked again."""
SKEW_SECONDS = 0.5
"""A node's clock that differs by more than this from what was thought is measured again."""

_CAN_WAIT = frozenset({"time", "usage"})


class Reports:
    """What nodes tell until somebody takes it; a measurement alone wakes nobody."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._woken = threading.Event()

    def put(self, node: int, told: dict[str, Any]) -> None:
        """Add a report of a node's agent, or {"state": ...}."""
        with self._lock:
            self._waiting.append((node, told))
        if not told.keys() <= _CAN_WAIT:
            self._woken.set()

    def wake(self) -> None:
        """Have `wait` return."""
        self._woken.set()

    def wait(self, seconds: float) -> bool:
        """Wait until there is something that cannot wait, and return whether there is."""
        return self._woken.wait(seconds)

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """What nodes have told since the last time: each node's number, and its report."""
        self._woken.clear()
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken


class NodeWatch:
    """Hears one agent on a thread of its own, and reports what it tells."""

    def __init__(self, pool: ReachedPool, node: int, reports: Reports) -> None:
        self.node = node
        self.facts = pool.record.node(node)
        """What the record says of the node; another agent has other facts."""
        self._pool, self._reports = pool, reports
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._connection: ServiceConnection | None = None
        self._skew: float | None = None
        self._thread = threading.Thread(target=self._run, name="skyward-node-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._hear()
            except (SkywardError, OSError, EOFError):
                if not self._ended.is_set():
                    self._reports.put(self.node, {"state": "unreachable"})
            self._ended.wait(AGAIN_SECONDS)

    def _hear(self) -> None:
        connection = self._pool.service(self.node, "activity")
        with contextlib.closing(connection):
            with self._lock:
                self._connection = connection
                if self._ended.is_set():
                    return
            connection.channel.on_change(self._changed)
            connection.send("watch")
            state: dict[str, Any] = {"state": "ready", "fresh": True}
            while True:
                told = connection.next_reply().value
                self._reports.put(self.node, self._in_our_time(told) | state)
                state = {}

    def _changed(self, connected: bool) -> None:
        self._reports.put(self.node, {"state": "ready" if connected else "reconnecting"})

    def _in_our_time(self, told: dict[str, Any]) -> dict[str, Any]:
        """The report with the times of this machine's clock: clocks of machines differ."""
        skew = time.time() - float(told["time"])
        if self._skew is None or abs(skew - self._skew) > SKEW_SECONDS:
            self._skew = skew
        if abs(self._skew) < SKEW_SECONDS:
            return told
        for task in told.get("tasks", ()):
            task[3] += self._skew
            task[4] = task[4] and task[4] + self._skew
        for line in told.get("lines", ()):
            line[0] += self._skew
        return told

    def end(self) -> None:
        """Have the thread end; `join` waits for it."""
        self._ended.set()
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.channel.abort()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()
