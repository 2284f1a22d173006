"""The cleanup: removes the machines of a pool whose client does not remove them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skyward import bootstrap
from skyward.errors import PoolError
from skyward.nodes import records
from skyward.nodes.records import Journal, PoolRecord
from skyward.providers import (
    Allocation,
    Collector,
    Machine,
    Provider,
    Remains,
    Stopper,
    find_provider,
    is_here,
    owner,
)

_APPEARING_SECONDS = 10.0
"""How long after the request for a machine the provider may take to find it."""
REMOVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The machines of one pool that were removed, and what was not removed."""

    pool: str
    name: str
    removed: tuple[str, ...]
    failures: tuple[str, ...]
    """Why something is left; if anything is, the pool stays in the journal."""
    unwritten: tuple[str, ...] = ()
    """What could not be written back before the machines went, and why."""
    brought: int = 0
    """How many files came back into folders of this machine that the nodes had."""


def clean(journal: Journal, pool: PoolRecord) -> Cleaned:
    """Remove everything of a pool in the journal, also what the client did not finish making."""
    provider: Provider = find_provider(pool.provider)(**pool.arguments)
    return asyncio.run(_clean(journal, pool, provider))


def halt(journal: Journal, pool: PoolRecord, provider: Stopper) -> Cleaned:
    """End the agents of a pool, and stop its machines.

    They stay in the journal, at the price of stopped ones.
    """
    return asyncio.run(_halt(journal, pool, provider))


async def _halt(journal: Journal, pool: PoolRecord, provider: Stopper) -> Cleaned:
    allocation = provider.allocate(pool.id)
    try:
        found = await _found(provider, allocation, pool)
        there = [machine for machine in found if not machine.ended]
        await asyncio.gather(
            *(bootstrap.end_agent(each, pool.id, REMOVE_SECONDS) for each in there)
        )
        price = await provider.stop(pool.id)
    except Exception as problem:
        return Cleaned(pool.id, pool.name, (), (_said(problem),))
    finally:
        await allocation.close()
    for machine in found:
        each = price / len(found) if price is not None else None
        journal.gone(pool.id, machine.node)
        journal.intend(pool.id, machine.node)
        journal.made(pool.id, machine.node, machine.id, machine.address, each)
    return Cleaned(pool.id, pool.name, tuple(machine.id for machine in found), ())


def clean_remains(journal: Journal, provider: Collector, remains: Remains) -> Cleaned:
    """Remove everything of a pool that a provider has found, whether it is in the journal or not.

    The journal may say how to make the provider that the pool had, of another region for example;
    the provider that has found the pool can remove it, too.
    """
    record = next((pool for pool in journal.pools() if pool.id == remains.pool), None)
    if record is None:
        record = PoolRecord(
            id=remains.pool,
            name=remains.name,
            provider=provider.name,
            arguments={},
            host="",
            pid=remains.pid,
            began=0.0,
            created=0.0,
            price=None,
            machines=(),
        )
    return asyncio.run(_clean(journal, record, provider))


Whose = Literal["gone", "running", "other"]
"""Whose remains are: of a client of this user that is gone, or that may run, or of another user."""


def whose(journal: Journal, remains: Remains) -> Whose:
    """Say whether the client of a pool that a provider has found is gone, runs, or is another's.

    Without a line in the journal, a client counts as running if a process has its number.
    """
    record = next((pool for pool in journal.pools() if pool.id == remains.pool), None)
    name = record.name if record is not None else remains.name
    if records.find(remains.pool) is not None or name in records.damaged():
        # It stays without a client, which is as it should be.
        return "running"
    if record is not None and record.client != "elsewhere":
        return record.client
    if remains.owner != owner():
        return "other"
    return "running" if remains.pid and _is_process(remains.pid) else "gone"


def _is_process(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))


async def _clean(journal: Journal, pool: PoolRecord, provider: Provider) -> Cleaned:
    allocation = provider.allocate(pool.id)
    try:
        return await _removed(journal, pool, provider, allocation)
    finally:
        await allocation.close()


async def _removed(
    journal: Journal, pool: PoolRecord, provider: Provider, allocation: Allocation[Any]
) -> Cleaned:
    try:
        found = await _found(provider, allocation, pool)
    except Exception as problem:
        return Cleaned(
            pool.id, pool.name, (), (f"its machines cannot be looked up: {_said(problem)}",)
        )
    outcomes = await asyncio.gather(*(_destroyed(machine, pool.id) for machine in found))
    failures = [outcome for outcome in outcomes if outcome is not None]
    if not failures:
        failures += await _swept(allocation)
    if not failures:
        for record in pool.machines:
            journal.gone(pool.id, record.node)
        journal.close_pool(pool.id)
    removed = [each.id for each, problem in zip(found, outcomes, strict=True) if problem is None]
    return Cleaned(pool.id, pool.name, tuple(removed), tuple(failures))


async def _swept(allocation: Allocation[Any]) -> list[str]:
    try:
        await allocation.sweep()
    except Exception as problem:
        return [f"what it had besides its machines: {_said(problem)}"]
    return []


async def _found(
    provider: Provider, allocation: Allocation[Any], pool: PoolRecord
) -> Sequence[Machine]:
    """The pool's machines; waits for a machine that was asked for a moment ago."""
    asked = max((each.created for each in pool.machines if each.id is None), default=0.0)
    # No longer than that: the clock by which the client has asked may have been ahead.
    left = min(_APPEARING_SECONDS, asked + _APPEARING_SECONDS - time.time())
    deadline = time.monotonic() + left
    wanted = {each.node for each in pool.machines}
    while True:
        found = [*await allocation.find()]
        found += _kept_here(provider, pool, [machine.id for machine in found])
        if wanted <= {machine.node for machine in found} or time.monotonic() > deadline:
            return found
        await asyncio.sleep(1)


def _kept_here(provider: Provider, pool: PoolRecord, found: list[str]) -> list[Machine]:
    """Machines of a kept pool on this machine, made where `find` does not look now."""
    if not is_here(provider):
        return []
    ids = [each.id for each in pool.machines if each.id is not None and each.id not in found]
    return [provider.machine_at(machine) for machine in ids if Path(machine).is_dir()]


async def _destroyed(machine: Machine, pool: str) -> str | None:
    try:
        if machine.equipment is not None:
            await machine.destroy()
        else:
            await bootstrap.take_down(machine, pool, REMOVE_SECONDS)
    except (PoolError, OSError) as problem:
        return f"{machine.id}: {problem}"
    return None


def _said(problem: Exception) -> str:
    return str(problem) or type(problem).__name__


def matching(pools: list[PoolRecord], name: str) -> list[PoolRecord]:
    """The pools that have this name, or an identifier that begins with it."""
    return [pool for pool in pools if pool.name == name or pool.id.startswith(name)]
