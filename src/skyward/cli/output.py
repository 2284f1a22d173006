"""Output: tables for people, plain columns for pipes, one JSON document for programs."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime

import click

from skyward.cli.commands import remembered
from skyward.console.measures import ago

_GAP = 2
_NARROWEST = 10


def wants_json() -> bool:
    """Whether the command was called with `--json`."""
    return bool(remembered("json"))


def as_json(document: object) -> None:
    """Print the one JSON document of a command."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=_encoded))


def _encoded(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON")


def clean(text: object) -> str:
    """Text of unknown origin, such as metadata, without characters that control a terminal."""
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(text)
    )


def on_a_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout.isatty()


def moment(when: datetime) -> str:
    """A time: relative for a person, exact in a pipe."""
    return ago(when) if on_a_terminal() else when.isoformat(timespec="seconds")


def item(text: str) -> None:
    """Print an item of a list; on a terminal, in lines of its width."""
    if not on_a_terminal():
        click.echo(f"- {text}")
        return
    width = shutil.get_terminal_size().columns
    # Commands and addresses stay whole, to be copied.
    wrapped = textwrap.TextWrapper(
        width, "- ", "  ", break_long_words=False, break_on_hyphens=False
    )
    click.echo(wrapped.fill(text))


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str],
    *,
    wraps: bool = False,
) -> None:
    """Print rows under heads; columns in `right` are aligned right.

    On a terminal that is too narrow, the last column is cut, or goes on in the next line.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    if on_a_terminal():
        _rich_table(heads, cells, right, wraps=wraps)
        return
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for row in [[head.upper() for head in heads], *cells]:
        parts = [
            cell.rjust(width) if head in right else cell.ljust(width)
            for cell, width, head in zip(row, widths, heads, strict=True)
        ]
        click.echo("  ".join(parts).rstrip())


def _rich_table(
    heads: Sequence[str], rows: list[list[str]], right: Sequence[str], *, wraps: bool
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    fixed = sum(widths[:-1]) + _GAP * (len(heads) - 1)
    last = max(min(widths[-1], console.width - fixed), len(heads[-1]), _NARROWEST)
    # rich would narrow every column; with this width, a narrow terminal wraps the lines.
    console.width = max(console.width, fixed + last)
    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for head in heads:
        made.add_column(
            head,
            justify="right" if head in right else "left",
            no_wrap=not (wraps and head == heads[-1]),
        )
    for row in rows:
        *cells, cut = (Text(cell) for cell in row)
        if not wraps:
            cut.truncate(last, overflow="ellipsis")
        made.add_row(*cells, cut)
    console.print(made)
