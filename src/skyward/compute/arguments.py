"""The arguments of `Compute`: checked, and resolved to the pool that they describe."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from skyward import accelerators, checks
from skyward.accelerators import Accelerator
from skyward.calls.packer import blob_room
from skyward.compute.choice import Spec
from skyward.context import kernel_shell
from skyward.errors import ConfigurationError
from skyward.files.mounts import PACKAGES
from skyward.nodes import records
from skyward.nodes.deliveries import SentFolder
from skyward.nodes.records import KeptPool
from skyward.nodes.spec import PoolSpec, Preparations
from skyward.plugins.plugin import (
    Cluster,
    ClusterSpec,
    Plugin,
    check_distributed,
    composed,
    transformed,
)
from skyward.providers import (
    AllocationKind,
    Provider,
    Request,
    check_allocation,
    check_provider,
    check_region,
    is_here,
    providers_with,
    sells,
)
from skyward.providers.local import Local
from skyward.spec import Image, Nodes, Options, Project, Volume, Worker

_given: Counter[str] = Counter()
_SCRIPT_MOST = 30
_PROVIDERS_OWN = frozenset({"pvc", "emptydir"})
"""Schemes that a provider understands."""


def new_name() -> str:
    """A name for a pool that the user gave none: of the script and the time, "fit-191207"."""
    name = f"{_script()}-{time.strftime('%H%M%S')}"
    _given[name] += 1
    return name if _given[name] == 1 else f"{name}-{_given[name]}"


def _script() -> str:
    """What this program is called, in letters that every provider takes in a name."""
    if kernel_shell() is not None:
        return "notebook"
    path = Path(sys.argv[0] if sys.argv else "")
    # `python -m package` runs the file `__main__.py` of the package.
    called = path.parent.name if path.name == "__main__.py" else path.stem
    plain = re.sub("[^a-z0-9]+", "-", called.lower())[:_SCRIPT_MOST].strip("-")
    # An interactive Python, or one with -c, has no script.
    return plain if plain and called != "-c" else "python"


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
    project: str | Project | None,
    name: str | None,
    allocation: AllocationKind,
    region: str | None,
    max_hourly_cost: float | None,
    ttl: float | None,
    disk_gb: float | None,
    keep: bool | float,
) -> tuple[PoolSpec, tuple[Plugin, ...]]:
    """Return the pool that the arguments describe, and its plugins.

    Raises `ConfigurationError` for arguments that no pool can have.
    """
    if isinstance(provider, Spec):
        raise ConfigurationError(
            f"Compute({provider!r}): give a provider; for one of several specs write "
            "sky.Compute.any([sky.Spec(...), ...])"
        )
    provider = Local() if provider is None else provider
    check_provider("Compute", provider)
    accelerators.check("Compute", accelerator)
    _require(image, Image, "image", "sky.Image(...)", optional=True)
    _require(worker, Worker, "worker", "sky.Worker(...)", optional=True)
    _require(options, Options, "options", "sky.Options(...)", optional=True)
    numbers = {
        "vcpus": vcpus,
        "memory_gb": memory_gb,
        "max_hourly_cost": max_hourly_cost,
        "ttl": ttl,
        "disk_gb": disk_gb,
    }
    for what, number in numbers.items():
        checks.above_zero("Compute", what, number)
    provider, notes = _bought(
        provider,
        allocation=allocation,
        region=region,
        max_hourly_cost=max_hourly_cost,
        disk_gb=disk_gb,
    )
    if isinstance(provider, Local):
        notes += provider.lacking(vcpus, memory_gb)
    if not isinstance(volumes, Sequence):
        raise ConfigurationError(f"Compute(volumes={volumes!r}): give a list of volumes")
    for volume in volumes:
        _require(volume, Volume, "volumes", "sky.Volume(...)")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise ConfigurationError(f"Compute(name={name!r}): give a name of at least one letter")
    idle = _idle_limit(keep, name)
    if idle is not None and not Nodes.of(nodes).floor:
        raise ConfigurationError(
            f"Compute(keep={keep!r}, nodes={nodes!r}): a kept pool has at least one node, "
            "which knows its clients; give nodes=(1, n)"
        )
    worker, options = worker or Worker(), options or Options()
    name = name or new_name()
    cluster = Cluster(name, ClusterSpec(Nodes.of(nodes), accelerator, worker, options))
    plugged = composed(plugins)
    check_distributed(plugged, worker, options)
    planned = volume_plan(provider, volumes)
    image = _equipped(transformed(image or Image(), plugged, cluster), provider, planned.nodes)
    request = Request(
        accelerator,
        vcpus,
        memory_gb,
        image,
        planned.providers,
        cluster.spec.nodes.ceiling,
        allocation=allocation,
        max_hourly_cost=max_hourly_cost,
        disk_gb=disk_gb,
        ttl=ttl,
        idle_timeout=options.idle_timeout,
        keep=idle is not None,
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
        keep=idle,
        folders=(*_project(project), *planned.sent),
        volumes=planned.nodes,
        notes=notes,
    )
    if idle is not None:
        spec = replace(spec, recorded=_recorded(spec, plugged))
    return spec, plugged


def _idle_limit(keep: bool | float, name: str | None) -> float | None:
    """After how many seconds without a client a pool ends; 0: never, None: it is not kept."""
    if keep is False:
        return None
    if keep is not True:
        checks.above_zero("Compute", "keep", keep)
    if name is None:
        raise ConfigurationError(
            f"Compute(keep={keep!r}): a kept pool needs a name to be found by; write "
            "Compute(name='train', keep=True)"
        )
    records.check_name(name)
    if records.path_of(name).exists():
        raise records.exists(name)
    return 0.0 if keep is True else float(keep)


def _recorded(spec: PoolSpec, plugins: tuple[Plugin, ...]) -> str:
    """What the pool's record has of a specification, besides the provider."""
    parts = {each.name: getattr(spec, each.name) for each in fields(PoolSpec)}
    del parts["provider"], parts["recorded"], parts["id"]
    try:
        return records.pickled({**parts, "plugins": plugins})
    except Exception as problem:
        raise ConfigurationError(
            f"Compute(keep=...): the pool's plugins and image cannot be written down for other "
            f"clients: {type(problem).__name__}: {problem}"
        ) from problem


