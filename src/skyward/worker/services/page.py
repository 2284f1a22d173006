"""Page: has the node serve the page of its pool, once for all who look, until the pool ends.

"open" starts the page's process, or finds it, and returns its port and its token. The connection
may then stay: a last reply says that the process has ended. "stop" ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from skyward.closing import Closing
from skyward.errors import PoolError
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker.program import ProgramConfig
from skyward.worker.programs import RunningProgram, environment_of
from skyward.worker.services import Caller, ServedNode, answers

MODULE = "skyward.page.server"
START_SECONDS = 60.0
CONNECT_SECONDS = 5.0
_LAST_WORDS = 2000


class PageAnnouncement(msgspec.Struct):
    """What the process says when it serves."""

    port: int
    token: str


class NodePage(Closing):
    """The page's process on this node, and the connections of those who look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._program: RunningProgram | None = None
        self._said = PageAnnouncement(0, "")
        self._since = 0.0
        self._watching: dict[Channel, RunningProgram] = {}
        """Those who look, and the process whose end they are told."""

    def open(
        self, caller: Caller, name: str, environment: dict[str, str], private: dict[str, str]
    ) -> dict[str, Any]:
        """The page's port and token; its process is started if there is none."""
        node, channel = caller.node, caller.channel
        with self._lock:
            folder = Path(node.config.folder, "page")
            for place, text in private.items():
                _write_private(folder, place, text)
            program, found = self._program, True
            if program is None or not _answers(self._said.port):
                if program is not None:
                    program.close()
                program, found = self._start(node, name, environment, folder), False
            self._watching[channel] = program
            said = self._said
            return {
                "port": said.port,
                "token": said.token,
                "since": self._since,
                "found": found,
            }

    def _start(
        self, node: ServedNode, name: str, environment: dict[str, str], folder: Path
    ) -> RunningProgram:
        folder.mkdir(exist_ok=True, mode=0o700)
        own = {key: each.replace("{folder}", str(folder)) for key, each in environment.items()}
        config = ProgramConfig(
            [sys.executable, "-P", "-m", MODULE, name],
            node.config.working_directory,
            environment_of(node.config) | own,
            status=-1,
        )
        log = folder / "page.log"
        nothing = os.open(os.devnull, os.O_RDONLY)
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        said, saying = os.pipe()
        try:
            program = RunningProgram(config, (nothing, saying, errors))
        except BaseException:
            os.close(said)
            raise
        finally:
            for descriptor in (nothing, errors, saying):
                os.close(descriptor)
        try:
            self._said = _announcement(said, program, log)
        except BaseException:
            program.close()
            program.forget()
            raise
        finally:
            os.close(said)
        self._program, self._since = program, time.time()
        threading.Thread(
            target=self._follow, args=(program,), name="skyward-node-page", daemon=True
        ).start()
        return program

    def _follow(self, program: RunningProgram) -> None:
        program.wait()
        program.end()
        program.forget()
        with self._lock:
            if self._program is program:
                self._program = None
            told = [channel for channel, of in self._watching.items() if of is program]
            for channel in told:
                del self._watching[channel]
        for channel in told:
            with contextlib.suppress(OSError):
                channel.send(Reply("the page was ended"))

    def leave(self, channel: Channel) -> None:
        """Tell a connection nothing more."""
        with self._lock:
            self._watching.pop(channel, None)

    def stop(self) -> bool:
        """End the process; whether there was one."""
        with self._lock:
            program = self._program
        if program is not None:
            program.close()
        return program is not None

    def close(self) -> None:
        """End the page with its node."""
        self.stop()


@answers("page", "open")
def open_page(
    caller: Caller,
    name: str,
    environment: dict[str, str] | None = None,
    private: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The page's port and token; it stays when the caller leaves.

    The page's process finds the pool with these variables and private files.
    """
    page = caller.node.own(NodePage)
    caller.leaving.callback(page.leave, caller.channel)
    return page.open(caller, name, environment or {}, private or {})


@answers("page")
def stop(caller: Caller) -> bool:
    """End the page; whether there was one."""
    return caller.node.own(NodePage).stop()


def _answers(port: int) -> bool:
    """Whether somebody listens there: a process that was killed is noticed a moment later."""
    try:
        socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _announcement(said: int, program: RunningProgram, log: Path) -> PageAnnouncement:
    """The first line that the process prints."""
    status = program.next_status()
    if status is None or status.problem:
        raise PoolError(status.problem if status is not None else "the page's process was killed")
    deadline = time.monotonic() + START_SECONDS
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        ready, _, _ = select.select([said], [], [], max(0.0, left))
        data = os.read(said, 4096) if ready else b""
        if not data:
            why = "did not start in time" if not ready else "ended as it started"
            words = log.read_text("utf-8", "replace")[-_LAST_WORDS:].strip()
            raise PoolError(f"the page's process on the head {why}: {words or 'it said nothing'}")
        line += data
    return msgspec.json.decode(line, type=PageAnnouncement)


def _write_private(folder: Path, place: str, text: str) -> None:
    """Write a text that only this user may read; a process that reads it gets all or none."""
    path = folder / place
    if not place or ".." in path.parts or Path(place).is_absolute():
        raise PoolError(f"{place!r} is no place in the page's folder; give a relative path")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
