"""The parts that all commands share: `--json`, `--debug`, and how a command fails."""

from __future__ import annotations

import difflib
import os
import signal
import sys
import traceback
from typing import Any

import click

from skyward.errors import SkywardError

FAILED = 1
INTERRUPTED = 130
"""The exit code that a shell reports for a program that Ctrl-C ended."""
UNREAD = 141
"""The exit code of a program whose reader has ended, such as `head`."""
ALONE = object()
"""The root context's object if `sky` owns the process and its signals."""

_KEY = "skyward."
OPTIONS = {
    "store": "--store",
    "token": "--token",
    "host": "--host",
    "port": "--port",
    "certificate": "--cert",
    "key": "--key",
    "insecure": "--insecure",
    "output": "-o",
    "gc": "`sky models gc`",
}
"""The options for the library's arguments; messages of the library name these options."""


def remember(context: click.Context, option: click.Parameter, value: object) -> None:
    """Keep an option that may stand before or after a subcommand; the last one counts."""
    if value not in (None, False):
        context.meta[f"{_KEY}{option.name}"] = value


def remembered(name: str) -> Any:
    """The value of an option that was kept with `remember`, or None."""
    return click.get_current_context().meta.get(f"{_KEY}{name}")


def shared(*names: str, **settings: Any) -> click.Option:
    """An option that may stand before or after a subcommand."""
    return click.Option(names, callback=remember, expose_value=False, **settings)


def _common() -> list[click.Parameter]:
    return [
        shared("--json", is_flag=True, help="Print one JSON document and nothing else."),
        shared("--debug", is_flag=True, help="Show the traceback of an error [SKYWARD_DEBUG=1]."),
    ]


class Command(click.Command):
    """A command with the common options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _common()


class CommandGroup(click.Group):
    """A group of commands; the common options may stand before or after a command's name."""

    command_class = Command

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += _common()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the commands that there are, if there is none of the given name."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            meant = f"did you mean `{near[0]}`? " if near else ""
            there = ", ".join(self.list_commands(ctx))
            ctx.fail(f"no command {name!r}; {meant}there are: {there}")
        return super().resolve_command(ctx, args)


def ignore_interrupts() -> None:
    """Ignore interrupts from now on: the command has succeeded, and the exit code must say so."""
    if click.get_current_context().obj is ALONE:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def reported(context: click.Context, problem: BaseException) -> int | None:
    """Report a failure on stderr, and return its exit code; None for a defect of Skyward."""
    notes = getattr(problem, "__notes__", ())
    if isinstance(problem, KeyboardInterrupt | click.Abort):
        # On a terminal the cursor stands behind a ^C or a question.
        begin = "\nInterrupted" if sys.stderr.isatty() else "Interrupted"
        click.echo("\n".join([begin, *notes]), err=True)
        return INTERRUPTED
    if isinstance(problem, BrokenPipeError):
        return UNREAD
    message = _message(problem)
    if message is None:
        return None
    if context.meta.get(f"{_KEY}debug") or os.environ.get("SKYWARD_DEBUG", "0") != "0":
        click.echo("".join(traceback.format_exception(problem)), err=True, nl=False)
    click.echo("\n".join([f"Error: {message}", *notes]), err=True)
    return FAILED


def _message(problem: BaseException) -> str | None:
    if isinstance(problem, ModuleNotFoundError) and problem.name == "torch":
        return "this needs torch; install skyward-torch[torch]"
    if isinstance(problem, SkywardError):
        return str(problem)
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        return f"{where}{problem.strerror or problem}"
    return None