def restored(record: KeptPool, provider: Provider) -> tuple[PoolSpec, tuple[Plugin, ...]]:
    """The specification and the plugins of a kept pool, from its record."""
    parts = records.unpickled(record)
    plugins: tuple[Plugin, ...] = parts.pop("plugins")
    spec = PoolSpec(provider=provider, recorded=record.spec, id=record.id, **parts)
    if record.stopped and record.count and spec.nodes.floor == spec.nodes.ceiling:
        spec = replace(spec, nodes=Nodes(record.count))
    return spec, plugins


def _project(given: str | Project | None) -> tuple[SentFolder, ...]:
    """The project's folder, which must be there."""
    if given is None:
        return ()
    _require(given, (str, Project), "project", "the path of a folder, or sky.Project(...)")
    project = Project(given) if isinstance(given, str) else given
    source = Path(project.path).expanduser().resolve()
    if not source.is_dir():
        raise ConfigurationError(
            f"Compute(project={project.path!r}): there is no folder {source}; paths are relative "
            f"to the working directory, which is {Path.cwd()}"
        )
    if source in (Path(source.root), Path.home()):
        raise ConfigurationError(
            f"Compute(project={project.path!r}): that is {source}, with everything in it; name the "
            "project's own folder"
        )
    return (SentFolder(source, "", tuple(project.excludes), before_calls=project.before_calls),)


def _bought(
    provider: Provider,
    *,
    allocation: AllocationKind,
    region: str | None,
    max_hourly_cost: float | None,
    disk_gb: float | None,
) -> tuple[Provider, tuple[str, ...]]:
    """The provider in the region that was asked for, and what the user is told of the arguments.

    Refuses what only a seller understands; `Local` leaves it out, so that a program for a cloud can
    be tried here.
    """
    check_allocation("Compute", allocation)
    check_region("Compute", region)
    if sells(provider):
        return (provider if region is None else provider.in_region(region)), ()
    given: dict[str, object] = {
        "allocation": None if allocation == "on-demand" else allocation,
        "region": region,
        "max_hourly_cost": max_hourly_cost,
        "disk_gb": disk_gb,
    }
    asked = [f"{what}={value!r}" for what, value in given.items() if value is not None]
    if not asked:
        return provider, ()
    if isinstance(provider, Local):
        return provider, (f"{', '.join(asked)}: ignored, since this machine is not bought",)
    sellers = ", ".join(sorted(providers_with(sells))) or "none is installed"
    raise ConfigurationError(
        f"Compute({asked[0]}): the provider {provider.name!r} sells no machines; leave "
        f"{asked[0].partition('=')[0]} out, or use a provider that sells machines ({sellers})"
    )


def _require(value: Any, kind: Any, what: str, example: str, *, optional: bool = False) -> None:
    if (value is None and optional) or isinstance(value, kind):
        return
    hint = " (give an instance, not the class)" if isinstance(value, type) else ""
    raise ConfigurationError(f"Compute({what}={value!r}): expected {example}{hint}")


@dataclass(frozen=True, slots=True)
class VolumePlan:
    """Who makes each volume of a pool."""

    providers: tuple[Volume, ...]
    nodes: tuple[Volume, ...]
    sent: tuple[SentFolder, ...]


def volume_plan(provider: Provider, volumes: Sequence[Volume]) -> VolumePlan:
    """Say who makes each volume; refuses folders of this machine that are not there."""
    providers, nodes, sent = [], [], []
    targets: set[str] = set()
    for volume in volumes:
        if volume.target in targets:
            raise ConfigurationError(
                f"Compute(volumes=[...]): two of them have the target {volume.target!r}; give each "
                "its own"
            )
        targets.add(volume.target)
        scheme = volume.source.partition("://")[0] if "://" in volume.source else ""
        if scheme and scheme not in _PROVIDERS_OWN:
            nodes.append(volume)
        elif scheme or volume.source == volume.target or provider.capabilities.mounts_folders:
            providers.append(volume)
        else:
            source = Path(volume.source).expanduser().resolve()
            if not source.is_dir():
                raise ConfigurationError(
                    f"{volume}: there is no folder {source} on this machine, and it would be sent "
                    "to the nodes; name one, or leave target out for a path of the nodes"
                )
            if is_here(provider):
                nodes.append(Volume(str(source), volume.target, volume.read_only))
            else:
                back = not volume.read_only
                sent.append(SentFolder(source, volume.target, everything=True, back=back))
    return VolumePlan(tuple(providers), tuple(nodes), tuple(sent))


def _equipped(image: Image, provider: Provider, volumes: Sequence[Volume]) -> Image:
    """The image with the packages that copy volumes, in case a node cannot mount them."""
    needed = list(image.pip)
    for volume in volumes:
        scheme = volume.source.partition("://")[0]
        if "://" not in volume.source or scheme == "nfs":
            continue
        package = PACKAGES.get(scheme, "fsspec")
        if is_here(provider) and importlib.util.find_spec(package) is not None:
            continue
        if package not in needed:
            needed.append(package)
    return image if needed == list(image.pip) else replace(image, pip=needed)
