"""SSH hosts on this machine, for these tests alone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky

TESTBED = Path(
    os.environ.get("SKYWARD_TESTBED") or Path(__file__).parents[3] / "shared" / "testbed"
)


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

    def lose(self, number: int) -> None:
        """End a host: its sshd and all the connections it serves."""
        pid = int((self.folder / "sshd" / "pids" / f"sshd{number}").read_text().split()[0])
        sshd = psutil.Process(pid)
        # What a command started belongs to the host's other processes, and goes on.
        for process in [sshd, *sshd.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("sshd"):
                    process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            sshd.wait(10)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def sshd() -> Iterator[Sshd]:
    """Two SSH hosts; skips where there is no testbed."""
    if not (TESTBED / "sshd-up").exists():
        pytest.skip("no testbed here; name its folder with SKYWARD_TESTBED")
    # Short, because Unix sockets end up below it.
    folder = Path(tempfile.mkdtemp(prefix="skysshd-", dir="/tmp"))
    port = free_port()
    hosts = Sshd(folder, ("127.0.0.1", "127.0.0.2"), port, "", "", "")
    try:
        said = dict(re.findall(r"export (\w+)='(.*)'", hosts.up()))
        yield Sshd(
            folder,
            tuple(said["SKY_SSH_HOSTS"].split(",")),
            port,
            said["SKY_SSH_USER"],
            said["SKY_SSH_KEY"],
            said["SKY_SSH_KNOWN_HOSTS"],
        )
    finally:
        environment = os.environ | {"TESTBED_STATE": str(folder)}
        subprocess.run([str(TESTBED / "sshd-down")], env=environment, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
