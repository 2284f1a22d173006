"""SkyTorch's computes as pods of a real Kubernetes cluster, and the examples that run on one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyward as sky
from skytorch.client import Cluster, Compute, init
from skytorch.client.event import Event
from skytorch.client.metrics import Metrics

from ..conftest import only_in_all
from . import kube

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _no_gpus_and_no_defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPUs in place of the cluster's pretended GPUs."""
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    yield
    init()


@pytest.fixture
def namespace(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[kube.Namespace]:
    """That of a user's kubeconfig; nothing may be left in it."""
    made = kube.Namespace(cluster)
    config = kube.changed_kubeconfig(cluster, tmp_path / "config", namespace=made.name)
    monkeypatch.setenv("KUBECONFIG", config)
    for name, value in kube.site(tmp_path).items():
        monkeypatch.setenv(name, value)
    try:
        yield made
        made.until_empty()
    finally:
        made.remove()


def _jobs(namespace: kube.Namespace) -> dict[str, int]:
    """The Jobs, and how many pods each is to have."""
    there = namespace.batch.list_namespaced_job(namespace.name).items
    return {job.metadata.name: job.spec.parallelism for job in there}


def shell(command: str) -> str:
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True
    ).stdout.strip()


def wait(seconds: float) -> None:
    time.sleep(seconds)


@only_in_all
def test_a_compute_is_a_pod_that_can_be_suspended_and_resumed(
    namespace: kube.Namespace, tmp_path: Path
) -> None:
    events: list[Event] = []
    readings: list[Metrics] = []
    resources = {
        "cpu": "300m",
        "memory": "1Gi",
        "ephemeral-storage": "100Mi",
        "nvidia.com/gpu": "1",
    }

    async def main() -> None:
        async with Compute(
            name="whole",
            # The site's template names another: there is no registry here.
            image="registry.example/server:latest",
            command=["sh", "-c"],
            args=['echo "$0 $HOSTNAME" >/tmp/beside', "ran"],
            env={"COLOUR": "red"},
            resources=resources,
            labels={"team": "vision"},
            annotations={"example.org/owner": "me"},
            volumes=[
                {"name": "data", "storage": "1Mi", "path": "/data"},
                {"name": "here", "path": str(tmp_path)},
            ],
            on_events=events.append,
            on_metrics=readings.append,
        ) as node:
            (pod,) = namespace.pods()
            assert pod.metadata.labels["team"] == "vision"
            assert pod.metadata.annotations["example.org/owner"] == "me"
            (container,) = pod.spec.containers
            assert container.resources.requests == container.resources.limits == resources
            assert "nvidia.com/gpu" in [each.key for each in pod.spec.tolerations]

            words = await node.execute(shell, "echo $COLOUR; cat /tmp/beside; echo kept >/data/it")
            assert words.split() == ["red", "ran", pod.metadata.name]
            await node.execute(shell, f"touch {tmp_path}/seen")
            assert (tmp_path / "seen").exists()
            ones = torch.ones(3, device=node.device("cuda"))
            assert (ones + 1).sum().item() == 6.0

            before = len(readings)
            await node.execute(wait, 3)
            assert len(readings) >= before + 2, "metrics come while a function runs"
            last = readings[-1]
            assert 0 < last.memory_used < last.memory_total == 1 << 30, "those of the container"
            assert last.operations > 0

            await node.suspend()
            assert (_jobs(namespace), namespace.pods()) == ({"sky-whole": 0}, [])
            assert "persistentvolumeclaims/whole-data" in namespace.objects()
            await node.resume()
            assert await node.execute(shell, "cat /data/it") == "kept"
            assert [each.metadata.name for each in namespace.pods()] != [pod.metadata.name]

    with _storage(namespace, "whole-data", tmp_path / "storage"):
        asyncio.run(main())
        namespace.until_empty()

    reasons = [event.reason for event in events]
    assert [reason for reason in reasons if reason not in ("Pending", "Logged")] == (
        ["Starting", "Ready", "Suspended", "Starting", "Ready", "Deleted"]
    )


@contextlib.contextmanager
def _storage(namespace: kube.Namespace, claim: str, folder: Path) -> Iterator[None]:
    """A volume of the cluster that this claim will be bound to."""
    folder.mkdir()
    name = f"{namespace.name}-{claim}"
    spec = {
        "capacity": {"storage": "1Mi"},
        "accessModes": ["ReadWriteOnce"],
        "hostPath": {"path": str(folder)},
        "claimRef": {"namespace": namespace.name, "name": claim},
    }
    namespace.core.create_persistent_volume({"metadata": {"name": name}, "spec": spec})
    try:
        yield
    finally:
        namespace.core.delete_persistent_volume(name)


