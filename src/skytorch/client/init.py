"""The defaults of every compute that the program makes from now on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skytorch.client import kubeconfig
from skytorch.client.event import OnEvents
from skytorch.client.metrics import OnMetrics
from skytorch.client.resources import NAME_RULE, is_name
from skyward.errors import ConfigurationError

Volumes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Defaults:
    """The arguments of `Compute` that programs share, and the cluster that `init` was told."""

    image: str | None = None
    env: Mapping[str, str] | None = None
    resources: Mapping[str, str | int | float] | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    volumes: Volumes | None = None
    on_events: OnEvents | None = None
    on_metrics: OnMetrics | None = None
    namespace: str | None = None
    client_config: object = None


_current = Defaults()


def current() -> Defaults:
    """The defaults as they are now."""
    return _current


def default_namespace() -> str:
    """The namespace of every `Compute` made from now on.

    It is the one given to `init`, or that of the kubeconfig's context, or that of the pod that this
    process runs in, or "default".

    >>> default_namespace()
    'default'
    """
    if _current.namespace is not None:
        return _current.namespace
    place = kubeconfig.place(_current.client_config, None)
    return "default" if place is None else place.namespace


def init(
    *,
    client_config: object = None,
    namespace: str | None = None,
    image: str | None = None,
    env: Mapping[str, str] | None = None,
    resources: Mapping[str, str | int | float] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    volumes: Volumes | None = None,
    on_events: OnEvents | None = None,
    on_metrics: OnMetrics | None = None,
) -> None:
    """Set the defaults of every `Compute` made from now on; `init()` alone clears them.

    What a `Compute` gives itself replaces the default as a whole: two `env` are not merged.
    `Compute` checks the values. A `namespace` has no effect on this machine. `client_config` names
    a Kubernetes cluster: it is a `kubernetes.client.Configuration`, the path of a kubeconfig, or a
    kubeconfig as a mapping. A token in a `Configuration` is used as it is now: if it expires, give
    the path of the kubeconfig that renews it.

    >>> init(namespace="research", resources={"nvidia.com/gpu": "1"}, on_events=log_event)
    """
    global _current
    if namespace is not None and not is_name(namespace):
        raise ConfigurationError(
            f"init(namespace={namespace!r}): a namespace {NAME_RULE}; write one such as 'research'"
        )
    _current = Defaults(
        image,
        env,
        resources,
        labels,
        annotations,
        volumes,
        on_events,
        on_metrics,
        namespace,
        client_config,
    )
