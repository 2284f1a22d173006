"""A compute: one machine with a name, which the user starts, suspends, resumes and deletes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import skyward as sky
from skytorch.client import kubeconfig, metrics, pods
from skytorch.client import volumes as storage
from skytorch.client.event import Event, OnEvents, Printed, Reporting, Returned
from skytorch.client.init import Volumes, current
from skytorch.client.metrics import Meter, OnMetrics
from skytorch.client.resources import NAME_RULE, Resources, is_name
from skytorch.client.state_dict import with_load_into
from skyward import checks
from skyward.errors import ConfigurationError, NoDeviceError, PoolClosedError
from skyward.providers.kubernetes.pending import MAKING

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")

OnLog = Callable[[str, str], object]
"""Gets "stdout" or "stderr" and the text, newline included."""


class Compute:
    """One machine to put tensors on and to execute functions on.

    With a kubeconfig, a `client_config` given to `init`, or in a pod, the compute is a pod of that
    cluster. `name` is that of the Job `sky-NAME`: one that exists, also of another process, is
    used, and replaced if it is not as this compute wants it. The pod has the torch of this process.
    `command` with `args` runs in it beside Skyward's own process, which is its first. A volume
    `{"name": ..., "storage": "10Gi", "path": ...}` is a claim that is kept while the compute is
    suspended, and deleted with it; `{"claim": ..., "path": ...}` is a claim that exists, and
    `{"path": ...}` a folder of the cluster's machines.

    With no cluster the compute is a process on this machine, which shares its files and packages:
    `image`, `command`, `args`, `labels` and `annotations` are checked and have no effect, a volume
    must be a path that exists.

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
        self.image = usual.image if image is None else image
        if self.image is not None:
            checks.text(self, "image", self.image)
        for what, words in (("command", command), ("args", args)):
            if words is not None:
                checks.texts(self, what, words)
        labels = usual.labels if labels is None else labels
        annotations = usual.annotations if annotations is None else annotations
        for what, pairs in (("labels", labels), ("annotations", annotations)):
            _check_pairs(self, what, pairs)
        checks.flag(self, "suspend", suspend)
        self._on_events = _callback(self, "on_events", on_events or usual.on_events)
        self._on_metrics = _callback(self, "on_metrics", on_metrics or usual.on_metrics)
        wanted = (usual.resources if resources is None else resources) or {}
        self._resources = Resources.of(self, wanted)
        env = dict((usual.env if env is None else env) or {})
        mounted = (usual.volumes if volumes is None else volumes) or ()
        cluster = kubeconfig.place(usual.client_config, usual.namespace)
        self._provider: pods.Kubernetes | None = None
        if cluster is None:
            kubeconfig.say_here()
            self._resources.check_here(self)
            self._image = sky.Image(env=env)
            self._volumes = storage.here(self, mounted)
            self.namespace = usual.namespace or "default"
        else:
            if args and not command:
                raise checks.refused(
                    self,
                    {"args": args},
                    "the first process of the pod is Skyward's, so the image's own command does "
                    "not run and nothing takes these; give command=, which runs beside it",
                )
            self._image = pods.image(env, self._resources)
            self._volumes = storage.on_cluster(self, self.name, mounted)
            self._provider = pods.Kubernetes(
                kubeconfig=cluster.kubeconfig,
                context=cluster.context,
                namespace=cluster.namespace,
                image=self.image,
                pod_template=pods.template(self._resources, labels, annotations),
                tolerations=self._resources.tolerations(),
                job=self.name,
                command=[*(command or ()), *(args or ())],
                on_pending=self._pending,
            )
            self.namespace = cluster.namespace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits_for = ""
        """What the pod waits for, while it is pending."""
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
            self._provider,
            vcpus=self._resources.cpus,
            memory_gb=self._resources.memory_gb,
            image=self._image,
            volumes=self._volumes,
            name=self.name,
        )

    # Starting, suspending, resuming, deleting.

    async def __aenter__(self) -> Self:
        if self._state != "suspended":
            try:
                await self.ready()
            except BaseException:
                if self._provider is not None:
                    # What this compute has made; not what others use.
                    await asyncio.to_thread(self._provider.delete, unused=True)
                raise
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
                f"{timeout} s{f': {self._waits_for}' if self._waits_for else ''}; give it longer"
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
                await self._stop()
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
                await self._stop()
                if self._provider is not None:
                    await asyncio.to_thread(self._provider.delete)
                self._state = "deleted"
                self._tell("Deleted", "it is gone")

    async def _start(self) -> None:
        if self._state == "ready":
            return
        self._loop, self._waits_for = asyncio.get_running_loop(), ""
        on_cluster = f"in the namespace {self.namespace!r}"
        self._tell("Starting", "on this machine" if self._provider is None else on_cluster)
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

    async def _stop(self) -> None:
        started, self._state = self._state == "ready", "suspended"
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
        for first with `device`, or else the best. They do not pass through this process. Returned
        modules and state dicts have `load_into(model)`. Tensors of the compute's devices among the
        arguments are passed by reference: the function gets the real ones, and what it writes to
        them is seen here.

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
        device: str | torch.device = self._devices[0] if self._devices else "auto"
        if self._on_events is None and on_log is None:
            staying = sky.remote(sky.Function(body, name=name), device=device)
            value = await (staying(*args, **kwargs) > self._pool)
        else:
            reporting = sky.Function(Reporting(body, printed=on_log is not None), name=name)
            call = sky.remote(reporting, device=device)(*args, **kwargs)
            value = await self._reported(call, on_log)
        return with_load_into(value, self._note_device)

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

    def _note_device(self, device: torch.device) -> None:
        if device.type == "sky" and device not in self._devices:
            self._devices.append(device)

    # Events and metrics.

    def _tell(
        self, reason: str, message: str, type: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        self.hear(Event(reason, message, type=type))

    def _pending(self, reason: str) -> None:
        """Tell why the pod is pending; called on a thread of the provider's."""
        self._waits_for = reason
        kind: Literal["Normal", "Warning"] = "Normal" if reason == MAKING else "Warning"
        assert self._loop is not None
        # The event loop may have ended: then nobody listens.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, "Pending", reason, kind)

    def hear(self, event: Event) -> None:
        """Give an event to `on_events`, as an event of this compute."""
        if self._on_events is not None:
            self._on_events(dataclasses.replace(event, compute=self.name))

    def _reading(self) -> metrics.Metrics | None:
        usage = self._pool.usage()
        if usage is None:
            return None
        operations = 0
        if self._devices:
            from skyward.device.core import core

            operations = sum(core().stats(device.index).operations for device in self._devices)
        stats = self._pool.stats()
        done = stats.succeeded + stats.failed
        traffic = stats.bytes_sent, stats.bytes_received
        return metrics.reading(self.name, usage, done, operations, *traffic)

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
    if not is_name(text):
        raise checks.refused(
            owner, {"name": name}, f"a compute's name {NAME_RULE}; write one such as 'trainer-1'"
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
        raise NoDeviceError(
            f"{given}: there is no such device; ask for 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'"
        )
    if index is None:
        if not colon:
            return kind
        index = int(number)
    elif colon:
        raise NoDeviceError(f"{given}: the index is there twice; write device({kind!r}, {index!r})")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise NoDeviceError(f"{given}: an index is a whole number, 0 or more")
    if kind == "auto" or (index and kind != "cuda"):
        raise NoDeviceError(
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
