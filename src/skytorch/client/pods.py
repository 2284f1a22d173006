"""A compute as a pod: its arguments, as those of skyward's Kubernetes provider."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from packaging.version import Version

import skyward as sky
from skytorch.client.resources import Resources
from skyward.providers import Order, tell_nobody
from skyward.providers.kubernetes import PodAllocation, PodMachine
from skyward.providers.kubernetes.manifests import CONTAINER

_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


@dataclasses.dataclass(frozen=True)
class Kubernetes(sky.Kubernetes):
    """Skyward's provider, which also tells the compute why its pod is pending."""

    on_pending: Callable[[str], None] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def allocate(self, pool: str) -> PodAllocation:
        """The pods of one Job, which also tell the compute what they wait for."""
        return _ToldPods(self, pool)


class _ToldPods(PodAllocation):
    def __init__(self, provider: Kubernetes, pool: str) -> None:
        super().__init__(provider, pool)
        self._told = provider.on_pending or tell_nobody

    async def get(self, order: Order) -> PodMachine:
        def tell(reason: str) -> None:
            order.tell(reason)
            self._told(reason)

        return await super().get(dataclasses.replace(order, tell=tell))


def template(
    resources: Resources, labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None
) -> dict[str, Any]:
    """The pod template that has what a compute asks for."""
    container = {"name": CONTAINER, "resources": resources.container()}
    return {
        "metadata": {"labels": dict(labels or {}), "annotations": dict(annotations or {})},
        "spec": {"containers": [container]},
    }


def image(env: Mapping[str, str], resources: Resources) -> sky.Image:
    """What a pod has installed: the torch and numpy of this process, and a compiler.

    The compiler is for the torch device, once. Where `SKYWARD_KUBERNETES_PYTHON` names an
    interpreter that has everything, nothing is installed.
    """
    pip = []
    for package in ("torch", "numpy"):
        try:
            pip.append(f"{package}=={Version(metadata.version(package)).public}")
        except metadata.PackageNotFoundError:
            continue
    # The wheels for CPUs alone are a tenth as large.
    indexes = [] if resources.devices else [sky.PipIndex(_CPU_WHEELS, ["torch"])]
    return sky.Image(pip=pip, pip_indexes=indexes, apt=["g++"], env=env)
