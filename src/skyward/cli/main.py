"""The entry point: finds a command by name, and turns its failure into an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from skyward import __version__, checks
from skyward.cli.commands import ALONE, INTERRUPTED, OPTIONS, UNREAD, CommandGroup, reported

COMMANDS = {
    "ps": "List the pools that have machines, or what one of them has.",
    "down": "Remove the machines of pools that were left behind.",
    "up": "Start a kept pool.",
    "attach": "Say how to use a kept pool, or move its record to another machine.",
    "stop": "End the workers of a kept pool, and keep it on record.",
    "start": "Start a pool again that was stopped.",
    "gc": "Find and remove what providers still have of pools that are over.",
    "exec": "Run a command on nodes of a pool.",
    "shell": "Open a terminal on a node of a pool.",
    "cp": "Copy files and folders to and from nodes.",
    "run": "Run a script here with a pool, or on a kept pool.",
    "logs": "Show the output of a job, or of a pool's tasks.",
    "jobs": "List the jobs of a pool.",
    "cancel": "End a job of a pool.",
    "offers": "List the machines that providers sell, and their prices.",
    "ui": "Show pools live in a browser, and serve metrics.",
    "stacks": "Show where every worker is: its task, its line, its stacks.",
    "demo": "Train a model on a worker and evaluate it here.",
    "doctor": "Check this machine, the providers and the pools, and say what to do.",
    "models": "Keep models by name and version: push, pull, list, serve.",
    "completion": "Print the script that makes a shell complete sky's commands.",
}
"""The commands, each with its line, so that `--help` need not import it."""


_HOMES = {
    **dict.fromkeys(("up", "attach", "stop", "start", "down"), "pools"),
    **dict.fromkeys(("exec", "shell", "cp"), "nodes"),
    **dict.fromkeys(("run", "jobs", "logs", "cancel"), "jobs"),
    "completion": "names",
}
"""The modules of commands that are about the same thing; else a command is in one of its name."""


class _Sky(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        home = importlib.import_module(f"skyward.cli.{_HOMES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(home, cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click would import every command for its line of help.
        commands = [
            CompletionItem(name, help=line)
            for name, line in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with checks.naming_options(OPTIONS):
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (Exception, KeyboardInterrupt) as problem:
            code = reported(ctx, problem)
            if code is None:
                raise
            ctx.exit(code)


@click.command("sky", cls=_Sky, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="skyward %(version)s")
def sky() -> None:
    """Run your PyTorch on someone else's hardware, and keep the models it makes.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 nobody reads the output.
    """


def main() -> NoReturn:
    """Run the command line of this process."""
    try:
        sky.main(prog_name="sky", obj=ALONE)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except SystemExit as end:
        if end.code in (INTERRUPTED, UNREAD):
            _leave(int(end.code))
        raise


def _leave(code: int) -> NoReturn:
    """End the process without waiting for threads that upload: no manifest names their files."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
