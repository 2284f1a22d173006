"""What the tests of SSH hosts do over and over."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.providers import Order
from skyward.providers.hosts import machine as ssh_machine
from skyward.providers.hosts.machine import SSHMachine
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


SSHD = "/usr/sbin/sshd"
SETTINGS = """
ListenAddress {address}
Port {port}
HostKey {folder}/host{number}
AuthorizedKeysFile {folder}/id.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
MaxStartups 100
MaxSessions 100
AcceptEnv SKY_* LANG LC_*
SetEnv SHLVL=1 PATH={path}
"""
"""Without SHLVL, bash reads the user's .bashrc for every command, which took 0.2 s and 50 processes
where that sets up pyenv. PATH has the Python that such a .bashrc may have provided."""


def skip_if_absent() -> None:
    """Skip where no SSH hosts can be started."""
    if sys.platform != "linux":
        pytest.skip("only Linux has a second loopback address for a second SSH host")
    if not os.access(SSHD, os.X_OK):
        pytest.skip("there is no sshd; install openssh-server")


def hosts_held() -> int:
    """To how many hosts this event loop holds connections."""
    here = ssh_machine.hosts_here()
    return len(here.held) + len(here.closing)


@dataclass(frozen=True)
class Sshd:
    """Two hosts, each an sshd with an address and a host key of its own."""

    folder: Path
    port: int
    hosts: tuple[str, ...] = ("127.0.0.1", "127.0.0.2")
    user: str = field(default_factory=getpass.getuser)
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key that opens both hosts."""
        return str(self.folder / "id")

    @property
    def known_hosts(self) -> str:
        """The file with the keys of both hosts."""
        return str(self.folder / "known_hosts")

    def make(self) -> None:
        """Write the keys and settings of both hosts."""
        known = []
        python = Path(sys.base_prefix, "bin")
        for name in ("id", *(f"host{n}" for n, _ in enumerate(self.hosts, 1))):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f"]
            subprocess.run([*command, str(self.folder / name)], check=True)
        for number, address in enumerate(self.hosts, 1):
            settings = SETTINGS.format(
                address=address,
                port=self.port,
                folder=self.folder,
                number=number,
                path=f"{python}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            )
            (self.folder / f"sshd{number}.conf").write_text(settings)
            key = " ".join((self.folder / f"host{number}.pub").read_text().split()[:2])
            known.append(f"[{address}]:{self.port} {key}\n")
        Path(self.known_hosts).write_text("".join(known))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)

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

    def up(self) -> None:
        """Start the hosts that are not running."""
        for number, address in enumerate(self.hosts, 1):
            if number not in self.running or self.running[number].poll() is not None:
                command = [SSHD, "-D", "-e", "-f", str(self.folder / f"sshd{number}.conf")]
                with (self.folder / f"sshd{number}.log").open("ab") as log:
                    self.running[number] = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True
                    )
                wait_until(partial(listens, self.port, address), 60, f"the sshd on {address}")

    def down(self) -> None:
        """End both hosts, with all of their connections."""
        for number in self.running:
            self.lose(number)

    def daemons(self, number: int) -> list[psutil.Process]:
        """A host's sshd, and those that serve its connections."""
        sshd = psutil.Process(self.running[number].pid)
        found = [sshd]
        for process in sshd.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    found.append(process)
        return found

    def lose(self, number: int) -> None:
        """End a host, but not what was started there, as with any sshd."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.daemons(number):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.running[number].wait(60)
        # One that was being forked meanwhile would go on serving its connection.
        place = (self.hosts[number - 1], self.port)
        for connection in psutil.net_connections("tcp"):
            if connection.laddr == place and connection.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(connection.pid).kill()


@contextlib.contextmanager
def running() -> Iterator[Sshd]:
    """Two hosts, as long as they are needed; skips where there can be none."""
    skip_if_absent()
    # Short, because Unix sockets end up below it.
    hosts = Sshd(Path(tempfile.mkdtemp(prefix="skysshd-", dir="/tmp")), free_port())
    try:
        hosts.make()
        hosts.up()
        yield hosts
    finally:
        hosts.down()
        shutil.rmtree(hosts.folder, ignore_errors=True)


@contextlib.contextmanager
def another(sshd: Sshd, folder: Path, *settings: str) -> Iterator[int]:
    """One more sshd at the first address, with settings of its own; gives its port."""
    port = free_port()
    plain = (sshd.folder / "sshd1.conf").read_text().splitlines()
    first = [f"Port {port}", *settings]
    names = tuple(line.split()[0] for line in first)
    config = folder / "sshd.conf"
    config.write_text("\n".join([*first, *(x for x in plain if not x.startswith(names))]) + "\n")
    command = [SSHD, "-D", "-f", str(config)]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(port), 60, "the sshd")
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


def refusal(provider: sky.SSH, kind: type[sky.SkywardError] = sky.errors.UnreachableError) -> str:
    """What creating a machine says when it cannot be."""

    async def attempt() -> str:
        with pytest.raises(kind) as caught:
            await provider.create(Order("t-refused", 0, plain_request()))
        assert isinstance(caught.value, sky.errors.PoolStartError)
        assert hosts_held() == 0
        return str(caught.value)

    return asyncio.run(attempt())


async def created(provider: sky.SSH) -> None:
    """Make a machine, and destroy it."""
    async with made(provider):
        pass


def listens(port: int, address: str = "127.0.0.1") -> bool:
    """Whether there is a server on a port of this machine."""
    with socket.socket() as probe:
        return not probe.connect_ex((address, port))
