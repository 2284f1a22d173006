"""`sky ui`: a page that shows the pools of this user's processes, or that a pool's head serves."""

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
from skyward.cli.names import kept_pools
from skyward.cli.nodes import reached

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
    """Say which of these pools are not kept: the page shows them if a process has them."""
    kept = importlib.import_module("skyward.nodes.records").names()
    if missing := [repr(name) for name in names if name not in kept]:
        there = ", ".join(kept) or "none"
        click.echo(
            f"no kept pool is called {' or '.join(missing)} (there are: {there}); the page "
            "shows a pool of that name while a process has it",
            err=True,
        )


def _check_for_head(names: tuple[str, ...], host: str) -> None:
    if len(names) != 1:
        given = ", ".join(names) or "none"
        raise click.UsageError(f"--on-head needs the name of one kept pool; given: {given}")
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

    With --on-head, the head node of the kept pool NAME serves the page; it goes on when
    this command ends, and the same command finds it again, also elsewhere. The page comes to this
    machine's loopback through the pool's own connections.
    """
    if on_head:
        _check_for_head(names, host)
        if stops:
            _stop_head(names[0])
        else:
            _show_head(names[0], port, shows)
        return
    if stops:
        raise click.UsageError("--stop ends the page of a pool's head: give --on-head, too")
    hub = importlib.import_module("skyward.page.hub").Hub(names)
    server = importlib.import_module("skyward.page.server").PageServer(hub, host, port)
    try:
        with _interrupted() as ended:
            _tell(f"the page is at {server.url}, until interrupted", server.url, server.address)
            _tell_missing(names)
            _wait(server.url, shows, ended)
    finally:
        server.close()


def _show_head(name: str, port: int, shows: bool) -> None:
    """Bring the page of the head of a pool here, until interrupted or the page ends."""
    from skyward.compute.workbench.head_page import HeadPage

    with reached(name) as pool, HeadPage(pool, port=port) as page, _interrupted() as ended:
        reasons: list[str] = []

        def follow() -> None:
            reasons.append(page.wait())
            ended.set()

        watcher = threading.Thread(target=follow, name="skyward-head-page", daemon=True)
        watcher.start()
        served = f"{'still serves' if page.found else 'serves'} the page; here it is at {page.url}"
        about = {"pool": name, "node": page.node, "found": page.found}
        _tell(f"the head of {name} {served}, until interrupted", page.url, page.address, **about)
        if not output.wants_json():
            click.echo(f"(it goes on there; `sky ui {name} --on-head --stop` ends it)", err=True)
        _wait(page.url, shows, ended)
        for reason in reasons:
            click.echo(f"{name}: {reason}", err=True)
    watcher.join()


def _stop_head(name: str) -> None:
    """End the page of the head of a pool."""
    from skyward.compute.workbench.head_page import stop_page

    with reached(name) as pool:
        ended = stop_page(pool)
    if output.wants_json():
        output.as_json({"pool": name, "stopped": ended})
    else:
        click.echo(f"the page of {name} is ended" if ended else f"{name} has no page on its head")


@contextlib.contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """An event that is set when the command is interrupted."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(text: str, url: str, address: str, **more: object) -> None:
    if output.wants_json():
        # On one line, so that a program can read it while the page is served.
        text = json.dumps({"url": url, "address": address, **more})
    click.echo(text)
    sys.stdout.flush()


def _wait(url: str, shows: bool, ended: threading.Event) -> None:
    with opened(url) if shows else contextlib.nullcontext():
        # With a limit: a signal that another thread gets does not end a wait without one.
        while not ended.wait(LOOK_SECONDS):
            pass
