"""`sky down`: remove the machines of pools."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.errors import PoolError
from skyward.providers import money

if TYPE_CHECKING:
    from skyward.nodes.cleaning import Cleaned
    from skyward.nodes.journal import PoolRecord


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=names.recorded_pools)
@click.option("--all", "everything", is_flag=True, help="Every pool, also those in use.")
@click.option("--yes", is_flag=True, help="Do not ask about pools that may be in use.")
@click.option("--force", is_flag=True, help="Also end a pool that stays and is in use.")
@click.option("--forget", is_flag=True, help="Only take the pool NAME off the record.")
def down(name: str | None, everything: bool, yes: bool, force: bool, forget: bool) -> None:
    """Remove the machines of pools that were left behind, or of the pool NAME.

    NAME is a pool's name or the beginning of its identifier, as `sky ps` shows them. A pool that
    stays is removed only by its name, or with --all; if it has clients, or scripts or calls by
    name run on it, --force is needed. --forget removes nothing: it is for machines that are gone,
    or that nobody can reach any more.
    """
    if name is not None and everything:
        raise click.UsageError("give a name or --all, not both")
    if forget and name is None:
        raise click.UsageError("--forget: give the name of the pool that is to be forgotten")
    from skyward.nodes import keeping
    from skyward.nodes.cleaning import clean, matching
    from skyward.nodes.journal import Journal
    from skyward.nodes.occupancy import end, recorded_pools

    journal = Journal()
    kept = {pool.id: record for pool, record in recorded_pools(journal) if record is not None}
    pools = [pool for pool, _ in recorded_pools(journal)]
    if name is not None:
        chosen = matching(pools, name)
        if not chosen:
            known = ", ".join(f"{pool.name} ({pool.id})" for pool in pools) or "none"
            raise PoolError(f"no pool is called {name!r}; on record: {known}")
    elif everything:
        chosen = pools
    else:
        # A pool whose record cannot be read may be in use; by its name it can be ended.
        unclear = keeping.damaged()
        chosen = [
            pool
            for pool in pools
            if pool.client == "gone" and pool.id not in kept and pool.name not in unclear
        ]
    # Whether a pool that stays is in use, its agents know.
    in_use = [pool for pool in chosen if pool.client != "gone" and pool.id not in kept]
    if forget:
        _check_forgettable(chosen)
        ask([f"{pool.name} ({pool.id})" for pool in in_use], yes, "forget")
        journal.forget(chosen[0].id)
        if chosen[0].id in kept:
            keeping.forget(chosen[0].name, chosen[0].id)
        _tell_forgotten(chosen[0])
        return
    ask([f"{pool.name} ({pool.id})" for pool in in_use], yes, "remove")
    if name is not None and len(chosen) == 1 and chosen[0].id in kept:
        # Not attempted: that it is in use is no failure to remove something.
        outcomes = [end(journal, chosen[0], kept[chosen[0].id], force=force)]
    else:
        outcomes = [
            attempted(
                pool.id,
                pool.name,
                functools.partial(end, journal, pool, kept[pool.id], force=force)
                if pool.id in kept
                else functools.partial(clean, journal, pool),
            )
            for pool in chosen
        ]
    for each in outcomes:
        if not each.failures:
            keeping.forget_damaged(each.name)
        for problem in each.unwritten:
            click.echo(f"{each.name}: not written back: {problem}", err=True)
    if output.wants_json():
        output.as_json(
            [
                {
                    "id": each.pool,
                    "removed": each.removed,
                    "failures": each.failures,
                    "brought_back": each.brought,
                    "not_written_back": each.unwritten,
                }
                for each in outcomes
            ]
        )
    else:
        for pool, each in zip(chosen, outcomes, strict=True):
            click.echo(said(each) + brought_back(each) + _cost(pool, each))
        if not outcomes:
            click.echo("nothing was left behind")
    if failures := failed(outcomes):
        left = next(each.pool for each in outcomes if each.failures)
        raise PoolError(
            f"{failures}. The pool stays on record; if its machines are gone, take it off the "
            f"record: sky down {left} --forget"
        )


def attempted(pool: str, name: str, clean: Callable[[], Cleaned]) -> Cleaned:
    """Remove a pool; if that fails altogether, the others are removed all the same."""
    from skyward.nodes.cleaning import Cleaned

    try:
        return clean()
    except Exception as problem:
        return Cleaned(pool, name, (), (str(problem) or type(problem).__name__,))


def said(cleaned: Cleaned, besides: Sequence[str] = ()) -> str:
    """What was removed, in words; `besides` is what went with the machines if nothing failed."""
    count = len(cleaned.removed)
    parts = ["1 machine" if count == 1 else f"{count} machines"] if count else []
    parts += () if cleaned.failures else besides
    name = f"{cleaned.name} ({cleaned.pool})" if cleaned.name else cleaned.pool
    if parts:
        return f"{name}: {', '.join(parts)} removed"
    return f"{name}: {'nothing removed' if cleaned.failures else 'no machine was left'}"


def brought_back(cleaned: Cleaned) -> str:
    """How many files came back from the nodes, in words."""
    if not cleaned.brought:
        return ""
    return f"; {cleaned.brought} file{'s' * (cleaned.brought > 1)} brought back"


def failed(outcomes: Iterable[Cleaned]) -> str:
    """What could not be removed, in words; empty if everything was."""
    failures = [f"{each.name or each.pool}: {what}" for each in outcomes for what in each.failures]
    return f"not everything could be removed: {'; '.join(failures)}" if failures else ""


def _cost(pool: PoolRecord, cleaned: Cleaned) -> str:
    """What a pool has cost; a machine that was not found has ended nobody knows when."""
    if not pool.cost or cleaned.failures:
        return ""
    most = "" if len(cleaned.removed) >= len(pool.machines) else "at most "
    return f"; cost {most}{money(pool.cost)}"


def _check_forgettable(pools: list[PoolRecord]) -> None:
    if len(pools) > 1:
        ids = ", ".join(pool.id for pool in pools)
        raise click.UsageError(f"--forget: several pools match; give one of these: {ids}")
    for pool in pools:
        if pool.client == "running":
            raise PoolError(
                f"{pool.name} ({pool.id}): its process {pool.pid} still runs, and looks after its "
                "machines; end the process first"
            )


def _tell_forgotten(pool: PoolRecord) -> None:
    if output.wants_json():
        output.as_json([{"id": pool.id, "forgotten": True}])
        return
    machines = ", ".join(each.id or f"node {each.node}" for each in pool.machines) or "none"
    click.echo(f"{pool.name} ({pool.id}): off the record, nothing removed; had: {machines}")


def ask(in_use: list[str], yes: bool, verb: str) -> None:
    """Ask about pools that may be in use; without a terminal, insist on `--yes`."""
    if not in_use or yes:
        return
    names = ", ".join(in_use)
    if not sys.stdin.isatty():
        raise click.UsageError(f"{names}: may be in use; pass --yes to {verb} them all the same")
    click.confirm(f"{names}: may be in use. {verb.capitalize()}?", abort=True)
