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
from skyward.providers import Capabilities, Remains, Request
from skyward.providers.kubernetes import jobs, manifests, remains
from skyward.providers.kubernetes.access import Access, Place, resolve
from skyward.providers.kubernetes.manifests import Pod, job_name
from skyward.providers.kubernetes.pods import PodAllocation, PodSettings

__all__ = ["Kubernetes"]

IMAGE = "SKYWARD_KUBERNETES_IMAGE"
TEMPLATE = "SKYWARD_KUBERNETES_TEMPLATE"
PYTHON = "SKYWARD_KUBERNETES_PYTHON"
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

    def allocate(self, pool: str) -> PodAllocation:
        """The pods of one Job."""
        return PodAllocation(pool, self._settings)

    @property
    def _settings(self) -> PodSettings:
        return PodSettings(
            self._place,
            self._pod,
            job=self.job,
            python=self.python,
            direct=self.direct,
            timeout=self.timeout,
        )

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
            jobs.empty(access, job["metadata"]["name"])
        finally:
            access.close()

    def delete(self, *, unused: bool = False) -> None:
        """Remove the Job named `job`, with its pods and all else that it owns, if there is one.

        With `unused`, only if this process made it and no pool uses it.

        >>> sky.Kubernetes(job="mnist").delete()
        """
        if self.job is None:
            raise ConfigurationError(f"{self}: there is no job to delete; name it with job=")
        access, name = Access(self._place), job_name(self.job)
        try:
            if not unused or jobs.is_idle(access, name):
                jobs.remove(access, name)
        finally:
            access.close()

    def _pod(self, request: Request) -> Pod:
        return Pod(
            image=self.image or os.environ.get(IMAGE) or _official_python(request),
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


def _official_python(request: Request) -> str:
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python:{mine if request.image.python == 'auto' else request.image.python}-slim"
