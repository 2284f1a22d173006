"""`sky start`: start a pool again that was stopped."""

from __future__ import annotations

import click

from skyward.cli import names, output
from skyward.cli.commands import Command


@click.command(cls=Command)
@click.argument("name", shell_complete=names.kept_pools)
def start(name: str) -> None:
    """Start the pool NAME again, as it was before `sky stop NAME`."""
    from skyward.compute.attaching import start_pool

    count = start_pool(name)
    if output.wants_json():
        output.as_json({"name": name, "nodes": count})
    else:
        click.echo(f"{name}: {count} {'node' if count == 1 else 'nodes'} started")
