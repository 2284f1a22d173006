"""`sky ui --on-head`: the page that the head node of a pool serves, and how it comes here."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

import click

from skyward.cli import output
from skyward.cli.reached import reached


def show_page(name: str, port: int, opened: Callable[[str], AbstractContextManager[None]]) -> None:
    """Bring the page of the head of a pool here, until interrupted or the page ends."""
    from skyward.compute.workbench.head_page import HeadPage

    ended = threading.Event()
    reasons: list[str] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        ended.set()

    with reached(name) as pool, HeadPage(pool, port=port) as page:

        def follow() -> None:
            reasons.append(page.wait())
            ended.set()

        before = {
            number: signal.signal(number, interrupted) for number in (signal.SIGTERM, signal.SIGINT)
        }
        watcher = threading.Thread(target=follow, name="skyward-head-page", daemon=True)
        watcher.start()
        try:
            _tell(name, page.url, page.address, page.node, page.found)
            with opened(page.url):
                ended.wait()
            for reason in reasons:
                click.echo(f"{name}: {reason}", err=True)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    watcher.join()


def _tell(name: str, url: str, address: str, node: int, found: bool) -> None:
    if output.wants_json():
        # On one line, so that a program can read it while the page is carried.
        document = {"url": url, "address": address, "pool": name, "node": node, "found": found}
        click.echo(json.dumps(document))
    else:
        served = "still serves" if found else "serves"
        click.echo(f"the head of {name} {served} the page; here it is at {url}, until interrupted")
        click.echo(f"(there it stays; `sky ui {name} --on-head --stop` ends it)", err=True)
    sys.stdout.flush()


def stop(name: str) -> None:
    """End the page of the head of a pool."""
    from skyward.compute.workbench.head_page import stop_page

    with reached(name) as pool:
        ended = stop_page(pool)
    if output.wants_json():
        output.as_json({"pool": name, "stopped": ended})
    else:
        click.echo(f"the page of {name} is ended" if ended else f"{name} has no page on its head")
