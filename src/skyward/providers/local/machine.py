"""This machine as a provider's machine: commands run in a folder, and end with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Equipment, Machine, Order
from skyward.providers.local.image import place_includes
from skyward.spec import Image
from skyward.wire.connecting import dial_here
from skyward.worker import detached
from skyward.worker.process import kill_group

_LEAVE_SECONDS = 8.0
"""How long the agent of a pool that stays has to end by itself."""
_SOCKET_PATH_MAX = 70
"""How long the folder's path may be: the path of a Unix socket may have 107 characters."""


class LocalMachine(Machine):
    """A folder of this machine in which one node runs its commands."""

    equipment: Equipment

    def __init__(
        self, folder: Path, *, accelerators: int = 0, accelerator: str | None = None
    ) -> None:
        self._folder = folder
        self.id = str(folder)
        self.node = int(folder.name.rpartition("-")[2].partition(".")[0])
        self.address = "127.0.0.1"
        self.direct = "127.0.0.1"
        self.python = sys.executable
        self.equipment = Equipment(
            folder=str(folder),
            hostname=socket.gethostname(),
            accelerators=accelerators,
            accelerator=accelerator,
        )

    @classmethod
    def made(
        cls, order: Order, *, accelerators: int = 0, accelerator: str | None = None
    ) -> LocalMachine:
        """Make the folder of one node.

        Each machine of the node gets a new folder: a lost agent still removes its own folder.
        """
        try:
            prefix = f"sky-{order.pool}-{order.node}."
            base = _lasting_base() if order.request.keep else _base()
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        except OSError as problem:
            raise PoolStartError(
                f"node {order.node}: its folder cannot be made: {problem}; set TMPDIR to a folder "
                "that you can write to"
            ) from problem
        return cls(folder, accelerators=accelerators, accelerator=accelerator)

    def place_includes(self, wanted: Image) -> None:
        """Make a working directory that holds the files that an image includes."""
        work = place_includes(wanted, self._folder)
        if work is not None:
            self.equipment = replace(self.equipment, working_directory=str(work))

    @classmethod
    def of(cls, pool: str) -> list[LocalMachine]:
        """The machines of a pool that are still there."""
        bases = sorted({_base(), _lasting_base()})
        return [cls(found) for base in bases for found in sorted(base.glob(f"sky-{pool}-*"))]

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a child process that leads a process group of its own."""
        if not self._folder.exists():
            raise UnreachableError(f"{self._folder} is not there: the machine was destroyed")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._folder,
                env=_environment(),
                start_new_session=True,
            )
        except FileNotFoundError as error:
            if output is not None:
                output(f"{command[0]}: {error.strerror}\n".encode())
            return 127
        assert process.stdin is not None
        assert process.stdout is not None
        leader = self._folder / f"{process.pid}.group"
        with contextlib.suppress(FileNotFoundError):
            leader.touch()
        try:
            feeding = asyncio.create_task(_feed(process.stdin, input))
            while data := await process.stdout.read(1 << 16):
                if output is not None:
                    output(data)
            await feeding
            status = await process.wait()
            return status if status >= 0 else 128 - status
        finally:
            if process.returncode is None:
                kill_group(process.pid)
                await process.wait()
            leader.unlink(missing_ok=True)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect directly."""
        return dial_here(endpoint)

    async def alive(self) -> bool:
        """Whether the folder is there."""
        return self._folder.exists()

    async def destroy(self) -> None:
        """End the commands that run in the folder, and remove the folder."""
        for leader in self._folder.glob("*.group"):
            kill_group(int(leader.stem))
        await self._end_agent()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_agent(self) -> None:
        """End the agent of a pool that stays; it leaves the plugins' hooks, if it has time."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        asked = False
        while pid := detached.running(self._folder):
            if not asked:
                asked = True
                # A stopped process handles a SIGTERM only after it is continued.
                for number in (signal.SIGTERM, signal.SIGCONT):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            elif time.monotonic() > deadline:
                kill_group(pid)
            await asyncio.sleep(0.02)


def _base() -> Path:
    return _usable(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def _lasting_base() -> Path:
    """Where the folders of pools that stay are: the runtime directory ends with the login."""
    return _usable(tempfile.gettempdir())


def _usable(base: str) -> Path:
    usable = os.access(base, os.W_OK) and len(base) <= _SOCKET_PATH_MAX
    return Path(base if usable else "/tmp")


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


def _environment() -> dict[str, str]:
    """The client's environment, with this very skyward importable from any folder."""
    home = str(Path(__file__).resolve().parents[3])
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [home, *map(os.path.abspath, inherited)]
    if "site-packages" in Path(home).parts:
        paths.remove(home)
    environment = dict(os.environ)
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
