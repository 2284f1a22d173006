"""`sky ui`: a page that shows the pools of this user's processes."""

from __future__ import annotations

import contextlib
import html
import importlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import click

from skyward.cli import output, ui_on_head
from skyward.cli.commands import Command
from skyward.cli.names import kept_pools

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 1.0
"""How often the command looks whether it was interrupted."""


@contextlib.contextmanager
def opened(url: str) -> Iterator[None]:
    """Open the page in the browser, through a file that only this user can read.

    As an argument of the browser, the token would be in the list of processes, which all users see.
    """
    import webbrowser  # imported here: few ask for it

    with tempfile.NamedTemporaryFile("w", prefix="skyward-ui-", suffix=".html") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


def _tell_missing(names: Iterable[str]) -> None:
    """Say which of these pools do not stay: the page shows them if a process has them."""
    staying = importlib.import_module("skyward.nodes.keeping").names()
    if missing := [repr(name) for name in names if name not in staying]:
        there = ", ".join(staying) or "none"
        click.echo(
            f"no pool that stays is called {' or '.join(missing)} (there are: {there}); the page "
            "shows a pool of that name while a process has it",
            err=True,
        )


def _unopened(url: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _check_for_head(names: tuple[str, ...], host: str) -> None:
    if len(names) != 1:
        given = ", ".join(names) or "none"
        raise click.UsageError(f"--on-head needs the name of one pool that stays; given: {given}")
    if host != LOOPBACK:
        raise click.UsageError(
            f"--host {host}: the page of a head comes to this machine's loopback alone; leave it "
            "out, and let others run `sky ui NAME --on-head` themselves"
        )


@click.command(cls=Command)
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=kept_pools)
@click.option("--host", default=LOOPBACK, show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port.  [default: a free one]"
)
@click.option("--open", "shows", is_flag=True, help="Open the page in the browser.")
@click.option("--on-head", is_flag=True, help="The head node of the pool NAME serves the page.")
@click.option("--stop", "stops", is_flag=True, help="With --on-head: end the page of the head.")
def ui(
    names: tuple[str, ...], host: str, port: int, shows: bool, on_head: bool, stops: bool
) -> None:
    """Serve a page that shows pools live, until interrupted.

    The page has the pools of all your processes on this machine, or those called NAME. Pools that
    are entered later appear by themselves. Whoever has the printed address sees them; /metrics is
    there for Prometheus.

    With --on-head, the head node of the pool NAME, which stays, serves the page; it goes on when
    this command ends, and the same command finds it again, also elsewhere. The page comes to this
    machine's loopback through the pool's own connections.
    """
    if on_head:
        _check_for_head(names, host)
        if stops:
            ui_on_head.stop(names[0])
        else:
            ui_on_head.show_page(names[0], port, opened if shows else _unopened)
        return
    if stops:
        raise click.UsageError("--stop ends the page of a pool's head: give --on-head, too")
    gathering = importlib.import_module("skyward.page.gathering").Gathering(names)
    server = importlib.import_module("skyward.page.server").PageServer(gathering, host, port)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = signal.signal(signal.SIGTERM, end)
    try:
        if output.wants_json():
            # On one line, so that a program can read it while the server runs.
            click.echo(json.dumps({"url": server.url, "address": server.address}))
        else:
            click.echo(f"the page is at {server.url}, until interrupted")
        _tell_missing(names)
        sys.stdout.flush()
        with (
            opened(server.url) if shows else contextlib.nullcontext(),
            contextlib.suppress(KeyboardInterrupt),
        ):
            # With a limit: a signal that another thread gets does not end a wait without one.
            while not ended.wait(LOOK_SECONDS):
                pass
    finally:
        signal.signal(signal.SIGTERM, before)
        server.close()
        gathering.close()
