"""Containers and SSH hosts on this machine, from the testbed's scripts."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import skyward as sky

HERE = Path(__file__).parent
IMAGE = "localhost/hostbind:1"


class NoTestbedError(RuntimeError):
    """There are no such machines to be had here; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """SSH hosts at loopback addresses, with a key of their own."""

    names: tuple[str, ...]
    port: int
    user: str
    key: str
    known_hosts: str

    def provider(self, **options: bool) -> sky.SSH:
        return sky.SSH(
            self.names,
            user=self.user,
            port=self.port,
            key=self.key,
            known_hosts=self.known_hosts,
            config=None,
            **options,
        )

    @property
    def options(self) -> list[str]:
        """The same for OpenSSH's own programs."""
        return [
            *("-F", "none", "-i", self.key, "-o", f"Port={self.port}", "-o", "BatchMode=yes"),
            *("-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=yes"),
        ]


@contextlib.contextmanager
def ssh_hosts() -> Iterator[Hosts]:
    """Two SSH hosts, taken down afterwards."""
    # Short, because Unix sockets end up below it.
    folder = tempfile.mkdtemp(prefix="skybench-", dir="/tmp")
    port = _free_port()
    environment = {"TESTBED_STATE": folder, "TESTBED_SSH_PORT": str(port)}
    try:
        said = _run("sshd-up", "2", **environment)
        yield Hosts(
            tuple(said["SKY_SSH_HOSTS"].split(",")),
            port,
            said["SKY_SSH_USER"],
            said["SKY_SSH_KEY"],
            said["SKY_SSH_KNOWN_HOSTS"],
        )
    finally:
        with contextlib.suppress(NoTestbedError):
            _run("sshd-down", **environment)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def forgetful_host() -> Iterator[tuple[sky.SSH, Path]]:
    """An SSH host that keeps what it builds in one folder, which may be deleted; and the folder."""
    with ssh_hosts() as hosts, tempfile.TemporaryDirectory(prefix="skybench-") as name:
        folder = Path(name)
        cache = folder / "cache"
        port = _free_port()
        plain = Path(hosts.key).with_name("sshd1.conf").read_text().splitlines()
        kept = [line for line in plain if line.split()[:1] not in (["Port"], ["SetEnv"])]
        config = folder / "sshd.conf"
        config.write_text("\n".join([f"Port {port}", f"SetEnv SKYWARD_CACHE={cache}", *kept, ""]))
        known = folder / "known_hosts"
        entries = Path(hosts.known_hosts).read_text()
        known.write_text(entries.replace(f"]:{hosts.port} ", f"]:{port} "))
        daemon = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-f", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            _await_listener(hosts.names[0], port)
            one = replace(hosts, names=hosts.names[:1], port=port, known_hosts=str(known))
            yield one.provider(), cache
        finally:
            daemon.terminate()
            daemon.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_listener(host: str, port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((host, port), 1).close()
        except OSError as problem:
            if time.monotonic() > deadline:
                raise NoTestbedError(f"sshd on port {port}: {problem}") from problem
            time.sleep(0.05)
        else:
            return


@contextlib.contextmanager
def containers() -> Iterator[sky.Container]:
    """A provider of containers with this very environment, on a Podman of the testbed's."""
    if os.geteuid():
        raise NoTestbedError("the testbed's Podman needs root")
    os.environ.update(_run("podman-up"))
    try:
        listed = subprocess.run(
            [_script("hostbind-mounts"), "podman", sys.prefix],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found = [each.split(":") for each in re.findall(r"-v (\S+)", listed)]
        mounts = [sky.Volume(source, target, read_only=True) for source, target, *_ in found]
        mounts.append(sky.Volume(str(Path(sky.__file__).parents[1]), read_only=True))
        yield sky.Container(IMAGE, mounts=mounts, python=sys.executable)
    finally:
        _run("podman-down")


def _script(name: str) -> str:
    folder = os.environ.get("SKYWARD_TESTBED") or HERE.parents[1] / "shared" / "testbed"
    script = Path(folder, name)
    if not script.exists():
        raise NoTestbedError("no testbed here; name its folder with SKYWARD_TESTBED")
    return str(script)


def _run(name: str, *arguments: str, **environment: str) -> Mapping[str, str]:
    """The variables that a script of the testbed exports."""
    done = subprocess.run(
        [_script(name), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NoTestbedError(f"{name}: {done.stderr.strip()[-300:]}")
    return dict(re.findall(r"export (\w+)='(.*)'", done.stdout))
