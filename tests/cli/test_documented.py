"""docs/cli.md against the commands: each is there with its arguments and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from skyward.cli.main import COMMANDS, sky

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
COMMON = {"--json", "--debug", "--help", "--version", "--store", "--token"}
"""Options that the page describes once for all commands, or for a whole group."""


def commands(
    command: click.Command, *names: str
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command by its names, `("models", "push")`; groups are left out."""
    if not isinstance(command, click.Group):
        yield names, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, *names, name)


ALL = dict(commands(sky))


def rows() -> dict[str, str]:
    """The rows of the page's tables by the first word of their code: all that it says of `ps`."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        row = re.match(r"\| `(?:sky )?((?:models )?[\w-]+)", line)
        if row is not None:
            found[row[1]] = found.get(row[1], "") + line
    return found


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_every_command_is_on_the_page_with_all_its_options(names: tuple[str, ...]) -> None:
    known = rows()
    row = known.get(" ".join(names)) or known.get(names[-1], "")
    assert row, f"docs/cli.md has no row for `{' '.join(names)}`"
    for parameter in ALL[names].params:
        if isinstance(parameter, click.Option) and COMMON.isdisjoint(parameter.opts):
            assert any(option in row for option in parameter.opts), parameter.opts
        elif isinstance(parameter, click.Argument):
            told = (parameter.metavar or parameter.name or "").upper().strip("[].")
            assert told in row.upper(), told


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_every_command_has_json_and_debug(names: tuple[str, ...]) -> None:
    options = {option for parameter in ALL[names].params for option in parameter.opts}
    assert {"--json", "--debug"} <= options


def test_the_line_of_help_is_in_the_table_of_commands() -> None:
    for name, line in COMMANDS.items():
        assert line.endswith("."), name
        assert sky.get_command(click.Context(sky), name) is not None