KILLED = """
import asyncio, os, signal, socket
from skytorch.client import Compute
async def main():
    volumes = [{"name": "data", "storage": "1Mi", "path": "/data"}]
    node = await Compute(name="shared", resources={"cpu": "100m"}, volumes=volumes).ready()
    await node.execute(os.system, "echo kept >/data/it")
    print(await node.execute(socket.gethostname), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@only_in_all
def test_a_compute_that_exists_is_used_and_replaced_if_it_is_to_be_another(
    namespace: kube.Namespace, tmp_path: Path
) -> None:
    def killed() -> str:
        done = subprocess.run(
            [sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout.strip()

    async def main() -> None:
        volumes = [{"name": "data", "storage": "1Mi", "path": "/data"}]
        node = Compute(name="shared", resources={"cpu": "200m"}, volumes=volumes)
        await node.ready()
        (pod,) = namespace.pods()
        assert await node.execute(shell, "hostname") == pod.metadata.name != first
        assert pod.spec.containers[0].resources.requests == {"cpu": "200m"}
        # Another object, in the same process; its storage keeps what is in it.
        assert await node.execute(shell, "cat /data/it") == "kept"
        with pytest.raises(
            sky.errors.ConfigurationError, match="uses that Job with other arguments"
        ):
            async with Compute(name="shared", resources={"cpu": "300m"}, volumes=volumes):
                pass
        assert await node.execute(shell, "cat /data/it") == "kept"
        await node.suspend()
        async with Compute(name="shared", resources={"cpu": "300m"}, volumes=volumes) as other:
            (pod,) = namespace.pods()
            assert pod.spec.containers[0].resources.requests == {"cpu": "300m"}
            assert await other.execute(shell, "cat /data/it") == "kept"

    with _storage(namespace, "shared-data", tmp_path / "storage"):
        first = killed()
        assert [pod.metadata.name for pod in namespace.pods()] == [first]
        assert killed() == first
        asyncio.run(main())
        namespace.until_empty()


@only_in_all
def test_the_computes_of_a_cluster_start_together_where_init_says(
    namespace: kube.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes import client, config

    configuration = client.Configuration()
    config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    init(client_config=configuration, namespace=namespace.name)
    events: list[Event] = []

    async def main() -> None:
        computes = [Compute(name=name, on_events=events.append) for name in ("trainer", "judge")]
        async with Cluster(*computes) as (trainer, judge):
            assert _jobs(namespace) == {"sky-trainer": 1, "sky-judge": 1}
            first = torch.arange(3.0, device=trainer.device("cuda"))
            second = first.cpu().to(judge.device("cuda"))
            assert (second * 2).sum().item() == 6.0

    asyncio.run(main())

    assert [event.reason for event in events][:2] == ["Starting", "Starting"]


@only_in_all
def test_why_a_pod_is_pending_is_an_event_and_nothing_is_left_of_it(
    namespace: kube.Namespace,
) -> None:
    events: list[Event] = []

    async def main() -> None:
        node = Compute(name="greedy", resources={"nvidia.com/gpu": 64}, on_events=events.append)
        with pytest.raises(TimeoutError, match=r"within 5 s: 0/2 nodes are available: .*"):
            await node.ready(timeout=5)
        assert not namespace.pods()
        await node.delete()

    asyncio.run(main())

    told = [(event.type, event.message) for event in events if event.reason == "Pending"]
    assert any(kind == "Warning" and "Insufficient nvidia.com/gpu" in why for kind, why in told)


# The examples.


@only_in_all
@pytest.mark.slow
def test_the_example_of_skytorch_runs_unmodified(namespace: kube.Namespace) -> None:
    """Slow: trains on a node of the cluster."""
    done = _example("skytorch_mnist.py")

    assert "(kubernetes)" in done.stderr
    accuracy = float(done.stdout.rpartition("accuracy: ")[2].rstrip("%\n"))
    assert accuracy > 80, done.stdout


@only_in_all
@pytest.mark.slow
def test_a_model_is_trained_on_two_pods(namespace: kube.Namespace) -> None:
    """Slow: starts two pods that import PyTorch, and trains."""
    shown = _example("kubernetes_ddp.py").stdout

    assert re.search(r"\[node 0\] epoch  4/4 on cpu: loss=0\.", shown)
    addresses = re.findall(r"rank [01] on ([\d.]+): 2000 digits an epoch", shown)
    assert len(set(addresses)) == 2
    assert re.search(r"Held-out accuracy: (8[6-9]|9\d)\.\d%, the same weights on both pods", shown)


def _example(name: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"SKYWARD_EXAMPLE_QUICK": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done
