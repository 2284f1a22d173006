"""What every compute made from now on has unless it says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skytorch.events import OnEvents
from skytorch.metrics import OnMetrics

Volumes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Defaults:
    """The arguments of `Compute` that programs share."""

    image: str | None = None
    env: Mapping[str, str] | None = None
    resources: Mapping[str, str | int | float] | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    volumes: Volumes | None = None
    on_events: OnEvents | None = None
    on_metrics: OnMetrics | None = None


_current = Defaults()


def current() -> Defaults:
    """The defaults as they are now."""
    return _current


def init(
    *,
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

    What a `Compute` gives itself replaces the default as a whole: two `env` are not merged. The
    values are checked where they are used.

    >>> init(resources={"nvidia.com/gpu": "1"}, on_events=log_event)
    """
    global _current
    _current = Defaults(image, env, resources, labels, annotations, volumes, on_events, on_metrics)
