"""Pools that stay as pods, when pods are lost or nobody uses them; see test_kubernetes.py, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import skyward as sky

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
    with pytest.raises(sky.PoolError, match="its machines are gone, so its record is, too"):
        sky.attach("pods")
    kept_pools.says("down", "pods", "--yes")
