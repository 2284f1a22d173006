"""Staying: what providers and machines of pools that stay may offer besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

from skyward.providers import Machine, Provider


class Stopper(Provider, Protocol):
    """A provider that can stop machines and keep them, for `sky stop` and `sky start`.

    If there is a stopped machine of the pool for the node, `create` starts that one.
    """

    async def stop(self, pool: str) -> None:
        """Stop the machines of a pool, whose agents have ended, and wait for that.

        What they have on their disks stays. Raises a `PoolError` if one cannot be stopped.
        """
        ...


def stops(provider: Provider) -> TypeGuard[Stopper]:
    """Whether a provider can stop machines and keep them."""
    return hasattr(provider, "stop")


def spares(provider: Provider) -> bool:
    """Whether something has to be done before the agents of a pool are ended for `stop`."""
    return hasattr(provider, "before_stop")


async def before_stop(provider: Provider, pool: str) -> None:
    """Have a pool's machines lose nothing, by a method `before_stop`, if they end by themselves.

    It is called before the agents are ended: a machine without one may end itself, and its client
    may be killed before it calls `stop`. Raises a `PoolError` if that is not possible.
    """
    prepare = getattr(provider, "before_stop", None)
    if prepare is not None:
        await prepare(pool)


async def undo_before_stop(provider: Provider, pool: str) -> None:
    """Undo `before_stop`, by a method `undo_before_stop`: the pool goes on, with all its agents."""
    undo = getattr(provider, "undo_before_stop", None)
    if undo is not None:
        await undo(pool)


async def after_start(machine: Machine) -> None:
    """Undo `before_stop`, by a method `after_start`: the machine has an agent and is on record."""
    undo = getattr(machine, "after_start", None)
    if undo is not None:
        await undo()


async def why_not_stop(provider: Stopper, pool: str) -> str:
    """Why a pool's machines cannot be stopped, by a method `why_not_stop`; empty if they can."""
    explain = getattr(provider, "why_not_stop", None)
    return "" if explain is None else str(await explain(pool))


async def stopped_price(provider: Stopper, pool: str) -> float | None:
    """What a pool's stopped machines cost in an hour, by a method `stopped_price`; None if unknown.

    In US dollars, all machines together.
    """
    ask = getattr(provider, "stopped_price", None)
    return None if ask is None else await ask(pool)


def has_ended(machine: Machine) -> bool:
    """Whether a machine that was found does not run, by its attribute `ended`.

    Such a machine can be removed, or started again by `create`; there is no agent on it.
    """
    return bool(getattr(machine, "ended", False))


async def reach(machine: Machine) -> None:
    """Find out how a machine that was found is reached, if it has a method `reach` for that.

    After that, its `direct` is known.
    """
    find_out = getattr(machine, "reach", None)
    if find_out is not None:
        await find_out()


class KeyHolder(Provider, Protocol):
    """A provider that keeps keys of its own for each pool, in the user's state folder."""

    def export_keys(self, pool: str) -> Mapping[str, str]:
        """The keys that another machine of the user's needs for a pool, as texts by name.

        Raises a `PoolError` if the pool can only be used on this machine.
        """
        ...

    def import_keys(self, pool: str, keys: Mapping[str, str]) -> None:
        """Write down keys that another machine has exported."""
        ...


def holds_keys(provider: Provider) -> TypeGuard[KeyHolder]:
    """Whether a provider keeps keys of its own for each pool."""
    return hasattr(provider, "export_keys")
