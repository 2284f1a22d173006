"""The jobs API of a Ray cluster: plain HTTP to its dashboard, with no Ray on this machine."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyward.errors import PoolStartError, UnreachableError

SECONDS = 15.0
"""How long an answer may take."""
AGENT_SECONDS = 60.0
"""How long a cluster that has just started may take until it accepts jobs."""
OVER = ("STOPPED", "SUCCEEDED", "FAILED")
METADATA = "skyward_pool"
"""The entry of a job's metadata that names its pool."""
OWNER, PID, NAME = "skyward_owner", "skyward_pid", "skyward_name"
"""The entries that say whose the pool is, its client's process, and what the user calls it."""


class JobsApi:
    """The API at one address."""

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
        return [job for job, about in self.jobs_of_pools() if about[METADATA] == pool]

    def jobs_of_pools(self) -> list[tuple[str, dict[str, str]]]:
        """The jobs of any pool that have not ended, with their metadata."""
        return [
            (each["submission_id"], each["metadata"])
            for each in self.call("GET", "/api/jobs/") or ()
            if METADATA in (each.get("metadata") or {}) and each["status"] not in OVER
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
