"""The driver's program, where it runs: as a job of the cluster, or as a process beside the client.

Both are started by a shell, which looks for a Python that has Ray: a job's entrypoint does not know
where Ray is installed, and neither does a client in an environment of its own.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import owner
from skyward.providers.ray import records
from skyward.providers.ray.jobs_api import METADATA, NAME, OVER, OWNER, PID, JobsApi

_HAS_RAY = "import importlib.util as u,sys;sys.exit(u.find_spec('ray') is None)"
# A raylet's command line names the Python of its workers.
_SCRIPT = """
raylet=
for line in /proc/[0-9]*/cmdline; do
  found=$(tr '\\000' '\\n' <"$line" 2>/dev/null | grep -a '^--python_worker_command=') || continue
  found=${found#*=}; raylet=${found%% *}; break
done
for python in "$FIRST" "$raylet" python python3; do
  [ -n "$python" ] && command -v "$python" >/dev/null 2>&1 || continue
  if "$python" -c "$HAS_RAY" 2>/dev/null; then exec "$python" -c "$CODE"; fi
done
echo 'skyward failed "no Python here has Ray"'
exit 1
"""
# Ray's Python has no skyward, or another one: the modules are made from the text that is sent.
_CODE = """
import base64, json, sys, types, zlib
given = json.loads(zlib.decompress(base64.b64decode({text!r})))
def made(name):
    module = sys.modules[name] = types.ModuleType(name)
    parent, _, own = name.rpartition(".")
    setattr(sys.modules.get(parent), own, module) if parent else None
    return module
for name in ("skyward", "skyward.providers", "skyward.providers.ray"):
    made(name).__path__ = []
for name in ("keeper", "site"):
    exec(given[name], made("skyward.providers.ray." + name).__dict__)
exec(given["driver"])
main(given)
"""
_SENT = ("keeper", "site", "driver")


class DriverProgram(Protocol):
    """A driver's program that was started, or is to be."""

    id: str
    """The job's name, or the process's number; empty before the start."""

    def start(self, pool: str, given: Mapping[str, Any]) -> None:
        """Start it, with what it needs to know."""

    def log(self) -> str:
        """What it has printed."""

    def why_over(self) -> str:
        """Why it does not run any more; empty while it does."""

    def stop(self) -> None:
        """Have it end, however it is."""

    def forget(self) -> None:
        """Remove what is left of it after its end."""


def _entrypoint(pool: str, given: Mapping[str, Any], first: str) -> str:
    sources = {name: Path(__file__).with_name(f"{name}.py").read_text("utf-8") for name in _SENT}
    told = {**given, **sources}
    text = base64.b64encode(zlib.compress(json.dumps(told).encode(), 9)).decode()
    assigned = {"FIRST": first, "HAS_RAY": _HAS_RAY, "CODE": _CODE.format(text=text)}
    lines = [f"{name}={shlex.quote(value)}" for name, value in assigned.items()]
    return "\n".join([f": skyward pool {pool}", *lines, _SCRIPT])


class JobProgram:
    """The program as a job, through the cluster's jobs API."""

    def __init__(self, api: JobsApi, id: str = "") -> None:
        self.api, self.id = api, id

    def start(self, pool: str, given: Mapping[str, Any]) -> None:
        """Submit the job."""
        self.id = f"skyward-{pool}-{uuid.uuid4().hex[:6]}"
        entrypoint = _entrypoint(pool, {**given, "address": "auto"}, "")
        about = {OWNER: owner(), PID: str(os.getpid()), NAME: str(given.get("name", ""))}
        self.api.submit(self.id, entrypoint, {METADATA: pool, **about})

    def log(self) -> str:
        """The job's log."""
        return self.api.log(self.id)

    def why_over(self) -> str:
        """The job's last state and message."""
        state, message = self.api.state(self.id)
        if not state:
            return f"the job {self.id} is not there any more"
        return f"the job {self.id} is {state}: {message}" if state in OVER else ""

    def stop(self) -> None:
        """Stop the job."""
        self.api.stop(self.id)

    def forget(self) -> None:
        """Leave the ended job in the cluster's list, which Ray cuts by itself.

        If a job is deleted soon after its end, Ray writes it down again, as failed.
        """


class ChildProgram:
    """The program as a process of this machine, which is in the cluster or can reach it."""

    def __init__(self, address: str, pool: str, id: str = "") -> None:
        self.address, self.id = address, id
        self._log = records.log_of(pool)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, pool: str, given: Mapping[str, Any]) -> None:
        """Start the process; it outlives this one, for as long as its lease says."""
        entrypoint = _entrypoint(pool, {**given, "address": self.address}, sys.executable)
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-s"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(entrypoint.encode())
            self._process.stdin.close()
        began = psutil.Process(self._process.pid).create_time()
        self.id = f"{self._process.pid} {began}"

    def log(self) -> str:
        """The process's log."""
        with contextlib.suppress(OSError):
            return self._log.read_text("utf-8", "replace")
        return ""

    def _found(self) -> psutil.Process | None:
        pid, began = self.id.split()
        if self._process is not None and self._process.poll() is not None:
            return None
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(int(pid))
            same = abs(found.create_time() - float(began)) < 1.0
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        return None

    def why_over(self) -> str:
        """The process's last words."""
        if self._found() is not None:
            return ""
        words = self.log().strip().splitlines()
        return f"the driver's process has ended; it said: {words[-1] if words else 'nothing'}"

    def stop(self) -> None:
        """End the process in order, or after a while without."""
        found = self._found()
        if found is None:
            return
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            found.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                found.wait(10.0)
                return
            os.killpg(found.pid, signal.SIGKILL)

    def forget(self) -> None:
        """Remove the log."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
        self._log.unlink(missing_ok=True)


def failure(said: str, cluster: str) -> PoolStartError:
    """What the driver said when it could not start, with the next step."""
    if "no Python here has Ray" in said:
        return PoolStartError(
            f"Ray({cluster!r}): no Python that was looked at has Ray: neither this one "
            f"({sys.executable}) nor `python` and `python3`; install the cluster's version of it "
            "with `pip install ray==VERSION`, or give the dashboard's address, 'http://head:8265', "
            "which needs no Ray here"
        )
    if "ersion mismatch" in said:
        return PoolStartError(
            f"Ray({cluster!r}): the Ray or the Python here is not the cluster's: "
            f"{' '.join(said.split())}; install the cluster's versions here, or give the "
            "dashboard's address, 'http://head:8265', which needs no Ray here"
        )
    if "ConnectionError" in said or "Could not find any running Ray" in said:
        return UnreachableError(
            f"Ray({cluster!r}): there is no cluster: {' '.join(said.split())}; start one with "
            "`ray start --head`, or give the dashboard's address, 'http://head:8265'"
        )
    return PoolStartError(f"Ray({cluster!r}): the driver did not start: {' '.join(said.split())}")
