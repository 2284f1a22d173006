"""Jobs of kept pools, when a start fails or a client leaves early, without a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

import skyward as sky
from skyward.nodes.cleanup import REMOVE_SECONDS
from skyward.providers import Order, Request, owner, signature
from skyward.providers.kubernetes import PodAllocation, PodMachine, jobs, manifests
from skyward.providers.kubernetes.access import (
    IN_CLUSTER,
    Access,
    ConflictError,
    NotFoundError,
    Object,
    Place,
)
from skyward.providers.kubernetes.manifests import JOB, Pod

REQUEST = Request(
    accelerator=None, vcpus=None, memory_gb=None, image=sky.Image(), volumes=(), keep=True
)
PROVIDER = sky.Kubernetes("here", image="busybox", kubeconfig=IN_CLUSTER, timeout=60.0)


class Cluster:
    """An API server with one Job, some of whose pods run; it notes the changes."""

    def __init__(self, running: int, *, has_job: bool) -> None:
        self._running, self._has_job = running, has_job
        self._new = running
        """How many pods of a new Job run."""
        self.job: Object = {"metadata": {"name": "sky-a"}, "spec": {}}
        self.deleted: list[tuple[str, str]] = []
        self.made: list[int] = []
        """How many pods each Job was made for."""
        self.deadlines: list[int | None] = []

    def create(self, kind: str, manifest: Object, **query: str) -> Object:
        if kind != "jobs":
            return manifest
        if self._has_job:
            self.job = manifest | self.job | {"metadata": manifest["metadata"]}
            self.job["spec"] = manifest["spec"] | self.job["spec"]
            raise ConflictError(409, "AlreadyExists", "there is one", "making job")
        self.job, self._running = manifest, self._new
        self.made.append(manifest["spec"]["parallelism"])
        return manifest

    def get(self, kind: str, name: str = "", **query: str) -> Object:
        if kind == "jobs" and not name:
            return {"items": [self.job] if self._has_job and "labels" in self.job else []}
        if kind == "jobs":
            if ("jobs", name) in self.deleted and not self.made:
                raise NotFoundError(404, "NotFound", "there is none", "looking at job")
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
        if kind == "jobs":
            self._has_job = False

    def delete_all(self, kind: str, **query: str) -> None:
        self._running = 0

    def run(self, pods: int) -> None:
        self._running = pods

    place = PROVIDER._place

    def stop_watching(self) -> None: ...

    def close(self) -> None: ...

    def pods(self) -> PodAllocation:
        """Those of its Job."""
        found = PodAllocation(PROVIDER, "a")
        found._connection = cast(Access, self)
        return found


async def get(
    pods: PodAllocation, node: int, seconds: float = 60.0, request: Request = REQUEST
) -> PodMachine:
    pods.timeout = seconds
    return await pods.get(Order("a", node, request))


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.providers.kubernetes.AGAIN_SECONDS", 0.05)


def test_pods_that_nobody_can_follow_fail_the_start(no_events: None) -> None:
    class Strange(Cluster):
        def watch(self, kind: str, version: str, **query: str) -> Iterator[tuple[str, Object]]:
            raise TypeError("no watch")

    async def start() -> None:
        pods = Strange(0, has_job=True).pods()
        try:
            await get(pods, 0)
        finally:
            await pods.close()

    with pytest.raises(
        sky.errors.PoolStartError, match="its pods cannot be followed: TypeError: no watch"
    ):
        asyncio.run(start())


def test_a_start_that_fails_on_all_nodes_leaves_the_job_that_it_found(no_events: None) -> None:
    cluster = Cluster(0, has_job=True)

    async def start() -> list[Any]:
        pods = cluster.pods()
        both = get(pods, 0, 0.3), get(pods, 1, 0.3)
        return await asyncio.gather(*both, return_exceptions=True)

    problems = asyncio.run(start())
    assert [type(each) for each in problems] == [sky.errors.PoolStartError] * 2
    assert ("jobs", "sky-a") not in cluster.deleted


def test_a_start_that_fails_on_all_nodes_removes_the_job_that_it_made(no_events: None) -> None:
    cluster = Cluster(0, has_job=False)

    async def start() -> None:
        pods = cluster.pods()
        both = get(pods, 0, 0.3), get(pods, 1, 0.3)
        await asyncio.gather(*both, return_exceptions=True)

    asyncio.run(start())
    assert ("jobs", "sky-a") in cluster.deleted


def test_a_node_that_is_ordered_while_the_job_is_removed_has_a_pod_of_the_next_one(
    no_events: None,
) -> None:
    removing, go_on = threading.Event(), threading.Event()

    class Slow(Cluster):
        def delete(self, kind: str, name: str, **options: Any) -> None:
            removing.set()
            assert go_on.wait(60)
            super().delete(kind, name, **options)

    cluster = Slow(1, has_job=False)

    async def order() -> int:
        pods = cluster.pods()
        await get(pods, 0)
        removal = asyncio.create_task(pods.release(0))
        await asyncio.to_thread(removing.wait, 60)
        next_one = asyncio.create_task(get(pods, 0))
        while 0 not in pods.wanted:
            await asyncio.sleep(0)
        pods._seen(dict(pods._pods))  # The old pod is still there, and runs.
        assert not next_one.done()
        assert pods.waiting == [0]
        go_on.set()
        await removal
        made = (await next_one).node
        await pods.close()
        return made

    assert asyncio.run(order()) == 0
    assert cluster.made == [1, 1]


def test_a_pool_stays_when_its_client_leaves_while_a_node_is_pending(no_events: None) -> None:
    cluster = Cluster(1, has_job=False)

    async def leave() -> list[int | None]:
        pods = cluster.pods()
        pods.expect([0, 1])
        second = asyncio.create_task(get(pods, 1))
        await get(pods, 0)
        before = list(cluster.deadlines)
        second.cancel()
        await asyncio.wait([second])
        await pods.release(1)
        await pods.close()
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
        pods = cluster.pods()
        await get(pods, 0, request=dataclasses.replace(REQUEST, ttl=600.0))
        await pods.close()

    cluster.run(1)
    asyncio.run(start())
    (again,) = cluster.deadlines[1:]
    assert again is not None
    assert again >= 600
    # Another client leaves the deadline as it is.
    asyncio.run(start())
    assert cluster.deadlines[1:] == [again]


def test_a_container_of_a_kept_pool_outlives_the_stop_of_the_slowest_agent() -> None:
    def main(request: Request) -> str:
        made = manifests.job("sky-a", "a", Pod("busybox"), request, [0, 1])
        command = made["spec"]["template"]["spec"]["containers"][0]["command"]
        return str(command[2])

    seconds = [int(each) for each in re.findall(r"\bleft=(\d+)", main(REQUEST))]
    assert min(seconds) >= 2 * REMOVE_SECONDS
    others = main(dataclasses.replace(REQUEST, keep=False))
    assert f"left={manifests.AGENTLESS_SECONDS}\n" in others


class TestNothingIsLost:
    """Whenever `sky stop` or `sky start` is killed, the Job and its claims are there."""

    async def start(self, cluster: Cluster, *nodes: int) -> PodAllocation:
        pods = cluster.pods()
        await asyncio.gather(*(get(pods, node) for node in nodes))
        return pods

    def test_a_job_that_is_spared_stays_so_until_all_its_nodes_have_agents(
        self, no_events: None
    ) -> None:
        cluster = Cluster(2, has_job=True)
        cluster.job["spec"]["ttlSecondsAfterFinished"] = 30
        jobs.spare(cast(Access, cluster), "sky-a")
        seen = []

        async def start() -> None:
            pods = await self.start(cluster, 0, 1)
            seen.append(jobs.is_spared(cluster.job))
            await pods.after_start(0)
            seen.append(jobs.is_spared(cluster.job))
            await pods.after_start(1)
            seen.append(jobs.is_spared(cluster.job))
            await pods.close()

        asyncio.run(start())
        assert seen == [True, True, False]

    def test_a_job_in_place_of_one_that_has_ended_is_spared_too(self, no_events: None) -> None:
        cluster = Cluster(1, has_job=True)
        cluster.job["spec"]["ttlSecondsAfterFinished"] = None
        cluster.job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

        async def start() -> None:
            pods = await self.start(cluster, 0)
            assert ("jobs", "sky-a") in cluster.deleted
            assert jobs.is_spared(cluster.job)
            await pods.after_start(0)
            await pods.close()

        asyncio.run(start())
        assert cluster.job["spec"]["ttlSecondsAfterFinished"] == manifests.TTL_SECONDS

    def test_a_job_that_has_ended_is_found_if_it_is_spared(self) -> None:
        class Listing(Cluster):
            def get(self, kind: str, name: str = "", **query: str) -> Object:
                return {"items": [self.job]}

        cluster: Any = Listing(0, has_job=True)
        cluster.job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        assert jobs.find(cluster, "a") == cluster.job
        cluster.job["spec"]["ttlSecondsAfterFinished"] = manifests.TTL_SECONDS
        assert jobs.find(cluster, "a") is None

    def test_a_claim_whose_job_was_not_made_anew_spares_the_next_one(self) -> None:
        class Claimed(Cluster):
            claim: Object = {  # noqa: RUF012
                "metadata": {"labels": {manifests.LEFT_BY: "sky-a"}, "ownerReferences": None}
            }

            def get(self, kind: str, name: str = "", **query: str) -> Object:
                return self.claim if kind == "persistentvolumeclaims" else super().get(kind, name)

            def create(self, kind: str, manifest: Object, **query: str) -> Object:
                if kind == "persistentvolumeclaims":
                    raise ConflictError(409, "AlreadyExists", "there is one", "making claim")
                if kind == "jobs":
                    manifest["metadata"]["uid"] = "1"
                return super().create(kind, manifest, **query)

            def patch(self, kind: str, name: str, change: Object) -> Object:
                if kind != "jobs":
                    self.claim["metadata"] |= change["metadata"]
                    return self.claim
                return super().patch(kind, name, change)

        cluster: Any = Claimed(1, has_job=False)
        volume = sky.Volume("pvc://data?size=1Gi&remove=yes", "/data")
        request = dataclasses.replace(REQUEST, volumes=(volume,))
        made, is_new = jobs.make(cluster, "sky-a", "a", Pod("busybox"), request, [0])
        assert is_new
        assert jobs.is_spared(made)
        (job,) = cluster.claim["metadata"]["ownerReferences"]
        assert (job["name"], cluster.claim["metadata"]["labels"]) == (
            "sky-a",
            {manifests.LEFT_BY: None},
        )


class Namespace(Cluster):
    """A namespace with these Jobs, and a claim of the first one."""

    place = Place("config", None, "ours")

    def __init__(self, *jobs: Object) -> None:
        super().__init__(0, has_job=True)
        self._jobs = jobs

    def get(self, kind: str, name: str = "", **query: str) -> Object:
        owner = {"name": self._jobs[0]["metadata"]["name"]}
        claim = {"metadata": {"name": "data", "ownerReferences": [owner]}}
        return {"items": list(self._jobs) if kind == "jobs" else [claim]}


def test_remains_are_the_jobs_of_pools_that_the_cluster_does_not_remove_by_itself() -> None:
    def job(pool: str, name: str = "", *, ended: bool = False, keeps: bool = False) -> Object:
        made = manifests.job(name or f"sky-{pool}", pool, Pod("busybox"), REQUEST, [0, 2])
        made["metadata"]["annotations"] |= signature(manifests.SIGNATURE, pool, "mine")
        if keeps:
            del made["spec"]["ttlSecondsAfterFinished"]
        condition = {"type": "Complete", "status": "True"}
        made["status"] = {"conditions": [condition] if ended else []}
        return cast(Object, made)

    namespace: Any = Namespace(
        job("a"),
        job("b", ended=True),
        job("c", ended=True, keeps=True),
        job("d", "sky-mnist"),
    )
    first, second = jobs.remains(namespace)
    assert (first.pool, first.name, first.owner, first.pid) == ("a", "mine", owner(), os.getpid())
    nodes = "node ours/sky-a-0", "node ours/sky-a-2"
    assert first.resources == ("Job sky-a", *nodes, "claim data")
    assert (second.pool, second.resources[0]) == ("c", "Job sky-c")


def test_a_program_for_a_container_that_is_gone_waits_for_the_words_of_its_end() -> None:
    class Ending(Cluster):
        def execute(self, pod: str, *others: Any) -> None:
            raise sky.errors.UnreachableError(f"pod {pod}: HTTP 500: container not found")

        def get(self, kind: str, name: str = "", **query: str) -> Object:
            self._looks = getattr(self, "_looks", 0) + 1
            ended = {"state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
            status = {"phase": "Failed", "containerStatuses": [ended]}
            return self._pod(0) | ({"status": status} if self._looks > 2 else {})

        def logs(self, pod: str) -> str:
            return "no such model"

    cluster = Ending(1, has_job=True)
    machine = PodMachine(cluster.pods(), 0, cluster._pod(0))
    with pytest.raises(sky.errors.UnreachableError, match=r"status 3 .*it said:\nno such"):
        asyncio.run(machine.run(["true"]))
