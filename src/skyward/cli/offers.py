"""`sky offers`: the machines that providers sell, and their prices."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.market import money

if TYPE_CHECKING:
    from skyward.market import Offer

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
@click.argument("accelerator", required=False)
@click.option("--region", help="Only there; a name of the provider's, such as us-east-1.")
@click.option("--vcpus", type=float, help="At least so many.")
@click.option("--memory", type=float, metavar="GB", help="At least so many gigabytes.")
@click.option("--max-cost", type=float, metavar="DOLLARS", help="At most so much an hour.")
@click.option(
    "--spot/--on-demand",
    default=None,
    help="Only machines that can be taken back, or only those that cannot.",
)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="At most.")
def offers(
    accelerator: str | None,
    region: str | None,
    vcpus: float | None,
    memory: float | None,
    max_cost: float | None,
    spot: bool | None,
    limit: int,
) -> None:
    """List machines that one can buy, the cheapest first.

    ACCELERATOR is a model and how many of it, such as H100, H100:8 or A100-40GB.
    """
    from skyward.compute.offers import offers as find

    found = find(
        accelerator,
        vcpus=vcpus,
        memory_gb=memory,
        region=region,
        allocation=None if spot is None else "spot" if spot else "on-demand",
        max_hourly_cost=max_cost,
    )
    shown = found[:limit]
    if output.wants_json():
        output.as_json([_document(offer) for offer in shown])
        return
    if not found:
        click.echo("no provider sells such a machine")
        return
    output.table(_HEADS, [_row(offer) for offer in shown], right=_RIGHT)
    if len(shown) < len(found):
        click.echo(f"{len(found) - len(shown)} more cost as much or more; see --limit", err=True)


def _row(offer: Offer) -> tuple[object, ...]:
    return (
        offer.provider,
        offer.instance_type,
        offer.accelerator or "",
        f"{offer.vcpus:g}",
        f"{offer.memory_gb:g} GB",
        offer.zone or offer.region,
        offer.allocation,
        "" if offer.hourly_cost is None else money(offer.hourly_cost),
    )


def _document(offer: Offer) -> dict[str, object]:
    accelerator = None if offer.accelerator is None else str(offer.accelerator)
    return asdict(offer) | {"accelerator": accelerator}
