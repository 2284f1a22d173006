"""A real apt, in a container with this machine's programs and a package database that is empty."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward import bootstrap
from skyward.bootstrap import Environment
from skyward.errors import ImageError
from skyward.providers.container.machine import ContainerMachine
from skyward.providers.container.service import NODE, POOL, Service
from skyward.spec import Image

from ..conftest import only_in_all
from . import podman

ME = "{}.{}".format(*sys.version_info)
NAME = f"sky-apt{os.getpid()}-0"
PREPARE = """
cd /var && mkdir -p lib/dpkg/info lib/dpkg/updates lib/dpkg/triggers lib/dpkg/alternatives \
    lib/apt/lists/partial cache/apt/archives/partial log/apt cache/debconf
: >lib/dpkg/status
rm -rf /usr/bin/python* /usr/local/bin/python* /usr/lib/python3* /usr/share/python3
apt-get -qq update && apt-cache policy "$1"
"""


class Debian:
    """One machine, and what was said while it was prepared."""

    def __init__(self, machine: ContainerMachine) -> None:
        self.machine = machine
        self.phases: list[str] = []

    def prepared(self, image: Image) -> Environment:
        self.phases.clear()
        pool = NAME.split("-")[1]
        return asyncio.run(
            bootstrap.prepare(self.machine, pool, 0, image, self.phases.append, print)
        )

    def says(self, *command: str) -> str:
        out = bytearray()
        assert asyncio.run(self.machine.run(command, output=out.extend)) == 0, out
        return out.decode()


@pytest.fixture(scope="module")
def debian(engine: None) -> Iterator[Debian]:
    """Layers over /usr and /etc take what apt writes, and go with the container."""
    if not Path("/usr/bin/apt-get").exists():
        pytest.skip("this machine has no apt")
    labels = ["-l", f"{POOL}=apt", "-l", f"{NODE}=0"]
    layers = ["-v", "/usr:/usr:O", "-v", "/etc:/etc:O"]
    command = ["podman", "run", "-d", "--init", "--name", NAME, *labels, *layers]
    subprocess.run([*command, podman.IMAGE, "sleep", "900"], check=True, capture_output=True)
    try:
        service = Service(os.environ["DOCKER_HOST"])
        with service.connected() as docker:
            found = Debian(ContainerMachine(service, docker.containers.get(NAME), None))
        try:
            policy = found.says("sh", "-c", PREPARE, "sh", f"python{ME}")
        except AssertionError as problem:
            pytest.skip(f"apt reaches nothing here: {problem}")
        if not re.search(rf"Candidate: {re.escape(ME)}", policy):
            pytest.skip(f"this machine's apt has no Python {ME}")
        yield found
    finally:
        remove = ["podman", "rm", "-f", "-t", "0", NAME]
        subprocess.run(remove, check=True, capture_output=True)


@only_in_all
@pytest.mark.slow
def test_a_package_that_apt_does_not_have_is_named_with_what_apt_said(debian: Debian) -> None:
    """Slow, as all of these: apt fetches its lists."""
    with pytest.raises(ImageError) as caught:
        debian.prepared(Image(apt=["hello", "nosuch-package-xyz"]))
    message = str(caught.value)
    assert message.startswith("node 0: installing hello nosuch-package-xyz with apt failed")
    assert "for Image(apt=['nosuch-package-xyz'])\n" in message
    assert "E: Unable to locate package nosuch-package-xyz" in message
    assert "apt-cache search" in message


@only_in_all
@pytest.mark.slow
def test_python_and_packages_come_from_apt(debian: Debian) -> None:
    """Slow: a Python with all that it needs is unpacked."""
    prepared = debian.prepared(Image(apt=["hello"]))
    assert "installing hello with apt" in debian.phases
    assert f"installing Python {ME} with apt" in debian.phases
    code = "import skyward, sys; print(sys.base_prefix, *sys.version_info[:2], sep='.')"
    assert debian.says(prepared.python, "-c", code) == f"/usr.{ME}\n"
    assert debian.says("hello") == "Hello, world!\n"
    assert debian.prepared(Image(apt=["hello"])).cached
    assert debian.phases == ["looking at the machine"]
