"""Kubernetes: nodes as pods, for a user with a kubeconfig and ordinary rights in one namespace."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from skyward import checks
from skyward.errors import ConfigurationError
from skyward.providers import Allocation, Capabilities, Order, Remains, Request
from skyward.providers.kubernetes import jobs, manifests, remains
from skyward.providers.kubernetes.access import Access, Object, Place, resolve
from skyward.providers.kubernetes.machine import PodMachine
from skyward.providers.kubernetes.manifests import JOB, NODE, Pod, job_name
from skyward.providers.kubernetes.pods import Pods, is_usable

__all__ = ["Kubernetes"]

IMAGE = "SKYWARD_KUBERNETES_IMAGE"
TEMPLATE = "SKYWARD_KUBERNETES_TEMPLATE"
PYTHON = "SKYWARD_KUBERNETES_PYTHON"
_JOB = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,57}[a-z0-9])?")
_Key = tuple[asyncio.AbstractEventLoop, Place, str]
_jobs: dict[_Key, Pods] = {}
"""The Jobs that this process has made, each on the event loop that asked for it."""


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
    capabilities = Capabilities(answers=True, collects=True, stops=True)

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

    def check(self, request: Request) -> None:
        """Refuse volumes that no pod can have; the rest only the cluster knows."""
        manifests.check_volumes(request.volumes)

    async def ping(self) -> str:
        """List a pod, which says whether the server answers and knows the user."""

        def ask() -> str:
            access = Access(self._place)
            try:
                access.get("pods", limit="1")
                return access.server
            finally:
                access.close()

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

    def price(self, request: Request) -> float | None:
        """None: what a cluster's nodes cost is unknown."""
        return None

    def allocate(self, pool: str) -> Allocation[PodMachine]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> PodMachine:
        """Have the pool's Job keep a pod for the node, and wait until the pod runs."""
        shared = await self._shared(order)
        pod = await shared.get(order, self.timeout)
        return self._machine(shared.access, shared.job, order.node, pod, shared)

    async def _shared(self, order: Order) -> Pods:
        """The pods of the Job that the order is for."""
        key = asyncio.get_running_loop(), self._place, job_name(self.job or order.pool)
        wanted = self._pod(order), order.request
        shared = _jobs.get(key)
        if shared is not None and not shared.closed and not shared.is_for(*wanted):
            if not shared.is_idle:
                raise ConfigurationError(
                    f"Kubernetes(job={self.job!r}): this process uses that Job with other "
                    "arguments; end that pool first, or give this one another name"
                )
            await shared.leave()
        if key not in _jobs or _jobs[key].closed:
            access = await asyncio.to_thread(Access, self._place)
            # Another node of the pool may have been as quick.
            if key not in _jobs or _jobs[key].closed:
                _jobs[key] = Pods(
                    access,
                    key[-1],
                    *wanted,
                    keep=self.job is not None,
                    forget=lambda pods: _forget(key, pods),
                )
        return _jobs[key]

    async def find(self, pool: str) -> Sequence[PodMachine]:
        """The nodes that the pool's Job was asked for, with their pods."""
        return await asyncio.to_thread(self._find, pool, asyncio.get_running_loop())

    async def remains(self) -> Sequence[Remains]:
        """The Jobs of all pools in the namespace, with what they own."""
        return await asyncio.to_thread(self._remains)

    def _remains(self) -> list[Remains]:
        access = Access(self._place)
        try:
            return remains.remains(access)
        finally:
            access.close()

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
        access = Access(self._place)
        try:
            if (job := jobs.find(access, pool)) is not None:
                (jobs.spare if spared else jobs.unspare)(access, job["metadata"]["name"])
        finally:
            access.close()

    async def stop(self, pool: str) -> float | None:
        """Remove the pool's pods; the Job stays, with the claims that go with it."""
        await asyncio.to_thread(self._stop, pool)
        return None

    def _stop(self, pool: str) -> None:
        access = Access(self._place)
        try:
            job = jobs.find(access, pool)
            if job is None:
                return
            name = job["metadata"]["name"]
            for (loop, place, there), shared in list(_jobs.items()):
                # This process may have made it, and would take its pods for those of now.
                if (place, there) == (self._place, name) and loop.is_running():
                    asyncio.run_coroutine_threadsafe(shared.leave(), loop).result()
            jobs.empty(access, name)
        finally:
            access.close()

    def _find(self, pool: str, loop: asyncio.AbstractEventLoop) -> list[PodMachine]:
        access = Access(self._place)
        job = jobs.find(access, pool)
        if job is None:
            return []
        name = job["metadata"]["name"]
        there = access.get("pods", labelSelector=f"{JOB}={name}")["items"]
        # Of a node's pods, the one that runs comes last.
        there.sort(key=is_usable)
        by_node = {int(each["metadata"]["labels"].get(NODE, -1)): each for each in there}
        shared = _jobs.get((loop, self._place, name))
        return [
            self._machine(access, name, node, by_node.get(node), shared)
            for node in jobs.nodes_of(job)
        ]

    def _machine(
        self, access: Access, job: str, node: int, pod: Object | None, shared: Pods | None
    ) -> PodMachine:
        return PodMachine(access, job, node, pod, self.python, shared=shared, direct=self.direct)

    def delete(self, *, unused: bool = False) -> None:
        """Remove the Job named `job`, with its pods and all else that it owns, if there is one.

        With `unused`, only if this process made it and no pool uses it.

        >>> sky.Kubernetes(job="mnist").delete()
        """
        if self.job is None:
            raise ConfigurationError(f"{self}: there is no job to delete; name it with job=")
        name = job_name(self.job)
        for (loop, place, job), shared in list(_jobs.items()):
            if (place, job) == (self._place, name) and loop.is_running():
                if not unused or (shared.is_own and shared.is_idle):
                    asyncio.run_coroutine_threadsafe(shared.remove(), loop).result()
                return
        if not unused:
            jobs.remove(Access(self._place), name)

    def _pod(self, order: Order) -> Pod:
        return Pod(
            image=self.image or os.environ.get(IMAGE) or _official_python(order.request),
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


def _forget(key: _Key, pods: Pods) -> None:
    if _jobs.get(key) is pods:
        del _jobs[key]


def _official_python(request: Request) -> str:
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python:{mine if request.image.python == 'auto' else request.image.python}-slim"
