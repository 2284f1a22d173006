"""`sky ps`: the pools that have machines."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.market import money

if TYPE_CHECKING:
    from skyward.nodes.journal import PoolRecord

_STATES = {"running": "in use", "gone": "left behind", "elsewhere": "from another host"}


@click.command(cls=Command)
def ps() -> None:
    """List pools that have machines: containers, hosts, clouds.

    A pool whose process has ended is left behind; `sky down` removes it. Its machines may have
    ended themselves, so its cost is what it is at most. Pools of plain workers on
    this machine end with their process and are not listed.
    """
    from skyward.nodes.journal import Journal

    pools = Journal().pools()
    if output.wants_json():
        output.as_json([_document(pool) for pool in pools])
        return
    if not pools:
        click.echo("no pool has machines")
        return
    heads = ("pool", "name", "provider", "machines", "state", "made", "cost", "$/hour")
    output.table(heads, [_row(pool) for pool in pools], right=heads[3:4] + heads[6:])


def _row(pool: PoolRecord) -> tuple[object, ...]:
    made = output.moment(datetime.fromtimestamp(pool.created, UTC))
    costs = ["" if each is None else money(each) for each in (pool.cost, pool.hourly_cost)]
    if pool.cost and pool.cost_is_upper_bound:
        costs[0] = f"at most {costs[0]}"
    state = _STATES[pool.client]
    return pool.id, pool.name, pool.provider, len(pool.machines), state, made, *costs


def _document(pool: PoolRecord) -> dict[str, object]:
    return {
        "id": pool.id,
        "name": pool.name,
        "provider": pool.provider,
        "state": pool.client,
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
