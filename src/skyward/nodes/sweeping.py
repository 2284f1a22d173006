"""Sweeping: removes what a pool has besides machines, when its last machine is gone."""

from __future__ import annotations

from collections.abc import Callable

from skyward.nodes import provider_loop
from skyward.nodes.journal import Journal
from skyward.providers import Provider, sweeps

SWEEP_SECONDS = 180.0
"""How long a provider may take."""


def swept(provider: Provider, pool: str, journal: Journal, note: Callable[[str], None]) -> bool:
    """Have a provider remove what a pool has besides machines; False if something may be left."""
    if not sweeps(provider):
        return True
    if journal.has_machines(pool):
        return False
    sweeping = provider_loop.submit(provider.sweep(pool))
    try:
        sweeping.result(SWEEP_SECONDS)
    except Exception as problem:
        sweeping.cancel()
        note(
            "what the pool had besides its machines could not be removed: "
            f"{str(problem) or type(problem).__name__}; `sky down` tries again"
        )
        return False
    return True
