"""Local: worker processes on this machine, with nothing to set up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from skyward.errors import ConfigurationError, ImageError, PoolStartError, UnreachableError
from skyward.providers import Order, Wish
from skyward.spec import Image
from skyward.worker import lifeline
from skyward.worker.config import AgentConfig

START_SECONDS = 60.0
_SOCKET_PATH_MAX = 70
"""Of the 107 characters a Unix socket's path may have, what the folder may use."""


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

    name = "local"

    @property
    def encrypted(self) -> bool:
        """Only TCP needs credentials."""
        return self.transport == "tcp"

    def describe(self) -> dict[str, Any]:
        """What made it."""
        return {"transport": self.transport}

    def price(self, wish: Wish) -> float | None:
        """This machine is paid for."""
        return 0.0

    async def create(self, order: Order) -> LocalMachine:
        """A folder on this machine, in which commands run."""
        return LocalMachine.made(order)

    async def find(self, pool: str) -> list[LocalMachine]:
        """The folders of a pool."""
        return LocalMachine.of(pool)

    def check(self, wish: Wish) -> None:
        """What this machine does not have cannot be asked for."""
        _check_python(wish.image)
        if wish.accelerator is not None and os.environ.get("SKYWARD_DEVICE") != "cpu":
            count, model = _graphics_cards()
            if count < wish.accelerator.count or wish.accelerator.name not in (model or ""):
                has = f"{count} x {model}" if count else "none"
                raise ConfigurationError(
                    f"accelerator={wish.accelerator}: this machine has {has}; choose a provider "
                    "that has it, drop accelerator=, or set SKYWARD_DEVICE=cpu to try GPU code here"
                )
        for volume in wish.volumes:
            if volume.target != volume.source or not Path(volume.source).exists():
                raise ConfigurationError(
                    f"{volume}: local workers see this machine's files where they are; give an "
                    "existing path without a different target, or use a provider with containers"
                )

    def machine(self, node: int, pool: str, wish: Wish) -> LocalHost:
        """A process on this machine."""
        return LocalHost(self, node, pool, wish)


