"""`sky exec`: run a command on nodes of a pool."""

from __future__ import annotations

import os
import sys
import threading
from typing import BinaryIO

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.names import kept_pools
from skyward.cli.reached import chosen_node, reached


class _Exec(Command):
    """Leaves all that follows the first word of COMMAND to COMMAND, as `ssh` does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write the -- that stands for: no option of `sky exec` follows."""
        name = self._first_word(args, 0)
        command = self._first_word(args, name + 1)
        if not ctx.resilient_parsing and "--" not in args[: command + 1]:
            args = [*args[:command], "--", *args[command:]]
        return super().parse_args(ctx, args)

    def _first_word(self, args: list[str], at: int) -> int:
        """The place of the first argument from there on that is no option, nor an option's."""
        options = [each for each in self.params if isinstance(each, click.Option)]
        takes_one = {name for each in options if not each.is_flag for name in each.opts}
        while at < len(args) and args[at].startswith("-"):
            at += 2 if args[at] in takes_one else 1
        return at


@click.command("exec", cls=_Exec)
@click.argument("name", shell_complete=kept_pools)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--node", "nodes", type=int, multiple=True, help="On this node; may be repeated.")
@click.option("--all", "everywhere", is_flag=True, help="On every node.")
@click.option("--worker-env", is_flag=True, help="With the environment of the node's first worker.")
@click.option("--no-input", is_flag=True, help="Do not read this command's standard input.")
def exec_command(
    name: str,
    command: tuple[str, ...],
    nodes: tuple[int, ...],
    everywhere: bool,
    worker_env: bool,
    no_input: bool,
) -> None:
    """Run COMMAND on the head node of the pool NAME, on other nodes, or on all.

    Options stand before COMMAND: sky exec train --all nvidia-smi -L. Output comes as it is written,
    labelled by node if there are several. Piped input goes to every node. The exit code is the
    command's; of several, the highest. Ctrl-C goes to the command. Whatever the command has started
    ends with it.
    """
    if nodes and everywhere:
        raise click.UsageError("give --node or --all, not both")
    from skyward.compute.workbench.commands import run_everywhere

    with reached(name) as pool:
        if everywhere:
            chosen = sorted(pool.nodes)
        else:
            chosen = [chosen_node(pool, each) for each in dict.fromkeys(nodes or (None,))]
        show = _Collected() if output.wants_json() else _Shown(labelled=len(chosen) > 1)
        codes = run_everywhere(
            pool,
            chosen,
            command,
            show,
            like_worker=worker_env,
            given=None if no_input else _piped_input(),
        )
    show.finish(codes)
    click.get_current_context().exit(max(codes.values()))


exec = exec_command


def _piped_input() -> int | None:
    """The descriptor of standard input, unless it is a terminal or nothing."""
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return None if os.isatty(descriptor) else descriptor


class _Shown:
    """Writes output at once; of several nodes, line by line with the node's number."""

    def __init__(self, *, labelled: bool) -> None:
        self._labelled = labelled
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, str], bytes] = {}

    def __call__(self, node: int, stream: str, data: bytes) -> None:
        with self._lock:
            if self._labelled:
                whole = self._begun.get((node, stream), b"") + data
                lines, _, self._begun[node, stream] = whole.rpartition(b"\n")
                data = b"".join(_labelled(node, line) for line in lines.split(b"\n") if lines)
            _write(stream, data)

    def finish(self, codes: dict[int, int]) -> None:
        """Write lines that have no end, and the codes of nodes that failed."""
        for (node, stream), rest in sorted(self._begun.items()):
            if rest:
                _write(stream, _labelled(node, rest))
        if self._labelled:
            for node, code in codes.items():
                if code:
                    click.echo(f"node {node}: exit code {code}", err=True)


class _Collected:
    """Keeps the output for one JSON document."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[tuple[int, str], bytearray] = {}

    def __call__(self, node: int, stream: str, data: bytes) -> None:
        with self._lock:
            self._written.setdefault((node, stream), bytearray()).extend(data)

    def finish(self, codes: dict[int, int]) -> None:
        """Print the document."""
        output.as_json(
            [
                {
                    "node": node,
                    "code": code,
                    **{
                        stream: self._written.get((node, stream), b"").decode("utf-8", "replace")
                        for stream in ("stdout", "stderr")
                    },
                }
                for node, code in codes.items()
            ]
        )


def _labelled(node: int, line: bytes) -> bytes:
    return b"[node %d] %s\n" % (node, line)


def _write(stream: str, data: bytes) -> None:
    if data:
        there: BinaryIO = (sys.stderr if stream == "stderr" else sys.stdout).buffer
        there.write(data)
        there.flush()
