"""`Stats`: what a pool has done so far, in numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from skyward.calls.counts import Counts
from skyward.pool import Pool


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


def stats_of(pool: Pool) -> Stats:
    """The numbers of a pool so far."""
    counts = pool.counts
    sent, received = pool.traffic()
    return Stats(
        counts.submitted,
        counts.succeeded,
        counts.failed,
        counts.cancelled,
        counts.retried,
        counts.workers_died,
        counts.nodes_lost,
        sent,
        received,
        time.monotonic() - counts.started,
        pool.ledger.cost,
        pool.ledger.hourly_cost,
    )


def done(counts: Counts) -> str:
    """How many calls of a pool succeeded, in words."""
    return (
        f"{counts.succeeded} of {counts.submitted} calls succeeded"
        + (f", {counts.failed} failed" if counts.failed else "")
        + (f", {counts.cancelled} cancelled" if counts.cancelled else "")
        + f" in {time.monotonic() - counts.started:.1f} s"
    )
