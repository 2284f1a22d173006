"""What the tests of SSH hosts do over and over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.providers import Order
from skyward.providers.ssh import connections
from skyward.providers.ssh.machine import SSHMachine
from skyward.testing import plain_request

from ..conftest import wait_until

TESTBED = Path(
    os.environ.get("SKYWARD_TESTBED") or Path(__file__).parents[3] / "shared" / "testbed"
)
MARKERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "skyward", "machines")
LISTENER = """
import hashlib, os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind("s")
listener.listen()
print(os.path.abspath("s"), flush=True)
end = listener.accept()[0]
"""


@dataclass(frozen=True)
class Sshd:
    """Two hosts, each an sshd with an address and a host key of its own."""

    folder: Path
    hosts: tuple[str, ...]
    port: int
    user: str
    key: str
    known_hosts: str

    def provider(self, *hosts: str, **changed: Any) -> sky.SSH:
        """The hosts as a provider, with nothing of the user's own configuration."""
        given: dict[str, Any] = {
            "user": self.user,
            "port": self.port,
            "key": self.key,
            "known_hosts": self.known_hosts,
            "config": None,
        }
        return sky.SSH(list(hosts or self.hosts), **given | changed)

    def up(self) -> str:
        """Start what is not running."""
        environment = os.environ | {
            "TESTBED_STATE": str(self.folder),
            "TESTBED_SSH_PORT": str(self.port),
        }
        done = subprocess.run(
            [str(TESTBED / "sshd-up"), "2"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"no sshd here: {done.stderr.strip()}")
        return done.stdout

    def daemons(self, number: int) -> list[psutil.Process]:
        """A host's sshd, and those that serve its connections."""
        pid = int((self.folder / "sshd" / "pids" / f"sshd{number}").read_text().split()[0])
        sshd = psutil.Process(pid)
        found = [sshd]
        for process in sshd.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    found.append(process)
        return found

    def lose(self, number: int) -> None:
        """End a host, but not what was started there, as with any sshd."""
        daemons = self.daemons(number)
        for process in daemons:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            daemons[0].wait(10)


@contextlib.contextmanager
def another(sshd: Sshd, folder: Path, *settings: str) -> Iterator[int]:
    """One more sshd at the first address, with settings of its own; gives its port."""
    port = free_port()
    plain = (sshd.folder / "sshd" / "sshd1.conf").read_text().splitlines()
    first = [f"Port {port}", *settings]
    names = tuple(line.split()[0] for line in first)
    config = folder / "sshd.conf"
    config.write_text("\n".join([*first, *(x for x in plain if not x.startswith(names))]) + "\n")
    command = ["/usr/sbin/sshd", "-D", "-f", str(config)]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(port), 10, "the sshd")
        yield port
    finally:
        daemon.terminate()
        daemon.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def made(provider: sky.SSH, node: int = 0, pool: str = "") -> AsyncIterator[SSHMachine]:
    machine = await provider.create(
        Order(pool or f"t-{os.urandom(4).hex()}", node, plain_request())
    )
    try:
        yield machine
    finally:
        await machine.destroy()
        assert not list(MARKERS.glob(f"{machine.id.rpartition('/')[2]}*"))


async def said(machine: SSHMachine, *command: str) -> str:
    out = bytearray()
    assert await machine.run(command, output=out.extend) == 0, out
    return out.decode().strip()


async def serving(machine: SSHMachine, script: str) -> tuple[asyncio.Task[int], str]:
    """A Python server on the machine's Unix socket, and the endpoint it prints."""
    out = bytearray()
    task = asyncio.create_task(
        machine.run([sys.executable, "-c", LISTENER + script], output=out.extend)
    )
    async with asyncio.timeout(30):
        while b"\n" not in out:
            await asyncio.sleep(0.005)
    return task, "unix:" + out.decode().strip()


def refusal(provider: sky.SSH, kind: type[sky.SkywardError] = sky.UnreachableError) -> str:
    """What creating a machine says when it cannot be."""

    async def attempt() -> str:
        with pytest.raises(kind) as caught:
            await provider.create(Order("t-refused", 0, plain_request()))
        assert isinstance(caught.value, sky.PoolStartError)
        assert connections.hosts_held() == 0
        return str(caught.value)

    return asyncio.run(attempt())


async def created(provider: sky.SSH) -> None:
    """Make a machine, and destroy it."""
    async with made(provider):
        pass


def listens(port: int) -> bool:
    """Whether there is a server on a local port."""
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))
