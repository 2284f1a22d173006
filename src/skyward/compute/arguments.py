"""The arguments of `Compute`: checked, and resolved to the pool that they describe.

They may be those of a pool in the settings file, by its name. Of several pools of which one is
enough, they say which to try first: in the user's order, or the cheapest.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from skyward import accelerators, checks, plugins
from skyward.accelerators import Accelerator
from skyward.calls.packer import blob_room
from skyward.context import kernel_shell
from skyward.errors import ConfigurationError, UnavailableError
from skyward.files.mounts import PACKAGES
from skyward.former import explained
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
    find_provider,
    is_here,
    provider_names,
    providers_with,
    sells,
)
from skyward.providers.local import Local
from skyward.settings import ProjectSettings, expanded, meant, required_settings
from skyward.spec import Image, Nodes, Options, PipIndex, Project, Volume, Worker

_given: Counter[str] = Counter()
_SCRIPT_MOST = 30
_PROVIDERS_OWN = frozenset({"pvc", "emptydir"})
"""Schemes that a provider understands."""
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)")
_DURATIONS = re.compile(r"ttl|(?:.*_)?timeout")
"""Keys whose values are times; a string there, such as "8h", is a duration."""

Choose = Literal["cheapest", "first"]


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
        elif scheme and not provider.capabilities.mounts_folders:
            raise ConfigurationError(
                f"{volume}: {scheme}:// is of Kubernetes, and nodes of {provider.name} have only "
                "the files of their machines; give a folder of this machine, which is sent to "
                "them, or a bucket"
            )
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


@explained
@dataclass(frozen=True, slots=True)
class Spec:
    """Machines that a pool may have: one of several, for `Compute.any`.

    `max_hourly_cost` is the most that one machine may cost in an hour, in US dollars.

    >>> sky.Spec(sky.AWS(), accelerator=sky.accelerators.L4(), allocation="spot")
    """

    provider: Provider
    accelerator: Accelerator | None = None
    vcpus: float | None = None
    memory_gb: float | None = None
    region: str | None = None
    allocation: AllocationKind = "on-demand"
    max_hourly_cost: float | None = None
    disk_gb: float | None = None

    def __post_init__(self) -> None:
        check_provider("Spec", self.provider)
        accelerators.check("Spec", self.accelerator)
        for what in ("vcpus", "memory_gb", "max_hourly_cost", "disk_gb"):
            checks.above_zero("Spec", what, getattr(self, what))
        check_region("Spec", self.region)
        check_allocation("Spec", self.allocation)

    def __str__(self) -> str:
        """What tells this spec from others, such as "aws g6.xlarge, 8 vCPUs, spot in us-east-1"."""
        name, region = self.provider.name, self.region
        parts = [str(self.accelerator)] if self.accelerator is not None else []
        if self.vcpus is not None:
            parts.append(f"{self.vcpus:g} vCPUs")
        if self.memory_gb is not None:
            parts.append(f"{self.memory_gb:g} GB")
        if sells(self.provider):
            name += f" {self.provider.instance_type}" if self.provider.instance_type else ""
            region = region or self.provider.region
            parts.append("on demand" if self.allocation == "on-demand" else self.allocation)
        told = f"{name} {', '.join(parts)}".rstrip()
        return f"{told} in {region}" if region else told


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pool that could be started."""

    label: str
    pool: PoolSpec


class Failures:
    """Why candidates were passed over."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[str] = []

    def add(self, candidate: Candidate, problem: Exception) -> str:
        """Note that a candidate is passed over; returns the line that tells the user."""
        self._lines.append(f"{candidate.label}: {problem}")
        return f"{self._name}: {candidate.label} is passed over: {problem}"

    def error(self) -> UnavailableError:
        """The error if all candidates were passed over."""
        reasons = "".join(f"\n- {line}" for line in self._lines)
        count = len(self._lines)
        which = "its only spec is not" if count == 1 else f"none of its {count} specs is"
        return UnavailableError(
            f"{self._name} did not start: {which} available; add another spec, or try again later:"
            f"{reasons}"
        )


def check_choice(specs: object, choose: object) -> None:
    """Refuse what `Compute.any` cannot choose from."""
    if choose not in ("cheapest", "first"):
        raise ConfigurationError(
            f"Compute.any(choose={choose!r}): choose 'cheapest', or 'first' for your own order"
        )
    if not isinstance(specs, Sequence) or isinstance(specs, str) or not specs:
        raise ConfigurationError(f"Compute.any({specs!r}): give a list of at least one sky.Spec")
    for spec in specs:
        if not isinstance(spec, Spec):
            raise ConfigurationError(f"Compute.any([{spec!r}]): expected sky.Spec(provider, ...)")


def ordered(
    candidates: Sequence[Candidate], choose: Choose
) -> Iterator[tuple[Candidate, UnavailableError | None]]:
    """The candidates in the order in which to try them, or why one is not to be tried."""
    if choose == "first":
        yield from ((candidate, None) for candidate in candidates)
        return
    prices: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        try:
            prices.append((_price(candidate.pool), candidate))
        except UnavailableError as problem:
            yield candidate, problem
    for _, candidate in sorted(prices, key=lambda priced: priced[0]):
        yield candidate, None


def _price(pool: PoolSpec) -> float:
    provider, price = pool.provider, None
    if sells(provider):
        first = next(iter(provider.offers(pool.request)), None)
        price = None if first is None else first.hourly_cost
    else:
        price = provider.price(pool.request)
    return math.inf if price is None else price


def arguments_of(name: str, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of the `Compute` that the settings file describes under a name.

    `without` names arguments that the caller has: their values in the file are checked as far as
    their keys go, and not made.

    >>> sky.Compute(**arguments_of("train"))
    """
    settings = required_settings(name)
    return _Reader(settings, name).arguments(settings.pool(name), without)


