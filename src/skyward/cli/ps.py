"""`sky ps`: the pools that have machines, or what one of them has."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.jobs import HEADS, job_document, job_row
from skyward.cli.names import kept_pools
from skyward.console.measures import size
from skyward.errors import SkywardError
from skyward.providers import money

if TYPE_CHECKING:
    from skyward.nodes.occupancy import Occupancy
    from skyward.nodes.records import KeptNode, KeptPool, PoolRecord
    from skyward.worker.jobs import Job

    NodeWorkers = tuple[KeptNode, int | None]

AT_ONCE = 16
"""How many pools or nodes are asked at the same time."""
_STATES = {"running": "in use", "gone": "left behind", "elsewhere": "from another host"}


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=kept_pools)
def ps(name: str | None) -> None:
    """List pools that have machines, or what the pool NAME has: nodes, clients, jobs, results.

    A pool whose process has ended is left behind; `sky down` removes it. Its machines may have
    ended themselves, so its cost is what it is at most. A kept pool is listed with the number
    of its clients and calls by name, or how long it has been idle, and with the size of its values.
    Other pools of plain workers on this machine end with their process and are not listed.
    NAME is a kept pool.
    """
    if name is not None:
        _show_pool(name)
        return
    from skyward.nodes.occupancy import occupancy, recorded_pools
    from skyward.nodes.records import Journal

    found = recorded_pools(Journal())
    # Each kept pool is asked who uses it, all at once: one may be out of reach.
    with ThreadPoolExecutor(AT_ONCE) as asking:
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


def _show_pool(name: str) -> None:
    """Print what a pool has now."""
    from skyward.nodes import records
    from skyward.nodes.occupancy import occupancy

    record = records.read(name)
    now = occupancy(record)
    nodes, jobs = _asked(record)
    if output.wants_json():
        output.as_json(_pool_document(record, now, nodes, jobs))
        return
    click.echo(f"{name}: {now.state}")
    heads = ("node", "state", "host", "address", "accelerator", "workers")
    _section("nodes", heads, [_node_row(*each) for each in nodes], ("node", "workers"))
    clients = [_client_row(each) for each in now.clients]
    _section("clients", ("client", "process", "since", "command"), clients, ("process",))
    _section("jobs", HEADS, [job_row(each) for each in jobs], ("code", "took"))
    values = [_value_row(each) for each in now.values]
    _section("values", ("value", "node", "device", "size"), values, ("node", "size"))


def _asked(record: KeptPool) -> tuple[list[NodeWorkers], list[Job]]:
    """The nodes with the number of their worker processes, None if they do not answer; the jobs."""
    from skyward.compute.workbench.jobs import jobs_of
    from skyward.nodes.kept import ReachedPool

    problems = (SkywardError, OSError, EOFError)

    def workers(node: KeptNode) -> int | None:
        with contextlib.suppress(*problems), pool.service(node.index, "about") as about:
            return len(about.ask("facts")["executors"])
        return None

    silent: list[NodeWorkers] = [(node, None) for node in record.nodes]
    if record.stopped:
        return silent, []
    try:
        with ReachedPool(record) as pool, ThreadPoolExecutor(AT_ONCE) as asking:
            nodes = list(zip(record.nodes, asking.map(workers, record.nodes), strict=True))
            jobs: list[Job] = []
            with contextlib.suppress(*problems):
                jobs = jobs_of(pool, record.head)
            return nodes, jobs
    except problems:
        return silent, []


def _section(
    title: str, heads: tuple[str, ...], rows: list[tuple[object, ...]], right: tuple[str, ...]
) -> None:
    if rows:
        click.echo(f"\n{title}")
        output.table(heads, rows, right=right)


def _node_row(node: KeptNode, workers: int | None) -> tuple[object, ...]:
    state = "answers" if workers is not None else "out of reach"
    cards = "" if not node.accelerators else f"{node.accelerator}:{node.accelerators}"
    return node.index, state, node.hostname, node.address, cards, workers or 0


def _client_row(client: dict[str, Any]) -> tuple[object, ...]:
    since = output.moment(_since(client))
    who = f"{client.get('user', '?')}@{client.get('host', '?')}"
    return who, client.get("pid", "?"), since, client.get("command", "")


def _since(client: dict[str, Any]) -> datetime:
    return datetime.fromtimestamp(float(client["since"]), UTC)


def _value_row(value: dict[str, Any]) -> tuple[object, ...]:
    return value["name"], value["node"], value["device"], size(value["bytes"])


def _pool_document(
    record: KeptPool, now: Occupancy, nodes: list[NodeWorkers], jobs: list[Job]
) -> dict[str, object]:
    return {
        "id": record.id,
        "name": record.name,
        "provider": record.provider,
        "state": now.state,
        "created": datetime.fromtimestamp(record.created, UTC),
        "idle": now.idle,
        "nodes": [
            {
                "node": node.index,
                "answers": workers is not None,
                "hostname": node.hostname,
                "address": node.address,
                "accelerator": node.accelerator,
                "accelerators": node.accelerators,
                "workers": workers or 0,
            }
            for node, workers in nodes
        ],
        "clients": [each | {"since": _since(each)} for each in now.clients],
        "values": list(now.values),
        "jobs": [job_document(each) for each in jobs if each.kind != "call"],
        "calls": [job_document(each) for each in jobs if each.kind == "call"],
    }
