"""Kept pools: attached to from any process of their user, stopped, and started again."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass

import msgspec

from skyward import bootstrap
from skyward.compute import Compute, shown_from_outside
from skyward.compute.listening import OnEvent, check_callback
from skyward.context import POOL_VARIABLE
from skyward.errors import ConfigurationError, PoolError
from skyward.nodes import records
from skyward.nodes.cleanup import REMOVE_SECONDS, Cleaned, halt
from skyward.nodes.kept import ReachedPool, note_pool, provider_of, stopped_machines
from skyward.nodes.occupancy import end, recorded_pools
from skyward.nodes.records import Journal, KeptPool, PoolRecord
from skyward.providers import Stopper, providers_with, stops

OWN = ("local", "ssh")
"""The providers whose machines are the user's own: without its workers, a pool costs nothing."""


def attach(name: str | None = None, *, on_event: OnEvent | None = None) -> Compute:
    """Connect to a kept pool, and return a `Compute` on it.

    The pool was made by `sky up NAME` or by `Compute(name=..., keep=True)`. Leaving the block, or
    the end of the process, leaves the pool as it is. Without a name, it is the pool on which this
    process runs. `on_event` is as for `Compute`.

    >>> with sky.attach("train") as compute:
    ...     result = train(model) >> compute
    """
    check_callback(on_event)
    try:
        with reach(_named(name), forget=True) as reached:
            return Compute._attach(reached, on_event)
    except PoolError as problem:
        raise shown_from_outside(problem) from problem.__cause__


def reach(name: str, *, forget: bool = False) -> ReachedPool:
    """A kept pool, for its services alone: `pool.service(0, "about")`.

    With `forget`, the record of a pool whose machines are gone is removed.
    """
    record = records.read(name)
    if record.stopped:
        _check_stopped(record)
        raise PoolError(f"{name} is stopped; `sky start {name}` starts it again")
    return ReachedPool(record, forget=forget)


def _named(name: str | None) -> str:
    found = name or os.environ.get(POOL_VARIABLE)
    if not found or not isinstance(found, str):
        raise ConfigurationError(
            f"attach({name!r}): give the name of a kept pool, such as `sky ps` lists; "
            f"only a script that runs on such a pool ({POOL_VARIABLE}) may leave it out"
        )
    return found


@dataclass(frozen=True, slots=True)
class StoppedPool:
    """What became of a pool that was stopped."""

    cleaned: Cleaned
    """What came back from the nodes, and what did not."""
    hourly_cost: float | None
    """What it costs while it is stopped, in US dollars; None if nobody knows."""


def stop_pool(name: str, *, force: bool) -> StoppedPool:
    """End the agents and workers of a pool, stop its machines, and keep its record."""
    record = records.read(name)
    if record.stopped and not record.ending:
        raise PoolError(f"{name} is stopped already; `sky start {name}` starts it again")
    if record.provider not in OWN:
        _check_stops(record)
    journal = Journal()
    note_pool(journal, record)
    journalled = _journalled(journal, record)
    if journalled is None:
        raise PoolError(f"{name} has just ended; `sky ps` shows the pools that are left")
    cleaned = end(journal, journalled, record, force=force, stop=True)
    if cleaned.failures:
        raise PoolError(f"{name} was not stopped as a whole: {'; '.join(cleaned.failures)}")
    costs = [pool.hourly_cost for pool in journal.pools() if pool.id == record.id]
    return StoppedPool(cleaned, costs[0] if costs else None)


def _check_stopped(record: KeptPool) -> None:
    """Refuse a pool of which agents may run, though its record says that they are to end."""
    if record.ending:
        name = record.name
        raise PoolError(
            f"{name} is being stopped, or was not stopped as a whole; if nobody does that now, "
            f"`sky stop {name}` goes on with it, and `sky down {name}` removes it"
        )


def _check_stops(record: KeptPool) -> None:
    """Refuse a pool whose machines cannot be stopped."""
    provider, name = provider_of(record), record.name
    advice = f"`sky down {name}` ends it, `sky up {name}` makes it anew"
    if not stops(provider):
        able = ", ".join(sorted({*OWN, *providers_with(stops)}))
        raise PoolError(
            f"{name}: the provider {record.provider} cannot stop a pool and keep its machines; "
            f"those that can are {able}. {advice}"
        )
    try:
        asyncio.run(provider.check_stop(record.id))
    except PoolError as problem:
        raise PoolError(f"{name}: {problem}; {advice}") from None


def start_pool(name: str) -> int:
    """Start a stopped pool again, and return the number of its nodes."""
    record = records.read(name)
    provider = provider_of(record)
    _check_stopped(record)
    if not record.stopped:
        if not stopped_machines(record, provider):
            raise PoolError(f"{name} is not stopped; `sky attach {name}` says who uses it")
        record = _noted_as_stopped(record)
    compute = Compute._again(record)
    try:
        with compute:
            nodes = [view.node for view in compute.nodes]
    except BaseException as problem:
        if stops(provider):
            _stop_again(record, provider, problem)
        if name not in records.names():
            records.write(record)
        raise
    if stops(provider):
        asyncio.run(_remove_others(provider, record.id, nodes))
    return len(nodes)


def _stop_again(record: KeptPool, provider: Stopper, problem: BaseException) -> None:
    """Stop what a start that failed has started; tell with its problem what could not be."""
    journal = Journal()
    journalled = _journalled(journal, record)
    if journalled is None:
        return
    failures = halt(journal, journalled, provider).failures
    if failures:
        problem.add_note(
            f"machines of {record.name} may be running still: {'; '.join(failures)}; "
            f"`sky down {record.name}` removes them"
        )


def _noted_as_stopped(record: KeptPool) -> KeptPool:
    """Write down that a pool is stopped: its machines were, or have ended by themselves."""
    count = len(record.nodes) or record.count
    stopped = msgspec.structs.replace(record, nodes=[], stopped=True, count=count)
    with records.changing(record.name):
        records.write(stopped)
    return stopped


async def _remove_others(provider: Stopper, pool: str, nodes: list[int]) -> None:
    """Remove machines that are stopped, and whose numbers no node has any more."""
    allocation = provider.allocate(pool)
    try:
        for machine in await allocation.find():
            if machine.node not in nodes:
                await bootstrap.take_down(machine, pool, REMOVE_SECONDS)
                Journal().gone(pool, machine.node)
    finally:
        await allocation.close()


def _journalled(journal: Journal, record: KeptPool) -> PoolRecord | None:
    found = (each for each, kept in recorded_pools(journal) if kept and kept.id == record.id)
    return next(found, None)
