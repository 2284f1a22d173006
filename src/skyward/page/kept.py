"""Kept pools on the page: what their agents tell of nodes, calls, output, jobs and clients."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from skyward.errors import SkywardError
from skyward.nodes import keeping
from skyward.nodes.keeping import KeptPool
from skyward.nodes.reaching import ReachedPool
from skyward.page.kept_state import KeptState
from skyward.page.node_watch import NodeWatch, Reports

TICK_SECONDS = 0.1
SAMPLE_SECONDS = 2.0
ANSWER_SECONDS = 1.0
"""How long the first look at a pool waits for its agents."""

Messages = list[dict[str, Any]]


def key_of_kept(pool: str) -> str:
    """What names a kept pool on a page; its clients on this machine have keys of their own."""
    return f"{pool}-kept"


class KeptWatch:
    """Shows one kept pool, on a thread of its own, until it is ended or the pool is."""

    def __init__(
        self,
        name: str,
        tell: Callable[[Messages], object],
        clients: Callable[[str], Messages],
    ) -> None:
        """`clients` returns the last samples of the clients on this machine of a pool's id."""
        self.name = name
        self._tell, self._clients = tell, clients
        self._ended = threading.Event()
        self._reports: Reports = queue.SimpleQueue()
        self._watches: dict[int, NodeWatch] = {}
        self._thread = threading.Thread(target=self._run, name="skyward-kept", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the pool is still shown."""
        return self._thread.is_alive()

    def end(self) -> None:
        """End the connections and the threads."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        shown = ""
        try:
            record = keeping.read(self.name)
            if record.stopped:
                return
            state = KeptState(record, key_of_kept(record.id))
            self._watch(record)
            self._await_answers(state)
            shown = state.key
            self._tell([state.snapshot()])
            self._show(record, state)
        except (SkywardError, OSError, EOFError):
            pass  # it is gone, or out of reach; who looks for kept pools tries again
        finally:
            self._close(self._watches)
            if shown:
                self._tell([{"type": "gone", "pool": shown, "time": time.time()}])

    def _watch(self, record: KeptPool) -> None:
        """Have a watch for every node of the record, and for no other."""
        there = {node.index for node in record.nodes}
        self._close(
            {index: self._watches.pop(index) for index in [*self._watches] if index not in there}
        )
        new = there - self._watches.keys()
        if new:
            pool = ReachedPool(record)
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
            try:
                report = self._reports.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            state.take([report])

    def _show(self, record: KeptPool, state: KeptState) -> None:
        sampled, first = time.monotonic(), True
        while not self._ended.wait(TICK_SECONDS):
            reports = []
            while not self._reports.empty():
                reports.append(self._reports.get())
            changes = state.take(reports)
            messages = [] if changes is None else [changes]
            if time.monotonic() - sampled >= SAMPLE_SECONDS or (first and state.is_measured):
                sampled, first = time.monotonic(), False
                found = keeping.read(self.name)
                if found.id != record.id or found.stopped:
                    return
                if found.nodes != record.nodes:
                    record = found
                    self._watch(record)
                    messages += state.renew(record)
                messages.append(state.sample(self._clients(record.id)))
            if messages:
                self._tell(messages)
