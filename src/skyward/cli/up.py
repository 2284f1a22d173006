"""`sky up`: start a pool that stays."""

from __future__ import annotations

from typing import Any

import click

from skyward.cli import names, output
from skyward.cli.commands import Command
from skyward.errors import ConfigurationError


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
    from skyward.compute.configured import seconds_of
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
