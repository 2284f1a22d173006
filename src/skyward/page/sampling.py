"""Sampling: how busy a pool's nodes and devices are, in numbers for the page and for metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from skyward.errors import DeviceError
from skyward.nodes.fleet import Fleet
from skyward.nodes.usage import NodeUsage
from skyward.page.state import key_of

NODES_A_TIME = 128
"""How many nodes are asked at a time: a thousand nodes are asked in turn, each every 16 s."""
ANSWER_SECONDS = 0.8
"""How long a sample waits for nodes; one that is slower is asked again in its turn."""


class Samples:
    """The last samples of a pool, for the curves of a page that has just been opened."""

    MOST = 300
    ROWS = 3000
    """How many rows of nodes all of them have together."""

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque()
        self._rows = 0

    def add(self, sample: dict[str, Any]) -> None:
        """Keep a sample, and as many of the others as there is room for."""
        self._kept.append(sample)
        self._rows += len(sample["usage"])
        while len(self._kept) > 1 and (len(self._kept) > self.MOST or self._rows > self.ROWS):
            self._rows -= len(self._kept.popleft()["usage"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._kept)


class Sampler:
    """Measures one pool; one thread at a time asks."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._next = 0
        self._before: dict[int, tuple[float, int, int]] = {}
        """When each node was measured last, and how many bytes it had received and sent."""

    def sample(self, *, every_node: bool = False) -> dict[str, Any]:
        """The pool's numbers now; of a large pool, with the nodes whose turn it is."""
        fleet = self._fleet
        calls = fleet.dispatcher
        nodes = [node.index for node in fleet.nodes if node.serves]
        usages = fleet.usages(nodes if every_node else self._turn(nodes), ANSWER_SECONDS)
        sent, received = calls.traffic()
        counts, ledger = calls.counts, fleet.ledger
        return {
            "type": "sample",
            "pool": key_of(fleet),
            "time": time.time(),
            "usage": [self._row(node, usage) for node, usage in sorted(usages.items())],
            "devices": device_rows(fleet),
            "submitted": counts.submitted,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "retried": counts.retried,
            "nodes_lost": counts.nodes_lost,
            "waiting": calls.backlog,
            "sent": sent,
            "received": received,
            "curves_left_out": calls.teller.curves.left_out,
            "cost": ledger.cost,
            "hourly_cost": ledger.hourly_cost,
        }

    def _turn(self, nodes: list[int]) -> list[int]:
        """The nodes that are measured this time."""
        if len(nodes) <= NODES_A_TIME:
            return nodes
        first = self._next % len(nodes)
        self._next = first + NODES_A_TIME
        return (nodes + nodes)[first : first + NODES_A_TIME]

    def _row(self, node: int, usage: NodeUsage) -> list[Any]:
        """Node, processors, memory, memory there is, bytes a second in and out, GPUs, bytes."""
        return [
            node,
            usage.cpu_percent,
            usage.memory_used,
            usage.memory_total,
            *rates(self._before, node, usage.network_received, usage.network_sent),
            [[gpu.name, gpu.percent, gpu.memory_used, gpu.memory_total] for gpu in usage.gpus],
            usage.network_received,
            usage.network_sent,
        ]


def rates(
    before: dict[int, tuple[float, int, int]], node: int, received: int, sent: int
) -> tuple[float, float]:
    """Bytes a second that a node has received and sent since `before`, which is set anew."""
    now = time.monotonic()
    then, received_then, sent_then = before.get(node, (now, received, sent))
    before[node] = (now, received, sent)
    seconds = max(now - then, 1e-3)
    return max(0, received - received_then) / seconds, max(0, sent - sent_then) / seconds


def device_rows(fleet: Fleet) -> list[dict[str, Any]]:
    """The numbers of a pool's open torch devices so far."""
    opened = fleet.devices.all_open()
    if not opened:
        return []
    # Imported here: it imports torch, which a process with an open device has done already.
    from skyward.device.core import core

    rows = []
    for node, index, kind in opened:
        try:
            stats = core().stats(index)
        except DeviceError:
            # It was closed a moment ago.
            continue
        rows.append(
            {
                "device": index,
                "node": node,
                "kind": kind,
                "operations": stats.operations,
                "waits": stats.waits,
                "cache_hits": stats.cache_hits,
                "sent": stats.bytes_sent + stats.bytes_uploaded,
                "fetched": stats.bytes_fetched,
            }
        )
    return rows
