"""Kept pools as pods, when pods are lost or nobody uses them; see test_kubernetes.py, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.nodes import records
from skyward.nodes.records import Journal
from skyward.providers.kubernetes.manifests import TTL_SECONDS

from ..conftest import only_in_all
from . import kept_pools, kube


@only_in_all
def test_a_pod_that_is_deleted_is_replaced_for_a_client_that_attached(
    namespace: kube.Namespace, eventually: Callable[..., None]
) -> None:
    kept_pools.start(namespace.provider(), "pods")
    with sky.attach("pods") as compute:
        (pod,) = namespace.pods()
        namespace.core.delete_namespaced_pod(pod.metadata.name, namespace.name)
        eventually(lambda: compute.stats().nodes_lost, 60, "the loss")
        eventually(lambda: compute.nodes[0].state == "ready", 90, "another pod")
        assert kept_pools.pid() >> compute
    assert namespace.deadline() is None
    kept_pools.end("pods")


@only_in_all
def test_a_pool_that_nobody_uses_takes_its_job_with_it(namespace: kube.Namespace) -> None:
    """The container waits for more than a minute, and the cluster for half of one."""
    kept_pools.start(namespace.provider(), "pods", keep=1)
    namespace.until_empty(seconds=180)
    with pytest.raises(sky.errors.PoolError, match="its machines are gone, so its record is, too"):
        sky.attach("pods")
    kept_pools.says("down", "pods", "--yes")


@pytest.fixture
def volume(namespace: kube.Namespace, tmp_path: Path) -> Iterator[sky.Volume]:
    """A claim that goes with its pool."""
    with namespace.bindable("data", tmp_path):
        yield sky.Volume("pvc://data?size=1Mi&remove=yes", "/data")


@only_in_all
def test_gc_removes_a_job_that_no_record_knows(
    namespace: kube.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    volume: sky.Volume,
) -> None:
    config = kube.changed_kubeconfig(
        namespace.kubeconfig, tmp_path / "config", namespace=namespace.name
    )
    monkeypatch.setenv("KUBECONFIG", config)
    kept_pools.start(namespace.provider(storage_class=kube.BY_HAND), "pods", volumes=[volume])
    gc = "gc", "--provider", "kubernetes"
    assert re.search("pods +kubernetes .* may be in use +Job sky-", kept_pools.says(*gc))
    records.forget("pods")
    (pool,) = Journal().pools()
    Journal().forget(pool.id)
    removed = kept_pools.says(*gc, "--all", "--yes")
    assert removed == f"pods ({pool.id}): 1 machine, Job sky-{pool.id}, claim data removed\n"
    assert "nothing of any pool: kubernetes in" in kept_pools.says(*gc)


@only_in_all
def test_a_stop_that_is_killed_loses_no_claim(
    namespace: kube.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., None],
    volume: sky.Volume,
) -> None:
    """The container waits for more than a minute before it ends without its agent."""
    kept_pools.start(namespace.provider(storage_class=kube.BY_HAND), "pods", volumes=[volume])

    def killed(self: sky.Kubernetes, pool: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sky.Kubernetes, "_stop", killed)
        kept_pools.says("stop", "pods", code=130)

    def is_over() -> bool:
        (job,) = namespace.batch.list_namespaced_job(namespace.name).items
        return job.status.completion_time is not None

    eventually(is_over, 180, "the end of the Job")
    assert kept_pools.shown("pods")["state"] == "stopped"
    # The cluster would have removed it by then.
    claim = namespace.core.read_namespaced_persistent_volume_claim("data", namespace.name)
    assert "pods: 1 node started\n" in kept_pools.says("start", "pods")
    with sky.attach("pods") as compute:
        assert kept_pools.pid() >> compute
    after = namespace.core.read_namespaced_persistent_volume_claim("data", namespace.name)
    assert (after.metadata.uid, after.metadata.deletion_timestamp) == (claim.metadata.uid, None)
    (job,) = namespace.batch.list_namespaced_job(namespace.name).items
    assert job.spec.ttl_seconds_after_finished == TTL_SECONDS
    assert [each.uid for each in after.metadata.owner_references] == [job.metadata.uid]
    kept_pools.end("pods")
