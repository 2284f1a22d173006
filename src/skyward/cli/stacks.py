"""`sky stacks`: where every worker of a pool is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from skyward.cli import names, output
from skyward.cli.commands import Command

if TYPE_CHECKING:
    from skyward.nodes.stacks import PoolStacks


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=names.kept_pools)
@click.option(
    "--all", "everything", is_flag=True, help="Also show frames of Skyward and of importlib."
)
def stacks(name: str | None, everything: bool) -> None:
    """Show the task, the line and the stack of every worker of your pools.

    These are the pools of all your processes on this machine and the kept pools, or those called
    NAME. A worker that hangs in C code is shown, too. The innermost call comes last.
    """
    from skyward.errors import PoolError
    from skyward.page.door import all_stacks

    found = all_stacks(name)
    if not found and name is not None:
        there = ", ".join(dict.fromkeys(pool.name for pool in all_stacks())) or "none"
        raise PoolError(f"no pool is called {name!r}; there are: {there}")
    if output.wants_json():
        output.as_json([_document(pool) for pool in found])
        return
    if not found:
        click.echo("no pool runs here, and none is kept")
        return
    for number, pool in enumerate(found):
        click.echo(("\n" if number else "") + output.clean(f"{pool.name} ({pool.pool})"))
        if pool.problem:
            click.echo(f"  {output.clean(pool.problem)}")
        for process in pool.processes:
            click.echo()
            for line in process.text(everything=everything).split("\n"):
                click.echo(output.clean(line))


def _document(pool: PoolStacks) -> object:
    import msgspec  # imported here: `--help` does not need it

    return msgspec.to_builtins(pool)
