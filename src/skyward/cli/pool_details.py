"""One pool that stays, for `sky ps NAME`: its nodes, clients, jobs, calls and values."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from skyward.cli import output
from skyward.cli.following import job_document
from skyward.cli.jobs import HEADS, job_row
from skyward.console.measures import size

if TYPE_CHECKING:
    from skyward.compute.workbench.details import NodeDetails, PoolDetails


def show_pool(name: str) -> None:
    """Print what a pool has now."""
    from skyward.compute.workbench.details import details_of
    from skyward.nodes import keeping

    found = details_of(keeping.read(name))
    if output.wants_json():
        output.as_json(_document(found))
        return
    click.echo(f"{name}: {found.occupancy.state}")
    heads = ("node", "state", "host", "address", "accelerator", "workers")
    _section("nodes", heads, [_node_row(each) for each in found.nodes], ("node", "workers"))
    clients = [_client_row(each) for each in found.occupancy.clients]
    _section("clients", ("client", "process", "since", "command"), clients, ("process",))
    _section("jobs and calls", HEADS, [job_row(each) for each in found.jobs], ("code", "took"))
    values = [_value_row(each) for each in found.occupancy.values]
    _section("values", ("value", "node", "device", "size"), values, ("node", "size"))


def _section(
    title: str, heads: tuple[str, ...], rows: list[tuple[object, ...]], right: tuple[str, ...]
) -> None:
    if rows:
        click.echo(f"\n{title}")
        output.table(heads, rows, right=right)


def _node_row(found: NodeDetails) -> tuple[object, ...]:
    node = found.node
    state = "answers" if found.answers else "out of reach"
    cards = "" if not node.accelerators else f"{node.accelerator}:{node.accelerators}"
    return node.index, state, node.hostname, node.address, cards, found.workers


def _client_row(client: dict[str, Any]) -> tuple[object, ...]:
    since = output.moment(_since(client))
    who = f"{client.get('user', '?')}@{client.get('host', '?')}"
    return who, client.get("pid", "?"), since, client.get("command", "")


def _since(client: dict[str, Any]) -> datetime:
    return datetime.fromtimestamp(float(client["since"]), UTC)


def _value_row(value: dict[str, Any]) -> tuple[object, ...]:
    return value["name"], value["node"], value["device"], size(value["bytes"])


def _document(found: PoolDetails) -> dict[str, object]:
    record = found.record
    return {
        "id": record.id,
        "name": record.name,
        "provider": record.provider,
        "state": found.occupancy.state,
        "created": datetime.fromtimestamp(record.created, UTC),
        "idle": found.occupancy.idle,
        "nodes": [
            {
                "node": each.node.index,
                "answers": each.answers,
                "hostname": each.node.hostname,
                "address": each.node.address,
                "accelerator": each.node.accelerator,
                "accelerators": each.node.accelerators,
                "workers": each.workers,
            }
            for each in found.nodes
        ],
        "clients": [each | {"since": _since(each)} for each in found.occupancy.clients],
        "values": list(found.occupancy.values),
        "jobs": [job_document(each) for each in found.jobs if each.kind == "script"],
        "calls": [job_document(each) for each in found.jobs if each.kind == "call"],
    }
