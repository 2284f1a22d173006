"""`sky completion`: the script that makes a shell complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from skyward.cli import output
from skyward.cli.commands import Command

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
