"""What a pool costs and has done: `Stats` in numbers, and the same in words for the console."""

from __future__ import annotations

import time
from dataclasses import dataclass

from skyward.calls.dispatch import Counts
from skyward.nodes.fleet import Fleet
from skyward.nodes.spec import PoolSpec
from skyward.providers import money, sells
from skyward.spec import Nodes


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


def stats_of(fleet: Fleet) -> Stats:
    """The numbers of a pool so far."""
    counts = fleet.dispatcher.counts
    sent, received = fleet.dispatcher.traffic()
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
        fleet.ledger.cost,
        fleet.ledger.hourly_cost,
    )


def done(counts: Counts) -> str:
    """How many calls of a pool succeeded, in words."""
    return (
        f"{counts.succeeded} of {counts.submitted} calls succeeded"
        + (f", {counts.failed} failed" if counts.failed else "")
        + (f", {counts.cancelled} cancelled" if counts.cancelled else "")
        + f" in {time.monotonic() - counts.started:.1f} s"
    )


def quoted(spec: PoolSpec) -> str:
    """What a pool starts with, and its price if that costs money; may ask the provider.

    Raises `UnavailableError` if a provider that sells machines does not answer.
    """
    count, provider = spec.nodes.desired, spec.provider
    if not sells(provider):
        return f"{_nodes(count)} ({type(provider).__name__.lower()})"
    first = next(iter(provider.offers(spec.request)), None)
    if first is None:
        return f"{_nodes(count)} ({provider.name}); no offer fulfils the request"
    return first.of(count) if count else f"{_nodes(count)}; each will be {first}"


def readiness(there: int, nodes: Nodes, seconds: float, price: float | None) -> str:
    """How many of a pool's nodes are ready, after how long, and what they cost in an hour."""
    if not nodes.desired:
        return f"no nodes yet, up to {nodes.ceiling} when calls come"
    ready, more = _nodes(nodes.desired), ""
    if there != nodes.desired:
        ready, more = f"{there} of {ready}", "; it goes on with the others"
    cost = f", {money(price)} an hour" if price else ""
    return f"{ready} ready in {seconds:.1f} s{cost}{more}"


def without_end(spec: PoolSpec, price: float | None) -> str:
    """The warning that a kept pool costs money with no end in sight; empty if it does not."""
    if spec.keep != 0 or spec.request.ttl is not None or not sells(spec.provider):
        return ""
    cost = "an unknown price" if price is None else f"{money(price)} an hour"
    return (
        f"{spec.name} is kept until `sky down {spec.name}`, at {cost}; ttl=SECONDS ends it in any "
        "case, keep=SECONDS when nobody uses it for so long"
    )


def _nodes(count: int) -> str:
    if not count:
        return "with no nodes"
    return f"{count} node{'s' if count != 1 else ''}"
