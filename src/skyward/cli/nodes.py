"""`sky exec`, `shell` and `cp`: commands, a terminal and files on nodes of a kept pool."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, BinaryIO

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.names import kept_pools
from skyward.console.measures import size
from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    from skyward.files.transfer import FilePlace
    from skyward.nodes.kept import ReachedPool


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


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
@click.argument("node", type=int, required=False)
@click.option("--command", help="Run this on the terminal, in place of the user's shell.")
@click.option("--worker-env", is_flag=True, help="With the environment of the node's first worker.")
def shell(name: str, node: int | None, command: str | None, worker_env: bool) -> None:
    """Open a terminal on a node of the pool NAME: on NODE, or on the head.

    Every key goes to the node. The shell ends with `exit` or Ctrl-D, and its exit code is this
    command's. If the connection is lost, what runs in the shell ends.
    """
    if output.wants_json():
        raise click.UsageError("--json: a terminal has no document; use `sky exec --json`")
    from skyward.compute.workbench.commands import open_terminal

    with reached(name) as pool:
        wanted = ["/bin/sh", "-c", command] if command else []
        code = open_terminal(pool, chosen_node(pool, node), wanted, like_worker=worker_env)
    click.get_current_context().exit(code)


_REMOTE = re.compile(r"(?P<pool>[^/:]+)(?:/(?P<node>\d+))?:(?P<path>.*)", re.DOTALL)


@click.command(cls=Command)
@click.argument("source")
@click.argument("destination")
@click.option("-r", "--recursive", is_flag=True, help="Copy a folder with all that is in it.")
def cp(source: str, destination: str, recursive: bool) -> None:
    """Copy SOURCE to DESTINATION; NAME:path is on the head node of a pool, NAME/1:path on node 1.

    A path on a node is relative to the node's working directory; ~ is the home folder there. If
    DESTINATION is a folder, the copy goes into it. A file appears when it is complete, and modes
    are kept; what is there already is not sent. Write ./a:b for a file of this machine with a colon
    in its name.
    """
    from skyward.files.transfer import copy
    from skyward.store.progress import watched

    with contextlib.ExitStack() as opened:
        files, path = _opened(opened, source)
        to_files, to = _opened(opened, destination)
        with watched(not output.wants_json(), f"copying {output.clean(source)}") as progress:
            done = copy(
                files,
                path,
                to_files,
                to,
                recursive=recursive,
                begin=progress.begin,
                advance=progress.advance,
            )
    if output.wants_json():
        output.as_json({"files": done.files, "bytes": done.bytes, "passed_over": done.passed_over})
        return
    count = "1 file" if done.files == 1 else f"{done.files} files"
    besides = f"; {done.passed_over} passed over: pipes, sockets" if done.passed_over else ""
    click.echo(f"{count}, {size(done.bytes)}{besides}", err=True)


def _opened(opened: contextlib.ExitStack, given: str) -> tuple[FilePlace, str]:
    from skyward.files.transfer import FilesHere, FilesOnNode

    found = _REMOTE.fullmatch(given)
    if found is None:
        return FilesHere(), given
    pool = opened.enter_context(reached(found["pool"]))
    node = chosen_node(pool, None if found["node"] is None else int(found["node"]))
    label = f"{found['pool']}/{node}"
    files = FilesOnNode(functools.partial(pool.service, node), label)
    return files, found["path"] or "."


def reached(name: str) -> ReachedPool:
    """The pool of that name; the caller closes it."""
    # Imported here, as in every command: help and completion need none of it.
    from skyward.compute import reach

    return reach(name)


def chosen_node(pool: ReachedPool, node: int | None) -> int:
    """A node of the pool; the head if none is given."""
    there = sorted(pool.nodes)
    if not there:
        raise ConfigurationError(
            f"{pool.record.name} has no node now; `sky ps` shows the pools that are there"
        )
    if node is None:
        return there[0]
    if node not in there:
        listed = ", ".join(map(str, there))
        raise ConfigurationError(f"{pool.record.name} has no node {node}; its nodes are: {listed}")
    return node