def seconds_of(text: str) -> float:
    """The seconds of a duration such as "90s", "8h" or "1h 30min".

    >>> seconds_of("1h30m")
    5400.0
    """
    total, end = 0.0, 0
    while match := _PART.match(text.lower(), end):
        if match[2] not in _UNITS:
            break
        total, end = total + float(match[1]) * _UNITS[match[2]], match.end()
    if not end or text[end:].strip():
        raise ConfigurationError(
            "not a duration; write a number of seconds, or one such as '90s', '45min', '8h', '2d'"
        )
    return total


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the table of one pool."""

    settings: ProjectSettings
    pool: str

    def arguments(self, table: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
        readers = self._readers()
        named, inline = self._provider_table(table)
        given = {key: value for key, value in table.items() if key in readers}
        others = {key: value for key, value in table.items() if key not in (*readers, "provider")}
        # Every key that is no argument of `Compute` has to be one of the provider.
        made = self._provider(
            named, {**inline, **others}, [*readers], make="provider" not in without
        )
        found: dict[str, Any] = {"name": self.pool}
        if made is not None and "provider" in table:
            found["provider"] = made
        for key, value in given.items():
            if key not in without:
                found[key] = self._made(key, value, readers[key])
        return {key: value for key, value in found.items() if key not in without}

    def _readers(self) -> dict[str, Callable[[Any], Any]]:
        """How each argument of `Compute` is made from a value of the file."""
        return {
            "nodes": self._nodes,
            "accelerator": lambda value: accelerators.parse(_is(value, str, '"H100:8"')),
            "vcpus": _number,
            "memory_gb": _number,
            "image": self._image,
            "plugins": self._plugins,
            "worker": partial(_call, Worker, "worker"),
            "options": partial(_call, Options, "options"),
            "volumes": _volumes,
            "project": self._project,
            "allocation": lambda value: _is(value, str, '"spot"'),
            "region": lambda value: _is(value, str, '"us-east-1"'),
            "max_hourly_cost": _number,
            "ttl": _duration,
            "disk_gb": _number,
            "keep": lambda value: _is(value, bool, "true"),
        }

    def _made(self, key: str, value: Any, make: Callable[[Any], Any]) -> Any:
        try:
            return make(expanded(value))
        except LookupError as problem:
            raise self.settings.refused(self.pool, key, problem.args[0], value) from None
        except ConfigurationError as problem:
            if str(problem).startswith(str(self.settings.path)):
                raise
            raise self.settings.refused(self.pool, key, str(problem), value) from problem

    # The provider.

    def _provider_table(self, table: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The provider's name, and the arguments that stand in a table of its own."""
        given = table.get("provider", Local.name)
        if isinstance(given, str):
            return self._made("provider", given, lambda value: value), {}
        if isinstance(given, dict) and isinstance(given.get("name"), str):
            name = self._made("provider", given["name"], lambda value: value)
            return name, {key: value for key, value in given.items() if key != "name"}
        raise self.settings.refused(
            self.pool,
            "provider",
            'write its name, provider = "ssh", or a table, provider = {name = "ssh", ...}',
            given,
        )

    def _provider(
        self, name: str, table: Mapping[str, Any], others: list[str], *, make: bool
    ) -> Provider | None:
        try:
            kind = find_provider(name)
        except ConfigurationError as problem:
            hint = meant(name, provider_names())
            raise self.settings.refused(self.pool, "provider", f"{problem}{hint}", name) from None
        except ImportError as problem:
            raise self.settings.refused(
                self.pool, "provider", f"it cannot be imported: {problem}; install it", name
            ) from problem
        known = _parameters(kind)
        for key, value in table.items():
            if key not in known:
                raise self.settings.refused(
                    self.pool,
                    key,
                    f"neither a pool nor the provider {name!r} has it"
                    f"{meant(key, [*others, *known])}; a pool has provider, "
                    f"{', '.join(others)}; {name} has {', '.join(known) or 'none'}",
                    value,
                )
        if not make:
            return None
        given = {key: self._made(key, value, _argument(key)) for key, value in table.items()}
        if missing := [key for key, needed in known.items() if needed and key not in given]:
            raise self.settings.refused(
                self.pool,
                "provider",
                f"it needs {' and '.join(missing)}; add {missing[0]} = ...",
                name,
            )
        try:
            provider: Provider = kind(**given)
        except (TypeError, ValueError) as problem:
            raise self.settings.refused(self.pool, "provider", str(problem), name) from problem
        return provider

    # The values of a pool.

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, dict):
            return _call(Nodes, "nodes", value)
        return Nodes.of((*value,)) if isinstance(value, list) else Nodes(value).desired

    def _image(self, value: Any) -> Image:
        if isinstance(value, str):
            raise ConfigurationError(
                'a table such as {pip = ["numpy"]}; the image of a provider\'s containers goes to '
                'the provider: provider = {name = "container", image = ...}'
            )
        table = dict(_is(value, dict, '{pip = ["numpy"]}'))
        indexes = table.get("pip_indexes")
        if isinstance(indexes, list):
            table["pip_indexes"] = [_call(PipIndex, "pip_indexes", each) for each in indexes]
        if isinstance(table.get("includes"), list):
            # The folder of the file, not the working directory, is what its author saw.
            table["includes"] = [self._below_file(each) for each in table["includes"]]
        image: Image = _call(Image, "image", table)
        return image

    def _project(self, value: Any) -> Project:
        table = {"path": value} if isinstance(value, str) else dict(_is(value, dict, '"."'))
        table["path"] = self._below_file(table.get("path", "."))
        project: Project = _call(Project, "project", table)
        return project

    def _below_file(self, path: Any) -> Any:
        if not isinstance(path, str):
            return path
        return str(self.settings.path.parent / Path(path).expanduser())

    def _plugins(self, value: Any) -> list[Plugin]:
        example = '["torch", {huggingface = {models = ["gpt2"]}}]'
        return [self._plugin(each, example) for each in _is(value, list, example)]

    def _plugin(self, value: Any, example: str) -> Plugin:
        table: Any = {}
        if isinstance(value, dict) and len(value) == 1:
            ((value, table),) = value.items()
        if not isinstance(value, str):
            raise ConfigurationError(f"{value!r} is no plugin; write {example}")
        try:
            make = getattr(plugins, value)
        except AttributeError as problem:
            raise ConfigurationError(f"{problem}{meant(value, dir(plugins))}") from None
        if value not in dir(plugins):
            known = ", ".join(dir(plugins))
            raise ConfigurationError(f"there is no plugin {value!r}; there are {known}")
        if isinstance(make, Plugin):
            if table:
                raise ConfigurationError(f"plugin {value!r} takes no arguments; write its name")
            return make
        plugin: Plugin = _call(make, f"plugin {value!r}", table)
        return plugin


