"""A Slurm cluster for tests: the testbed's, with two nodes that have their own addresses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky

from .ssh_hosts import TESTBED

STATE = Path(os.environ.get("TESTBED_STATE") or "/var/tmp/skyward-testbed", "slurm")
_in_use: list[Any] = []


def skip_if_absent() -> None:
    """Skip where no cluster can be started."""
    if not (TESTBED / "slurm-up").exists():
        pytest.skip("there is no testbed with a Slurm cluster")
    if os.geteuid() != 0:
        pytest.skip("the testbed's Slurm needs root")


def start() -> str:
    """Start the cluster, unless one is up; gives the path of its configuration."""
    # One that somebody has started stays up; a cluster that is not the testbed's is not touched.
    if os.environ.get("SLURM_CONF") == str(STATE / "slurm.conf"):
        return str(STATE / "slurm.conf")
    with _locked("starting"):
        lock = _lock_file("in-use").open("w")
        fcntl.flock(lock, fcntl.LOCK_SH)
        _in_use.append(lock)
        done = subprocess.run(
            [str(TESTBED / "slurm-up")], capture_output=True, text=True, timeout=300
        )
    if done.returncode:
        pytest.skip(f"the testbed's Slurm does not start: {done.stderr.strip()[-300:]}")
    return dict(re.findall(r"export (\w+)='(.*)'", done.stdout))["SLURM_CONF"]


def stop() -> None:
    """Take the cluster down, unless another process uses it."""
    while _in_use:
        with _locked("starting"), _in_use.pop() as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run([str(TESTBED / "slurm-down")], capture_output=True, timeout=120)


def _lock_file(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"skyward-slurm-{name}.lock")


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with _lock_file(name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def provider(**changed: Any) -> sky.Slurm:
    """Nodes on which this very environment is ready."""
    return sky.Slurm(**{"python": sys.executable, "timeout": 120, **changed})


def says(*command: str) -> str:
    """What a command of Slurm's prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def jobs() -> list[str]:
    """The numbers and states of the pools' jobs that have not ended."""
    told = says("squeue", "--noheader", "--format=%i %T %j").splitlines()
    return [line for line in told if " sky-" in line and "COMPLETING" not in line]


def lose(daemon: str) -> None:
    """Kill one of the cluster's daemons: "slurmctld", or "slurmd2" with all that runs on node 2."""
    process = psutil.Process(int((STATE / "pids" / daemon).read_text().split()[0]))
    # Killed at once, the controller would forget the jobs of its last seconds.
    process.send_signal(signal.SIGTERM if daemon == "slurmctld" else signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(60)
    if daemon != "slurmctld":
        node = f"sky-n{daemon.removeprefix('slurmd')}"
        for pid in says("ip", "netns", "pids", node).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # On the disk of a machine of its own, its keepers' folders would be lost as well.
        for folder in Path("/tmp").glob(f"sky.slurm.*.{node.removeprefix('sky-')}"):
            shutil.rmtree(folder)


def bring_back() -> None:
    """Start the daemons again that were killed."""
    done = subprocess.run([str(TESTBED / "slurm-up")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
