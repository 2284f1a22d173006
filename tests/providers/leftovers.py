"""What a pool may leave behind, and the script that is killed to find out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyward.nodes.records import Journal

from ..conftest import other_case
from .ssh_hosts import MARKERS

PHASES = ["creating", "looking at", "starting the agent", "starting workers", "ready"]
"""What the console says, one after the other, while a pool of machines comes up."""


def phases(*chosen: str) -> list[Any]:
    """The phases in which the tests break off: these, and all of them in `make test-all`."""
    return [pytest.param(each, marks=() if each in chosen else other_case) for each in PHASES]


_SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
import skyward as sky
{setup}
with sky.Compute({provider}, nodes=2, options=sky.Options(console=True, {options})) as compute:
    print("skyward: all ready", flush=True)
    time.sleep(100)
"""


class Script:
    """A pool in a process of its own, which says how far it has come."""

    def __init__(self, provider: str, setup: str = "", options: str = "") -> None:
        root = str(Path(__file__).parents[2])
        self.code = _SCRIPT.format(root=root, setup=setup, provider=provider, options=options)

    @contextlib.contextmanager
    def reaching(self, phase: str) -> Iterator[subprocess.Popen[str]]:
        """Start it, and wait until it says that it is there."""
        wanted = "all ready" if phase == "ready" else phase
        process = subprocess.Popen(
            [sys.executable, "-c", self.code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if wanted in line:
                    break
            else:
                raise AssertionError(f"never said {wanted!r}:\n{''.join(said)}")
            yield process
        finally:
            process.kill()
            process.communicate()


def show_and_remove_after_a_kill(script: Script, phase: str, journal: Journal) -> str:
    """Kill a pool's process in a phase, and have `sky` deal with it; gives the pool's id."""
    with script.reaching(phase) as process:
        process.kill()
        process.wait()

    shown = json.loads(sky_says("ps", "--json"))
    assert [each["state"] for each in shown] == ["gone"]
    sky_says("down")
    assert journal.pools() == []
    return str(shown[0]["id"])


def press_ctrl_c(script: Script, phase: str, journal: Journal) -> list[str]:
    """Interrupt a pool's process in a phase; gives the ids of the pools that it had."""
    with script.reaching(phase) as process:
        pools = [pool.id for pool in journal.pools()]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=200)
        assert process.returncode != 0
    assert journal.pools() == []
    return pools


def sky_says(*command: str) -> str:
    """What a command of `sky` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "skyward", *command], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def podman_says(*command: str) -> str:
    """What a command of `podman` prints."""
    done = subprocess.run(["podman", *command], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def on_this_host(pool: str) -> list[str]:
    """Folders, markers and processes that a pool has on this machine."""
    found = [str(each) for each in Path("/tmp").glob(f"sky.{pool}.*")]
    found += [str(each) for each in MARKERS.glob(f"*{pool}*")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            where = process.cwd() + " ".join(process.cmdline())
            if pool in where and process.pid != os.getpid():
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
    return found
