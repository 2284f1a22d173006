"""Cleaning: removing the machines of pools that nobody takes down any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.bootstrap import preparation
from skyward.errors import PoolError
from skyward.nodes.journal import Journal, PoolRecord
from skyward.providers import Machine, Provider, find_provider

_APPEARING_SECONDS = 10.0
"""How long after it was asked for a machine may take to be found."""
_REMOVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What became of one pool's machines."""

    pool: PoolRecord
    removed: tuple[str, ...]
    failures: tuple[str, ...]
    """Why something is left; then the pool stays on record."""


def clean(journal: Journal, pool: PoolRecord) -> Cleaned:
    """Remove every machine of a pool, also those whose making was cut short."""
    return asyncio.run(_clean(journal, pool))


async def _clean(journal: Journal, pool: PoolRecord) -> Cleaned:
    provider: Provider = find_provider(pool.provider)(**pool.arguments)
    try:
        found = await _found(provider, pool)
    except Exception as problem:
        return Cleaned(pool, (), (f"its machines cannot be looked up: {problem}",))
    outcomes = await asyncio.gather(*(_destroyed(machine, pool.id) for machine in found))
    failures = tuple(outcome for outcome in outcomes if outcome is not None)
    if not failures:
        for record in pool.machines:
            journal.gone(pool.id, record.node)
        journal.close_pool(pool.id)
    return Cleaned(pool, tuple(machine.id for machine in found), failures)


async def _found(provider: Provider, pool: PoolRecord) -> Sequence[Machine]:
    """Its machines; one that was asked for a moment ago may be about to appear."""
    deadline = max((each.created for each in pool.machines if each.id is None), default=0.0)
    deadline += _APPEARING_SECONDS
    while True:
        found = await provider.find(pool.id)
        if len(found) >= len(pool.machines) or time.time() > deadline:
            return found
        await asyncio.sleep(1)


async def _destroyed(machine: Machine, pool: str) -> str | None:
    try:
        await preparation.take_down(machine, pool, _REMOVE_SECONDS)
    except (PoolError, OSError) as problem:
        return f"{machine.id}: {problem}"
    return None


def matching(pools: list[PoolRecord], name: str) -> list[PoolRecord]:
    """The pools of a name, or whose identifier begins with it."""
    return [pool for pool in pools if pool.name == name or pool.id.startswith(name)]
