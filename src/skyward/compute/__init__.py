"""`Compute`: the set of machines on which a user runs functions.

A kept pool is attached to from any process of its user, stopped, and started again.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextvars import Token
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import msgspec

from skyward import bootstrap, functions
from skyward.accelerators import Accelerator
from skyward.calls.flow import Crowd, Flow, Results
from skyward.calls.task import Task
from skyward.classes import Making
from skyward.closing import close_despite_interrupts, not_instead_of
from skyward.compute.arguments import (
    Candidate,
    Choose,
    Failures,
    Spec,
    arguments_of,
    check_choice,
    new_name,
    ordered,
    resolve,
    restored,
)
from skyward.compute.broadcasts import broadcast
from skyward.compute.kept_values import KeptValue, KeptValues, check_name
from skyward.compute.named import NamedCall, NamedCalls
from skyward.compute.objects import make, make_everywhere, make_later
from skyward.compute.snapshot import snapshot, unstarted
from skyward.console import console_for
from skyward.console.plain import Quiet
from skyward.context import POOL_VARIABLE
from skyward.errors import (
    ConfigurationError,
    NoDeviceError,
    PluginError,
    PoolClosedError,
    PoolError,
    SkywardError,
    UnavailableError,
    UnreachableError,
)
from skyward.events import Event, EventListener, PoolClosed, PoolReady, PoolStarted, json_log
from skyward.files.transfer import Synced
from skyward.former import METHODS, explained, missing
from skyward.functions import Function, Future, Pending, as_function, checked
from skyward.groups import InstanceGroup
from skyward.nodes import records
from skyward.nodes.cleanup import REMOVE_SECONDS, Cleaned, halt
from skyward.nodes.fleet import Fleet, NodeUsage
from skyward.nodes.kept import Adoption, ReachedPool, note_pool, provider_of, stopped_machines
from skyward.nodes.node import NodeView
from skyward.nodes.occupancy import check_jobs, end, recorded_pools
from skyward.nodes.records import Journal, KeptPool, PoolRecord
from skyward.nodes.spec import PoolSpec
from skyward.nodes.stacks import Stacks
from skyward.page.door import door
from skyward.plugins.plugin import Plugin, entered
from skyward.providers import (
    AllocationKind,
    Provider,
    Stopper,
    money,
    providers_with,
    sells,
    stops,
)
from skyward.spec import Image, Nodes, Options, Project, Volume, Worker
from skyward.state.link import StateLink

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from skyward.page.server import PageServer

T = TypeVar("T")
OnEvent = Callable[[Event], object]
On = int | Literal["head"] | None
E = TypeVar("E", bound=BaseException)
OWN_MACHINES = ("local", "ssh")
"""The providers whose machines are the user's own: without its workers, a pool costs nothing."""
LOG_VARIABLE = "SKYWARD_LOG"
_KIND = re.compile(r"[a-z]+(:[0-9]+)?")

