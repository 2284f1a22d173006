"""Two network namespaces with the testbed's link between them, which can be made to carry nothing.

One copy of that link fits on a machine: whoever uses it holds a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..providers.ssh_hosts import TESTBED, Sshd

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("across.py")
PORTS = (22001, 22002)
"""One for each host; the far namespace has no others."""
MTU = 1500
"""What a packet takes on most networks; the testbed's own is larger, and hides losses."""


@dataclass(frozen=True)
class Link:
    """The names and addresses of the two ends."""

    near: str
    far: str
    near_address: str
    far_address: str

    def client(self, limit: float, **told: Any) -> list[dict[str, Any]]:
        """What the script makes of its task in the near namespace, on each pool, within a limit."""
        told |= {"namespaces": [self.near, self.far]}
        paths = [str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            ["ip", "netns", "exec", self.near, sys.executable, str(SCRIPT), json.dumps(told)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            timeout=limit,
            check=False,
        )
        sys.stderr.write(done.stderr)
        assert done.returncode == 0, done.stderr
        outcomes: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return outcomes

    def congest(self, algorithm: str) -> None:
        """Have both ends use one way of TCP to deal with losses."""
        for namespace, other in ((self.near, self.far_address), (self.far, self.near_address)):
            route = ["route", "add", f"{other}/32", "dev", "sky0", "congctl", algorithm]
            subprocess.run(["ip", "-n", namespace, *route], check=True)

    @contextlib.contextmanager
    def hosts(self, sshd: Sshd, folder: Path) -> Iterator[dict[str, Any]]:
        """Two SSH hosts in the far namespace; gives the arguments of a provider."""
        known, daemons = [], []
        try:
            for number, port in enumerate(PORTS, 1):
                settings = (sshd.folder / f"sshd{number}.conf").read_text()
                settings = re.sub(
                    r"ListenAddress .*", f"ListenAddress {self.far_address}", settings
                )
                settings = re.sub(r"Port .*", f"Port {port}", settings)
                config = folder / f"far{number}.conf"
                config.write_text(settings)
                command = ["ip", "netns", "exec", self.far, "/usr/sbin/sshd", "-D", "-f"]
                daemons.append(subprocess.Popen([*command, str(config)], stderr=subprocess.DEVNULL))
                key = (sshd.folder / f"host{number}.pub").read_text()
                known.append(f"[{self.far_address}]:{port} {key}")
            (folder / "known_hosts").write_text("".join(known))
            yield {
                "hosts": [f"{self.far_address}:{port}" for port in PORTS],
                "user": sshd.user,
                "key": sshd.key,
                "known_hosts": str(folder / "known_hosts"),
                "config": None,
            }
        finally:
            # A session whose client went without a word would stay for ever.
            sessions = [
                session for daemon in daemons for session in psutil.Process(daemon.pid).children()
            ]
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait()
            for session in sessions:
                with contextlib.suppress(psutil.NoSuchProcess):
                    session.kill()


@contextlib.contextmanager
def linked(delay_ms: float = 0.0, loss: float = 0.0, mbit: float = 0.0) -> Iterator[Link]:
    """The link, with its delay one way, the share of packets it loses, and its rate; or a skip."""
    script = TESTBED / "delay-link"
    if not script.exists():
        pytest.skip("no testbed here; name its folder with SKYWARD_TESTBED")
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with Path(tempfile.gettempdir(), "skyward-link.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if Path("/run/netns/sky-a").exists():
            pytest.skip(f"the testbed's link is in use, or left over: try {script} down")
        done = subprocess.run(
            [str(script), "up", f"{delay_ms:g}", f"{loss:g}", f"{mbit:g}"],
            env={**os.environ, "TESTBED_LINK_MTU": str(MTU if loss else 9000)},
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            if done.returncode:
                pytest.skip(f"the testbed's link did not come up: {done.stderr.strip()}")
            said = dict(re.findall(r"export SKY_LINK_(\w+)='(.*)'", done.stdout))
            yield Link(said["NS_A"], said["NS_B"], said["ADDR_A"], said["ADDR_B"])
        finally:
            subprocess.run([str(script), "down"], capture_output=True, check=False)
