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
import time
import urllib.error
import urllib.request
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import signature
from skyward.providers.piped import program
from skyward.providers.ray import records

SECONDS = 15.0
"""How long an answer may take."""
AGENT_SECONDS = 60.0
"""How long a cluster that has just started may take until it accepts jobs."""
OVER = ("STOPPED", "SUCCEEDED", "FAILED")
METADATA = "skyward_"
"""How the entries of a job's metadata begin that say which pool it belongs to, and whose it is."""
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
# Ray's Python has no skyward, or another one: the driver is made from the text that is sent.
_CODE = """
import base64, json, zlib
given = json.loads(zlib.decompress(base64.b64decode({text!r})))
exec(given["driver"])
main(given)
"""


_children: set[subprocess.Popen[bytes]] = set()
"""Drivers beside this process: that of a kept pool outlives all who know it here."""


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
    driver = Path(__file__).with_name("driver.py").read_text("utf-8")
    told = {**given, "driver": driver, "keeper": program("keeper")}
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
        about = signature(METADATA, pool, str(given.get("name", "")))
        self.api.submit(self.id, entrypoint, about)

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
        _children.difference_update([each for each in _children if each.poll() is not None])
        _children.add(self._process)
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


class JobsApi:
    """The jobs API of a cluster: plain HTTP to its dashboard, with no Ray on this machine."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json", **_usual_headers(), **(headers or {})}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A request's answer; None where there is no such job.

        Raises `UnreachableError` if nobody answers, and `PoolStartError` with the cluster's words
        if it refuses.
        """
        request = urllib.request.Request(
            f"{self.address}{path}",
            method=method,
            headers=self._headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                data = answer.read()
        except urllib.error.HTTPError as problem:
            words = problem.read().decode(errors="replace").strip()
            if problem.code == 404 and "/api/jobs/" in path:
                return None
            raise PoolStartError(self._refusal(problem.code, method, path, words)) from None
        except (OSError, ValueError) as problem:
            raise UnreachableError(
                f"Ray({self.address!r}): nobody answers there: "
                f"{getattr(problem, 'reason', problem)}; give the address of the cluster's "
                "dashboard, as in 'http://head:8265', and see that its port is open or forwarded"
            ) from problem
        try:
            return json.loads(data) if data else None
        except ValueError:
            raise PoolStartError(
                f"Ray({self.address!r}): what answers there is not a Ray dashboard; give the "
                "address at which `ray job list --address` works"
            ) from None

    def _refusal(self, code: int, method: str, path: str, words: str) -> str:
        if code in (401, 403):
            return (
                f"Ray({self.address!r}): the cluster refuses this user ({code}): {words[-300:]}; "
                "set RAY_AUTH_TOKEN, or give headers={'Authorization': 'Bearer ...'}"
            )
        if code == 404:
            return (
                f"Ray({self.address!r}): there is no jobs API ({path} is not found); the cluster "
                "needs `ray[default]`, and a Ray from 2.9 on"
            )
        last = words.splitlines()[-1] if words else "no words"
        return f"Ray({self.address!r}): {method} {path} failed ({code}): {last[-500:]}"

    def version(self) -> str:
        """The version of the cluster's Ray."""
        told = self.call("GET", "/api/version")
        return str(told.get("ray_version", "unknown")) if isinstance(told, dict) else "unknown"

    def submit(self, job: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """Start a job."""
        body = {"entrypoint": entrypoint, "submission_id": job, "metadata": dict(metadata)}
        deadline = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                if self.call("POST", "/api/jobs/", body) is None:
                    raise PoolStartError(self._refusal(404, "POST", "/api/jobs/", ""))
                return
            except PoolStartError as problem:
                if "No available agent" not in str(problem) or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def state(self, job: str) -> tuple[str, str]:
        """A job's status and message; both are empty if there is no such job."""
        told = self.call("GET", f"/api/jobs/{job}")
        return ("", "") if told is None else (str(told["status"]), str(told.get("message") or ""))

    def log(self, job: str) -> str:
        """What a job has printed."""
        told = self.call("GET", f"/api/jobs/{job}/logs")
        return "" if told is None else str(told.get("logs") or "")

    def stop(self, job: str) -> None:
        """End a job that runs."""
        self.call("POST", f"/api/jobs/{job}/stop")

    def jobs_of(self, pool: str) -> list[str]:
        """The jobs of a pool that have not ended."""
        return [job for job, about in self.jobs_of_pools() if about[f"{METADATA}pool"] == pool]

    def jobs_of_pools(self) -> list[tuple[str, dict[str, str]]]:
        """The jobs of any pool that have not ended, with their metadata."""
        return [
            (each["submission_id"], each["metadata"])
            for each in self.call("GET", "/api/jobs/") or ()
            if f"{METADATA}pool" in (each.get("metadata") or {}) and each["status"] not in OVER
        ]


def _usual_headers() -> dict[str, str]:
    """The headers that Ray's own command line takes from the environment."""
    found: dict[str, str] = {}
    if given := os.environ.get("RAY_JOB_HEADERS"):
        found.update(json.loads(given))
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    file = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path.home() / ".ray" / "auth_token")
    if not token and Path(file).is_file():
        token = Path(file).read_text("utf-8").strip()
    if token:
        found.setdefault("Authorization", f"Bearer {token}")
    return found
