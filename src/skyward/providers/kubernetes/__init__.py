"""Kubernetes: nodes as pods, for a user with a kubeconfig and ordinary rights in one namespace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from skyward import checks
from skyward.errors import ConfigurationError, PoolStartError, UnreachableError
from skyward.providers import LOOPBACK, Capabilities, Machine, Order, Remains, Request
from skyward.providers.allocation import SharedAllocation
from skyward.providers.kubernetes import jobs, manifests, pending
from skyward.providers.kubernetes.access import (
    Access,
    ApiError,
    NotFoundError,
    Object,
    Place,
    place_here,
    resolve,
)
from skyward.providers.kubernetes.manifests import (
    JOB,
    LEASE_SECONDS,
    MARKS,
    NODE,
    Pod,
    job_name,
)
from skyward.providers.piped import Piped, relay_command
from skyward.wire.handshake import host_and_port

__all__ = ["Kubernetes"]

IMAGE = "SKYWARD_KUBERNETES_IMAGE"
TEMPLATE = "SKYWARD_KUBERNETES_TEMPLATE"
PYTHON = "SKYWARD_KUBERNETES_PYTHON"
NO_CONTAINER = "container not found"
"""What the kubelet says of a container that has ended."""
GONE_SECONDS = 30.0
"""How long it may take until the API server knows of the end of a container that is gone."""
ENDED_SECONDS = 3.0
"""How long after a failed command the client waits to hear that its pod has ended."""
REPLACED_SECONDS = 1.5
"""How long a node that is ordered again waits for the Job's new pod before the client makes one."""
EVENTS_SECONDS = 2.0
"""How often the client asks for events while pods are pending."""
AGAIN_SECONDS = 0.5
"""How long after the end of a watch the next one begins."""
_JOB = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,57}[a-z0-9])?")


