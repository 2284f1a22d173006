"""A compute: one machine with a name, made ready, suspended, resumed and deleted."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import skyward as sky
from skytorch import defaults, kubeconfig, metrics
from skytorch.defaults import Volumes
from skytorch.events import Event, OnEvents, Reporting, Returned
from skytorch.metrics import Meter, OnMetrics
from skytorch.placement import Placement
from skytorch.resources import Resources
from skyward import checks
from skyward.errors import ConfigurationError, PoolClosedError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class Compute:
    """One machine to put tensors on and to execute functions on.

    With no kubeconfig it is a process on this machine, which shares its files and packages:
    `image`, `command`, `args`, `labels` and `annotations` are checked and have no effect, a volume
    must be a path that exists. With one, it is refused: this version has no Kubernetes provider.

    `on_events` is called with every `Event`, on the event loop's thread; `on_metrics` with a
    `Metrics` every second, on a thread of its own. What is not given is as `init` said.

    >>> async with Compute(name="mnist", resources={"nvidia.com/gpu": "1"}) as node:
    ...     model.to(node.device("cuda"))
    """

    def __init__(
        self,
        name: str,
        *,
        image: str | None = None,
        command: Sequence[str] | None = None,
        args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        resources: Mapping[str, str | int | float] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        suspend: bool = False,
        volumes: Volumes | None = None,
        on_events: OnEvents | None = None,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        usual = defaults.current()
        self.name = _checked_name(self, name)
        self.image = usual.image if image is None else image
        if self.image is not None:
            checks.text(self, "image", self.image)
        for what, words in (("command", command), ("args", args)):
            if words is not None:
                checks.texts(self, what, words)
        marks = {
            "labels": usual.labels if labels is None else labels,
            "annotations": usual.annotations if annotations is None else annotations,
        }
        for what, pairs in marks.items():
            _check_pairs(self, what, pairs)
        checks.flag(self, "suspend", suspend)
        self._on_events = _callback(self, "on_events", on_events or usual.on_events)
        self._on_metrics = _callback(self, "on_metrics", on_metrics or usual.on_metrics)
        wanted = (usual.resources if resources is None else resources) or {}
        self._resources = Resources.of(self, wanted)
        self._env = dict((usual.env if env is None else env) or {})
        self._volumes = _volumes(self, (usual.volumes if volumes is None else volumes) or ())
        kubeconfig.require_none()
        self._resources.check_here(self, wanted)
        # Refuses now what it could not start with; each start makes its own.
        self._pool = self._new_pool()
        self._state: Literal["new", "ready", "suspended", "deleted"] = (
            "suspended" if suspend else "new"
        )
        self._changing = asyncio.Lock()
        self._meter: Meter | None = None
        self._devices: list[torch.device] = []

    def _new_pool(self) -> sky.Compute:
        return sky.Compute(
            vcpus=self._resources.cpus,
            memory_gb=self._resources.memory_gb,
            image=sky.Image(env=self._env),
            volumes=self._volumes,
            name=self.name,
        )

    # Its life.

    async def __aenter__(self) -> Self:
        if self._state != "suspended":
            await self.ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.delete()

    async def ready(self) -> None:
        """Start it if it has not started, and return when it can be used.

        >>> await node.ready()
        """
        async with self._changing:
            self._refuse("ready()", "suspended", "deleted")
            await self._start()

    async def suspend(self) -> None:
        """Give its machine back; the name stays, the tensors on its devices are gone.

        >>> await node.suspend()
        """
        async with self._changing:
            self._refuse("suspend()", "deleted")
            if self._state != "suspended":
                await self._stop("suspended")
                self._tell("Suspended", "it holds no machine")

    async def resume(self) -> None:
        """Start anew after `suspend`; devices and tensors of before stay gone, so ask again.

        >>> await node.resume()
        """
        async with self._changing:
            self._refuse("resume()", "deleted")
            await self._start()

    async def delete(self) -> None:
        """Take it down for good; leaving `async with` does this.

        >>> await node.delete()
        """
        async with self._changing:
            if self._state != "deleted":
                await self._stop("deleted")
                self._tell("Deleted", "it is gone")

    async def _start(self) -> None:
        if self._state == "ready":
            return
        self._tell("Starting", "on this machine")
        pool = self._new_pool()
        await pool.__aenter__()
        self._pool, self._state = pool, "ready"
        if self._on_metrics is not None:
            self._meter = Meter(self._reading, self._on_metrics)
        self._tell("Ready", "it can be used")

    async def _stop(self, state: Literal["suspended", "deleted"]) -> None:
        started, self._state = self._state == "ready", state
        meter, self._meter = self._meter, None
        self._devices = []
        if meter is not None:
            await asyncio.to_thread(meter.stop)
        if started:
            await self._pool.__aexit__(None, None, None)

    # Using it.

    def device(self, kind: str = "auto") -> torch.device:
        """A torch device on it: "cuda", "cuda:1", "cpu", "mps", or "auto" for the best it has.

        >>> model.to(node.device("cuda"))
        """
        self._refuse(f"device({kind!r})", "new", "suspended", "deleted")
        device = self._pool.device(kind)
        if device not in self._devices:
            self._devices.append(device)
        return device

    async def execute(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function on the compute and await its result, whose tensors stay remote.

        Tensors, modules and state dicts in the result are on the compute's device: the one asked
        for first with `device`, or else the best. In this version they get there by way of this
        process. Tensors of the compute's devices among the arguments are passed by reference: the
        function gets the real ones, and what it writes to them is seen here.

        >>> weights = await node.execute(load_weights, "resnet18")
        >>> weights.load_into(model)
        """
        self._refuse("execute()", "new", "suspended", "deleted")
        body = fn.body if isinstance(fn, sky.Function) else fn
        if not callable(body):
            raise ConfigurationError(f"execute({fn!r}): give a function, and its arguments after")
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise ConfigurationError(
                f"execute({body.__name__}): it yields, and execute returns one value; return a "
                "list, or run it with skyward's own Compute to stream"
            )
        name = getattr(body, "__qualname__", type(body).__name__)
        if self._on_events is None:
            value = await (sky.Function(body, name=name)(*args, **kwargs) > self._pool)
        else:
            value = await self._reported(sky.Function(Reporting(body), name=name)(*args, **kwargs))
        return await asyncio.to_thread(Placement(self._usual_device).of, value)

    async def _reported(self, call: sky.Pending[Any]) -> Any:
        stream: Any = await (call > self._pool)
        with stream:
            while True:
                item = await asyncio.to_thread(next, stream, None)
                if isinstance(item, Returned):
                    return item.value
                assert isinstance(item, Event)
                self.hear(item)

    def _usual_device(self) -> torch.device:
        return self._devices[0] if self._devices else self.device()

    # Telling.

    def _tell(self, reason: str, message: str) -> None:
        self.hear(Event(reason, message))

    def hear(self, event: Event) -> None:
        """Hand an event to whoever listens, as one of this compute."""
        if self._on_events is not None:
            self._on_events(dataclasses.replace(event, compute=self.name))

    def _reading(self) -> metrics.Metrics:
        operations = 0
        if self._devices:
            from skyward.device.core import core

            operations = sum(core().stats(device.index).operations for device in self._devices)
        stats = self._pool.stats()
        done = stats.succeeded + stats.failed
        return metrics.read(self.name, done, operations, stats.bytes_sent, stats.bytes_received)

    def _refuse(self, what: str, *states: str) -> None:
        if self._state not in states:
            return
        problem, remedy = {
            "new": ("has not started", "`await node.ready()` or enter it with `async with`"),
            "suspended": ("is suspended", "`await node.resume()` first"),
            "deleted": ("was deleted", "make another Compute"),
        }[self._state]
        raise PoolClosedError(f"{what}: the compute {self.name!r} {problem}; {remedy}")

    def __repr__(self) -> str:
        return f"<skytorch.Compute {self.name}: {self._state}>"


