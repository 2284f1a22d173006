"""`sky stop`: end the workers of a pool that stays, and keep it on record."""

from __future__ import annotations

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.cli.down import brought_back
from skyward.providers import money


@click.command(cls=Command)
@click.argument("name", shell_complete=names.kept_pools)
@click.option("--force", is_flag=True, help="Also if clients, scripts or calls by name use it.")
def stop(name: str, force: bool) -> None:
    """End the agents and workers of the pool NAME, and stop its machines.

    `sky start NAME` starts them again. The machines of AWS and containers keep their disks, pods
    are made anew; hosts and this machine stay as they are. The list of jobs, their output, and
    results of calls by name go: fetch what you need first.
    """
    from skyward.compute.attaching import stop_pool

    stopped = stop_pool(name, force=force)
    cleaned = stopped.cleaned
    for each in cleaned.unwritten:
        click.echo(f"{name}: not written back: {each}", err=True)
    if output.wants_json():
        output.as_json(
            {
                "name": name,
                "state": "stopped",
                "hourly_cost": stopped.hourly_cost,
                "brought_back": cleaned.brought,
                "not_written_back": cleaned.unwritten,
            }
        )
        return
    cost = ""
    if stopped.hourly_cost:
        cost = f"; its disks cost about {money(24 * stopped.hourly_cost)} a day meanwhile"
    came = brought_back(cleaned)
    click.echo(f"{name}: stopped{came}{cost}; `sky start {name}` starts it again")
