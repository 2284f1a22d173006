"""Kept pools on the page: what their agents tell of nodes, calls, output, jobs and clients.

However many look, each agent has one connection to a page, and is asked nothing: it tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from skyward.errors import SkywardError
from skyward.nodes import keeping
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.reaching import ReachedPool
from skyward.page.kept_state import KeptState
from skyward.page.node_watch import NodeWatch, Reports
from skyward.page.sampling import Samples

TICK_SECONDS = 0.1
"""What comes within so many seconds is told together; agents take 0.25 s for the same."""
SETTLE_SECONDS = 0.03
"""What comes after a pause waits so long for more: nodes often tell of the same call."""
SAMPLE_SECONDS = 2.0
ANSWER_SECONDS = 1.0
"""How long the first look at a pool waits for its agents."""

Messages = list[dict[str, Any]]


class Audience(Protocol):
    """One to whom a kept pool is shown."""

    def show(self, pool: dict[str, Any], samples: Messages) -> None:
        """Take all that is known of a pool, and its last samples."""

    def put(self, batch: str) -> None:
        """Take messages that come after that, in JSON."""


def key_of_kept(pool: str) -> str:
    """What names a kept pool on a page; its clients on this machine have keys of their own."""
    return f"{pool}-kept"


def encoded(messages: Messages) -> str:
    """Messages in JSON."""
    return msgspec.json.encode(messages).decode()


class KeptWatch:
    """Shows one kept pool, on a thread of its own, until it is ended or the pool is."""

    def __init__(self, name: str, clients: Callable[[str], Messages]) -> None:
        """`clients` returns the last samples of the clients on this machine of a pool's id."""
        self.name = name
        self._clients = clients
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._new: list[Audience] = []
        self._audience: list[Audience] = []
        self._reports = Reports()
        self._watches: dict[int, NodeWatch] = {}
        self._reached: list[ReachedPool] = []
        """What the watches go through."""
        self._known = KnownNodes()
        self._samples = Samples()
        self._thread = threading.Thread(target=self._run, name="skyward-kept", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the pool is still shown."""
        return self._thread.is_alive()

    def add(self, audience: Audience) -> None:
        """Show the pool to one more."""
        with self._lock:
            self._new.append(audience)
        self._reports.wake()

    def remove(self, audience: Audience) -> None:
        """Show it to this one no more."""
        with self._lock:
            self._new = [each for each in self._new if each is not audience]
            self._audience = [each for each in self._audience if each is not audience]

    def end(self) -> None:
        """End the connections and the threads."""
        self._ended.set()
        self._reports.wake()
        self._thread.join()

    def _run(self) -> None:
        shown = ""
        try:
            written = _WrittenRecord(self.name)
            record = written.read()
            if record.stopped:
                return
            self._known.write(record.nodes)
            state = KeptState(record, key_of_kept(record.id))
            self._watch(record)
            self._await_answers(state)
            shown = state.key
            self._show(written, state)
        except (SkywardError, OSError, EOFError):
            pass  # it is gone, or out of reach; who looks for kept pools tries again
        finally:
            self._close(self._watches)
            for pool in self._reached:
                pool.close()
            if shown:
                self._tell([{"type": "gone", "pool": shown, "time": time.time()}])

    def _watch(self, record: KeptPool) -> None:
        """Have a watch for every node of the record, and for no other."""
        there = {node.index: node for node in record.nodes}
        others = [i for i, watch in self._watches.items() if watch.facts != there.get(i)]
        self._close({index: self._watches.pop(index) for index in others})
        new = there.keys() - self._watches.keys()
        if new:
            pool = ReachedPool(record)
            self._reached.append(pool)
            for index in sorted(new & set(pool.nodes)):
                self._watches[index] = NodeWatch(pool, index, self._reports)

    @staticmethod
    def _close(watches: dict[int, NodeWatch]) -> None:
        for watch in watches.values():
            watch.end()
        for watch in watches.values():
            watch.join()

    def _await_answers(self, state: KeptState) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not state.all_answered and not self._ended.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._reports.wait(left)
            self._take(state)

    def _take(self, state: KeptState) -> Messages:
        reports = self._reports.take()
        for node, told in reports:
            # Only the head is told of all changes.
            if node == state.record.head and "members" in told:
                members = dict[int, KeptNode | None]
                self._known.tell(msgspec.convert(told["members"], members, strict=False))
        changes = state.take(reports)
        return [] if changes is None else [changes]

    def _show(self, written: _WrittenRecord, state: KeptState) -> None:
        sampled = 0.0
        while not self._ended.is_set():
            taken, messages = time.monotonic(), self._take(state)
            if written.has_changed():
                record = written.read()
                if record.id != state.record.id or record.stopped:
                    return
                self._known.write(record.nodes)
            nodes = self._known.nodes
            if nodes != state.record.nodes:
                record = msgspec.structs.replace(written.record, nodes=nodes)
                self._watch(record)
                messages.append(state.renew(record))
            now = time.monotonic()
            due = now - sampled >= SAMPLE_SECONDS if sampled else state.is_measured
            if due:
                sampled = now
                sample = state.sample(self._clients(state.record.id))
                self._samples.add(sample)
                messages.append(sample)
            self._tell(messages)
            self._greet(state, sampled=bool(sampled))
            # Until the load is known for the first time, there is more to come soon.
            left = sampled + SAMPLE_SECONDS - time.monotonic() if sampled else TICK_SECONDS
            if self._reports.wait(max(0.0, left)) and not self._new:
                self._ended.wait(max(SETTLE_SECONDS, taken + TICK_SECONDS - time.monotonic()))

    def _greet(self, state: KeptState, *, sampled: bool) -> None:
        """Show all that is known to those who are new."""
        with self._lock:
            new, self._new = self._new, []
            self._audience += new
        if new:
            clients = self._clients(state.record.id)
            pool, samples = state.snapshot(), list(self._samples)
            if sampled:
                samples.append(state.sample(clients, every=True))
            for each in new:
                each.show(pool, samples)

    def _tell(self, messages: Messages) -> None:
        with self._lock:
            audience = list(self._audience)
        if messages and audience:
            batch = encoded(messages)
            for each in audience:
                each.put(batch)


class KnownNodes:
    """The nodes of a pool, by its record and by what its head was told; what came last counts."""

    def __init__(self) -> None:
        self._written: dict[int, KeptNode] = {}
        self._told: dict[int, KeptNode | None] = {}
        self._outdated: dict[int, KeptNode | None] = {}
        """What the head was told, and says still, of nodes of which the record has news."""

    def write(self, nodes: list[KeptNode]) -> None:
        """Take the nodes of the record, which was read."""
        now = {node.index: node for node in nodes}
        for index, node in self._told.items():
            if now.get(index) != self._written.get(index):
                self._outdated[index] = node
        self._written = now

    def tell(self, members: dict[int, KeptNode | None]) -> None:
        """Take all that the head was told of nodes that came, and of those that left, as None."""
        self._told = members
        old = self._outdated.items()
        self._outdated = {i: node for i, node in old if i in members and members[i] == node}

    @property
    def nodes(self) -> list[KeptNode]:
        """The nodes that there are, in the order of their numbers."""
        newer = {i: node for i, node in self._told.items() if i not in self._outdated}
        found = self._written | newer
        return [node for _, node in sorted(found.items()) if node is not None]


class _WrittenRecord:
    """The record of a pool, which is read again when its file is another one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._mark: tuple[int, int] | None = None

    def read(self) -> KeptPool:
        """The record as it is; `PoolError` if there is none."""
        self._mark = self._look()
        self.record = keeping.read(self._name)
        return self.record

    def has_changed(self) -> bool:
        """Whether the file is not the one that was read."""
        return self._mark is None or self._look() != self._mark

    def _look(self) -> tuple[int, int] | None:
        try:
            found = keeping.path_of(self._name).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