def _checked_name(owner: object, name: object) -> str:
    text = checks.text(owner, "name", name)
    if not _NAME.fullmatch(text):
        raise checks.refused(
            owner,
            {"name": name},
            "a compute's name has small letters, digits and hyphens, at most 63; write one such "
            "as 'trainer-1'",
        )
    return text


def _check_pairs(owner: object, what: str, pairs: object) -> None:
    if pairs is None:
        return
    if not isinstance(pairs, Mapping) or not all(
        isinstance(text, str) for pair in pairs.items() for text in pair
    ):
        raise checks.refused(
            owner, {what: pairs}, f"{what} must map text to text; write {what}={{'team': 'vision'}}"
        )


def _callback(owner: object, what: str, given: Any) -> Any:
    if given is not None and (not callable(given) or inspect.iscoroutinefunction(given)):
        raise checks.refused(
            owner, {what: given}, f"{what} must be a plain function of one argument"
        )
    return given


def _volumes(owner: object, given: object) -> list[sky.Volume]:
    volumes = []
    for volume in given if isinstance(given, list | tuple) else [given]:
        path = volume.get("path") if isinstance(volume, Mapping) else None
        if not isinstance(path, str) or not os.path.exists(path):
            raise checks.refused(
                owner,
                {"volumes": given},
                f"{volume!r} names no path that exists, and a local compute sees this machine's "
                "files where they are; create it, and write [{'name': 'data', 'path': '/data'}]",
            )
        volumes.append(sky.Volume(path))
    return volumes
