"""Page: has the node serve the page of its pool, once for all who look, until the pool ends.

The page is a job, which writes its port and its token into its folder.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from skyward.errors import PoolError
from skyward.worker.jobs import LIVE, Job
from skyward.worker.services import Caller, answers

COMMAND = ["{python}", "-P", "-m", "skyward.page.server"]
ANNOUNCED = "page.json"
START_SECONDS = 60.0
CONNECT_SECONDS = 5.0


class PageAnnouncement(msgspec.Struct):
    """What the page's process writes when it serves."""

    port: int
    token: str


@answers("page", "open")
def open_page(
    caller: Caller,
    name: str,
    environment: dict[str, str] | None = None,
    private: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The page's port and token; it is started if there is none, and stays when the caller leaves.

    The page's process finds the pool with these variables and private files.
    """
    jobs = caller.node.jobs
    while True:
        job, found = jobs.find_or_start(
            "page", "page", [*COMMAND, name], own=environment, private=private
        )
        said = _announcement(caller, job)
        if not found or _answers(said.port):
            return {"port": said.port, "token": said.token, "found": found, "job": job.id}
        jobs.end(job.id)


@answers("page")
def wait(caller: Caller, job: str) -> str:
    """Wait until that page has ended; tells why."""
    with contextlib.suppress(PoolError):
        for _ in caller.looks():
            if caller.node.jobs.get(job).state not in LIVE:
                break
    return "the page was ended"


@answers("page")
def stop(caller: Caller) -> bool:
    """End the page; whether there was one."""
    jobs = caller.node.jobs
    pages = [each.id for each in jobs.all(("page",)) if each.state in LIVE]
    jobs.end(*pages)
    return bool(pages)


def _answers(port: int) -> bool:
    """Whether somebody listens there: a process that was killed is noticed a moment later."""
    try:
        socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _announcement(caller: Caller, job: Job) -> PageAnnouncement:
    """What the process writes when it serves; ended if it does not."""
    jobs, deadline = caller.node.jobs, time.monotonic() + START_SECONDS
    while True:
        # Before the file: a process that has ended meanwhile may have written it.
        ended = jobs.get(job.id).state not in LIVE
        with contextlib.suppress(FileNotFoundError):
            told = Path(job.folder, ANNOUNCED).read_bytes()
            return msgspec.json.decode(told, type=PageAnnouncement)
        if ended or time.monotonic() > deadline:
            jobs.end(job.id)
            words = jobs.last_words(job)
            why = "ended as it started" if ended else "did not start in time"
            raise PoolError(f"the page's process on the head {why}: {words or 'it said nothing'}")
        caller.wait(0.02)
