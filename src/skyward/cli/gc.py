"""`sky gc`: find and remove what providers still have of pools that are over."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.cli.pools import ask, attempted, failed, said
from skyward.errors import ConfigurationError, PoolError, SkywardError

if TYPE_CHECKING:
    from skyward.nodes.cleanup import Cleaned, Whose
    from skyward.nodes.records import Journal
    from skyward.providers import Collector, Remains

    Found = tuple[Collector, Remains, Whose]

_STATES = {"gone": "left behind", "running": "may be in use", "other": "of another user"}
_HEADS = ("pool", "name", "provider", "owner", "state", "resources")


@click.command(cls=Command)
@click.option("--provider", shell_complete=names.providers, help="Only this one, such as aws.")
@click.option("--region", help="Only there; a name of the provider's, such as us-east-1.")
@click.option("--profile", help="With the credentials of that name.")
@click.option("--all", "everything", is_flag=True, help="Also pools in use and of other users.")
@click.option("--yes", is_flag=True, help="Do not ask about pools that may be in use.")
@click.option("--dry-run", is_flag=True, help="Only list what there is.")
def gc(
    provider: str | None,
    region: str | None,
    profile: str | None,
    everything: bool,
    yes: bool,
    dry_run: bool,
) -> None:
    """Ask providers what they still have of any pool, and remove what was left behind.

    Unlike `sky down`, this needs no record of the pools: it finds machines, and what belongs to
    them, by their marks. A pool is left behind if this user made it on this host and its process
    has ended. Pools of other users are only listed, unless --all is given.
    """
    from skyward.nodes.records import Journal

    journal = Journal()
    found, asked = _found(journal, _collectors(journal, provider, region, profile))
    chosen = [each for each in found if everything or each[2] == "gone"]
    outcomes: dict[str, Cleaned] = {}
    if not dry_run:
        outcomes = _remove(journal, chosen, yes)
    if output.wants_json():
        output.as_json([_document(each, outcomes) for each in found])
    else:
        _tell(found, outcomes, asked, dry_run=dry_run)
    if failures := failed(outcomes.values()):
        raise PoolError(f"{failures}. Try again later")


@dataclass(frozen=True, slots=True)
class AskedProviders:
    """The providers to ask."""

    wanted: tuple[Collector, ...]
    """Those that the user has named, or that the journal has a pool of."""
    others: tuple[Collector, ...] = ()
    """Those that the user may have set up, or not."""
    unmade: tuple[str, ...] = ()
    """Why others cannot be made."""
    unset: tuple[str, ...] = ()
    """The same of those that the user has not set up."""


def _collectors(
    journal: Journal, name: str | None, region: str | None, profile: str | None
) -> AskedProviders:
    """The providers to ask, and why others cannot be made."""
    from skyward.providers import collects, find_provider, providers_with

    given = {"region": region, "profile": profile}
    options = {option: value for option, value in given.items() if value is not None}
    if name is not None:
        kind = find_provider(name)
        taken = _taken(kind, options)
        for option in options:
            if option not in taken:
                raise click.UsageError(f"--{option}: {name} has none")
        made = kind(**options)
        if not collects(made):
            raise click.UsageError(
                f"--provider {name}: it does not know the pools of other processes; ask one of "
                f"{', '.join(providers_with(collects)) or 'none'}, or use `sky down`"
            )
        return AskedProviders((made,))
    recorded = {(pool.provider, repr(pool.arguments)): pool for pool in journal.pools()}
    wanted: list[Any] = []
    unmade: list[str] = []
    if not options:
        for pool in recorded.values():
            try:
                recreated = find_provider(pool.provider)(**pool.arguments)
            except (TypeError, SkywardError) as problem:
                unmade.append(f"{pool.provider}: {problem}")
                continue
            wanted += [recreated] if collects(recreated) else []
    others: list[Any] = []
    unset: list[str] = []
    for each, kind in providers_with(collects).items():
        if _taken(kind, options) != options:
            continue
        try:
            others.append(kind(**options))
        except (TypeError, SkywardError) as problem:
            is_unset = isinstance(problem, ConfigurationError) and not options
            (unset if is_unset else unmade).append(f"{each}: {problem}")
    # Compared and not hashed: the arguments of a provider may be mappings.
    named = [each for place, each in enumerate(wanted) if each not in wanted[:place]]
    more = [each for each in others if each not in named]
    return AskedProviders(tuple(named), tuple(more), tuple(unmade), tuple(unset))


def _taken(kind: type[Any], options: dict[str, str]) -> dict[str, str]:
    """Those of the options that a provider's class takes."""
    parameters = inspect.signature(kind).parameters
    return {name: value for name, value in options.items() if name in parameters}


