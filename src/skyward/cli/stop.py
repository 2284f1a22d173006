"""`sky stop`: end the workers of a pool that stays, and keep it on record."""

from __future__ import annotations

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.cli.down import brought_back


@click.command(cls=Command)
@click.argument("name", shell_complete=names.kept_pools)
@click.option("--force", is_flag=True, help="Also if the pool has clients.")
def stop(name: str, force: bool) -> None:
    """End the agents and workers of the pool NAME; `sky start NAME` starts them again.

    For pools on this machine and on SSH hosts, whose machines stay.
    """
    from skyward.compute.restarting import stop_pool

    stopped = stop_pool(name, force=force)
    for each in stopped.unwritten:
        click.echo(f"{name}: not written back: {each}", err=True)
    if output.wants_json():
        output.as_json(
            {
                "name": name,
                "state": "stopped",
                "brought_back": stopped.brought,
                "not_written_back": stopped.unwritten,
            }
        )
    else:
        click.echo(f"{name}: stopped{brought_back(stopped)}; `sky start {name}` starts it again")
