"""The pods of a pool: one Job keeps them, and each serves one node."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Order, Request
from skyward.providers.allocation import SharedAllocation
from skyward.providers.kubernetes import jobs, pending
from skyward.providers.kubernetes.access import Access, ApiError, NotFoundError, Object, Place
from skyward.providers.kubernetes.machine import PodMachine, is_usable
from skyward.providers.kubernetes.manifests import JOB, LEASE_SECONDS, NODE, Pod, job_name

REPLACED_SECONDS = 1.5
"""How long a node that is ordered again waits for the Job's new pod before the client makes one."""
EVENTS_SECONDS = 2.0
"""How often the client asks for events while pods are pending."""
AGAIN_SECONDS = 0.5
"""How long after the end of a watch the next one begins."""


@dataclass(frozen=True)
class PodSettings:
    """What the pods of a pool are to be, apart from what the pool asks for."""

    place: Place
    pod: Callable[[Request], Pod]
    job: str | None
    """The name of a Job that outlives its pools."""
    python: str | None
    direct: bool
    timeout: float


@dataclass(eq=False)
class NodePod:
    """What the client knows of the pod of one node."""

    name: str = ""
    serves: bool = False
    """Whether it has an agent, and the pool's record says so."""
    reason: str = ""
    """Why there is no running pod yet."""
    refusal: str = ""
    """What the registry said when the image was pulled."""
    has_failed: bool = False
    """Whether the node is being told why its pod has failed."""


