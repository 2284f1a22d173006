"""SSH hosts on this machine, for these tests alone."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.nodes.journal import Journal

from . import podman
from .ssh_hosts import TESTBED, Sshd, free_port


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


WAITING_SECONDS = 900
"""What a test of containers may take, with the wait for another file's."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "engine" in fixtures and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WAITING_SECONDS))


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    """A Podman of the testbed's, at `DOCKER_HOST`, for one file at a time."""
    podman.skip_if_absent()
    with Path(tempfile.gettempdir(), "skyward-podman.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        variables = podman.start()
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            podman.stop()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """A journal for one test, also for the processes that it starts."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    return Journal()