@dataclass(frozen=True)
class Kubernetes:
    """Nodes as pods of a cluster.

    `namespace` and `context` are read from the kubeconfig now, if left out, and stay what they are.
    `image` is the container image; without it, `SKYWARD_KUBERNETES_IMAGE` or an official Python.
    `pod_template` is a pod template, or the spec of one, that is merged into ours last; before it,
    the file that `SKYWARD_KUBERNETES_TEMPLATE` names, in YAML or JSON, is merged. `queue` names a
    queue of Kueue, which admits all pods of the pool together. `python`, or
    `SKYWARD_KUBERNETES_PYTHON`, names an interpreter of the image that has skyward and all that is
    needed.

    >>> with sky.Compute(sky.Kubernetes(), nodes=2, accelerator=sky.accelerators.H100()) as c: ...
    """

    namespace: str | None = None
    context: str | None = None
    image: str | None = None
    service_account: str | None = None
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Mapping[str, Any]] | None = None
    pod_template: Mapping[str, Any] | None = None
    runtime_class: str | None = None
    queue: str | None = None
    storage_class: str | None = None
    python: str | None = None
    cache: str | None = manifests.CACHE_FOLDER
    """Where the environments of images and compiled code are kept between pools: a folder of the
    cluster's machines, unless the namespace's rules forbid that, or 'pvc://NAME'; None for
    nowhere."""
    direct: bool = True
    """Whether to try the pods' own addresses before connections go through the API server."""
    timeout: float = 1800.0
    """How many seconds a pod may be pending."""
    kubeconfig: str | None = None
    """The path of a kubeconfig file; if left out, as `kubectl` finds it, or that of the pod."""
    job: str | None = None
    """The name of a Job that outlives its pools: one that exists is used, with the pod that it has;
    the end of a pool leaves it without pods, and `delete` removes it."""
    command: Sequence[str] = ()
    """A command that runs in each container, beside the agent."""
    name: str = field(default="kubernetes", init=False, repr=False)
    capabilities = Capabilities(answers=True, collects=True, stops=True, moves=True)

    def __post_init__(self) -> None:
        for what in (
            *("namespace", "context", "image", "service_account", "runtime_class", "queue"),
            *("storage_class", "python", "cache", "kubeconfig", "job"),
        ):
            value = getattr(self, what)
            if value is not None:
                checks.text(self, what, value)
        for what in ("node_selector", "pod_template"):
            value = getattr(self, what)
            if value is not None and not isinstance(value, Mapping):
                raise checks.refused(self, {what: value}, f"not a mapping: {checks.kind(value)}")
        if self.job is not None and not _JOB.fullmatch(self.job):
            raise checks.refused(
                self,
                {"job": self.job},
                "a name has small letters, digits and hyphens, at most 59; write one like 'mnist'",
            )
        place = resolve(self.kubeconfig, self.context, self.namespace)
        checks.store(
            self,
            namespace=place.namespace,
            context=place.context,
            kubeconfig=place.kubeconfig,
            python=self.python or os.environ.get(PYTHON) or None,
            tolerations=tuple(self.tolerations or ()),
            command=checks.texts(self, "command", self.command),
            direct=checks.flag(self, "direct", self.direct),
            timeout=checks.seconds(self, "timeout", self.timeout),
        )

    @property
    def _place(self) -> Place:
        assert self.kubeconfig is not None
        assert self.namespace is not None
        return Place(self.kubeconfig, self.context, self.namespace)

    def _reached(self) -> contextlib.closing[Access]:
        """A connection to the API server, which closes at its end."""
        return contextlib.closing(Access(self._place))

    def check(self, request: Request) -> None:
        """Refuse volumes that no pod can have; the rest only the cluster knows."""
        manifests.check_volumes(request.volumes)

    async def ping(self) -> str:
        """List a pod, which says whether the server answers and knows the user."""

        def ask() -> str:
            with self._reached() as access:
                access.get("pods", limit="1")
                return access.server

        server = await asyncio.to_thread(ask)
        return f"namespace {self.namespace} at {server}"

    def describe(self) -> Mapping[str, Any]:
        """The arguments, with what variables name: another process makes the same pods."""
        told = {each.name: getattr(self, each.name) for each in fields(Kubernetes) if each.init}
        template = manifests.template(os.environ.get(TEMPLATE), self.pod_template)
        more = {
            "image": self.image or os.environ.get(IMAGE) or None,
            "node_selector": None if self.node_selector is None else dict(self.node_selector),
            "tolerations": [dict(each) for each in self.tolerations or ()],
            "pod_template": template if template.get("spec") or len(template) > 1 else None,
            "command": list(self.command),
        }
        return told | more

    @classmethod
    def arguments_here(cls, arguments: Mapping[str, Any], home: str) -> Mapping[str, Any]:
        """The same context, in its kubeconfig if that is here, or else in the user's own."""
        return {**arguments, **place_here(arguments["kubeconfig"], arguments["context"], home)}

    def price(self, request: Request) -> float | None:
        """None: what a cluster's nodes cost is unknown."""
        return None

    def allocate(self, pool: str) -> PodAllocation:
        """The pods of one Job."""
        return PodAllocation(self, pool)

    async def remains(self) -> Sequence[Remains]:
        """The Jobs of all pools in the namespace, with what they own."""
        return await asyncio.to_thread(self._remains)

    def _remains(self) -> list[Remains]:
        with self._reached() as access:
            return jobs.remains(access)

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        of = f" of {self.context}" if self.context else ""
        return f"kubernetes in the namespace {self.namespace}{of}"

    async def check_stop(self, pool: str) -> None:
        """Every Job can be left without pods."""

    async def spare(self, pool: str, spared: bool) -> None:
        """Have the pool's Job stay after its end with all that it owns, or go."""
        await asyncio.to_thread(self._spare, pool, spared)

    def _spare(self, pool: str, spared: bool) -> None:
        with self._reached() as access:
            if (job := jobs.find(access, pool)) is not None:
                (jobs.spare if spared else jobs.unspare)(access, job["metadata"]["name"])

    async def stop(self, pool: str) -> float | None:
        """Remove the pool's pods; the Job stays, with the claims that go with it."""
        await asyncio.to_thread(self._stop, pool)
        return None

    def _stop(self, pool: str) -> None:
        with self._reached() as access:
            if (job := jobs.find(access, pool)) is not None:
                jobs.empty(access, job["metadata"]["name"])

    def delete(self, *, unused: bool = False) -> None:
        """Remove the Job named `job`, with its pods and all else that it owns, if there is one.

        With `unused`, only if this process made it and no pool uses it.

        >>> sky.Kubernetes(job="mnist").delete()
        """
        if self.job is None:
            raise ConfigurationError(f"{self}: there is no job to delete; name it with job=")
        name = job_name(self.job)
        with self._reached() as access:
            if not unused or jobs.is_idle(access, name):
                jobs.remove(access, name)

    def _pod(self, request: Request) -> Pod:
        return Pod(
            image=self.image or os.environ.get(IMAGE) or request.python_image,
            service_account=self.service_account,
            node_selector=self.node_selector,
            tolerations=self.tolerations or (),
            template=manifests.template(os.environ.get(TEMPLATE), self.pod_template),
            runtime_class=self.runtime_class,
            queue=self.queue,
            storage_class=self.storage_class,
            cache=self.cache,
            command=self.command,
        )


