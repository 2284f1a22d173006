"""Kept pools on the page: measured through their agents while no client of theirs shows them.

Their calls are known to their clients alone, so a pool without a client shows its nodes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from skyward.errors import SkywardError
from skyward.nodes import keeping
from skyward.nodes.keeping import KeptPool
from skyward.nodes.reaching import ReachedPool
from skyward.page.sampling import rates
from skyward.page.state import BUCKETS
from skyward.wire.asking import ServiceConnection

SAMPLE_SECONDS = 2.0
_COUNTS = ("submitted", "succeeded", "failed", "cancelled", "retried", "nodes_lost")
_NUMBERS = (*_COUNTS, "waiting", "sent", "received", "call_seconds")


class KeptWatch:
    """Measures one kept pool on a thread of its own, until it is ended or does not answer."""

    def __init__(
        self,
        name: str,
        tell: Callable[[list[dict[str, Any]]], object],
        is_shown: Callable[[str], bool],
    ) -> None:
        """`is_shown` says whether a client shows the pool of an id, which is better."""
        self.name = name
        self._tell, self._is_shown = tell, is_shown
        self._ended = threading.Event()
        self._connections: dict[int, ServiceConnection] = {}
        self._before: dict[int, tuple[float, int, int]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="skyward-kept", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the pool is still measured."""
        return self._thread.is_alive()

    def end(self) -> None:
        """End the connections and the thread."""
        self._ended.set()
        self._abort()
        self._thread.join()

    def _run(self) -> None:
        key = ""
        try:
            record = keeping.read(self.name)
            if record.stopped or self._is_shown(record.id):
                return
            pool = ReachedPool(record)
            key = f"{record.id}-kept"
            self._tell([_snapshot(record, key)])
            while not self._ended.is_set() and not self._is_shown(record.id):
                usage = self._measure(pool)
                self._tell([_sample(record, key, usage)])
                self._ended.wait(SAMPLE_SECONDS)
        except (SkywardError, OSError, EOFError):
            pass  # it is gone, or out of reach; who looks for kept pools tries again
        finally:
            self._abort()
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.close()
            if key:
                self._tell([{"type": "gone", "pool": key, "time": time.time()}])

    def _measure(self, pool: ReachedPool) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for node in pool.nodes:
            connection = self._connections.get(node)
            if connection is None:
                connection = pool.service(node, "usage")
                with self._lock:
                    self._connections[node] = connection
                    if self._ended.is_set():
                        return rows
            told = connection.ask("usage")
            received, sent = told["network_received"], told["network_sent"]
            rows.append(
                [
                    node,
                    told["cpu_percent"],
                    told["memory_used"],
                    told["memory_total"],
                    *rates(self._before, node, received, sent),
                    told["gpus"],
                    received,
                    sent,
                ]
            )
        return rows

    def _abort(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.channel.abort()


def _snapshot(record: KeptPool, key: str) -> dict[str, Any]:
    nodes = [
        [node.index, "ready", node.address, node.accelerator, node.accelerators, ""]
        for node in record.nodes
    ]
    empty: dict[str, Any] = {"running": [], "ended": [], "lines": [], "notes": [], "workers": []}
    about = {"type": "pool", "pool": key, "name": record.name, "provider": record.provider}
    return about | {"nodes": nodes} | empty


def _sample(record: KeptPool, key: str, usage: list[list[Any]]) -> dict[str, Any]:
    hourly = record.hourly_cost
    cost = None if hourly is None else hourly * (time.time() - record.created) / 3600
    numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, 0)
    about = {"type": "sample", "pool": key, "time": time.time(), "usage": usage, "devices": []}
    more = {"cost": cost, "hourly_cost": hourly, "buckets": [0] * (len(BUCKETS) + 1)}
    return numbers | about | more
