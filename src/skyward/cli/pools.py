"""`sky up`, `attach`, `stop`, `start`, `down`: the life of pools, kept or left behind."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.errors import ConfigurationError, PoolError
from skyward.providers import money

if TYPE_CHECKING:
    from skyward.nodes.cleanup import Cleaned
    from skyward.nodes.records import PoolRecord


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=names.recorded_pools)
@click.option("--all", "everything", is_flag=True, help="Every pool, also those in use.")
@click.option("--yes", is_flag=True, help="Do not ask about pools that may be in use.")
@click.option("--force", is_flag=True, help="Also end a kept pool that is in use.")
@click.option("--forget", is_flag=True, help="Only take the pool NAME off the record.")
def down(name: str | None, everything: bool, yes: bool, force: bool, forget: bool) -> None:
    """Remove the machines of pools that were left behind, or of the pool NAME.

    NAME is a pool's name or the beginning of its identifier, as `sky ps` shows them. A kept
    pool is removed only by its name, or with --all; if it has clients or runs jobs, --force
    is needed. --forget removes nothing: it is for machines that are gone, or that nobody can reach
    any more.
    """
    if name is not None and everything:
        raise click.UsageError("give a name or --all, not both")
    if forget and name is None:
        raise click.UsageError("--forget: give the name of the pool that is to be forgotten")
    from skyward.nodes import records
    from skyward.nodes.cleanup import clean, matching
    from skyward.nodes.occupancy import end, recorded_pools
    from skyward.nodes.records import Journal

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
        unclear = records.damaged()
        chosen = [
            pool
            for pool in pools
            if pool.client == "gone" and pool.id not in kept and pool.name not in unclear
        ]
    # Whether a kept pool is in use, its agents know.
    in_use = [pool for pool in chosen if pool.client != "gone" and pool.id not in kept]
    if forget:
        _check_forgettable(chosen)
        ask([f"{pool.name} ({pool.id})" for pool in in_use], yes, "forget")
        journal.forget(chosen[0].id)
        if chosen[0].id in kept:
            records.forget(chosen[0].name, chosen[0].id)
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
            records.forget_damaged(each.name)
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
    from skyward.nodes.cleanup import Cleaned

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


@click.command(cls=Command)
@click.argument("name", shell_complete=names.described_pools)
@click.option("--provider", shell_complete=names.providers, help="local, container, aws, ...")
@click.option("--nodes", help="How many: 4, or 1-8 for a pool that grows and shrinks.")
@click.option("--accelerator", shell_complete=names.accelerators, help="A100, or H100:8 for 8.")
@click.option("--region", help="Where a provider that sells machines is to make them.")
@click.option("--ttl", metavar="TIME", help="End the pool after this time: 90s, 8h, 2d.")
@click.option("--keep", metavar="TIME", help="End it after so long without a client.")
def up(
    name: str,
    provider: str | None,
    nodes: str | None,
    accelerator: str | None,
    region: str | None,
    ttl: str | None,
    keep: str | None,
) -> None:
    """Start the pool NAME and leave it running, for `sky.attach` and the other commands.

    If skyward.toml describes a pool of that name, it is that one; options count in place of what
    the file says. `sky down NAME` ends it.
    """
    from skyward.compute import Compute
    from skyward.compute.arguments import seconds_of
    from skyward.settings import read_settings
    from skyward.spec import Options

    given: dict[str, Any] = {"keep": True if keep is None else seconds_of(keep)}
    if provider is not None:
        given["provider"] = made_provider(provider)
    if nodes is not None:
        given["nodes"] = _nodes(nodes)
    if accelerator is not None:
        given["accelerator"] = _accelerator(accelerator)
    if region is not None:
        given["region"] = region
    if ttl is not None:
        given["ttl"] = seconds_of(ttl)
    settings = read_settings()
    described = settings is not None and name in settings.pools
    if output.wants_json() and not described:
        given["options"] = Options(console=False)
    made = Compute.named(name, **given) if described else Compute(name=name, **given)
    with made as compute:
        count = len(compute.nodes)
    if output.wants_json():
        output.as_json({"name": name, "nodes": count})
        return
    click.echo(
        f"{name}: {count} {'node' if count == 1 else 'nodes'}; sky.attach({name!r}) uses it, and "
        f"`sky down {name}` ends it"
    )


def made_provider(name: str) -> Any:
    """The provider of that name, as the environment describes it."""
    from skyward.providers import find_provider

    made = find_provider(name)
    try:
        return made()
    except TypeError:
        raise ConfigurationError(
            f"--provider {name}: it needs arguments, so describe the pool in skyward.toml"
        ) from None


def _nodes(text: str) -> int | tuple[int, int]:
    least, dash, most = text.partition("-")
    try:
        return (int(least), int(most)) if dash else int(least)
    except ValueError:
        raise click.UsageError(f"--nodes {text}: give a number, or 1-8") from None


def _accelerator(text: str) -> Any:
    from skyward import accelerators

    return accelerators.parse(text)


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=names.kept_pools)
@click.option(
    "--export",
    "target",
    metavar="FILE",
    help="Write the pool's record, and the keys that Skyward made for it, to a file.",
)
@click.option("--import", "source", metavar="FILE", help="Read a record that was exported.")
@click.option(
    "--with",
    "given",
    metavar="NAME=VALUE",
    multiple=True,
    help="With --import: an argument of the pool's provider that is another one here.",
)
def attach(
    name: str | None, target: str | None, source: str | None, given: tuple[str, ...]
) -> None:
    """Check that the pool NAME can be used from here, and say who uses it.

    --export and --import move its record to another machine of yours. The record is a key: whoever
    has it can run anything on the pool. What it names that is not on this machine, such as a
    kubeconfig or the key of SSH, is looked for where you have yours; --with context=NAME or
    --with key=FILE says which.
    """
    if source is not None:
        if target is not None:
            raise click.UsageError("give --export or --import, not both")
        _import(Path(source), name, given)
        return
    if given:
        raise click.UsageError("--with goes with --import")
    if name is None:
        raise click.UsageError("give the name of a pool, or --import FILE")
    from skyward.nodes import records

    record = records.read(name)
    if target is not None:
        from skyward.nodes.kept import exported

        _export(exported(record), Path(target))
        return
    from skyward.nodes.occupancy import occupancy

    now = occupancy(record)
    if output.wants_json():
        output.as_json({"name": name, "state": now.state, "clients": list(now.clients)})
        return
    click.echo(f"{name}: {now.state}; in Python: sky.attach({name!r})")


def _export(data: bytes, path: Path) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
    if output.wants_json():
        output.as_json({"file": str(path)})
    else:
        click.echo(f"{path}: a key to the pool; give it to nobody, and delete it after --import")


def _import(path: Path, name: str | None, given: Sequence[str]) -> None:
    from skyward.nodes.kept import imported

    for each in given:
        if not each.partition("=")[1]:
            raise click.UsageError(f"--with {each}: write NAME=VALUE, as in context=lab")
    arguments = {key: value for key, _, value in (each.partition("=") for each in given)}
    with path.open("rb") as file:
        others = os.fstat(file.fileno()).st_mode & 0o077
        record = imported(file.read(), str(path), name, arguments)
    if others:
        click.echo(f"{path}: others can read this key to the pool; delete it", err=True)
    if output.wants_json():
        output.as_json({"name": record.name})
    else:
        click.echo(f"{record.name}: sky.attach({record.name!r}) uses it from here, too")


@click.command(cls=Command)
@click.argument("name", shell_complete=names.kept_pools)
@click.option("--force", is_flag=True, help="Also if it has clients or runs jobs.")
def stop(name: str, force: bool) -> None:
    """End the agents and workers of the pool NAME, and stop its machines.

    `sky start NAME` starts them again. The machines of AWS and containers keep their disks, pods
    are made anew; hosts and this machine stay as they are. The list of jobs, their output and
    their results go: fetch what you need first.
    """
    from skyward.compute import stop_pool

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


@click.command(cls=Command)
@click.argument("name", shell_complete=names.kept_pools)
def start(name: str) -> None:
    """Start the pool NAME again, as it was before `sky stop NAME`."""
    from skyward.compute import start_pool

    count = start_pool(name)
    if output.wants_json():
        output.as_json({"name": name, "nodes": count})
    else:
        click.echo(f"{name}: {count} {'node' if count == 1 else 'nodes'} started")
