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

from skyward.cli import output
from skyward.cli.commands import Command


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


@click.command(cls=Command)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port.  [default: a free one]"
)
@click.option("--open", "shows", is_flag=True, help="Open the page in the browser.")
def ui(names: tuple[str, ...], host: str, port: int, shows: bool) -> None:
    """Serve a page that shows pools live, until interrupted.

    The page has the pools of all your processes on this machine, or those called NAME. Pools that
    are entered later appear by themselves. Whoever has the printed address sees them; /metrics is
    there for Prometheus.
    """
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
            ended.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        server.close()
        gathering.close()