class PodAllocation(SharedAllocation[PodMachine]):
    """The pods of one Job."""

    def __init__(self, pool: str, settings: PodSettings) -> None:
        super().__init__(pool)
        self.timeout = settings.timeout
        self.job = job_name(settings.job or pool)
        self._settings = settings
        self._request: Request | None = None
        """What the pool asks for; None if nothing was ordered here."""
        self._called = ""
        self._connection: Access | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nodes: dict[int, NodePod] = {}
        self._pods: dict[str, Object] = {}
        self._started_at: float | None = None
        """When the Job started, if it has."""
        self._applied: list[int] = []
        """The nodes that the Job is to have pods for."""
        self._explaining: asyncio.Task[None] | None = None
        self._follows = False
        """Whether the pods and the lease are looked after."""
        self._is_own = False
        """Whether the Job was made here, and not found."""
        self._has_served = False
        """Whether a node has had its pod."""
        self._stays = False
        """Whether the Job outlives this process, since its pool stays."""
        self._dated = False
        """Whether the Job's deadline is that of a pool that stays."""
        self._is_spared = False
        """Whether the Job stays after its end, since its pool was stopped."""

    @property
    def access(self) -> Access:
        """The connection to the API server; the first call asks the server."""
        if self._connection is None:
            self._connection = Access(self._settings.place)
        return self._connection

    # Nodes.

    async def get(self, order: Order) -> PodMachine:
        """A running pod for a node, made if necessary."""
        self._request, self._called = order.request, order.name
        self._loop = asyncio.get_running_loop()
        former = self._nodes.get(order.node)
        if former is None or not self.has(former.name):
            # In a pool that stays, a node is not released when its pod is lost.
            self._nodes[order.node] = NodePod()
        machine = await super().get(order)
        self._has_served = True
        await self._stay()
        return machine

    async def ask(self, nodes: Sequence[int]) -> None:
        """Have the Job keep as many pods as nodes are wanted."""
        await asyncio.to_thread(lambda: self.access)
        lost = [node for node in nodes if node in self._applied]
        if self._started_at is None:
            await asyncio.to_thread(self._make)
        else:
            await self._resize()
        self._assign()
        for node in lost:
            self.start(self._replace(node))
        if self._explaining is None or self._explaining.done():
            self._explaining = self.start(self._explain())

    def late(self, order: Order, seconds: float) -> PoolStartError:
        """Why a pod is still pending."""
        found = self._nodes.get(order.node)
        reason = found.reason if found else ""
        return PoolStartError(
            f"node {order.node}: its pod did not run within {seconds:.0f} s: "
            f"{reason or 'nobody says why'}{pending.advice(reason)}"
        )

    async def cancelled(self, node: int) -> None:
        """The Job keeps the node's pod, and `find` has it."""
        await self._stay()

    async def find(self) -> list[PodMachine]:
        """The nodes that the pool's Job was asked for, with their pods."""
        return await asyncio.to_thread(self._find)

    def _find(self) -> list[PodMachine]:
        job = jobs.find(self.access, self.pool)
        if job is None:
            return []
        self.job = job["metadata"]["name"]
        there = self.access.get("pods", labelSelector=f"{JOB}={self.job}")["items"]
        # Of a node's pods, the one that runs comes last.
        there.sort(key=is_usable)
        by_node = {int(each["metadata"]["labels"].get(NODE, -1)): each for each in there}
        return [self._machine(node, by_node.get(node)) for node in jobs.nodes_of(job)]

    def _machine(self, node: int, pod: Object | None) -> PodMachine:
        return PodMachine(self, node, pod, self._settings.python, direct=self._settings.direct)

    async def look(self, name: str) -> Object | None:
        """A pod as it is known; None if it is gone."""
        if self._follows:
            return self._pods.get(name)
        try:
            return await asyncio.to_thread(self.access.get, "pods", name)
        except NotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Whether the pod of this name runs, or will."""
        return name in self._pods and is_usable(self._pods[name])

    async def _stay(self) -> None:
        """Take the lease from the Job of a pool that stays, when each of its nodes has a pod.

        Its pods end by themselves or with the pool's ttl, and not with this process.
        """
        request = self._request
        if request is None or not request.keep or self._dated or self.closed or not self.wanted:
            return
        if all(each.has_machine for each in self.wanted.values()):
            self._stays = self._dated = True
            await asyncio.to_thread(jobs.stay, self.access, self.job, request.ttl)

    async def after_start(self, node: int) -> None:
        """Have the Job go after its end again, when each of its nodes has an agent."""
        if node in self._nodes:
            self._nodes[node].serves = True
        if self._is_spared and all(self._nodes[each].serves for each in self.wanted):
            self._is_spared = False
            await asyncio.to_thread(jobs.unspare, self.access, self.job)

    # The end.

    async def end(self, node: int) -> None:
        """Remove a node's pod; with the last node, everything that is not to be kept."""
        if self._request is None:
            await asyncio.to_thread(jobs.release, self.access, self.job, node)
        else:
            pod = self._nodes[node].name if node in self._nodes else ""
            await self.release(node, lost=bool(pod) and not self.has(pod))

    async def shrink(self, gone: Sequence[int]) -> None:
        """Remove the pods of these nodes."""
        names = [self._nodes.pop(node, NodePod()).name for node in gone]
        if not self.nodes:
            # First, or the Job replaces the pods.
            await self._resize()
        for name in filter(None, names):
            await asyncio.to_thread(self.access.delete, "pods", name, gracePeriodSeconds=5)
        await self._resize()
        await self._stay()
        for name in filter(None, names):
            await self._until_ended(name)

    async def remove(self) -> None:
        """Remove the Job with all that it owns, unless it is to be kept."""
        gone = list(self._nodes)
        if self._started_at is None:
            self._nodes.clear()
        elif self._settings.job is not None and self._has_served:
            await self.shrink(gone)
        elif self._has_served or self._is_own:
            await asyncio.to_thread(jobs.remove, self.access, self.job)
            self._started_at, self._applied = None, []
            self._nodes.clear()

    async def close(self) -> None:
        """End the watch and the lease."""
        await super().close()
        if self._connection is not None:
            self._connection.stop_watching()
            self._connection.close()

    async def _until_ended(self, name: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(jobs.GONE_SECONDS):
                while name in self._pods and jobs.is_live(self._pods[name]) and not self.closed:
                    await asyncio.sleep(0.05)

    # The Job.

    async def _resize(self) -> None:
        nodes = self.nodes
        if nodes == self._applied or self._started_at is None:
            return
        try:
            await asyncio.to_thread(jobs.resize, self.access, self.job, nodes, pool=self.pool)
        except NotFoundError:
            if nodes:
                self._make_again()
            return
        self._applied = nodes

    def _make(self) -> None:
        request = self._request
        assert request is not None
        if request.keep and (there := jobs.find(self.access, self.pool)) is not None:
            self.others = set(jobs.nodes_of(there)) - self.wanted.keys()
        nodes = self._applied = self.nodes
        pod = self._settings.pod(request)
        job, self._is_own = jobs.make(
            self.access, self.job, self.pool, pod, request, nodes, self._called
        )
        self._is_spared = request.keep and jobs.is_spared(job)
        # One that was found stays already; one that was stopped has lost the deadline of its ttl.
        self._stays = request.keep and not self._is_own
        has_deadline = job["spec"].get("activeDeadlineSeconds") is not None
        self._dated = self._stays and (request.ttl is None or has_deadline)
        self._started_at = time.monotonic() - jobs.age(self.access, job)
        if not self._follows:
            self._follows = True
            threading.Thread(target=self._watch, name="skyward-pods", daemon=True).start()
            self._soon(lambda: self.start(self._lease()))

    def _make_again(self) -> None:
        """Make the Job anew: somebody has removed it, or its deadline came while this one slept."""
        self._started_at, self._applied = None, []
        self.ask_again()

    async def _lease(self) -> None:
        """Extend the Job's deadline for as long as this process lives."""
        while not self.closed:
            await asyncio.sleep(LEASE_SECONDS / 5)
            if self._started_at is None or self._stays:
                continue
            until = int(time.monotonic() - self._started_at) + LEASE_SECONDS
            try:
                job = await asyncio.to_thread(jobs.extend, self.access, self.job, until)
            except NotFoundError:
                self._make_again()
                continue
            except (ApiError, UnreachableError):
                continue  # The next attempt is soon enough.
            if jobs.has_ended(job):
                self._make_again()
            elif job["spec"].get("suspend"):
                # The cluster counts from the moment at which the queue admits the Job.
                self._started_at = time.monotonic()

    async def _replace(self, node: int) -> None:
        """Make a pod for a node that lost its own, unless the Job is quicker."""
        wanted = self.wanted.get(node)
        await asyncio.sleep(REPLACED_SECONDS)
        if wanted is None or self.wanted.get(node) is not wanted or self._nodes[node].name:
            return
        try:
            await asyncio.to_thread(jobs.add_pod, self.access, self.job)
        except NotFoundError:
            self._make_again()
        except (ApiError, UnreachableError):
            pass  # Where that is not allowed, the Job will do it.

    # What becomes of the pods.

    def _watch(self) -> None:
        """Follow the pods, on a thread of its own, whatever the API server is doing."""
        failures = 0
        while not (self.closed or self._loop is None or self._loop.is_closed()):
            try:
                for kind, pod in self._events():
                    failures = 0
                    if kind == "ERROR" or self.closed:
                        break
                    self._soon(self._changed, kind, pod)
                else:
                    # Something on the way may end every watch at once.
                    time.sleep(AGAIN_SECONDS)
            except Exception as problem:
                failures += 1
                if isinstance(problem, ApiError) and problem.status in (401, 403):
                    self._soon(self.refuse, self.waiting, problem)
                time.sleep(min(2.0**failures / 4, 30.0))

    def _events(self) -> Iterator[tuple[str, Object]]:
        selector = {"labelSelector": f"{JOB}={self.job}"}
        there = self.access.get("pods", **selector)
        self._soon(self._seen, {each["metadata"]["name"]: each for each in there["items"]})
        yield from self.access.watch("pods", there["metadata"]["resourceVersion"], **selector)

    def _soon(self, action: Callable[..., object], *given: Any) -> None:
        # The event loop may have ended, and the pool with it.
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action, *given)

    def _seen(self, pods: dict[str, Object]) -> None:
        self._pods = pods
        self._assign()

    def _changed(self, kind: str, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            self._pods.pop(name, None)
        else:
            self._pods[name] = pod
        self._assign()

    def _assign(self) -> None:
        """Give pods to nodes that have none, and tell those whose pod runs or has failed."""
        for node in self.waiting:
            found = self._nodes[node]
            if found.has_failed:
                continue
            pod = self._pods.get(found.name)
            if pod is not None and pod["metadata"].get("deletionTimestamp"):
                # Evicted before it ran: the next one.
                pod, found.name = None, ""
                self.start(self._replace(node))
            if pod is not None and not is_usable(pod):
                found.has_failed = True
                self.start(self._tell_ended(node, pod))
                continue
            if pod is None:
                found.name = self._free_pod(node)
                if found.name:
                    self.start(self._label(found.name, node))
            if found.name:
                found.refusal = pending.refusal(self._pods[found.name]) or found.refusal
            if found.name and jobs.is_running(self._pods[found.name]):
                self.give(node, self._machine(node, self._pods[found.name]))

    def _free_pod(self, node: int) -> str:
        """The oldest pod that serves no node, or was serving this one; empty if there is none."""
        taken = {each.name for each in self._nodes.values()}
        for name, pod in sorted(self._pods.items(), key=lambda item: _age(item[1])):
            serves = pod["metadata"]["labels"].get(NODE, str(node))
            if name not in taken and serves == str(node) and is_usable(pod):
                return name
        return ""

    async def _label(self, name: str, node: int) -> None:
        """Write on a pod which node it serves, for `sky down` after a crash."""
        with contextlib.suppress(ApiError, UnreachableError):
            change = {"metadata": {"labels": {NODE: str(node)}}}
            await asyncio.to_thread(self.access.patch, "pods", name, change)

    async def _tell_ended(self, node: int, pod: Object) -> None:
        """Tell a node that its pod has ended before it was used, with its last words."""
        words = await asyncio.to_thread(self.access.logs, pod["metadata"]["name"])
        self.refuse([node], PoolStartError(pending.ended(pod, words)))

    async def _explain(self) -> None:
        """Tell, as it happens, why pods are pending."""
        while waiting := self.waiting:
            events: list[Object] = []
            with contextlib.suppress(ApiError, UnreachableError):
                told = await asyncio.to_thread(
                    self.access.get, "events", fieldSelector="type!=Normal"
                )
                events = told["items"]
            for node in waiting:
                if node in self.waiting:
                    self._tell(node, events)
            await asyncio.sleep(EVENTS_SECONDS)

    def _tell(self, node: int, events: list[Object]) -> None:
        found = self._nodes[node]
        pod = self._pods.get(found.name)
        reason = pending.reason(pod, self.job, events)
        if reason and reason != found.reason:
            found.reason = reason
            self.wanted[node].order.tell(reason)
        if pod is not None and (why := pending.hopeless(pod, found.refusal)):
            self.refuse([node], PoolStartError(f"node {node}: {why}"))


def _age(pod: Object) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]
