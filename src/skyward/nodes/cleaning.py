"""Cleaning: removes the machines of a pool whose client does not remove them."""

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
"""How long after the request for a machine the provider may take to find it."""
_REMOVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The machines of one pool that were removed, and those that were not."""

    pool: PoolRecord
    removed: tuple[str, ...]
    failures: tuple[str, ...]
    """Why machines are left; if any are, the pool stays in the journal."""


def clean(journal: Journal, pool: PoolRecord) -> Cleaned:
    """Remove every machine of a pool, also machines that the client did not finish making."""
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
    """The pool's machines; waits for a machine that was asked for a moment ago."""
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
    """The pools that have this name, or an identifier that begins with it."""
    return [pool for pool in pools if pool.name == name or pool.id.startswith(name)]
