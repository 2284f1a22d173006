"""A compute: one machine with a name, which the user starts, suspends, resumes and deletes."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import skyward as sky
from skytorch.client import kubeconfig, metrics, names
from skytorch.client.event import Event, OnEvents, Printed, Reporting, Returned
from skytorch.client.init import Volumes, current
from skytorch.client.metrics import Meter, OnMetrics
from skytorch.client.placement import Placement
from skytorch.client.resources import Resources
from skyward import checks
from skyward.errors import ConfigurationError, PoolClosedError

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")

OnLog = Callable[[str, str], object]
"""Gets "stdout" or "stderr" and the text, newline included."""


class Compute:
    """One machine to put tensors on and to execute functions on.

    With no kubeconfig the compute is a process on this machine, which shares its files and
    packages: `image`, `command`, `args`, `labels` and `annotations` are checked and have no effect,
    a volume must be a path that exists. With a kubeconfig, or a `client_config` given to `init`, it
    is refused: this version has no Kubernetes provider.

    `on_events` is called with every `Event`, on the event loop's thread; `on_metrics` with a
    `Metrics` every second, on a thread of its own. Arguments that are not given are as `init` set
    them.

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
        usual = current()
        self.name = _checked_name(self, name)
        self.namespace = usual.namespace
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
        kubeconfig.require_none(usual.client_config)
        self._resources.check_here(self, wanted)
        # Made here so that wrong arguments are refused now; each start makes a new one.
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

    # Starting, suspending, resuming, deleting.

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

    async def ready(self, timeout: float | None = None) -> Self:
        """Start the compute if it has not started, and return it when it can be used.

        `TimeoutError` if it does not start within `timeout` seconds. The start is then undone, and
        `ready` may be called again.

        >>> node = await Compute(name="mnist").ready(timeout=60)
        """
        _check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout), self._changing:
                self._refuse("ready()", "suspended", "deleted")
                await self._start()
        except TimeoutError as problem:
            if self.is_ready():
                return self
            raise TimeoutError(
                f"ready(timeout={timeout}): the compute {self.name!r} did not start within "
                f"{timeout} s; give it longer"
            ) from problem
        return self

    def is_ready(self) -> bool:
        """Whether the compute can be used now.

        >>> node.is_ready()
        """
        return self._state == "ready" and all(view.state == "ready" for view in self._pool.nodes)

    async def suspend(self) -> Self:
        """Give the machine back; the name stays, the tensors on its devices are gone.

        >>> await node.suspend()
        """
        async with self._changing:
            self._refuse("suspend()", "deleted")
            if self._state != "suspended":
                await self._stop("suspended")
                self._tell("Suspended", "it holds no machine")
        return self

    async def resume(self) -> Self:
        """Start anew after `suspend`, and return the compute.

        Devices and tensors from before `suspend` stay gone: ask for a device again.

        >>> device = (await node.resume()).device("cuda")
        """
        async with self._changing:
            self._refuse("resume()", "deleted")
            await self._start()
        return self

    async def delete(self) -> None:
        """Take the compute down for good; leaving `async with` does this.

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
        try:
            await pool.__aenter__()
        except BaseException as problem:
            self._tell("Failed", f"it did not start: {problem!r}", "Warning")
            raise
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

    # Using the compute.

    def device(self, type: str = "auto", index: int | None = None) -> torch.device:
        """A torch device on the compute: "cuda", "cpu", "mps", or "auto" for the best it has.

        `device("cuda", 1)` and `device("cuda:1")` are the same.

        >>> model.to(node.device("cuda"))
        """
        kind = _device_kind(type, index)
        self._refuse(f"device({kind!r})", "new", "suspended", "deleted")
        device = self._pool.device(kind)
        if device not in self._devices:
            self._devices.append(device)
        return device

    async def execute(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on_log: OnLog | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function on the compute and await its result, whose tensors stay remote.

        Tensors, modules and state dicts in the result are on the compute's device: the one asked
        for first with `device`, or else the best. In this version they get there by way of this
        process. Returned modules and state dicts have `load_into(model)`. Tensors of the compute's
        devices among the arguments are passed by reference: the function gets the real ones, and
        what it writes to them is seen here.

        `on_log(stream, text)` gets each line that the function prints from Python, in place of the
        console; `stream` is "stdout" or "stderr". It is called on the event loop's thread.

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
        if on_log is not None and (not callable(on_log) or inspect.iscoroutinefunction(on_log)):
            raise ConfigurationError(
                f"execute(on_log={on_log!r}): give a plain function of a stream's name and a text"
            )
        name = getattr(body, "__qualname__", type(body).__name__)
        if self._on_events is None and on_log is None:
            value = await (sky.Function(body, name=name)(*args, **kwargs) > self._pool)
        else:
            reporting = sky.Function(Reporting(body, printed=on_log is not None), name=name)
            value = await self._reported(reporting(*args, **kwargs), on_log)
        return await asyncio.to_thread(Placement(self._usual_device).of, value)

    async def _reported(self, call: sky.Pending[Any], on_log: OnLog | None) -> Any:
        stream: Any = await (call > self._pool)
        with stream:
            while True:
                item = await asyncio.to_thread(next, stream, None)
                if isinstance(item, Returned):
                    return item.value
                if isinstance(item, Printed):
                    assert on_log is not None
                    on_log(item.stream, item.text)
                    continue
                assert isinstance(item, Event)
                self.hear(item)

    def _usual_device(self) -> torch.device:
        return self._devices[0] if self._devices else self.device()

    # Events and metrics.

    def _tell(
        self, reason: str, message: str, type: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        self.hear(Event(reason, message, type=type))

    def hear(self, event: Event) -> None:
        """Give an event to `on_events`, as an event of this compute."""
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
    if not names.is_name(text):
        raise checks.refused(
            owner, {"name": name}, f"a compute's name {names.RULE}; write one such as 'trainer-1'"
        )
    return text


def _check_timeout(timeout: object) -> None:
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):  # type: ignore[operator]
        raise ConfigurationError(f"ready(timeout={timeout!r}): give seconds, more than 0, or None")


def _device_kind(type: object, index: object) -> str:
    """The name of a device, such as "cuda:1"; refuses what no machine could have."""
    given = f"device({type!r})" if index is None else f"device({type!r}, {index!r})"
    kind, colon, number = type.partition(":") if isinstance(type, str) else ("", "", "")
    if kind not in DEVICES or (colon and not (number.isascii() and number.isdigit())):
        raise ConfigurationError(
            f"{given}: there is no such device; ask for 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'"
        )
    if index is None:
        if not colon:
            return kind
        index = int(number)
    elif colon:
        raise ConfigurationError(
            f"{given}: the index is there twice; write device({kind!r}, {index!r})"
        )
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise ConfigurationError(f"{given}: an index is a whole number, 0 or more")
    if kind == "auto" or (index and kind != "cuda"):
        raise ConfigurationError(
            f"{given}: only 'cuda' devices are numbered; write device('cuda', {index})"
        )
    return f"{kind}:{index}"


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