_OURS = (
    str(Path(__file__).parents[1]),
    str(Path(asyncio.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
)

entered_computes: weakref.WeakSet[Compute] = weakref.WeakSet()
"""Every `Compute` of this process that is entered and not closed."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a pool has done so far; the bytes are those that went through executors' sockets."""

    submitted: int
    succeeded: int
    failed: int
    cancelled: int
    retried: int
    workers_died: int
    nodes_lost: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    cost: float | None
    """What the pool's machines have cost so far, in US dollars; None if a price is unknown."""
    hourly_cost: float | None
    """What the machines that are there now cost in an hour."""


@explained
class Compute:
    """A set of machines to run functions on.

    `name` stands for the pool in messages and in `sky ps`. It is only a name: two pools may have
    the same, and only `Compute.named` looks a name up in the project's settings.

    With `keep=True`, the pool is kept when the block is left: `sky.attach(name)` uses it again,
    from any process of this user, and `sky down NAME` or `compute.down()` ends it. With a number,
    it also ends by itself after so many seconds without a client.

    `project` is a folder of this machine whose files nodes have in their working directory.

    After `ttl` seconds the pool ends, whatever runs on it, and a machine ends itself even if this
    process is gone. The other arguments for machines that cost money are those of a provider that
    sells them: `allocation`, `region`, `disk_gb`, and `max_hourly_cost`, the most that one machine
    may cost in an hour, in US dollars. On this machine, which is not bought, a line says that they
    are ignored, and so are `vcpus` and `memory_gb` beyond what there is.

    `on_event` is called with every event of the pool (`sky.events`), on a thread of its own.

    >>> with sky.Compute(nodes=2) as compute:
    ...     result = train(model, x, y) >> compute
    """

    def __init__(
        self,
        provider: Provider | None = None,
        *,
        nodes: int | tuple[int, int] | Nodes = 1,
        accelerator: Accelerator | None = None,
        vcpus: float | None = None,
        memory_gb: float | None = None,
        image: Image | None = None,
        plugins: Sequence[Plugin] = (),
        worker: Worker | None = None,
        options: Options | None = None,
        volumes: Sequence[Volume] = (),
        project: str | Project | None = None,
        name: str | None = None,
        allocation: AllocationKind = "on-demand",
        region: str | None = None,
        max_hourly_cost: float | None = None,
        ttl: float | None = None,
        disk_gb: float | None = None,
        keep: bool | float = False,
        on_event: OnEvent | None = None,
    ) -> None:
        _check_callback(on_event)
        spec, plugins = resolve(
            provider=provider,
            nodes=nodes,
            accelerator=accelerator,
            vcpus=vcpus,
            memory_gb=memory_gb,
            image=image,
            plugins=plugins,
            worker=worker,
            options=options,
            volumes=volumes,
            project=project,
            name=name,
            allocation=allocation,
            region=region,
            max_hourly_cost=max_hourly_cost,
            ttl=ttl,
            disk_gb=disk_gb,
            keep=keep,
        )
        self._set_up(spec, plugins, on_event)

    def _set_up(
        self, spec: PoolSpec, plugins: tuple[Plugin, ...], on_event: OnEvent | None
    ) -> None:
        self._spec, self._plugins = spec, plugins
        self.name = spec.name
        self._candidates = [Candidate(spec.provider.name, spec)]
        self._choose: Choose | None = None
        """How to choose among the candidates; None if there is nothing to choose."""
        self._on_event = on_event
        self._token: Token[Any] | None = None
        self._pid = os.getpid()
        self._attached = False
        """Whether this is a client of a kept pool, which `attach` has connected."""
        self._fleet: Fleet | None = None
        """The nodes, and with their dispatcher the tasks on them; None before the first start."""
        self._named: NamedCalls | None = None
        """The calls by name; None before the first."""
        self._naming = threading.Lock()
        self._was_ready = False
        self._around = contextlib.ExitStack()
        """What the plugins have entered for the client."""
        self._listeners: PoolListeners | None = None
        """Who is told of what happens; None before the start and after the end."""
        self._ended = False
        """Whether the pool's last line has been shown."""

    @classmethod
    def any(
        cls,
        specs: Sequence[Spec],
        *,
        choose: Choose = "cheapest",
        nodes: int | tuple[int, int] | Nodes = 1,
        image: Image | None = None,
        plugins: Sequence[Plugin] = (),
        worker: Worker | None = None,
        options: Options | None = None,
        volumes: Sequence[Volume] = (),
        project: str | Project | None = None,
        name: str | None = None,
        ttl: float | None = None,
        on_event: OnEvent | None = None,
    ) -> Self:
        """A `Compute` on the machines of one of several specs: the first that can be had.

        The specs are tried one after the other when the block is entered, in the order of their
        prices, or with `choose="first"` in the order given. A spec whose machines are not available
        or out of reach is passed over, after everything made for it has been removed.

        >>> h100 = sky.Spec(sky.AWS(), accelerator=sky.accelerators.H100())
        >>> with sky.Compute.any([h100, sky.Spec(sky.SSH(["gpu1"]))], nodes=1) as compute: ...
        """
        check_choice(specs, choose)
        name = name or new_name()
        made = [
            cls(
                spec.provider,
                accelerator=spec.accelerator,
                vcpus=spec.vcpus,
                memory_gb=spec.memory_gb,
                region=spec.region,
                allocation=spec.allocation,
                max_hourly_cost=spec.max_hourly_cost,
                disk_gb=spec.disk_gb,
                nodes=nodes,
                image=image,
                plugins=plugins,
                worker=worker,
                options=options,
                volumes=volumes,
                project=project,
                name=name,
                ttl=ttl,
                on_event=on_event,
            )
            for spec in specs
        ]
        compute = made[0]
        compute._choose = choose
        compute._candidates = [
            Candidate(str(spec), each._spec) for spec, each in zip(specs, made, strict=True)
        ]
        return compute

    @classmethod
    def named(cls, name: str, **overrides: Any) -> Self:
        """The `Compute` that the project's settings file describes under a name.

        The file is the nearest skyward.toml, or pyproject.toml with [tool.skyward], from the
        working directory upwards, or what `SKYWARD_CONFIG` names. `overrides` are arguments of
        `Compute` that count in place of the file's.

        >>> with sky.Compute.named("train", nodes=4) as compute: ...
        """
        return cls(**{**arguments_of(name, without=overrides), **overrides})

    # Entering and leaving.

    def start(self) -> Self:
        """Start the pool without a `with` block; `close` ends it, or else the end of the process.

        For notebooks, where a block cannot span cells. A pool that runs already stays as it is.

        >>> compute = sky.Compute(nodes=2).start()
        """
        if self._fleet is not None and self._was_ready and not self._fleet.closed:
            return self
        try:
            self._open()
        except SkywardError as problem:
            raise shown_from_outside(problem) from problem.__cause__
        return self

    def __enter__(self) -> Self:
        try:
            self._open()
        except SkywardError as problem:
            # Not in a function of its own, which the user's traceback would show as well.
            raise shown_from_outside(problem) from problem.__cause__
        self._token = functions.current.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forget_context()
        with not_instead_of(problem):
            self.close()

    def _forget_context(self) -> None:
        if self._token is not None:
            # The context that leaves may not be the one that entered: `async with` across tasks.
            with contextlib.suppress(ValueError):
                functions.current.reset(self._token)
            self._token = None

    async def __aenter__(self) -> Self:
        opening = asyncio.create_task(asyncio.to_thread(self._open))
        try:
            await asyncio.shield(opening)
        except SkywardError as problem:
            raise shown_from_outside(problem) from problem.__cause__
        except asyncio.CancelledError:
            # The thread goes on in spite of the cancellation, and the pool that it opens must end.
            # A machine may take half an hour: what the thread waits for must end as well.
            while not opening.done():
                if self._fleet is not None and self._fleet.nodes:
                    await asyncio.to_thread(self.close)
                await asyncio.wait([opening], timeout=0.05)
            with contextlib.suppress(SkywardError):
                await opening
            await asyncio.to_thread(self.close)
            raise
        self._token = functions.current.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forget_context()
        with not_instead_of(problem):
            await asyncio.to_thread(self.close)

    @classmethod
    def _again(cls, record: KeptPool) -> Self:
        """A `Compute` like the one that has made a kept pool."""
        spec, plugins = restored(record, provider_of(record))
        compute = cls.__new__(cls)
        compute._set_up(spec, plugins, None)
        return compute

    @classmethod
    def _attach(cls, reached: ReachedPool, on_event: OnEvent | None) -> Self:
        """A `Compute` that is connected to a kept pool."""
        compute = cls._again(reached.record)
        compute._on_event = on_event
        # Last: from here on, the pool's fleet ends what has found the machines.
        compute._start(compute._spec, reached.adoption())
        compute._attached = True
        return compute

    def _open(self) -> None:
        fleet = self._fleet
        if self._attached and fleet is not None and not fleet.closed:
            self._attached = False
            return
        if fleet is not None:
            if not fleet.closed:
                raise PoolClosedError(
                    f"{self.name} is already entered; make another Compute instead"
                )
            if self._was_ready:
                raise PoolClosedError(
                    f"{self.name} is closed, and does not open again; make another Compute, with "
                    "the same arguments"
                )
            # It did not start, and nothing of that attempt is left.
            self._fleet = self._named = None
        if self._choose is None:
            self._start(self._spec)
        else:
            self._start_any(self._choose)

    def _start_any(self, choose: Choose) -> None:
        """Start the first of the candidates that can be had."""
        failures = Failures(self.name)
        for candidate, problem in ordered(self._candidates, choose):
            if problem is None:
                try:
                    self._start(candidate.pool)
                    return
                except (UnavailableError, UnreachableError) as failure:
                    # Closed by now: nothing of it is left.
                    self._fleet = self._named = None
                    Quiet().note(failures.add(candidate, failure))
            else:
                Quiet().note(failures.add(candidate, problem))
        raise failures.error()

    def _start(self, spec: PoolSpec, adoption: Adoption | None = None) -> None:
        self._spec = spec
        options, several = spec.options, spec.worker.per_node != 1
        console = console_for(options.console, several_workers=several, pool=spec.name)
        fleet = Fleet(spec, console, broadcast, adoption)
        self._was_ready = self._ended = False
        self._fleet = fleet
        try:
            self._begin(fleet, adoption)
        except BaseException:
            self.close()
            raise
        functions.active.append(self)
        entered_computes.add(self)

    def _begin(self, fleet: Fleet, adoption: Adoption | None) -> None:
        """Start the nodes, and all that is around them."""
        spec, console, is_new = self._spec, fleet.console, adoption is None
        started = time.monotonic()
        count = spec.nodes.desired if adoption is None else len(adoption.machines)
        self._listeners = PoolListeners(fleet, self._on_event, attached=not is_new)
        fleet.events.emit(PoolStarted, spec.provider.name, count)
        doing = f"starting {_quoted(spec)}" if is_new else "attaching"
        console.begin(f"{spec.name}: {doing}", count)
        for note in spec.notes if is_new else ():
            self._note(note)
        fleet.start()
        self._enter_plugins()
        if spec.keep is not None and is_new:
            fleet.keep()
            if warning := without_end(spec, fleet.ledger.hourly_cost):
                console.note(warning)
        seconds, there = time.monotonic() - started, sum(node.joined for node in fleet.nodes)
        ready = _readiness(there, spec.nodes, seconds, fleet.ledger.hourly_cost)
        fleet.events.emit(PoolReady, there, seconds)
        console.ready(f"{spec.name}: {ready}")
        # The block's output must follow this line, and not disturb a display that is redrawn.
        console.drain()
        self._was_ready = True

    def _enter_plugins(self) -> None:
        for plugin in self._plugins:
            if plugin.around_client is None:
                continue
            try:
                self._around.enter_context(entered(plugin.around_client, self))
            except Exception as problem:
                raise PluginError(
                    f"plugin {plugin.name!r}: its around_client failed: "
                    f"{type(problem).__name__}: {problem}"
                ) from problem

    def _note(self, text: str) -> None:
        self._open_fleet.console.note(f"{self.name}: {text}")

    def _hurry(self) -> None:
        if self._fleet is not None:
            self._fleet.hurry()

    def close(self, seconds: float = 5.0) -> None:
        """Take everything down; leaving the `with` block does this for you.

        Closes completely; a Ctrl-C meanwhile makes closing quicker.
        """
        close_despite_interrupts(lambda: self._take_down(seconds), self._hurry)

    def _take_down(self, seconds: float = 5.0) -> None:
        """Take everything down, or leave a kept pool; a second call does nothing more.

        Whatever fails of it, all of it is done; then the failure is raised.
        """
        if self in functions.active:
            functions.active.remove(self)
        entered_computes.discard(self)
        fleet = self._fleet
        if fleet is None or os.getpid() != self._pid:
            return
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._end, fleet, seconds)
            if fleet.is_kept and not fleet.closed:
                last_first.callback(fleet.devices.finish, self._note)
            last_first.callback(self._around.close)

    def _end(self, fleet: Fleet, seconds: float) -> None:
        kept = ""
        if self._named is not None:
            self._named.leave()
        if fleet.is_kept and not fleet.closed:
            fleet.detach(seconds)
            kept = f"kept until `sky down {self.name}`"
        else:
            fleet.close(seconds)
        listeners, self._listeners = self._listeners, None
        if listeners is not None:
            fleet.events.emit(PoolClosed, fleet.ledger.cost)
            listeners.close()
        if not self._ended:
            self._ended = True
            fleet.console.close(self._last_line(fleet, kept))

    def _last_line(self, fleet: Fleet, kept: str) -> str:
        receipt = fleet.ledger.receipt()
        if self._was_ready:
            counts = fleet.dispatcher.counts
            calls = str(counts) if counts.submitted else ""
            parts = [each for each in (calls, receipt, kept) if each]
            return f"{self.name}: {'; '.join(parts) or 'closed'}"
        return f"{self.name}: did not start; {receipt}" if receipt else ""

    def down(self, *, force: bool = False) -> None:
        """End a kept pool, for all its clients.

        Refuses while other clients are attached or jobs run on it, and names them, unless
        `force` is given.

        >>> sky.attach("train").down()
        """
        fleet = self._open_fleet
        with fleet.lock(force=force):
            if not force:
                check_jobs(self.name, [each.index for each in fleet.nodes], fleet.service)
            close_despite_interrupts(fleet.close, self._hurry)
        self.close()

    @property
    def _open_fleet(self) -> Fleet:
        """The fleet; raises `PoolClosedError` if there is none yet."""
        if self._fleet is None:
            raise PoolClosedError(
                f"{self.name} has not been entered; write `with sky.Compute() as compute:` first, "
                "or call compute.start()"
            )
        return self._fleet

    # Running calls.

    @overload
    def run(self, pending: Pending[T], on: On = None) -> T: ...
    @overload
    def run(self, pending: Making[T], on: On = None) -> T: ...
    def run(self, pending: Pending[Any] | Making[Any], on: On = None) -> Any:
        """Run on one node and wait; the same as `pending >> compute`.

        >>> compute.run(train(x), on="head")
        """
        fleet = self._fleet
        if fleet is None or fleet.deliveries.follows:
            fleet = self._fleet_for_calls()
        if isinstance(pending, Making):
            return make(fleet, pending, self._index(on))
        node, calls = None if on is None else self._index(on), fleet.dispatcher
        return calls.run(calls.prepare(checked(pending), on=node, keep=False))

    @overload
    def submit(
        self, pending: Pending[T], on: On = None, *, name: str | None = None
    ) -> Future[T]: ...
    @overload
    def submit(self, pending: Making[T], on: On = None) -> Future[T]: ...
    def submit(
        self, pending: Pending[Any] | Making[Any], on: On = None, *, name: str | None = None
    ) -> Future[Any]:
        """Run on one node and don't wait; the same as `pending > compute`.

        With a name, the call goes on when this client leaves the pool, which must be
        a kept one; `compute.result(name)` gets its result, from any client of the pool.

        >>> future = compute.submit(train(x), on=1)
        >>> compute.submit(train(x), name="run-7")
        """
        fleet = self._fleet_for_calls()
        if name is not None:
            return self._submit_named(pending, name, on=self._index(on), everywhere=False)
        if isinstance(pending, Making):
            return make_later(fleet, pending, self._index(on))
        calls = fleet.dispatcher
        return calls.future(calls.prepare(checked(pending), on=self._index(on), keep=True))

    @overload
    def broadcast(
        self, pending: Pending[T], on: None = None, *, name: None = None, fail_fast: bool = False
    ) -> list[T]: ...
    @overload
    def broadcast(
        self, pending: Pending[T], on: None = None, *, name: str, fail_fast: bool = False
    ) -> Future[list[T]]: ...
    @overload
    def broadcast(
        self, pending: Making[T], on: None = None, *, name: None = None, fail_fast: bool = False
    ) -> InstanceGroup[T]: ...
    def broadcast(
        self,
        pending: Pending[Any] | Making[Any],
        on: None = None,
        *,
        name: str | None = None,
        fail_fast: bool = False,
    ) -> Any:
        """Run on every worker at once; the same as `pending @ compute`.

        With `fail_fast`, it ends as soon as one worker has failed: the others are cancelled.
        Otherwise it waits for all; in a pool whose workers are a process group, those that are left
        are cancelled after `Options.fail_grace`.

        With a name, the broadcast is not waited for: the result is a `Future`, and the broadcast
        goes on when this client leaves, as with `submit`.

        >>> results = compute.broadcast(train())
        >>> compute.broadcast(train(), name="run-8")
        """
        fleet = self._fleet_for_calls()
        if on is not None:
            raise ConfigurationError(f"broadcast(on={on!r}): a broadcast runs everywhere; use run")
        if not isinstance(fail_fast, bool):
            raise ConfigurationError(f"broadcast(fail_fast={fail_fast!r}): give True or False")
        if name is not None:
            return self._submit_named(pending, name, on=None, everywhere=True, fail_fast=fail_fast)
        if isinstance(pending, Making):
            return make_everywhere(fleet, pending, fail_fast=fail_fast)
        return broadcast(fleet, checked(pending), fail_fast=fail_fast)

    def run_all(self, pendings: Sequence[Pending[Any]]) -> list[Any]:
        """Run different calls in parallel and wait for all; the first failure is raised.

        >>> compute.run_all([a(), b()])
        """
        calls = self._fleet_for_calls().dispatcher
        tasks: list[Task] = []
        crowd = Crowd()
        try:
            for pending in pendings:
                task = calls.prepare(checked(pending), keep=True)
                task.when_done(crowd.left)
                crowd.joined()
                tasks.append(task)
                calls.submit(task)
            failed = crowd.wait()
            if failed is not None:
                calls.result(failed)
            return [calls.result(task) for task in tasks]
        except BaseException:
            for task in tasks:
                if task.cancellable:
                    calls.cancel(task)
            raise

    def stream_all(self, pendings: Sequence[Pending[Any]], *, ordered: bool) -> Iterator[Any]:
        """Run different calls in parallel, yielding results as they come or in order.

        >>> for result in compute.stream_all([f(1), f(2)], ordered=False): ...
        """
        calls = self._fleet_for_calls().dispatcher
        flow: Flow[Any] = Flow(calls, iter(pendings), ordered, ahead=None)
        flow.fill()
        return flow

    @overload
    def map(
        self, fn: Function[..., T], *iterables: Iterable[Any], ordered: bool = True
    ) -> Results[T]: ...
    @overload
    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], ordered: bool = True
    ) -> Results[T]: ...
    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], ordered: bool = True
    ) -> Results[Any]:
        """Make one call per item; only a limited number of calls run ahead of the consumer.

        The results come one by one and are not kept. An index waits for all of them and keeps them.

        >>> for score in compute.map(evaluate, range(1000)): ...
        """
        if not iterables:
            raise ConfigurationError("map: give at least one iterable")
        for values in iterables:
            if not hasattr(values, "__iter__") and not hasattr(values, "__getitem__"):
                raise ConfigurationError(
                    f"map({fn!r}, {values!r}): that is not iterable; give a "
                    "list or another iterable for each argument"
                )
        call = as_function(fn)
        fleet = self._fleet_for_calls()
        pendings = (call(*items) for items in zip(*iterables, strict=False))
        sizes = [len(values) if isinstance(values, Sized) else None for values in iterables]
        known = [size for size in sizes if size is not None]
        count = min(known) if len(known) == len(sizes) else None
        ahead = 4 * fleet.slots() + 16
        results: Results[Any] = Results(fleet.dispatcher, pendings, ordered, ahead, count)
        results.fill()
        return results

    def _fleet_for_calls(self) -> Fleet:
        fleet = self._open_fleet
        if fleet.deliveries.follows:
            fleet.before_calls()
        return fleet

    def _index(self, on: On) -> int | None:
        if on is None:
            return None
        if on == "head":
            return 0
        # Node 0 is the first that a pool without nodes starts.
        count = max(1, len(self._open_fleet.nodes))
        if isinstance(on, bool) or not isinstance(on, int) or not 0 <= on < count:
            raise ConfigurationError(f"on={on!r}: give 'head' or a node from 0 to {count - 1}")
        return on

    # Calls by name.

    def _submit_named(
        self,
        pending: Any,
        name: str,
        *,
        on: int | None,
        everywhere: bool,
        fail_fast: bool = False,
    ) -> Future[Any]:
        if isinstance(pending, Making):
            raise ConfigurationError(
                f"name={name!r}: an object of {pending.name} lives with its client; make it inside "
                "a function, and name the call of that function"
            )
        return self._calls.submit(
            checked(pending), name, on=on, everywhere=everywhere, fail_fast=fail_fast
        )

    def result(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a call by its name; returns its value, or raises its exception.

        Any client of the pool may ask, as often as it likes. After `timeout` seconds it raises
        `TimeoutError`, and the call goes on.

        >>> sky.attach("train").result("run-7")
        """
        return self._calls.result(name, timeout)

    def calls(self) -> list[NamedCall]:
        """The calls that have names, in the order in which they were made, with their states.

        >>> [call.name for call in compute.calls() if call.state == "running"]
        """
        return self._calls.all()

    def cancel(self, name: str) -> None:
        """End a call by its name: its worker is interrupted. A call that has ended stays as it is.

        >>> compute.cancel("run-7")
        """
        self._calls.cancel(name)

    @property
    def _calls(self) -> NamedCalls:
        with self._naming:
            if self._named is None:
                self._named = NamedCalls(self._open_fleet)
            return self._named

    # Values by name.

    def keep(self, name: str, value: object) -> None:
        """Keep a value on the pool by name, in place of an earlier one, until `forget`.

        Tensors of a sky device, such as those of a model or a state dict, stay on the device as
        they are: nothing is copied, and what is written to them later is kept as well. All else is
        kept in the memory of the node: the device's, or the head node.

        >>> compute.keep("model", model)
        """
        KeptValues(self._open_fleet).keep(name, value)

    def kept(self, name: str) -> Any:
        """The value that was kept by that name; tensors of a device are on the device again.

        They are the tensors that were kept, not copies, unless another client that is attached now
        has them on its device. If this client's device is another process than theirs, they are on
        a sky device of their own: see `tensor.device`. Objects are of the classes that this process
        has imported.

        >>> model = sky.attach("train").kept("model")
        """
        return KeptValues(self._open_fleet).get(name)

    def kept_names(self) -> list[str]:
        """The names of the values that the pool keeps; `kept_values` says more of them."""
        return [each.name for each in self.kept_values()]

    def kept_values(self) -> list[KeptValue]:
        """The values that the pool keeps: where each is, and how large.

        >>> sum(each.bytes for each in compute.kept_values() if each.device == "cuda")
        """
        return KeptValues(self._open_fleet).all()

    def forget(self, name: str) -> None:
        """Discard what was kept by that name; nothing happens if there is nothing.

        That is a value of `keep`, or the result of a named call that has ended. The memory of a
        value's tensors is free when no client uses them any more.
        """
        check_name(name, "forget")
        if self._open_fleet.is_kept:
            self._calls.forget(name)
        KeptValues(self._open_fleet).forget(name)

    # Files.

    def sync(self) -> Synced:
        """Send the nodes what has changed in the project, and remove there what was removed here.

        Modules that a worker has imported are not imported again.

        >>> compute.sync().files
        """
        if not self._open_fleet.deliveries.follows:
            raise ConfigurationError(
                "sync(): the nodes follow no folder; write sky.Compute(..., project='.')"
            )
        return self._open_fleet.sync()

    def write_back(self) -> Synced:
        """Write what functions have written into volumes to where the volumes come from.

        That happens by itself when the pool ends.

        >>> compute.write_back().files
        """
        return self._open_fleet.write_back()

    # The nodes, and their devices and numbers.

    def device(self, kind: str = "auto", index: int = 0, *, node: int = 0) -> torch.device:
        """A torch device on a node: put tensors on it and go on in plain PyTorch.

        `kind` is what the node has: "cuda", "cuda:1", "cpu", "mps", or "auto" for the best of it.

        >>> model.to(compute.device("cuda"))
        """
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise NoDeviceError(
                f"device({kind!r}): there is no such device; give 'cuda', 'cuda:1', 'cpu', 'mps' "
                "or 'auto'"
            )
        if index and ":" in kind:
            raise NoDeviceError(
                f"device({kind!r}, {index!r}): the index is there twice; write "
                f"device({kind!r}), or device({kind.partition(':')[0]!r}, {index!r})"
            )
        if index:
            kind = f"{kind}:{index}"
        try:
            import torch
        except ModuleNotFoundError as problem:
            raise NoDeviceError(
                f"device({kind!r}): this needs torch, also where the script runs; install it with: "
                "pip install 'skyward-torch[torch]'"
            ) from problem
        kind = os.environ.get("SKYWARD_DEVICE") or kind
        fleet = self._open_fleet
        fleet.dispatcher.check_open()
        return torch.device("sky", fleet.devices.get(node, kind))

    def mesh(self, kind: str = "auto", /, **sizes: int) -> DeviceMesh:
        """A torch DeviceMesh over the pool, held by this program: a rank per GPU, or per worker.

        Its dimensions are named as you like. PyTorch's DTensor, tensor parallelism, `fully_shard`
        and collectives work on it; `mesh.device` is a torch device whose tensors exist once per
        rank. `kind` is "cuda", "cpu" or "auto".

        >>> mesh = compute.mesh(dp=2, tp=4)
        >>> fully_shard(model.to(mesh.device), mesh=mesh["dp"])
        """
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigurationError(f"mesh({name}={size!r}): give a whole number of ranks")
        if not sizes:
            raise ConfigurationError("mesh(): name its dimensions, such as compute.mesh(dp=4)")
        if kind not in ("auto", "cpu", "cuda"):
            raise NoDeviceError(f"mesh({kind!r}): give 'cuda', 'cpu' or 'auto'")
        try:
            from skyward.device.libraries import mesh as patches
            from skyward.device.mesh import Mesh
        except ModuleNotFoundError as problem:
            raise NoDeviceError(
                "mesh(): this needs torch, also where the script runs; install it with: "
                "pip install 'skyward-torch[torch]'"
            ) from problem
        patches.install()
        fleet = self._open_fleet
        fleet.dispatcher.check_open()
        kind = os.environ.get("SKYWARD_DEVICE") or kind
        index, world = fleet.devices.mesh(math.prod(sizes.values()), kind)
        return Mesh(index, sizes, world)

    def make_on_device(self, making: Making[T], index: int) -> T | None:
        """Make an object that can open a device's memory; None if the device is another pool's."""
        if (fleet := self._fleet) is None or fleet.closed:
            return None
        holder = fleet.devices.holder(index)
        if holder is None:
            return None
        node, worker = holder
        return make(self._fleet_for_calls(), making, node if worker is None else (node, worker))

    def devices(self, kind: str = "auto") -> list[torch.device]:
        """A torch device on every node that has started.

        >>> first, second = compute.devices("cpu")
        """
        there = [node for node in self.nodes if node.state not in ("starting", "failed")]
        return [self.device(kind, node=node.node) for node in there]

    @property
    def nodes(self) -> list[NodeView]:
        """The nodes as they are now: state, address, accelerator, running tasks."""
        return self._open_fleet.views()

    def resize(self, nodes: int | tuple[int, int] | Nodes, *, force: bool = False) -> None:
        """Grow or shrink to that many nodes; `(min, max)` and `Nodes` set new bounds as well.

        Returns when that many nodes are ready; with bounds, when `min` nodes are ready. A kept
        pool does not shrink while other clients are attached or jobs run on it: the
        error names them. `force` shrinks it all the same.

        >>> compute.resize(4)
        >>> compute.resize(sky.Nodes(8, min=4))
        """
        if isinstance(nodes, (tuple, list, Nodes)):
            if self._open_fleet.is_kept and not Nodes.of(nodes).floor:
                raise ConfigurationError(
                    f"resize({nodes!r}): a kept pool has at least one node, which knows its "
                    "clients; give (1, n)"
                )
            self._open_fleet.resize(Nodes.of(nodes), force=force)
            return
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ConfigurationError(
                f"resize({nodes!r}): give a whole number of nodes, 1 or more, (min, max) or Nodes"
            )
        self._open_fleet.resize(nodes, force=force)

    def current_nodes(self) -> int:
        """How many nodes are ready now.

        >>> compute.current_nodes()
        2
        """
        return sum(view.state == "ready" for view in self._open_fleet.views())

    def stats(self) -> Stats:
        """The pool's numbers so far: calls, losses, bytes and cost.

        >>> compute.stats().succeeded
        """
        fleet = self._open_fleet
        counts = fleet.dispatcher.counts
        sent, received = fleet.dispatcher.traffic()
        return Stats(
            counts.submitted,
            counts.succeeded,
            counts.failed,
            counts.cancelled,
            counts.retried,
            counts.workers_died,
            counts.nodes_lost,
            sent,
            received,
            time.monotonic() - counts.started,
            fleet.ledger.cost,
            fleet.ledger.hourly_cost,
        )

    def usage(self, node: int = 0) -> NodeUsage | None:
        """How busy a node is: processors, memory and GPUs; None if it does not answer now.

        Functions that run on the node do not hold up the answer.

        >>> compute.usage().cpu_percent
        """
        return self._open_fleet.usage(node)

    def stacks(self) -> Stacks:
        """Where every worker is: the stacks of all its threads, and the tasks that it runs.

        The nodes' agents answer, also for a worker that hangs in C code.

        >>> print(compute.stacks())
        """
        return self._open_fleet.stacks()

    def state_link(self) -> StateLink:
        """The way to the shared state, for `sky.dict` and the others."""
        return self._open_fleet.state

    def take_numbers(self, values: dict[str, float], step: int | None) -> None:
        """Take what the client logs, for `sky.log`."""
        self._open_fleet.dispatcher.teller.logged_here(values, step)

    def worker_count(self) -> int:
        """How many workers there are now."""
        return len(self._open_fleet.workers())

    def ui(self, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve a page that shows this process's pools; returns its URL, which has a secret token.

        The page is there until this pool is closed. A second call returns the same URL.

        >>> print(compute.ui())
        """
        listeners = None if self._open_fleet.closed else self._listeners
        if listeners is None:
            raise PoolClosedError(f"{self.name} is closed; its page ended with it")
        return listeners.serve_page(host, port)

    def __repr__(self) -> str:
        if "_fleet" not in vars(self):
            return "<sky.Compute: not made, its arguments were refused>"
        if self._fleet is None:
            state = "not entered"
        elif self._fleet.closed:
            state = "closed"
        else:
            count = len(self._fleet.nodes)
            state = "1 node" if count == 1 else f"{count} nodes"
        return f"<sky.Compute {self.name}: {state}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: nodes, their states, what they run and how busy they are."""
        if self._fleet is None:
            return unstarted(self.name, self._spec)
        return snapshot(self.name, self._fleet)

    if not TYPE_CHECKING:
        # Hidden from type checkers: to them, every name would be an attribute.
        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise missing("Compute", name, METHODS)
            # Once more, for the error: a property may have raised it.
            return object.__getattribute__(self, name)


def shown_from_outside(failure: E) -> E:
    """Drop the frames of skyward and asyncio from an error and its causes.

    The message says what happened; the place in a thread of the pool does not help the user. The
    frames of other people's providers stay, because they show where the provider failed.
    """
    failure.__traceback__ = None
    seen: set[int] = {id(failure)}
    cause = failure.__cause__ or failure.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _outside(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return failure


def _outside(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames


@atexit.register
def _close_all() -> None:
    for compute in list(entered_computes):
        # Directly: an interpreter that ends starts no thread.
        compute._take_down()


def _disown() -> None:
    """Forget the parent's pools in a forked child: the child must neither use nor close them."""
    functions.active.clear()
    functions.current.set(None)
    entered_computes.clear()


os.register_at_fork(after_in_child=_disown)


class PoolListeners:
    """The listeners of one pool, and the pool's place on the pages of this process and `sky ui`."""

    def __init__(self, fleet: Fleet, on_event: OnEvent | None, *, attached: bool = False) -> None:
        """The options of a pool that one is `attached` to are those of the client that made it."""
        self._fleet = fleet
        self._listeners: list[EventListener] = []
        self._page: PageServer | None = None
        options, note = fleet.spec.options, fleet.console.note
        try:
            if (folder := options.tensorboard) is not None:
                fleet.dispatcher.teller.tracking.write_to(folder)
        except ConfigurationError as problem:
            if not attached:
                raise
            note(f"{fleet.spec.name}: {problem}")
        log = options.log or os.environ.get(LOG_VARIABLE)
        if log:
            self._listeners.append(json_log(log, note))
        if on_event is not None:
            self._listeners.append(EventListener("on_event", on_event, note))
        for listener in self._listeners:
            fleet.events.add(listener.take)
        door.enter(fleet)

    def serve_page(self, host: str, port: int) -> str:
        """Serve a page, once, and return its URL."""
        # Imported here: few pools are looked at, and an HTTP server takes 20 ms to import.
        from skyward.page.hub import Hub
        from skyward.page.server import PageServer

        if self._page is None:
            self._page = PageServer(Hub(own=True), host, port)
            self._page.hub.hold()
        return self._page.url

    def close(self) -> None:
        """Give the listeners the last events, end their threads, and show the pool no more."""
        for listener in self._listeners:
            self._fleet.events.remove(listener.take)
            listener.close()
        self._listeners.clear()
        self._fleet.dispatcher.teller.tracking.close()
        door.leave(self._fleet)
        page, self._page = self._page, None
        if page is not None:
            page.close()


def _check_callback(on_event: OnEvent | None) -> None:
    """Refuse what cannot be called with an event."""
    if on_event is not None and not callable(on_event):
        raise ConfigurationError(
            f"Compute(on_event={on_event!r}): give a function that takes an event of sky.events"
        )


def attach(name: str | None = None, *, on_event: OnEvent | None = None) -> Compute:
    """Connect to a kept pool, and return a `Compute` on it.

    The pool was made by `sky up NAME` or by `Compute(name=..., keep=True)`. Leaving the block, or
    the end of the process, leaves the pool as it is. Without a name, it is the pool on which this
    process runs. `on_event` is as for `Compute`.

    >>> with sky.attach("train") as compute:
    ...     result = train(model) >> compute
    """
    _check_callback(on_event)
    try:
        with reach(_named(name), forget=True) as reached:
            return Compute._attach(reached, on_event)
    except PoolError as problem:
        raise shown_from_outside(problem) from problem.__cause__


def reach(name: str, *, forget: bool = False) -> ReachedPool:
    """A kept pool, for its services alone: `pool.service(0, "about")`.

    With `forget`, the record of a pool whose machines are gone is removed.
    """
    record = records.read(name)
    if record.stopped:
        _check_stopped(record)
        raise PoolError(f"{name} is stopped; `sky start {name}` starts it again")
    return ReachedPool(record, forget=forget)


def _named(name: str | None) -> str:
    found = name or os.environ.get(POOL_VARIABLE)
    if not found or not isinstance(found, str):
        raise ConfigurationError(
            f"attach({name!r}): give the name of a kept pool, such as `sky ps` lists; "
            f"only a script that runs on such a pool ({POOL_VARIABLE}) may leave it out"
        )
    return found


@dataclass(frozen=True, slots=True)
class StoppedPool:
    """What became of a pool that was stopped."""

    cleaned: Cleaned
    """What came back from the nodes, and what did not."""
    hourly_cost: float | None
    """What it costs while it is stopped, in US dollars; None if nobody knows."""


def stop_pool(name: str, *, force: bool) -> StoppedPool:
    """End the agents and workers of a pool, stop its machines, and keep its record."""
    record = records.read(name)
    if record.stopped and not record.ending:
        raise PoolError(f"{name} is stopped already; `sky start {name}` starts it again")
    if record.provider not in OWN_MACHINES:
        _check_stops(record)
    journal = Journal()
    note_pool(journal, record)
    journalled = _journalled(journal, record)
    if journalled is None:
        raise PoolError(f"{name} has just ended; `sky ps` shows the pools that are left")
    cleaned = end(journal, journalled, record, force=force, stop=True)
    if cleaned.failures:
        raise PoolError(
            f"{name} was not stopped as a whole: {'; '.join(cleaned.failures)}; `sky stop {name}` "
            "goes on with it"
        )
    costs = [pool.hourly_cost for pool in journal.pools() if pool.id == record.id]
    return StoppedPool(cleaned, costs[0] if costs else None)


def _check_stopped(record: KeptPool) -> None:
    """Refuse a pool of which agents may run, though its record says that they are to end."""
    if record.ending:
        name = record.name
        raise PoolError(
            f"{name} is being stopped, or was not stopped as a whole; if nobody does that now, "
            f"`sky stop {name}` goes on with it, and `sky down {name}` removes it"
        )


def _check_stops(record: KeptPool) -> None:
    """Refuse a pool whose machines cannot be stopped."""
    provider, name = provider_of(record), record.name
    advice = f"`sky down {name}` ends it, `sky up {name}` makes it anew"
    if not stops(provider):
        able = ", ".join(sorted({*OWN_MACHINES, *providers_with(stops)}))
        raise PoolError(
            f"{name}: the provider {record.provider} cannot stop a pool and keep its machines; "
            f"those that can are {able}. {advice}"
        )
    try:
        asyncio.run(provider.check_stop(record.id))
    except PoolError as problem:
        raise PoolError(f"{name}: {problem}; {advice}") from None


def start_pool(name: str) -> int:
    """Start a stopped pool again, and return the number of its nodes."""
    record = records.read(name)
    provider = provider_of(record)
    _check_stopped(record)
    if not record.stopped:
        if not stopped_machines(record, provider):
            raise PoolError(f"{name} is not stopped; `sky attach {name}` says who uses it")
        record = _noted_as_stopped(record)
    compute = Compute._again(record)
    try:
        with compute:
            nodes = [view.node for view in compute.nodes]
    except BaseException as problem:
        if stops(provider):
            _stop_again(record, provider, problem)
        if name not in records.names():
            records.write(record)
        raise
    if stops(provider):
        asyncio.run(_remove_others(provider, record.id, nodes))
    return len(nodes)


def _stop_again(record: KeptPool, provider: Stopper, problem: BaseException) -> None:
    """Stop what a start that failed has started; tell with its problem what could not be."""
    journal = Journal()
    journalled = _journalled(journal, record)
    if journalled is None:
        return
    failures = halt(journal, journalled, provider).failures
    if failures:
        problem.add_note(
            f"machines of {record.name} may be running still: {'; '.join(failures)}; "
            f"`sky down {record.name}` removes them"
        )


def _noted_as_stopped(record: KeptPool) -> KeptPool:
    """Write down that a pool is stopped: its machines were, or have ended by themselves."""
    count = len(record.nodes) or record.count
    stopped = msgspec.structs.replace(record, nodes=[], stopped=True, count=count)
    with records.changing(record.name):
        records.write(stopped)
    return stopped


async def _remove_others(provider: Stopper, pool: str, nodes: list[int]) -> None:
    """Remove machines that are stopped, and whose numbers no node has any more."""
    allocation = provider.allocate(pool)
    try:
        for machine in await allocation.find():
            if machine.node not in nodes:
                await bootstrap.take_down(machine, pool, REMOVE_SECONDS)
                Journal().gone(pool, machine.node)
    finally:
        await allocation.close()


def _journalled(journal: Journal, record: KeptPool) -> PoolRecord | None:
    found = (each for each, kept in recorded_pools(journal) if kept and kept.id == record.id)
    return next(found, None)


# What is said of a start.


def _quoted(spec: PoolSpec) -> str:
    """What a pool starts with, and its price if that costs money; may ask the provider.

    Raises `UnavailableError` if a provider that sells machines does not answer.
    """
    count, provider = spec.nodes.desired, spec.provider
    if not sells(provider):
        return f"{_in_nodes(count)} ({type(provider).__name__.lower()})"
    first = next(iter(provider.offers(spec.request)), None)
    if first is None:
        return f"{_in_nodes(count)} ({provider.name}); no offer fulfils the request"
    return first.of(count) if count else f"{_in_nodes(count)}; each will be {first}"


def _readiness(there: int, nodes: Nodes, seconds: float, price: float | None) -> str:
    """How many of a pool's nodes are ready, after how long, and what they cost in an hour."""
    if not nodes.desired:
        return f"no nodes yet, up to {nodes.ceiling} when calls come"
    ready, more = _in_nodes(nodes.desired), ""
    if there != nodes.desired:
        ready, more = f"{there} of {ready}", "; it goes on with the others"
    cost = f", {money(price)} an hour" if price else ""
    return f"{ready} ready in {seconds:.1f} s{cost}{more}"


def without_end(spec: PoolSpec, price: float | None) -> str:
    """The warning that a kept pool costs money with no end in sight; empty if it does not."""
    if spec.keep != 0 or spec.request.ttl is not None or not sells(spec.provider):
        return ""
    cost = "an unknown price" if price is None else f"{money(price)} an hour"
    return (
        f"{spec.name} is kept until `sky down {spec.name}`, at {cost}; ttl=SECONDS ends it in any "
        "case, keep=SECONDS when nobody uses it for so long"
    )


def _in_nodes(count: int) -> str:
    if not count:
        return "with no nodes"
    return f"{count} node{'s' if count != 1 else ''}"