class LocalHost:
    """An agent process on this machine."""

    def __init__(self, provider: Local, node: int, pool: str, wish: Wish) -> None:
        self._provider = provider
        self._node = node
        self._pool = pool
        self._wish = wish
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self.endpoint = ""
        self.address = "127.0.0.1"
        self.hostname = socket.gethostname()
        self.accelerators, self.accelerator = _graphics_cards()

    @cached_property
    def _folder(self) -> Path:
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        if not os.access(base, os.W_OK) or len(base) > _SOCKET_PATH_MAX:
            base = "/tmp"
        return Path(tempfile.mkdtemp(prefix=f"sky-{self._node}-", dir=base))

    def start(self, config: AgentConfig) -> None:
        """Start the agent's process and wait until it listens."""
        _check_packages(self._wish.image)
        config.address = "127.0.0.1" if self._provider.encrypted else "unix"
        config.folder = str(self._folder)
        config.client_pid = os.getpid()
        if self._wish.vcpus:
            config.env.setdefault("OMP_NUM_THREADS", str(max(1, int(self._wish.vcpus))))
        log = self._folder / "agent.log"
        with self._lock, log.open("wb") as errors:
            if self._stopped:
                raise PoolStartError(f"node {self._node} was stopped while it started")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skyward.worker.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
        line = _line_within(process.stdout, START_SECONDS)
        if not line:
            said = log.read_text(errors="replace").strip()[-2000:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            problem = (
                f"did not start within {START_SECONDS:.0f} s"
                if process.poll() is None
                else f"ended with exit status {process.returncode}"
            )
            self.stop(0)
            raise PoolStartError(
                f"node {self._node}: its agent {problem}" + (f"; it said:\n{said}" if said else "")
            )
        self.endpoint = str(msgspec.json.decode(line)["endpoint"])

    def looks_dead(self) -> bool:
        """Whether the process has ended or is stopped."""
        process = self._process
        if process is None or process.poll() is not None:
            return True
        import psutil

        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        return True

    def stop(self, seconds: float) -> None:
        """Wait for the agent to end by itself, then make it."""
        with self._lock:
            already, self._stopped = self._stopped, True
            process = self._process
        if process is not None:
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            if process.poll() is None:
                self._end_now(process)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if not already or "_folder" in self.__dict__:
            shutil.rmtree(self.__dict__.get("_folder", ""), ignore_errors=True)

    @staticmethod
    def _end_now(process: subprocess.Popen[bytes]) -> None:
        # A stopped process gets a SIGTERM only once it is continued.
        for number in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()


class LocalMachine:
    """This machine, as a provider's: commands run in a folder, and end with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = str(folder)
        self.node = int(folder.name.rpartition("-")[2])
        self.address = "127.0.0.1"
        self.direct: str | None = "127.0.0.1"
        self.python: str | None = sys.executable

    @classmethod
    def made(cls, order: Order) -> LocalMachine:
        """A new one."""
        folder = Path(tempfile.gettempdir(), f"sky-{order.pool}-{order.node}")
        folder.mkdir(mode=0o700)
        return cls(folder)

    @classmethod
    def of(cls, pool: str) -> list[LocalMachine]:
        """Those that a pool left."""
        return [cls(found) for found in sorted(Path(tempfile.gettempdir()).glob(f"sky-{pool}-*"))]

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """A child process that leads a process group of its own."""
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
                lifeline.cut(process.pid)
                await process.wait()
            leader.unlink(missing_ok=True)

    async def dial(self, endpoint: str) -> socket.socket:
        """Straight there."""
        family, _, place = endpoint.partition(":")
        if family == "unix":
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.connect(place)
            except OSError:
                end.close()
                raise
            return end
        host, _, port = place.rpartition(":")
        return socket.create_connection((host, int(port)))

    async def alive(self) -> bool:
        """Whether its folder is there."""
        return self._folder.exists()

    async def destroy(self) -> None:
        """End its commands and remove the folder."""
        for leader in self._folder.glob("*.group"):
            lifeline.cut(int(leader.stem))
        shutil.rmtree(self._folder, ignore_errors=True)


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        pipe.write(data)
        await pipe.drain()
    pipe.close()


def _environment() -> dict[str, str]:
    """The client's environment, with this very skyward importable."""
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "site-packages" in Path(home).parts:
        paths.remove(home)
    environment = dict(os.environ)
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _line_within(pipe: object, seconds: float) -> bytes:
    descriptor = pipe.fileno()  # type: ignore[attr-defined]
    data = b""
    deadline = time.monotonic() + seconds
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return b""
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return b""
        data += chunk
    return data


def _graphics_cards() -> tuple[int, str | None]:
    """How many NVIDIA cards the kernel knows, and the model of the first."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    for card in cards[:1]:
        match = re.search(r"^Model:\s*(.+)$", card.read_text(errors="replace"), re.MULTILINE)
        return len(cards), match.group(1) if match else "NVIDIA"
    return 0, None


def _check_python(image: Image) -> None:
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if image.python not in ("auto", mine):
        raise ConfigurationError(
            f"Image(python={image.python!r}): local workers run this Python, {mine}; use "
            "python='auto', or a provider that builds environments"
        )


def _check_packages(image: Image) -> None:
    """Local workers share this environment: what an image wants must be in it."""
    missing = []
    for requirement in image.pip:
        match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:==\s*([^\s;,]+))?", requirement)
        name, wanted = match.groups() if match else (requirement, None)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(requirement)
            continue
        if wanted and version.split("+")[0] != wanted.split("+")[0]:
            missing.append(f"{requirement} (here: {version})")
    if missing:
        raise ImageError(
            f"local workers share this environment, and it lacks {', '.join(missing)}; install "
            "that here, or use a provider that builds environments"
        )
