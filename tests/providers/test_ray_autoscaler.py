"""A pool that grows with Ray's own autoscaler, and gives back what it no longer needs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky

from ..conftest import only_in_all
from .ray_cluster import ENVIRONMENT, START_SECONDS, skip_if_absent
from .ssh_hosts import free_port

GROWN = {"CPU": 2, "grown": 1}
"""What a node has that the autoscaler starts; the head has no `grown`."""


class GrowingCluster:
    """A head whose autoscaler starts up to three nodes on this machine."""

    def __init__(self) -> None:
        # Short, because Ray makes Unix sockets below it.
        self.folder = Path(tempfile.mkdtemp(prefix="skyras-", dir="/tmp"))
        (self.folder / "ray").mkdir()
        port, dashboard = free_port(), free_port()
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        config = self.folder / "autoscaling.json"
        config.write_text(json.dumps(_autoscaling(f"127.0.0.1:{port}")))
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}",
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "disabled",
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        self._command = [
            *(f"{ENVIRONMENT}/bin/ray", "start", "--head", f"--port={port}", "--num-cpus=2"),
            *("--node-ip-address=127.0.0.1", f"--autoscaling-config={config}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *(f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats"),
            "--object-store-memory=100000000",
        ]

    def start(self) -> None:
        """Start the head."""
        subprocess.run(
            self._command,
            env=self._environment,
            check=True,
            capture_output=True,
            timeout=START_SECONDS,
        )

    def nodes(self) -> int:
        """How many nodes are alive, the head among them."""
        with urllib.request.urlopen(f"{self.dashboard}/api/v0/nodes?detail=1") as answer:
            found = json.load(answer)["data"]["result"]["result"]
        return sum(each["state"] == "ALIVE" for each in found)

    def stop(self) -> None:
        """End everything of it."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == str(self.folder):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _autoscaling(address: str) -> dict[str, object]:
    """The configuration of an autoscaler whose nodes are processes."""
    empty = ("head_node", "worker_nodes", "file_mounts", "docker")
    none = ("initialization", "setup", "head_setup", "worker_setup")
    return {
        "cluster_name": "growing",
        "max_workers": 3,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {"ssh_user": "nobody"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "grown": {"resources": GROWN, "node_config": {}, "min_workers": 0, "max_workers": 3},
        },
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        **{each: {} for each in empty},
        **{f"{each}_commands": [] for each in none},
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


@pytest.fixture
def growing() -> Iterator[GrowingCluster]:
    skip_if_absent()
    cluster = GrowingCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@sky.function
def where() -> tuple[int, int]:
    info = sky.instance_info()
    return info.node, info.total_nodes


@only_in_all
def test_the_cluster_grows_for_the_pool_and_shrinks_after_it(growing: GrowingCluster) -> None:
    """Slow: Ray's autoscaler starts three real nodes, and waits before it ends idle ones."""
    provider = sky.Ray(growing.dashboard, python=sys.executable, resources={"grown": 1})
    quiet = sky.Options(console=False)
    assert growing.nodes() == 1
    with sky.Compute(provider, nodes=(1, 3), options=quiet) as compute:
        assert growing.nodes() == 2
        compute.resize(3)
        assert growing.nodes() == 4
        assert where() @ compute == [(0, 3), (1, 3), (2, 3)]
        compute.resize(1)
        assert where() @ compute == [(0, 1)]
        until(lambda: growing.nodes() == 2)
    until(lambda: growing.nodes() == 1)
