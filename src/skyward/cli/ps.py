"""`sky ps`: the pools that have machines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.names import kept_pools
from skyward.cli.pool_details import show_pool
from skyward.providers import money

if TYPE_CHECKING:
    from skyward.nodes.journal import PoolRecord
    from skyward.nodes.occupancy import Occupancy

_STATES = {"running": "in use", "gone": "left behind", "elsewhere": "from another host"}


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=kept_pools)
def ps(name: str | None) -> None:
    """List pools that have machines, or what the pool NAME has: nodes, clients, jobs, results.

    A pool whose process has ended is left behind; `sky down` removes it. Its machines may have
    ended themselves, so its cost is what it is at most. A pool that stays is listed with the number
    of its clients and calls by name, or how long it has been idle, and with the size of its values.
    Other pools of plain workers on this machine end with their process and are not listed.
    NAME is a pool that stays.
    """
    if name is not None:
        show_pool(name)
        return
    from skyward.nodes.journal import Journal
    from skyward.nodes.occupancy import occupancy, recorded_pools

    found = recorded_pools(Journal())
    # Each pool that stays is asked who uses it, all at once: one may be out of reach.
    with ThreadPoolExecutor(max_workers=16) as asking:
        told = list(asking.map(lambda each: each[1] and occupancy(each[1]), found))
    pools = [(pool, kept) for (pool, _), kept in zip(found, told, strict=True)]
    if output.wants_json():
        output.as_json([_document(pool, kept) for pool, kept in pools])
        return
    if not pools:
        click.echo("no pool has machines")
        return
    heads = ("pool", "name", "provider", "machines", "state", "made", "cost", "$/hour")
    output.table(heads, [_row(*each) for each in pools], right=heads[3:4] + heads[6:])


def _row(pool: PoolRecord, kept: Occupancy | None) -> tuple[object, ...]:
    made = output.moment(datetime.fromtimestamp(pool.created, UTC))
    costs = ["" if each is None else money(each) for each in (pool.cost, pool.hourly_cost)]
    if pool.cost and pool.cost_is_upper_bound and kept is None:
        costs[0] = f"at most {costs[0]}"
    state = _STATES[pool.client] if kept is None else kept.state
    return pool.id, pool.name, pool.provider, len(pool.machines), state, made, *costs


def _document(pool: PoolRecord, kept: Occupancy | None) -> dict[str, object]:
    return {
        "id": pool.id,
        "name": pool.name,
        "provider": pool.provider,
        "state": pool.client if kept is None else kept.state,
        "kept": kept is not None,
        "clients": [] if kept is None else list(kept.clients),
        "idle": None if kept is None else kept.idle,
        "values": [] if kept is None else list(kept.values),
        "host": pool.host,
        "pid": pool.pid,
        "created": datetime.fromtimestamp(pool.created, UTC),
        "cost": pool.cost,
        "cost_is_upper_bound": pool.cost_is_upper_bound,
        "hourly_cost": pool.hourly_cost,
        "machines": [
            asdict(machine) | {"created": datetime.fromtimestamp(machine.created, UTC)}
            for machine in pool.machines
        ],
    }