def _found(journal: Journal, providers: AskedProviders) -> tuple[list[Found], list[str]]:
    """What the providers have, each pool once, and where they looked.

    A provider that does not answer is passed over, one that nobody has set up in silence; raises
    `PoolError` if none answers.
    """
    from skyward.nodes.cleanup import whose

    found: dict[str, Found] = {}
    asked: list[str] = []
    failures, unset = list(providers.unmade), list(providers.unset)
    for collector, remains in asyncio.run(_remains((*providers.wanted, *providers.others))):
        if isinstance(remains, SkywardError):
            is_unset = isinstance(remains, ConfigurationError) and collector in providers.others
            (unset if is_unset else failures).append(f"{collector.name}: {remains}")
            continue
        if (place := collector.where) not in asked:
            asked.append(place)
        for each in remains:
            found.setdefault(each.pool, (collector, each, whose(journal, each)))
    if not asked:
        why = "; ".join([*failures, *unset]) or "there is none to ask"
        raise PoolError(f"no provider answered: {why}")
    for failure in failures:
        click.echo(f"passed over: {failure}", err=True)
    return list(found.values()), asked


async def _remains(
    collectors: Sequence[Collector],
) -> list[tuple[Collector, Sequence[Remains] | SkywardError]]:
    """What each provider has, or why it does not say; all are asked at once."""

    async def answer(collector: Collector) -> Sequence[Remains] | SkywardError:
        try:
            return await collector.remains()
        except SkywardError as problem:
            return problem

    answers = await asyncio.gather(*map(answer, collectors))
    return list(zip(collectors, answers, strict=True))


def _remove(journal: Journal, chosen: list[Found], yes: bool) -> dict[str, Cleaned]:
    in_use = [
        f"{remains.name or 'a pool'} ({remains.pool}) of {remains.owner or 'an unknown user'}"
        for _, remains, whose in chosen
        if whose != "gone"
    ]
    ask(in_use, yes, "remove")
    return {remains.pool: _removed(journal, collector, remains) for collector, remains, _ in chosen}


def _removed(journal: Journal, collector: Collector, remains: Remains) -> Cleaned:
    from skyward.nodes.cleanup import clean_remains

    removing = functools.partial(clean_remains, journal, collector, remains)
    return attempted(remains.pool, remains.name, removing)


def _besides(remains: Remains, cleaned: Cleaned) -> list[str]:
    """What a pool had besides the machines that were removed."""
    machines = set(cleaned.removed)
    return [each for each in remains.resources if each.rpartition(" ")[2] not in machines]


def _tell(
    found: list[Found], outcomes: dict[str, Cleaned], asked: list[str], *, dry_run: bool
) -> None:
    for _, remains, _ in found:
        if cleaned := outcomes.get(remains.pool):
            click.echo(said(cleaned, _besides(remains, cleaned)))
    left = [each for each in found if each[1].pool not in outcomes]
    if left:
        rows = [
            (
                remains.pool,
                remains.name,
                collector.name,
                remains.owner,
                _STATES[whose],
                ", ".join(remains.resources),
            )
            for collector, remains, whose in left
        ]
        output.table(_HEADS, rows, right=())
        if not dry_run:
            click.echo("--all removes these, too", err=True)
    if not found:
        click.echo(f"nothing of any pool: {', '.join(asked)}")
    elif not left and not outcomes:
        click.echo("nothing was left behind")


def _document(found: Found, outcomes: dict[str, Cleaned]) -> dict[str, object]:
    collector, remains, whose = found
    cleaned = outcomes.get(remains.pool)
    return {
        "id": remains.pool,
        "name": remains.name,
        "provider": collector.name,
        "owner": remains.owner,
        "pid": remains.pid,
        "state": whose,
        "resources": remains.resources,
        "removed": cleaned is not None and not cleaned.failures,
        "failures": () if cleaned is None else cleaned.failures,
    }
