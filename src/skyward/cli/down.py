"""`sky down`: remove the machines of pools."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.errors import PoolError

if TYPE_CHECKING:
    from skyward.pool.journal import PoolRecord


@click.command(cls=Command)
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Every pool, also those in use.")
@click.option("--yes", is_flag=True, help="Do not ask before a pool in use is removed.")
def down(name: str | None, everything: bool, yes: bool) -> None:
    """Remove the machines of pools that were left behind, or of the pool NAME.

    NAME is a pool's name or the beginning of its identifier, as `sky ps` shows them.
    """
    if name is not None and everything:
        raise click.UsageError("give a name or --all, not both")
    from skyward.pool.cleaning import clean, matching
    from skyward.pool.journal import Journal

    journal = Journal()
    pools = journal.pools()
    if name is not None:
        chosen = matching(pools, name)
        if not chosen:
            known = ", ".join(f"{pool.name} ({pool.id})" for pool in pools) or "none"
            raise PoolError(f"no pool is called {name!r}; on record: {known}")
    elif everything:
        chosen = pools
    else:
        chosen = [pool for pool in pools if pool.client == "gone"]
    _ask([pool for pool in chosen if pool.client != "gone"], yes)
    outcomes = [clean(journal, pool) for pool in chosen]
    if output.wants_json():
        output.as_json(
            [
                {"id": each.pool.id, "removed": each.removed, "failures": each.failures}
                for each in outcomes
            ]
        )
    else:
        for each in outcomes:
            count = max(len(each.removed) - len(each.failures), 0)
            machines = "1 machine" if count == 1 else f"{count} machines"
            click.echo(f"{each.pool.name} ({each.pool.id}): {machines} removed")
        if not outcomes:
            click.echo("nothing was left behind")
    failures = [f"{each.pool.name}: {what}" for each in outcomes for what in each.failures]
    if failures:
        raise PoolError("not everything could be removed: " + "; ".join(failures))


def _ask(in_use: list[PoolRecord], yes: bool) -> None:
    if not in_use or yes:
        return
    names = ", ".join(f"{pool.name} ({pool.id})" for pool in in_use)
    if not sys.stdin.isatty():
        raise click.UsageError(f"{names}: may be in use; pass --yes to remove them all the same")
    click.confirm(f"{names}: may be in use. Remove?", abort=True)
