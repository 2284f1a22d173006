"""Local: worker processes on this machine, with nothing to set up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from skyward import checks, kernel
from skyward.accelerators import Accelerator, Card, describe, matching
from skyward.errors import ConfigurationError, PoolStartError, UnreachableError
from skyward.providers import Allocation, Capabilities, Equipment, Machine, Order, Request
from skyward.providers.local import image
from skyward.providers.local.image import place_includes
from skyward.spec import Image
from skyward.wire.handshake import dial_here
from skyward.worker import detached
from skyward.worker.process import kill_group
from skyward.worker.usage import memory_there


@dataclass(frozen=True)
class Local:
    """Workers on this machine.

    `transport` is how the client reaches them: "unix" (sockets and shared memory, the default) or
    "tcp" (loopback with TLS 1.3, as over a network).

    >>> with sky.Compute(sky.Local(transport="tcp"), nodes=2) as compute: ...
    """

    transport: Literal["auto", "unix", "tcp"] = "auto"

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "unix", "tcp"):
            raise ConfigurationError(
                f"Local(transport={self.transport!r}): choose 'auto', 'unix' or 'tcp'"
            )
        if self.transport == "tcp":
            checks.store(self, capabilities=replace(self.capabilities, encrypted=True))

    name = "local"
    capabilities = Capabilities(here=True, encrypted=False, mounts_folders=False)

    def describe(self) -> dict[str, Any]:
        """The arguments."""
        return {"transport": self.transport}

    def price(self, request: Request) -> float | None:
        """0: this machine costs nothing more."""
        return 0.0

    def allocate(self, pool: str) -> Allocation[LocalMachine]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> LocalMachine:
        """Make a folder of this machine, in which commands run."""
        wanted = order.request.image
        if wanted.pip or wanted.apt or wanted.includes:
            await asyncio.to_thread(image.check, wanted)
        cards = installed_cards()
        machine = LocalMachine.made(
            order, accelerators=len(cards), accelerator=cards[0].name if cards else None
        )
        if wanted.includes:
            try:
                await asyncio.to_thread(machine.place_includes, wanted)
            except BaseException:
                await machine.destroy()
                raise
        return machine

    async def find(self, pool: str) -> list[LocalMachine]:
        """The machines of a pool whose folders still exist."""
        return LocalMachine.of(pool)

    def machine_at(self, machine: str) -> LocalMachine:
        """The machine of a kept pool, by its id."""
        return LocalMachine(Path(machine))

    def lacking(self, vcpus: float | None, memory_gb: float | None) -> tuple[str, ...]:
        """What to tell the user of more processors or memory than this machine has.

        That is no error, so that a program for a cloud can be tried here.
        """
        told = []
        if vcpus is not None and vcpus > (processors := kernel.processors()):
            told.append(f"vcpus={vcpus:g}: this machine has {processors}, and workers use those")
        if memory_gb is not None and memory_gb * 1e9 > (there := memory_there()):
            told.append(f"memory_gb={memory_gb:g}: this machine has {there / 1e9:.3g} GB")
        return tuple(told)

    def check(self, request: Request) -> None:
        """Refuse a request for what this machine does not have."""
        image.check_python(request.image)
        check_accelerator(request.accelerator)
        for volume in request.volumes:
            if not Path(volume.source).exists():
                raise ConfigurationError(
                    f"{volume}: local workers see this machine's files where they are, and there "
                    "is no such path; name one that exists"
                )


# Machines.


_LEAVE_SECONDS = 8.0
"""How long the agent of a kept pool has to end by itself."""
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
        found = [each for base in bases for each in sorted(base.glob(f"sky-{pool}-*"))]
        # Another user may have made one of that name, to have processes of this user killed.
        return [cls(each) for each in found if kernel.is_own_folder(each)]

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
        """End the agent of a kept pool; it leaves the plugins' hooks, if it has time."""
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
    """Where the folders of kept pools are: the runtime directory ends with the login."""
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


# Cards.


_GPUS = Path("/proc/driver/nvidia/gpus")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_QUERY = ("--query-gpu=memory.total,name", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 30.0


def installed_cards() -> tuple[Card, ...]:
    """The NVIDIA cards that the kernel knows, without their memory: this only reads files."""
    cards = []
    for file in sorted(_GPUS.glob("*/information")):
        model = _MODEL.search(file.read_text(errors="replace"))
        cards.append(Card(model[1] if model else "NVIDIA"))
    return tuple(cards)


def measured_cards() -> tuple[Card, ...]:
    """The same cards with the memory that `nvidia-smi` reports, where it is there and answers."""
    cards = installed_cards()
    program = shutil.which("nvidia-smi")
    if not cards or program is None:
        return cards
    try:
        said = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return cards
    pairs = (line.partition(", ") for line in said.splitlines() if line.strip())
    return tuple(
        Card(name.strip(), int(memory) if memory.isdigit() else None) for memory, _, name in pairs
    )


def check_accelerator(wanted: Accelerator | None) -> None:
    """Refuse a request for cards that this machine does not have."""
    if wanted is None or os.environ.get("SKYWARD_DEVICE") == "cpu":
        return
    cards = measured_cards()
    if len(matching(wanted, cards)) < wanted.count:
        raise ConfigurationError(
            f"accelerator={wanted}: this machine has {describe(cards) or 'none'}; choose a "
            "provider that has it, drop accelerator=, or set SKYWARD_DEVICE=cpu to try GPU code "
            "here"
        )