def _call(make: Callable[..., Any], what: str, table: Any) -> Any:
    """Make a value from a table, whose keys are the arguments."""
    known = _parameters(make)
    for key in _is(table, dict, f"{{{next(iter(known), 'key')} = ...}}"):
        if key not in known:
            raise ConfigurationError(
                f"{what} has no {key!r}{meant(key, known)}; it has {', '.join(known) or 'no keys'}"
            )
    if missing := [key for key, needed in known.items() if needed and key not in table]:
        raise ConfigurationError(f"{what} needs {' and '.join(missing)}")
    given = {
        key: seconds_of(value) if _DURATIONS.fullmatch(key) and isinstance(value, str) else value
        for key, value in table.items()
    }
    try:
        return make(**given)
    except (TypeError, ValueError) as problem:
        raise ConfigurationError(str(problem)) from problem


def _argument(key: str) -> Callable[[Any], Any]:
    """How an argument of a provider is made."""
    if _DURATIONS.fullmatch(key):
        return lambda value: seconds_of(value) if isinstance(value, str) else value
    if key == "mounts":
        return _volumes
    return lambda value: value


def _volumes(value: Any) -> list[Volume]:
    example = '["/data", {source = "s3://bucket", target = "/data"}]'
    return [
        Volume(each) if isinstance(each, str) else _call(Volume, "a volume", each)
        for each in _is(value, list, example)
    ]


def _parameters(make: Callable[..., Any]) -> dict[str, bool]:
    """The names of a function's arguments, and whether each is needed."""
    known = inspect.signature(make).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each.default is each.empty for each in known if each.kind in named}


def _is(value: Any, kind: type, example: str) -> Any:
    if isinstance(value, kind):
        return value
    names = {str: "a string", bool: "true or false", list: "a list", dict: "a table"}
    raise ConfigurationError(f"must be {names[kind]}; write one such as {example}")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError("must be a number above 0; write one such as 16")
    return value


def _duration(value: Any) -> float:
    return seconds_of(value) if isinstance(value, str) else _number(value)
