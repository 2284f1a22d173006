"""The arguments of `Compute`: checked, and resolved to the pool that they describe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from skyward.accelerators import Accelerator
from skyward.calls.packing import blob_room
from skyward.errors import ConfigurationError
from skyward.nodes.preparations import Preparations
from skyward.nodes.spec import PoolSpec
from skyward.plugins.plugin import (
    Cluster,
    ClusterSpec,
    Plugin,
    check_distributed,
    composed,
    transformed,
)
from skyward.providers import Provider, Request
from skyward.providers.local import Local
from skyward.spec import Image, Nodes, Options, Volume, Worker

_names = itertools.count(1)


def resolve(
    *,
    provider: Provider | None,
    nodes: int | tuple[int, int] | Nodes,
    accelerator: Accelerator | None,
    vcpus: float | None,
    memory_gb: float | None,
    image: Image | None,
    plugins: Sequence[Plugin],
    worker: Worker | None,
    options: Options | None,
    volumes: Sequence[Volume],
    name: str | None,
) -> tuple[PoolSpec, tuple[Plugin, ...]]:
    """Return the pool that the arguments describe, and its plugins.

    Raises `ConfigurationError` for arguments that no pool can have.
    """
    provider = Local() if provider is None else provider
    _require(provider, Provider, "provider", "sky.Local()")
    _require(accelerator, Accelerator, "accelerator", "sky.accelerators.A100()", optional=True)
    _require(image, Image, "image", "sky.Image(...)", optional=True)
    _require(worker, Worker, "worker", "sky.Worker(...)", optional=True)
    _require(options, Options, "options", "sky.Options(...)", optional=True)
    for number, what in ((vcpus, "vcpus"), (memory_gb, "memory_gb")):
        if number is not None and not (isinstance(number, (int, float)) and number > 0):
            raise ConfigurationError(f"Compute({what}={number!r}): give a number above 0")
    if not isinstance(volumes, Sequence):
        raise ConfigurationError(f"Compute(volumes={volumes!r}): give a list of volumes")
    for volume in volumes:
        _require(volume, Volume, "volumes", "sky.Volume(...)")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ConfigurationError(f"Compute(name={name!r}): give a name of at least one letter")
    worker, options = worker or Worker(), options or Options()
    name = name or f"compute-{next(_names)}"
    cluster = Cluster(name, ClusterSpec(Nodes.of(nodes), accelerator, worker, options))
    plugged = composed(plugins)
    check_distributed(plugged, worker, options)
    image = transformed(image or Image(), plugged, cluster)
    request = Request(
        accelerator, vcpus, memory_gb, image, tuple(volumes), cluster.spec.nodes.ceiling
    )
    provider.check(request)
    blob_room()
    spec = PoolSpec(
        provider=provider,
        nodes=cluster.spec.nodes,
        accelerator=accelerator,
        worker=worker,
        options=options,
        request=request,
        name=name,
        preparations=Preparations.of(plugged, cluster),
    )
    return spec, plugged


def _require(value: Any, kind: Any, what: str, example: str, *, optional: bool = False) -> None:
    # `isinstance` takes a class for an instance: it has the attributes that the protocol names.
    if (value is None and optional) or (isinstance(value, kind) and not isinstance(value, type)):
        return
    hint = " (give an instance, not the class)" if isinstance(value, type) else ""
    raise ConfigurationError(f"Compute({what}={value!r}): expected {example}{hint}")
