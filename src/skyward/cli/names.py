"""Names that a shell completes, and `sky completion`, the script that makes it complete them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import get_completion_class

from skyward.cli import output
from skyward.cli.commands import Command
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
    from skyward.nodes import records

    return records.names()


def _recorded() -> Iterable[str]:
    from skyward.nodes.records import Journal

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
"""The pools that have machines, and those that are kept."""
kept_pools = _completing(_kept)
"""The kept pools."""
described_pools = _completing(_described)
"""The pools of the settings file."""
providers = _completing(_providers)
accelerators = _completing(_accelerators)


VARIABLE = "_SKY_COMPLETE"
"""The variable with which a shell asks `sky` for completions."""
_SET_UP = {
    "bash": 'eval "$(sky completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(sky completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "sky completion fish > ~/.config/fish/completions/sky.fish",
}


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(list(_SET_UP)))
def completion(shell: str) -> None:
    """Print the script for a shell: bash, zsh or fish.

    \b
    bash: eval "$(sky completion bash)" in ~/.bashrc
    zsh:  eval "$(sky completion zsh)" in ~/.zshrc, after compinit
    fish: sky completion fish > ~/.config/fish/completions/sky.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these three shells"
    root = click.get_current_context().find_root().command
    script = kind(root, {}, "sky", VARIABLE).source()
    if output.wants_json():
        output.as_json({"shell": shell, "script": script, "set_up": _SET_UP[shell]})
    else:
        click.echo(script)
