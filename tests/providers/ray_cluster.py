"""A Ray cluster on this machine for tests: a head and two nodes, from an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.providers.on_node.keeper import PLACES, VARIABLE
from skyward.providers.ray.programs import OVER

from .ssh_hosts import free_port

ENVIRONMENT = Path(
    os.environ.get("SKYWARD_RAY_ENV") or Path.home() / ".cache" / "skyward-testbed" / "ray"
)
"""A virtual environment with ray[default], which `.ci/run` makes."""
PYTHON = ENVIRONMENT / "bin" / "python"
STORE_BYTES = 100_000_000
START_SECONDS = 300.0

# The second node pretends to have GPUs.
_SCRIPT = """
import json, os, sys
from ray.cluster_utils import Cluster
store = int(sys.argv[2])
head = dict(num_cpus=2, object_store_memory=store, include_dashboard=True)
head.update(dashboard_host="127.0.0.1", dashboard_port=int(sys.argv[1]))
# The usual port may be another cluster's, and without it the head accepts no jobs.
head.update(dashboard_agent_listen_port=int(sys.argv[3]))
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = [cluster.add_node(num_cpus=2, object_store_memory=store)]
nodes += [cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=store, resources={"big": 2})]
print(json.dumps({"address": cluster.address}), flush=True)
for line in sys.stdin:
    if line.startswith("lose"):
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
    else:
        nodes.insert(0, cluster.add_node(num_cpus=2, object_store_memory=store))
    print("done", flush=True)
cluster.shutdown()
"""


def skip_if_absent() -> None:
    """Skip where there is no Ray."""
    if not PYTHON.exists():
        pytest.skip(
            f"no Ray in {ENVIRONMENT}; make it with `python3 -m venv {ENVIRONMENT} && "
            f"{ENVIRONMENT}/bin/pip install 'ray[default]'`"
        )


class RayCluster:
    """The cluster, its addresses, and what is in it."""

    def __init__(self, store_bytes: int = STORE_BYTES) -> None:
        # Short, because Ray makes Unix sockets below it.
        self.folder = Path(tempfile.mkdtemp(prefix="skyray-", dir="/tmp"))
        (self.folder / "ray").mkdir()
        self.token = secrets.token_hex(32)
        self.variables = {
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }
        port = free_port()
        self.dashboard = f"http://127.0.0.1:{port}"
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **self.variables,
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            # Ray gives up after a minute, which a machine that is busy with other tests may need.
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
            "RAY_gcs_server_port_wait_time_s": "300",
        }
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                *(str(PYTHON), "-c", _SCRIPT),
                *(str(port), str(store_bytes), str(free_port())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.address = ""

    def wait(self) -> None:
        """Wait until the cluster is up."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = (self.folder / "log").read_text(errors="replace")
            raise AssertionError(f"Ray does not start:\n{said[-2000:]}")
        self.address = json.loads(line)["address"]
        self.until(self._has_dashboard, START_SECONDS)

    def _has_dashboard(self) -> bool:
        with contextlib.suppress(OSError):
            return len(self.nodes()) == 3
        return False

    def stop(self) -> None:
        """End everything of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=200)
        self._process.kill()
        self._process.communicate()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == str(self.folder):
                    process.kill()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    @contextlib.contextmanager
    def without_a_node(self) -> Any:
        """Its first node has lost power; a new one comes afterwards."""
        self._tell("lose")
        try:
            yield
        finally:
            self._tell("add")
            self.until(lambda: len(self.nodes()) == 3, START_SECONDS)

    # What is in it.

    def provider(self, **changed: Any) -> sky.Ray:
        """Nodes on which this very environment is ready, through the jobs API."""
        return sky.Ray(**{"address": self.dashboard, "python": sys.executable, **changed})

    def get(self, path: str, method: str = "GET") -> Any:
        """An answer of the dashboard."""
        request = urllib.request.Request(
            f"{self.dashboard}{path}",
            method=method,
            headers={"Authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=200) as answer:
            return json.loads(answer.read() or b"null")

    def _listed(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(f"/api/v0/{kind}?detail=1")["data"]["result"][
            "result"
        ]
        return found

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive."""
        return [each for each in self._listed("nodes") if each["state"] == "ALIVE"]

    def jobs(self) -> list[str]:
        """The jobs of ours that have not ended."""
        running = [each for each in self.get("/api/jobs/") if each["status"] not in OVER]
        names = [each["submission_id"] or "" for each in running]
        return [name for name in names if name.startswith("skyward-")]

    def machines(self) -> list[dict[str, Any]]:
        """The actors of ours that are alive."""
        return [
            each
            for each in self._listed("actors")
            if each["class_name"] == "MachineActor" and each["state"] != "DEAD"
        ]

    def left(self) -> list[str]:
        """Everything that pools have made here and in the cluster."""
        found = [f"job {each}" for each in self.jobs()]
        found += [f"actor {each['actor_id']}" for each in self.machines()]
        found += [
            f"placement group {each['placement_group_id']} {each['state']}"
            for each in self._listed("placement_groups")
            if each["state"] != "REMOVED"
        ]
        found += [str(each) for place in PLACES for each in Path(place).glob("sky.ray-*")]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "sky.ray-" in process.environ().get(VARIABLE, ""):
                    found.append(f"process {process.pid}: {' '.join(process.cmdline())}"[:200])
        return found

    def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.1)

    def until_empty(self, seconds: float = 30.0) -> None:
        """Wait until nothing of any pool is left."""
        deadline = time.monotonic() + seconds
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.25)

    def kill_a_machine(self) -> None:
        """Kill an actor's process, and its keeper does not know."""
        os.kill(int(self.machines()[0]["pid"]), signal.SIGKILL)
