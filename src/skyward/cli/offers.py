"""`sky offers`: the machines that providers sell, and their prices."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.providers import money

if TYPE_CHECKING:
    from skyward.providers import Offer

_HEADS = (
    "provider",
    "type",
    "accelerator",
    "vcpus",
    "memory",
    "place",
    "allocation",
    "$/hour",
)
_RIGHT = ("vcpus", "memory", "$/hour")


@click.command(cls=Command)
@click.argument("accelerator", required=False, shell_complete=names.accelerators)
@click.option("--region", help="Only there; a name of the provider's, such as us-east-1.")
@click.option("--vcpus", type=float, help="At least so many.")
@click.option("--memory", type=float, metavar="GB", help="At least so many gigabytes.")
@click.option("--max-cost", type=float, metavar="DOLLARS", help="At most so much an hour.")
@click.option("--spot", is_flag=True, help="Only machines that can be taken back.")
@click.option("--on-demand", is_flag=True, help="Only machines that cannot be taken back.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Show at most so many; 0 for all.",
)
def offers(
    accelerator: str | None,
    region: str | None,
    vcpus: float | None,
    memory: float | None,
    max_cost: float | None,
    spot: bool,
    on_demand: bool,
    limit: int,
) -> None:
    """List machines that one can buy, the cheapest first.

    ACCELERATOR is a model and how many of it, such as H100, H100:8 or A100-40GB. A type that
    several zones of a region sell is one line, with the cheapest zone; --json lists each zone.
    """
    from skyward.compute.offers import search

    done = search(
        accelerator,
        vcpus=vcpus,
        memory_gb=memory,
        region=region,
        allocation=None if spot == on_demand else "spot" if spot else "on-demand",
        max_hourly_cost=max_cost,
    )
    found = done.offers
    if output.wants_json():
        output.as_json([_document(offer) for offer in found[: limit or None]])
        return
    if not found:
        click.echo(f"no provider sells such a machine: {done.why_none or _filters()}")
        return
    rows = _rows(found)
    shown = rows[: limit or None]
    output.table(_HEADS, shown, right=_RIGHT)
    if len(shown) < len(rows):
        click.echo(f"{len(rows) - len(shown)} more; --limit 0 shows all", err=True)


def _filters() -> str:
    """The arguments of the command, as the user gave them."""
    given = click.get_current_context().params
    parts = [str(given["accelerator"])] if given["accelerator"] else []
    for name in ("region", "vcpus", "memory", "max_cost"):
        if given[name] is not None:
            value = given[name]
            told = value if isinstance(value, str) else f"{value:g}"
            parts.append(f"--{name.replace('_', '-')} {told}")
    parts += [f"--{each.replace('_', '-')}" for each in ("spot", "on_demand") if given[each]]
    return " ".join(parts) or "none has any"


def _rows(found: list[Offer]) -> list[tuple[object, ...]]:
    """A row for each type and way to buy it, in the cheapest zone of a region."""
    alike: dict[tuple[str, ...], list[Offer]] = {}
    for offer in found:
        key = (offer.provider, offer.region, offer.instance_type, offer.allocation)
        alike.setdefault(key, []).append(offer)
    return [_row(first, len(others)) for first, *others in alike.values()]


def _row(offer: Offer, other_zones: int) -> tuple[object, ...]:
    place = offer.zone or offer.region
    return (
        offer.provider,
        offer.instance_type,
        offer.accelerator or "",
        f"{offer.vcpus:g}",
        f"{offer.memory_gb:g} GB",
        f"{place} and {other_zones} more" if other_zones else place,
        offer.allocation,
        "unknown" if offer.hourly_cost is None else money(offer.hourly_cost),
    )


def _document(offer: Offer) -> dict[str, object]:
    accelerator = None if offer.accelerator is None else str(offer.accelerator)
    return asdict(offer) | {"accelerator": accelerator}
