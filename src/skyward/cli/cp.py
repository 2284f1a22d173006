"""`sky cp`: copy files and folders between this machine and nodes of pools."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.reached import chosen_node, reached
from skyward.console.measures import size

if TYPE_CHECKING:
    from skyward.files.transfer import FilePlace

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
