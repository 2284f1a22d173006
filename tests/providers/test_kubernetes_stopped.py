"""Jobs of pools that stay, when a start fails or a client leaves early, without a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest

import skyward as sky
from skyward.nodes.cleaning import REMOVE_SECONDS
from skyward.providers import Request
from skyward.providers.kubernetes import jobs, manifests
from skyward.providers.kubernetes.access import Access, ConflictError, Object
from skyward.providers.kubernetes.manifests import JOB, Pod
from skyward.providers.kubernetes.pods import Pods

REQUEST = Request(
    accelerator=None, vcpus=None, memory_gb=None, image=sky.Image(), volumes=(), keep=True
)


class Cluster:
    """An API server with one Job, some of whose pods run; it notes the changes."""

    def __init__(self, running: int, *, has_job: bool) -> None:
        self._running, self._has_job = running, has_job
        self.job: Object = {"metadata": {"name": "sky-a"}, "spec": {}}
        self.deleted: list[tuple[str, str]] = []
        self.deadlines: list[int | None] = []

    def create(self, kind: str, manifest: Object, **query: str) -> Object:
        if kind != "jobs":
            return manifest
        if self._has_job:
            self.job = manifest | {"spec": manifest["spec"] | self.job["spec"]}
            raise ConflictError(409, "AlreadyExists", "there is one", "making job")
        self.job = manifest
        return manifest

    def get(self, kind: str, name: str = "", **query: str) -> Object:
        if kind == "jobs":
            return self.job
        items = [self._pod(each) for each in range(self._running)] if kind == "pods" else []
        return {"items": items, "metadata": {"resourceVersion": "1"}}

    def _pod(self, number: int) -> Object:
        status = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "containerStatuses": [{"state": {"running": {}}}],
        }
        about = {"name": f"sky-a-{number}", "uid": str(number), "labels": {JOB: "sky-a"}}
        return {"metadata": about, "status": status}

    def patch(self, kind: str, name: str, change: Object) -> Object:
        spec = change.get("spec") or {}
        if "activeDeadlineSeconds" in spec:
            self.deadlines.append(spec["activeDeadlineSeconds"])
        self.job["spec"] |= spec
        return self.job

    def watch(self, kind: str, version: str, **query: str) -> Iterator[tuple[str, Object]]:
        return iter(())

    def delete(self, kind: str, name: str, **options: Any) -> None:
        self.deleted.append((kind, name))

    def delete_all(self, kind: str, **query: str) -> None:
        self._running = 0

    def run(self, pods: int) -> None:
        self._running = pods

    def stop_watching(self) -> None: ...

    def close(self) -> None: ...

    def pods(self, request: Request = REQUEST) -> Pods:
        """Those of its Job; call it on an event loop."""
        access = cast(Access, self)
        return Pods(access, "sky-a", Pod("busybox"), request, keep=False, forget=lambda _: None)


async def get(pods: Pods, node: int, seconds: float = 60.0) -> Object:
    return await pods.get("a", node, lambda _: None, seconds)


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.providers.kubernetes.pods.AGAIN_SECONDS", 0.05)


def test_a_start_that_fails_on_all_nodes_leaves_the_job_that_it_found(no_events: None) -> None:
    cluster = Cluster(0, has_job=True)

    async def start() -> list[Object | BaseException]:
        pods = cluster.pods()
        both = get(pods, 0, 0.3), get(pods, 1, 0.3)
        return await asyncio.gather(*both, return_exceptions=True)

    problems = asyncio.run(start())
    assert [type(each) for each in problems] == [sky.PoolStartError] * 2
    assert ("jobs", "sky-a") not in cluster.deleted


def test_a_start_that_fails_on_all_nodes_removes_the_job_that_it_made(no_events: None) -> None:
    cluster = Cluster(0, has_job=False)

    async def start() -> None:
        pods = cluster.pods()
        both = get(pods, 0, 0.3), get(pods, 1, 0.3)
        await asyncio.gather(*both, return_exceptions=True)

    asyncio.run(start())
    assert ("jobs", "sky-a") in cluster.deleted


def test_a_pool_stays_when_its_client_leaves_while_a_node_is_pending(no_events: None) -> None:
    cluster = Cluster(1, has_job=False)

    async def leave() -> list[int | None]:
        pods = cluster.pods()
        second = asyncio.create_task(get(pods, 1))
        await get(pods, 0)
        before = list(cluster.deadlines)
        second.cancel()
        await asyncio.wait([second])
        await pods.release(1)
        await pods.leave()
        return before

    before = asyncio.run(leave())
    assert None not in before
    assert cluster.deadlines[-1] is None
    assert ("jobs", "sky-a") not in cluster.deleted


def test_a_stopped_pool_has_no_deadline_and_its_ttl_counts_from_the_next_start(
    no_events: None,
) -> None:
    cluster = Cluster(1, has_job=True)
    cluster.job["spec"]["activeDeadlineSeconds"] = 500
    jobs.empty(cast(Access, cluster), "sky-a")
    assert cluster.job["spec"] == {"parallelism": 0, "activeDeadlineSeconds": None}

    async def start() -> None:
        pods = cluster.pods(dataclasses.replace(REQUEST, ttl=600.0))
        await get(pods, 0)
        await pods.leave()

    cluster.run(1)
    asyncio.run(start())
    (again,) = cluster.deadlines[1:]
    assert again is not None
    assert again >= 600
    # Another client leaves the deadline as it is.
    asyncio.run(start())
    assert cluster.deadlines[1:] == [again]


def test_a_container_of_a_pool_that_stays_outlives_the_stop_of_the_slowest_agent() -> None:
    def main(request: Request) -> str:
        made = manifests.job("sky-a", "a", Pod("busybox"), request, [0, 1])
        command = made["spec"]["template"]["spec"]["containers"][0]["command"]
        return str(command[2])

    seconds = [int(each) for each in re.findall(r"\bleft=(\d+)", main(REQUEST))]
    assert min(seconds) >= 2 * REMOVE_SECONDS
    others = main(dataclasses.replace(REQUEST, keep=False))
    assert f"left={manifests.AGENTLESS_SECONDS}\n" in others
