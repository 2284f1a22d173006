"""Prospects: which nodes may still run tasks, and why the others will not."""

from __future__ import annotations

import threading
from typing import Protocol


class Aimed(Protocol):
    """What says where a task may run."""

    @property
    def on(self) -> int | None:
        """The node it must run on."""

    @property
    def worker(self) -> tuple[int, int] | None:
        """The (node, worker) it must run on."""


class Prospects:
    """The nodes of a pool that run tasks, or will once they are up.

    The fleet says what becomes of its nodes; the dispatcher asks whether a task can still run.
    """

    def __init__(self, *, grouped: bool) -> None:
        """`grouped`: the workers are one group, which needs as many nodes as `need` says."""
        self._grouped = grouped
        self._needed = 1
        self._ceiling = 0
        self._expected: set[int] = set()
        self._failures: dict[int, BaseException] = {}
        self._alike: set[int] = set()
        """The failed nodes whose failure every other node would have as well."""
        self._lock = threading.Lock()

    def need(self, count: int) -> None:
        """Say without how many nodes a group is of no use."""
        with self._lock:
            self._needed = count

    def grow_up_to(self, count: int) -> None:
        """Say how many nodes a pool without nodes may have when tasks wait; 0 if it has some."""
        with self._lock:
            self._ceiling = count

    def expect(self, node: int) -> None:
        """A node has been added to the pool."""
        with self._lock:
            self._expected.add(node)
            self._forget(node)

    def fail(self, node: int, failure: BaseException, *, alike: bool = False) -> None:
        """A node has failed for good; one that has left the pool is nobody's concern.

        `alike` says that another node would fail as well, so that the pool need not grow.
        """
        with self._lock:
            if node in self._expected:
                self._expected.discard(node)
                self._failures[node] = failure
                if alike:
                    self._alike.add(node)

    def leave(self, node: int) -> None:
        """A node takes no more tasks, because the pool shrinks."""
        with self._lock:
            self._expected.discard(node)
            self._forget(node)

    def _forget(self, node: int) -> None:
        self._failures.pop(node, None)
        self._alike.discard(node)

    def can_run(self, task: Aimed) -> bool:
        """Whether some node runs tasks like this one, or will."""
        with self._lock:
            if self._grouped and self._failures and len(self._expected) < self._needed:
                return False
            wanted = task.worker[0] if task.worker is not None else task.on
            # A pool without nodes starts with node 0 when a task waits.
            grows = not self._expected and len(self._failures) < self._ceiling and not self._alike
            if wanted is None:
                return grows or bool(self._expected)
            return wanted in self._expected or (grows and wanted == 0 and not self._failures)

    def why_not(self) -> str:
        """Why nodes failed, in words; empty if none did."""
        with self._lock:
            reasons = [str(self._failures[node]) for node in sorted(self._failures)]
        if not self._grouped:
            return "; ".join(reasons)
        return f"its workers are a group, and {reasons[0]}" if reasons else ""
