"""`Stats`: what a pool has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """What a pool has done so far; the bytes are those that went through executors' sockets."""

    submitted: int
    succeeded: int
    failed: int
    cancelled: int
    retried: int
    workers_died: int
    nodes_lost: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    cost: float | None
    """What the pool's machines have cost so far, in US dollars; None if a price is unknown."""
    hourly_cost: float | None
    """What the machines that are there now cost in an hour."""
