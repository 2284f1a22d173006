"""Podman for the tests of containers, with this machine's own programs inside."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

from .ssh_hosts import TESTBED

IMAGE = "localhost/hostbind:1"
SOURCE = str(Path(sky.__file__).parents[1])


def skip_if_absent() -> None:
    """Skip where there can be no Podman of the testbed's."""
    if not (TESTBED / "podman-up").exists():
        pytest.skip("no testbed here; name its folder with SKYWARD_TESTBED")
    if os.geteuid() != 0:
        pytest.skip("the testbed's Podman needs root")


@contextlib.contextmanager
def running() -> Iterator[None]:
    """A Podman at `DOCKER_HOST`, for one at a time; skips where there can be none."""
    skip_if_absent()
    with Path(tempfile.gettempdir(), "skyward-podman.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        variables = start()
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
            stop()


def start() -> dict[str, str]:
    """Bring Podman up, and return the variables that lead to it; skips where it does not start.

    Nobody else may use it: what tests have left that were killed is removed.
    """
    done = subprocess.run([str(TESTBED / "podman-up")], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"Podman does not start here: {done.stderr.strip()[-300:]}")
    variables = dict(re.findall(r"export (\w+)='(.*)'", done.stdout))
    for command in (["rm", "--all", "--force", "--time=0"], ["network", "prune", "--force"]):
        subprocess.run(
            ["podman", *command],
            env=os.environ | variables,
            capture_output=True,
            timeout=120,
            check=True,
        )
    return variables


def stop() -> None:
    """Take Podman down."""
    subprocess.run([str(TESTBED / "podman-down")], capture_output=True, timeout=120)


@functools.cache
def mounts() -> list[sky.Volume]:
    """What makes this machine's Python run in a container that has nothing."""
    listed = subprocess.run(
        [str(TESTBED / "hostbind-mounts"), "list", sys.prefix],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    folders = [sky.Volume(each, read_only=True) for each in listed.splitlines()]
    return [*folders, sky.Volume(SOURCE, read_only=True)]


def provider(**changed: Any) -> sky.Container:
    """Containers in which this very environment is ready."""
    arguments = {"image": IMAGE, "mounts": mounts(), "python": sys.executable}
    return sky.Container(**{**arguments, **changed})