class PodMachine(Piped, Machine):
    """The pod of one node."""

    forwards_to = LOOPBACK
    # The pod lives while one of its marks has the number of a process that runs.
    before, after = f'echo "$shell" >{MARKS}$shell', f"rm -f {MARKS}$shell"
    ends_input = False

    def __init__(self, pods: PodAllocation, node: int, pod: Object | None) -> None:
        self._access, self._pods = pods.access, pods
        self.id = f"{pods.access.place.namespace}/{pods.job}-{node}"
        self.node, self.python = node, pods.provider.python
        self._pod = pod["metadata"]["name"] if pod else ""
        self._uid = pod["metadata"]["uid"] if pod else ""
        self.address = str((pod or {}).get("status", {}).get("podIP", ""))
        self.direct = self.address if pods.provider.direct and self.address else None
        self.ended = pod is None or not is_usable(pod)
        """Whether its pod did not run when it was found."""
        self._refusal = ""
        self._destroyed = False

    # Commands.

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in the pod's container, through the API server."""
        execute, name = self._access.execute, self._name()
        try:
            return await asyncio.to_thread(execute, name, command, self._note_refusal)
        except UnreachableError as problem:
            if NO_CONTAINER not in str(problem):
                raise
            self._refusal = str(problem)
            raise UnreachableError(await self.why_lost()) from problem

    def _note_refusal(self, words: str) -> None:
        self._refusal = words and f"pod {self._pod}: {words}"

    async def why_lost(self) -> str:
        """How the pod has ended, if it has, or why it starts no program."""
        how = await asyncio.to_thread(self._how_it_ended)
        return how or self._refusal or f"the connection to pod {self._pod} was lost"

    def _how_it_ended(self) -> str:
        """How the pod has ended; empty if it has not, or nobody knows."""
        since = time.monotonic()
        with contextlib.suppress(ApiError, UnreachableError):
            # The kubelet tells the API server a moment after the fact.
            while is_usable(pod := self._access.get("pods", self._pod)):
                # Where it finds no container any more, which another thread hears meanwhile, that
                # is only a matter of time.
                is_gone = NO_CONTAINER in self._refusal
                if time.monotonic() - since > (GONE_SECONDS if is_gone else ENDED_SECONDS):
                    return ""
                time.sleep(0.2)
            return pending.ended(pod, self._access.logs(self._pod))
        return ""

    def _name(self) -> str:
        if not self._pod:
            raise UnreachableError(f"node {self.node} has no pod yet")
        return self._pod

    # Connections.

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a process in the pod that copies its streams to the socket."""
        command, text = relay_command(self.python, endpoint, "framed")
        return await asyncio.to_thread(self._access.relay, self._name(), command, text)

    async def forward(self, endpoint: str) -> socket.socket:
        """Connect to a port of the pod's loopback through the API server, past this interpreter."""
        _, port = host_and_port(endpoint)
        return await asyncio.to_thread(self._access.forward, self._name(), port)

    # Its end.

    async def alive(self) -> bool:
        """Whether the pod exists and has not ended."""
        if self._destroyed or not self._pod:
            return False
        found = await self._pods.look(self._pod)
        return found is not None and found["metadata"]["uid"] == self._uid and is_usable(found)

    async def after_start(self) -> None:
        """Have the Job go after its end again, with all that it owns."""
        await self._pods.after_start(self.node)

    async def destroy(self) -> None:
        """Remove the pod, and with the pool's last one the Job and all that it owns."""
        if self._destroyed:
            return
        await self._pods.end(self.node)
        self._destroyed = True


def is_usable(pod: Object) -> bool:
    """Whether the pod runs, or will."""
    gone = pod["metadata"].get("deletionTimestamp") is not None
    return not gone and (pod.get("status") or {}).get("phase") in (None, "Pending", "Running")


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

    def __init__(self, provider: Kubernetes, pool: str) -> None:
        super().__init__(pool)
        self.timeout = provider.timeout
        self.job = job_name(provider.job or pool)
        self.provider = provider
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
        """Whether the Job's deadline is that of a kept pool."""
        self._is_spared = False
        """Whether the Job stays after its end, since its pool was stopped."""

    @property
    def access(self) -> Access:
        """The connection to the API server; the first call asks the server."""
        if self._connection is None:
            self._connection = Access(self.provider._place)
        return self._connection

    # Nodes.

    async def get(self, order: Order) -> PodMachine:
        """A running pod for a node, made if necessary."""
        self._request, self._called = order.request, order.name
        self._loop = asyncio.get_running_loop()
        former = self._nodes.get(order.node)
        if former is None or not self.has(former.name):
            # In a kept pool, a node is not released when its pod is lost.
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
        return [PodMachine(self, node, by_node.get(node)) for node in jobs.nodes_of(job)]

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
        """Take the lease from the Job of a kept pool, when each of its nodes has a pod.

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
        elif self.provider.job is not None and self._has_served:
            await self.shrink(gone)
        elif self._has_served or self._is_own:
            # First: what is ordered meanwhile is for the next Job.
            self._nodes.clear()
            await asyncio.to_thread(jobs.remove, self.access, self.job)
            self._started_at, self._applied = None, []
            self._pods.clear()

    async def close(self) -> None:
        """End the watch and the lease."""
        await super().close()
        if self._connection is not None:
            self._connection.stop_watching()
            await asyncio.to_thread(self._connection.close)

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
        pod = self.provider._pod(request)
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
                    self._soon(lambda why=problem: self.refuse(self.waiting, why))
                elif not isinstance(problem, (ApiError, UnreachableError, OSError, ValueError)):
                    # Those pass, and a line that was cut is no JSON; this one does not.
                    said = f"its pods cannot be followed: {type(problem).__name__}: {problem}"
                    self._soon(lambda said=said: self.refuse(self.waiting, PoolStartError(said)))
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
            # The pods of a Job that is being removed are for nobody.
            if found.has_failed or not self.wanted[node].asked:
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
                self.give(node, PodMachine(self, node, self._pods[found.name]))

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
