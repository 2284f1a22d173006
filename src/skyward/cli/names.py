"""Names that a shell completes: of pools, providers and accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from skyward.errors import SkywardError

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _completing(names: Callable[[], Iterable[str]]) -> Completion:
    """Complete some names; nothing if they cannot be had, since a shell shows no error."""

    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
        try:
            return sorted({name for name in names() if name.lower().startswith(begun.lower())})
        except (SkywardError, OSError):
            return []

    return complete


# Each imports what it needs when a shell asks: a command's `--help` needs none of it.


def _kept() -> Iterable[str]:
    from skyward.nodes import keeping

    return keeping.names()


def _recorded() -> Iterable[str]:
    from skyward.nodes.journal import Journal

    return [*_kept(), *(pool.name for pool in Journal().pools())]


def _described() -> Iterable[str]:
    from skyward.settings import read_settings

    settings = read_settings()
    return () if settings is None else settings.pools


def _providers() -> Iterable[str]:
    from skyward.providers import provider_names

    return provider_names()


def _accelerators() -> Iterable[str]:
    from skyward import accelerators

    return [model.name for model in accelerators.models()]


recorded_pools = _completing(_recorded)
"""The pools that have machines, and those that stay."""
kept_pools = _completing(_kept)
"""The pools that stay."""
described_pools = _completing(_described)
"""The pools of the settings file."""
providers = _completing(_providers)
accelerators = _completing(_accelerators)
