"""Restarting: a pool that stays is stopped, and started again as it was."""

from __future__ import annotations

from skyward.compute import Compute
from skyward.errors import PoolError
from skyward.nodes import keeping
from skyward.nodes.cleaning import Cleaned
from skyward.nodes.journal import Journal
from skyward.nodes.occupancy import end, recorded_pools

STOPPABLE = ("local", "ssh")
"""The providers whose machines are the user's own: without its workers, a pool costs nothing."""


def stop_pool(name: str, *, force: bool) -> Cleaned:
    """End the agents and workers of a pool, and keep its record.

    The result says what came back from the nodes, and what did not.
    """
    record = keeping.read(name)
    if record.provider not in STOPPABLE:
        raise PoolError(
            f"{name}: the provider {record.provider} cannot stop a pool and keep its machines; "
            f"{' and '.join(STOPPABLE)} can. `sky down {name}` ends it, `sky up {name}` makes it "
            "anew"
        )
    if record.stopped:
        raise PoolError(f"{name} is stopped already; `sky start {name}` starts it again")
    journal = Journal()
    pool = next(each for each, kept in recorded_pools(journal) if kept and kept.id == record.id)
    cleaned = end(journal, pool, record, force=force, stop=True)
    if cleaned.failures:
        raise PoolError(f"{name} was not stopped as a whole: {'; '.join(cleaned.failures)}")
    return cleaned


def start_pool(name: str) -> int:
    """Start a stopped pool again, and return the number of its nodes."""
    record = keeping.read(name)
    if not record.stopped:
        raise PoolError(f"{name} is not stopped; `sky attach {name}` says who uses it")
    compute = Compute._again(record)
    try:
        with compute:
            return len(compute.nodes)
    except BaseException:
        if name not in keeping.names():
            keeping.write(record)
        raise
