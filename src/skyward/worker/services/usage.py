"""Usage: how busy a node is, for those who look at a pool without being its client."""

from __future__ import annotations

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.services import ServedNode
from skyward.worker.usage import Gauge


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer every question with a measurement; the load is since the question before."""
    gauge = Gauge()
    answer(channel, {"usage": lambda _: measured(gauge)})


def measured(gauge: Gauge) -> dict[str, object]:
    """A measurement, for a reply."""
    usage = gauge.read(0)
    return {
        "cpu_percent": usage.cpu_percent,
        "memory_used": usage.memory_used,
        "memory_total": usage.memory_total,
        "gpus": [list(gpu) for gpu in usage.gpus],
        "network_received": usage.network_received,
        "network_sent": usage.network_sent,
    }
