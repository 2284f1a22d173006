"""Membership: how many nodes a pool has, and how that number changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from skyward.calls.dispatch import Dispatcher
from skyward.calls.prospects import Prospects
from skyward.errors import PoolClosedError, PoolStartError
from skyward.nodes.briefing import Briefing
from skyward.nodes.capacity import Capacity
from skyward.nodes.node import Node
from skyward.nodes.preparing import Preparer
from skyward.nodes.roster import Roster
from skyward.nodes.startup import Startup

READY_SECONDS = 120.0
"""How long a node may take from its machine to its workers."""
PREPARE_SECONDS = 1800.0
"""How much longer a start with an image or plugins may take: some download gigabytes."""


class Membership:
    """Adds nodes to a pool and removes them from it."""

    def __init__(
        self,
        roster: Roster,
        startup: Startup,
        dispatcher: Dispatcher,
        prospects: Prospects,
        briefing: Briefing,
        preparer: Preparer,
        capacity: Capacity,
        *,
        is_slow: bool,
        stop_nodes: Callable[[list[Node], float], None],
    ) -> None:
        """`is_slow` says whether a node needs a new machine, or plugins, before it is ready."""
        self._roster, self._startup = roster, startup
        self._dispatcher, self._prospects = dispatcher, prospects
        self._briefing, self._preparer = briefing, preparer
        self._capacity = capacity
        self._seconds = READY_SECONDS + (PREPARE_SECONDS if is_slow else 0.0)
        self._stop_nodes = stop_nodes
        self._resizing = threading.Lock()

    def start(self, count: int, needed: int) -> None:
        """Start nodes together; returns when as many nodes as needed are ready."""
        added = self._add(count)
        self._await_ready(added, needed)
        self._roster.begin_serving()
        for node in added:
            if node.state == "failed":
                self._startup.tell_retry(node)

    def attach(self, indexes: Sequence[int]) -> None:
        """Connect to the nodes of a pool that stays; returns when each is ready or has failed."""
        added = self._add_nodes(list(indexes))
        self._await_ready(added, 1)
        deadline = time.monotonic() + self._seconds
        for node in added:
            while not node.settled.wait(0.1) and not self._roster.closed:
                if time.monotonic() > deadline:
                    break
        self._roster.begin_serving()

    def resize(self, count: int, needed: int) -> None:
        """Grow or shrink to so many nodes; a leaving node first finishes its tasks.

        A pool that does not shrink starts its failed nodes again, and `resize` returns when as many
        nodes as needed are ready. If they cannot be started, the pool has the nodes it had.
        """
        with self._resizing:
            nodes = self._roster.nodes
            if count < len(nodes):
                self._retire(nodes[count:])
                return
            for node in nodes:
                if node.state == "failed":
                    self._startup.start_again(node)
            added = self._add(count - len(nodes))
            try:
                self._await_ready([*nodes, *added], needed)
            except BaseException:
                self._drop(added)
                raise
            self._briefing.tell_all()

    def shrink(self, target: Callable[[int], int]) -> int:
        """Shrink to the number of nodes that `target` says for the present number; returns it."""
        with self._resizing:
            nodes = self._roster.nodes
            self._retire(nodes[target(len(nodes)) :])
            return len(self._roster.nodes)

    def grow(self, count: int) -> bool:
        """Begin to add nodes until there are so many; False if that is impossible now."""
        if not self._resizing.acquire(blocking=False):
            return False
        try:
            return bool(self._add(count - len(self._roster.nodes)))
        finally:
            self._resizing.release()

    def wake(self) -> None:
        """Have at least one node, and wait until it is ready."""
        with self._resizing:
            nodes = self._roster.nodes or self._add(1)
            with self._roster.lock:
                failed = [node for node in nodes if node.retries.at_next_call]
            for node in failed:
                self._startup.start_again(node)
            self._await_ready(nodes, 1)

    def retry_failed(self) -> None:
        """Start failed nodes again that have waited long enough, or for a call."""
        if self._roster.serves:
            is_called = self._dispatcher.backlog > 0
            for node in self._roster.nodes:
                if node.retries.is_due or (node.retries.at_next_call and is_called):
                    self._startup.start_again(node)

    def _add(self, count: int) -> list[Node]:
        with self._roster.lock:
            first = 1 + max((node.index for node in self._roster.nodes), default=-1)
            return self._add_nodes(list(range(first, first + count)))

    def _add_nodes(self, indexes: list[int]) -> list[Node]:
        # Under the lock: whoever closes the pool ends these nodes, or none is added.
        with self._roster.lock:
            if self._roster.closed:
                return []
            added = self._startup.new_nodes(indexes)
            self._roster.add(added)
        for node in added:
            self._startup.start(node)
        return added

    def _await_ready(self, nodes: list[Node], needed: int) -> None:
        """Wait until so many of these nodes are ready; raises when too many have failed.

        The wait for a machine has no limit here: it may be in a queue, and its provider says how
        long it waits. Nor is a node late whose executors come one after the other.
        """
        began = time.monotonic()
        most: dict[int, tuple[int, float]] = {}
        """How many executors each node had at most, and since when."""

        def is_late(node: Node) -> bool:
            made, now = node.host.made_at, time.monotonic()
            count, since = most.get(node.index, (0, began))
            if len(node.lanes) > count:
                most[node.index] = len(node.lanes), now
                return False
            return made is not None and now > max(since, made) + self._seconds

        while sum(node.serves for node in nodes) < needed:
            if self._roster.closed:
                raise PoolClosedError("this pool was closed while it started")
            failures = [node.failure for node in nodes if node.failure is not None]
            if len(nodes) - len(failures) < needed:
                raise failures[0]
            starting = [node for node in nodes if not node.serves and node.failure is None]
            late = [node for node in starting if is_late(node)]
            if late and len(nodes) - len(failures) - len(late) < needed:
                raise self._lateness(late[0])
            waiting = [node for node in nodes if not node.settled.is_set()]
            # Short waits, so that a Ctrl-C and the failure of another node are noticed. For the
            # last node: with the first, each of many nodes would end a wait, and be counted again.
            if waiting:
                waiting[-1].settled.wait(0.1)
            else:
                time.sleep(0.01)

    def _lateness(self, node: Node) -> PoolStartError:
        there = len(node.lanes)
        expected = there if node.control is None else self._capacity.executors_on(node)
        if there < expected:
            return PoolStartError(
                f"node {node.index}: {there} of {expected} worker processes are connected, and in "
                f"{self._seconds:.0f} s no other came; see what its machine does, and if that is "
                "too many for it, ask for fewer with sky.Worker(concurrency=...), or for threads "
                "of one process with executor='thread'"
            )
        return PoolStartError(
            f"node {node.index} was not ready {self._seconds:.0f} s after its machine was there; "
            "see what its machine does, and try again"
        )

    def _drop(self, nodes: list[Node]) -> None:
        """Remove nodes that were added together and did not all start."""
        self._roster.remove(nodes)
        for node in nodes:
            self._prospects.leave(node.index)
        self._stop_nodes(nodes, 0)
        self._dispatcher.fail_unrunnable()
        self._briefing.tell_all()

    def _retire(self, leaving: list[Node]) -> None:
        if not leaving:
            return
        with self._roster.lock:
            lanes = [lane for node in leaving for lane in node.lanes.values()]
            for node in leaving:
                node.drain()
                self._prospects.leave(node.index)
        for lane in lanes:
            self._dispatcher.drain(lane)
        self._dispatcher.fail_unrunnable()
        while any(lane.tasks for lane in lanes if not lane.lost) and not self._roster.closed:
            time.sleep(0.01)
        self._roster.remove(leaving)
        self._briefing.tell_all()
        self._preparer.regroup()
        self._stop_nodes(leaving, 5.0)
