"""The pods of a pool: asked for together, told apart by the node that each one serves."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from skyward.errors import PoolError, PoolStartError, UnreachableError
from skyward.providers import Order, Request
from skyward.providers.kubernetes import jobs, pending
from skyward.providers.kubernetes.access import (
    Access,
    ApiError,
    NotFoundError,
    Object,
)
from skyward.providers.kubernetes.manifests import JOB, LEASE_SECONDS, NODE, Pod
from skyward.providers.kubernetes.wanted import Wanted
from skyward.providers.together import GATHER_SECONDS, gather

REPLACED_SECONDS = 1.5
"""How long a node that is ordered again waits for the Job's new pod before the client makes one."""
REORDER_SECONDS = 10.0
"""How long a Job keeps its size after a pod was lost: its node is ordered again at once."""
EVENTS_SECONDS = 2.0
"""How often the client asks for events while pods are pending."""

AGAIN_SECONDS = 0.5
"""How long after the end of a watch the next one begins."""


class Pods:
    """The pods of one Job, as one event loop sees them."""

    def __init__(
        self,
        access: Access,
        job: str,
        pod: Pod,
        request: Request,
        *,
        keep: bool,
        forget: Callable[[Pods], None],
    ) -> None:
        """With `keep` the Job stays, without pods, when its last node is released.

        `forget` is called when everything has been removed.
        """
        self.access, self.job = access, job
        self._pod, self._request, self._keep, self._forget = pod, request, keep, forget
        self._pool = self._called = ""
        self.loop = asyncio.get_running_loop()
        self._wanted: dict[int, Wanted] = {}
        self._pods: dict[str, Object] = {}
        self._applying: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_at: float | None = None
        """When the Job started, if it has."""
        self._applied: list[int] = []
        self._changing = False
        """Whether the Job is being made or changed right now."""
        self._removing: asyncio.Task[None] | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._follows = False
        """Whether the pods and the lease are looked after."""
        self.is_own = False
        """Whether the Job was made here, and not found."""
        self._stays = False
        """Whether the Job outlives this process, since its pool stays."""
        self._dated = False
        """Whether the Job's deadline is that of a pool that stays."""
        self._is_spared = False
        """Whether the Job stays after its end, since its pool was stopped."""
        self.closed = False

    # Nodes.

    def is_for(self, pod: Pod, request: Request) -> bool:
        """Whether the pods are as these want them."""
        return (pod, request) == (self._pod, self._request)

    @property
    def is_idle(self) -> bool:
        """Whether no node uses the Job, which is kept."""
        return not self._wanted

    async def leave(self) -> None:
        """Leave the Job as it is, for others."""
        await self._stop()
        self._close()

    async def get(self, order: Order, seconds: float) -> Object:
        """A running pod for a node, made if necessary; raises with the reason if there is none."""
        node = order.node
        self._pool, self._called = order.pool, order.name
        if (former := self._wanted.get(node)) is not None and former.running.done():
            pod = self._pods.get(former.pod)
            if pod is None or not is_usable(pod):
                # In a pool that stays, a node is not released when its pod is lost.
                del self._wanted[node]
        wanted = self._wanted.setdefault(node, Wanted(order.tell))
        wanted.tell, wanted.together = order.tell, order.together
        self._apply_soon()
        self._assign()
        if node in self._applied and not wanted.pod:
            self._start(self._replace(wanted))
        if self._explaining is None or self._explaining.done():
            self._explaining = self._start(self._explain())
        try:
            async with asyncio.timeout(seconds):
                found = await asyncio.shield(wanted.running)
            await self._stay()
            return found
        except TimeoutError:
            await self._give_up(node)
            raise PoolStartError(
                f"node {node}: its pod did not run within {seconds:.0f} s: "
                f"{wanted.reason or 'nobody says why'}{pending.advice(wanted.reason)}"
            ) from None
        except asyncio.CancelledError:
            await self._settle(node)
            raise
        except Exception:
            await self._give_up(node)
            raise

    async def _stay(self) -> None:
        """Take the lease from the Job of a pool that stays, when each of its nodes has a pod.

        Its pods end by themselves or with the pool's ttl, and not with this process.
        """
        nodes = self._wanted.values()
        if not self._request.keep or self._dated or self.closed or not nodes:
            return
        if all(each.has_run for each in nodes):
            self._stays = self._dated = True
            await asyncio.to_thread(jobs.stay, self.access, self.job, self._request.ttl)

    async def after_start(self, node: int) -> None:
        """Have the Job go after its end again, when each of its nodes has an agent."""
        if node in self._wanted:
            self._wanted[node].serves = True
        if self._is_spared and all(each.serves for each in self._wanted.values()):
            self._is_spared = False
            await asyncio.to_thread(jobs.unspare, self.access, self.job)

    async def _settle(self, node: int) -> None:
        """After a cancelled `get`, have the Job ask for the node's pod, or nobody."""
        if self._changing and self._applying is not None:
            await asyncio.wait([self._applying])
        if node not in self._applied:
            self._wanted.pop(node, None)
        if not self._wanted and self._started_at is None:
            self._close()
        await self._stay()

    async def _give_up(self, node: int) -> None:
        """Leave nothing of a node whose pod does not run; what fails now has failed before."""
        with contextlib.suppress(PoolError):
            if set(self._wanted) <= {node} and self._started_at is None:
                self._wanted.clear()
                self._close()
            elif set(self._wanted) <= {node} and not self.is_own:
                self._wanted.clear()
                await self.leave()
            else:
                await self.release(node, final=True)

    def look(self, name: str) -> Object | None:
        """A pod as it was last seen; None if it is gone."""
        return self._pods.get(name)

    async def release(self, node: int, *, final: bool = False) -> None:
        """Remove a node's pod; with the last node, everything that is not to be kept.

        Unless it is `final`, a node whose pod is gone will be ordered again.
        """
        wanted = self._wanted.pop(node, None)
        name = wanted.pod if wanted is not None else ""
        if wanted is not None and not wanted.running.done():
            wanted.running.cancel()
        was_lost = bool(name) and not (name in self._pods and is_usable(self._pods[name]))
        if was_lost and not final:
            atexit.register(self._settle_at_exit)
            self._start(self._settle_later())
            return
        # The other nodes of the pool may be released as well.
        await asyncio.sleep(GATHER_SECONDS)
        if self.closed and self._removing is None:
            return  # Another node has left the Job to others meanwhile.
        # A start that fails leaves a Job that it has found.
        if not self._wanted and (self.is_own if final else not self._keep):
            if self._removing is None:
                self._removing = self.loop.create_task(self.remove())
            await asyncio.shield(self._removing)
        elif not self.closed:
            if not self._wanted:
                # First, or the Job replaces the pod.
                await self._resize()
            if name:
                await asyncio.to_thread(self.access.delete, "pods", name, gracePeriodSeconds=5)
            await self._resize()
            await self._stay()
            await self._until_ended(name)

    async def _settle_later(self) -> None:
        """After the loss of a pod, shrink or remove the Job, unless its node is ordered again."""
        await asyncio.sleep(REORDER_SECONDS)
        with contextlib.suppress(PoolError):
            if self._wanted or self._keep:
                await self._resize()
            else:
                await self.remove()

    def _settle_at_exit(self) -> None:
        """What `_settle_later` has not come to."""
        if not (self._wanted or self._keep or self.closed):
            with contextlib.suppress(PoolError):
                jobs.remove(self.access, self.job)

    async def remove(self) -> None:
        """Remove the Job and all that it owns, and wait until its pods have ended."""
        await self._stop()
        for wanted in self._wanted.values():
            wanted.fail(PoolStartError(f"{self.job} was removed"))
        try:
            await asyncio.to_thread(jobs.remove, self.access, self.job)
        finally:
            self._close()

    async def _stop(self) -> None:
        self.closed = True
        ending = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    def _close(self) -> None:
        self.closed = True
        atexit.unregister(self._settle_at_exit)
        self._forget(self)
        self.access.stop_watching()
        self.access.close()

    async def _until_ended(self, name: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(jobs.GONE_SECONDS):
                while name in self._pods and jobs.is_live(self._pods[name]) and not self.closed:
                    await asyncio.sleep(0.05)

    # The Job.

    def _apply_soon(self) -> None:
        if self._applying is None or self._applying.done():
            self._applying = self._start(self._apply())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._fail(problem)

    async def _apply(self) -> None:
        """Have the Job keep as many pods as nodes are wanted."""
        await gather(self._is_complete)
        try:
            while (nodes := sorted(self._wanted)) and nodes != self._applied and not self.closed:
                self._changing = True
                if self._started_at is None:
                    await asyncio.to_thread(self._make, nodes)
                    self._applied = nodes
                else:
                    await self._resize()
        except Exception as problem:
            self._fail(problem)
        finally:
            self._changing = False

    def _is_complete(self) -> bool:
        """Whether all nodes have been ordered that are to come together: a queue admits them so."""
        new = (each for node, each in self._wanted.items() if node not in self._applied)
        return all(each.together <= self._wanted.keys() for each in new)

    async def _resize(self) -> None:
        nodes = sorted(self._wanted)
        if nodes == self._applied or self.closed:
            return
        try:
            await asyncio.to_thread(jobs.resize, self.access, self.job, nodes, pool=self._pool)
        except NotFoundError:
            # The last node may have been released meanwhile.
            if not self.closed:
                self._make_again()
            return
        self._applied = nodes

    def _make(self, nodes: list[int]) -> None:
        job, self.is_own = jobs.make(
            self.access, self.job, self._pool, self._pod, self._request, nodes, self._called
        )
        self._is_spared = self._request.keep and jobs.is_spared(job)
        # One that was found stays already; one that was stopped has lost the deadline of its ttl.
        self._stays = self._request.keep and not self.is_own
        has_deadline = job["spec"].get("activeDeadlineSeconds") is not None
        self._dated = self._stays and (self._request.ttl is None or has_deadline)
        self._started_at = time.monotonic() - jobs.age(self.access, job)
        if not self._follows:
            self._follows = True
            threading.Thread(target=self._watch, name="skyward-pods", daemon=True).start()
            self._soon(lambda: self._start(self._lease()))

    def _make_again(self) -> None:
        """Make the Job anew: somebody has removed it, or its deadline came while this one slept."""
        self._started_at, self._applied = None, []
        self._apply_soon()

    def _fail(self, problem: BaseException) -> None:
        for wanted in self._wanted.values():
            wanted.fail(problem)

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

    async def _replace(self, wanted: Wanted) -> None:
        """Make a pod for a node that lost its own, unless the Job is quicker."""
        await asyncio.sleep(REPLACED_SECONDS)
        if wanted not in self._wanted.values() or wanted.pod:
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
        while not (self.closed or self.loop.is_closed()):
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
                    self._soon(self._fail, problem)
                time.sleep(min(2.0**failures / 4, 30.0))

    def _events(self) -> Iterator[tuple[str, Object]]:
        selector = {"labelSelector": f"{JOB}={self.job}"}
        there = self.access.get("pods", **selector)
        self._soon(self._seen, {each["metadata"]["name"]: each for each in there["items"]})
        yield from self.access.watch("pods", there["metadata"]["resourceVersion"], **selector)

    def _soon(self, action: Callable[..., object], *given: Any) -> None:
        # The event loop may have ended, and the pool with it.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(action, *given)

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
        for node in sorted(self._wanted):
            wanted = self._wanted[node]
            if wanted.running.done() or wanted.has_failed:
                continue
            pod = self._pods.get(wanted.pod)
            if pod is not None and pod["metadata"].get("deletionTimestamp"):
                # Evicted before it ran: the next one.
                pod = None
                self._start(self._replace(wanted))
            if pod is not None and not is_usable(pod):
                wanted.has_failed = True
                self._start(self._tell_ended(wanted, pod))
                continue
            if pod is None:
                wanted.pod = self._free_pod(node)
                if wanted.pod:
                    self._start(self._label(wanted.pod, node))
            if wanted.pod:
                wanted.refusal = pending.refusal(self._pods[wanted.pod]) or wanted.refusal
            if wanted.pod and jobs.is_running(self._pods[wanted.pod]):
                wanted.running.set_result(self._pods[wanted.pod])

    def _free_pod(self, node: int) -> str:
        """The oldest pod that serves no node, or was serving this one; empty if there is none."""
        taken = {wanted.pod for wanted in self._wanted.values()}
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

    async def _tell_ended(self, wanted: Wanted, pod: Object) -> None:
        """Tell a node that its pod has ended before it was used, with its last words."""
        words = await asyncio.to_thread(self.access.logs, pod["metadata"]["name"])
        wanted.fail(PoolStartError(pending.ended(pod, words)))

    async def _explain(self) -> None:
        """Tell, as it happens, why pods are pending."""
        while waiting := {n: w for n, w in self._wanted.items() if not w.running.done()}:
            events: list[Object] = []
            with contextlib.suppress(ApiError, UnreachableError):
                told = await asyncio.to_thread(
                    self.access.get, "events", fieldSelector="type!=Normal"
                )
                events = told["items"]
            for node, wanted in waiting.items():
                if not wanted.running.done():
                    self._tell(node, wanted, events)
            await asyncio.sleep(EVENTS_SECONDS)

    def _tell(self, node: int, wanted: Wanted, events: list[Object]) -> None:
        pod = self._pods.get(wanted.pod)
        reason = pending.reason(pod, self.job, events)
        if reason and reason != wanted.reason:
            wanted.reason = reason
            wanted.tell(reason)
        if pod is not None and (why := pending.hopeless(pod, wanted.refusal)):
            wanted.fail(PoolStartError(f"node {node}: {why}"))


def _age(pod: Object) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp") or "", pod["metadata"]["name"]


def is_usable(pod: Object) -> bool:
    """Whether the pod runs, or will."""
    gone = pod["metadata"].get("deletionTimestamp") is not None
    return not gone and (pod.get("status") or {}).get("phase") in (None, "Pending", "Running")
