"""`Compute`: the set of machines on which a user runs functions."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from collections.abc import Sequence
from contextvars import Token
from types import TracebackType
from typing import Any, Self

from skyward import functions
from skyward.accelerators import Accelerator
from skyward.compute.arguments import new_name, resolve, restored
from skyward.compute.choosing import Candidate, Choose, Failures, Spec, check_choice, ordered
from skyward.compute.closing import close_despite_interrupts, not_instead_of
from skyward.compute.configured import arguments_of
from skyward.compute.listening import OnEvent, check_callback
from skyward.compute.looking import Looking
from skyward.compute.opened import OpenedPool
from skyward.compute.snapshot import snapshot, unstarted
from skyward.console.plain import Quiet
from skyward.errors import (
    PoolClosedError,
    SkywardError,
    UnavailableError,
    UnreachableError,
)
from skyward.former import explained
from skyward.market import AllocationKind
from skyward.nodes.failures import shown_from_outside
from skyward.nodes.keeping import KeptPool
from skyward.nodes.occupancy import check_jobs
from skyward.nodes.reaching import Adoption, provider_of
from skyward.nodes.spec import PoolSpec
from skyward.plugins.plugin import Plugin
from skyward.providers import Provider
from skyward.spec import Image, Nodes, Options, Project, Volume, Worker

entered_computes: weakref.WeakSet[Compute] = weakref.WeakSet()
"""Every `Compute` of this process that is entered and not closed."""


@explained
class Compute(Looking):
    """A set of machines to run functions on.

    `name` stands for the pool in messages and in `sky ps`. It is only a name: two pools may have
    the same, and only `Compute.named` looks a name up in the project's settings.

    With `keep=True`, the pool stays when the block is left: `sky.attach(name)` uses it again, from
    any process of this user, and `sky down NAME` or `compute.down()` ends it. With a number, it
    also ends by itself after so many seconds without a client.

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
        check_callback(on_event)
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
        self._opened: OpenedPool | None = None
        self._on_event = on_event
        self._token: Token[Any] | None = None
        self._pid = os.getpid()
        self._attached = False
        """Whether this is a client of a pool that stays, which `attach` has connected."""

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
        if self._opened is not None and self._opened.was_ready and not self._opened.pool.closed:
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
                if self._pool is not None and self._pool.nodes:
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
        """A `Compute` like the one that has made a pool that stays."""
        spec, plugins = restored(record, provider_of(record))
        compute = cls.__new__(cls)
        compute._set_up(spec, plugins, None)
        return compute

    @classmethod
    def _attach(cls, adoption: Adoption, on_event: OnEvent | None) -> Self:
        """A `Compute` that is connected to a pool that stays."""
        compute = cls._again(adoption.record)
        compute._on_event = on_event
        compute._start(compute._spec, adoption)
        compute._attached = True
        return compute

    def _open(self) -> None:
        opened = self._opened
        if self._attached and opened is not None and not opened.pool.closed:
            self._attached = False
            return
        if opened is not None:
            if opened.was_ready or not opened.pool.closed:
                raise PoolClosedError(
                    f"{self.name} is already entered; make another Compute instead"
                )
            # It did not start, and nothing of that attempt is left.
            self._opened = self._pool = None
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
                    self._opened = self._pool = None
                    Quiet().note(failures.add(candidate, failure))
            else:
                Quiet().note(failures.add(candidate, problem))
        raise failures.error()

    def _start(self, spec: PoolSpec, adoption: Adoption | None = None) -> None:
        self._spec = spec
        opened = self._opened = OpenedPool(spec, self._plugins, adoption)
        self._pool = opened.pool
        try:
            opened.start(self, self._on_event)
        except BaseException:
            self.close()
            raise
        functions.active.append(self)
        entered_computes.add(self)

    def _hurry(self) -> None:
        if self._pool is not None:
            self._pool.hurry()

    def close(self, seconds: float = 5.0) -> None:
        """Take everything down; leaving the `with` block does this for you.

        Closes completely; a Ctrl-C meanwhile makes closing quicker.
        """
        close_despite_interrupts(lambda: self._take_down(seconds), self._hurry)

    def _take_down(self, seconds: float = 5.0) -> None:
        if self in functions.active:
            functions.active.remove(self)
        entered_computes.discard(self)
        if self._opened is not None and os.getpid() == self._pid:
            self._opened.close(seconds)

    def down(self, *, force: bool = False) -> None:
        """End a pool that stays, for all its clients.

        Refuses while other clients are attached, or scripts or calls by name run on it, and names
        them, unless `force` is given.

        >>> sky.attach("train").down()
        """
        pool = self._open_pool
        with pool.lock(force=force):
            if not force:
                check_jobs(self.name, [each.index for each in pool.nodes], pool.service)
            close_despite_interrupts(pool.close, self._hurry)
        self.close()

    def ui(self, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve a page that shows this process's pools; returns its URL, which has a secret token.

        The page is there until this pool is closed. A second call returns the same URL.

        >>> print(compute.ui())
        """
        showing = None if self._open_pool.closed or self._opened is None else self._opened.showing
        if showing is None:
            raise PoolClosedError(f"{self.name} is closed; its page ended with it")
        return showing.serve(host, port)

    def __repr__(self) -> str:
        if self._pool is None:
            state = "not entered"
        elif self._pool.closed:
            state = "closed"
        else:
            count = len(self._pool.nodes)
            state = "1 node" if count == 1 else f"{count} nodes"
        return f"<sky.Compute {self.name}: {state}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: nodes, their states, what they run and how busy they are."""
        if self._pool is None:
            return unstarted(self.name, self._spec)
        return snapshot(self.name, self._pool)


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
