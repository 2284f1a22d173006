"""A host: a provider's machine, made, given its environment and an agent, and destroyed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from skyward.errors import PoolStartError
from skyward.pool.journal import Journal
from skyward.providers import Host, Machine, Order, Provider, bootstrap, loop
from skyward.providers.bootstrap import Prepared
from skyward.wire.identity import direct
from skyward.worker.config import AgentConfig

DIRECT_SECONDS = 1.5
"""How long a straight connection is tried before the provider's own way is taken."""
SETTLE_SECONDS = 2.0
"""How long a provider that makes a machine is waited for before it is cut short."""
DESTROY_SECONDS = 60.0
LAST_TRY_SECONDS = 5.0
"""How long a host that was lost, and may be back, is given to remove what it still has."""
ALIVE_SECONDS = 10.0

T = TypeVar("T")


class RemoteHost:
    """One node's machine, from a provider."""

    def __init__(
        self,
        provider: Provider,
        order: Order,
        journal: Journal,
        phase: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.endpoint = ""
        self.address = ""
        self.hostname = ""
        self.accelerators = 0
        self.accelerator: str | None = None
        self._provider = provider
        self._order = order
        self._journal = journal
        self._phase, self._note = phase, note
        self._machine: Machine | None = None
        self._prepared: Prepared | None = None
        self._is_direct = False
        self._known_gone = False
        self._looking: concurrent.futures.Future[None] | None = None
        self._work: concurrent.futures.Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        """The work itself: it ends later than the future that was cancelled."""
        self._stopped = False
        self._intended = False
        self._lost: RemoteHost | None = None
        self._may_have_remains = False
        """Whether something of a machine that was lost may still be there."""
        self._settled = threading.Event()
        """Not set while it is open whether a machine will come of what the provider was asked."""
        self._settled.set()
        self._lock = threading.Lock()
        self._ending = threading.Lock()

    @property
    def made(self) -> bool:
        """Whether there is a machine of its own to remove."""
        return self._machine is not None

    def succeed(self, lost: Host) -> None:
        """Take the place of a host that was lost; what could not be removed stays on record."""
        self._lost = lost if isinstance(lost, RemoteHost) else None

    # Coming up.

    def prepare(self) -> None:
        """Make the machine and its environment."""
        self._phase("creating")
        lost, self._lost = self._lost, None
        with self._lock:
            self._refuse_if_stopped()
            self._may_have_remains = lost is not None and (lost._intended or lost._may_have_remains)
            self._journal.intend(self._order.pool, self._order.node)
            self._intended = True
            self._settled.clear()
        self._do(self._prepare())

    def start(self, config: AgentConfig) -> None:
        """Start the agent, and find the way to it."""
        self._do(self._launch(config))

    async def _prepare(self) -> None:
        order = self._order
        try:
            machine = self._machine = await self._provider.create(order)
        except Exception:
            # Then nothing is left behind, by what a provider promises, but by an earlier machine.
            if not self._may_have_remains:
                await asyncio.to_thread(self._journal.gone, order.pool, order.node)
            self._intended = False
            raise
        finally:
            self._settled.set()
        await asyncio.to_thread(
            self._journal.made, order.pool, order.node, machine.id, machine.address
        )
        self.address = machine.address
        if self._may_have_remains:
            # On a host that came back: its agent's folder, and the agent if it lives.
            await bootstrap.remove(machine, order.pool, order.node)
            self._may_have_remains = False
        prepared = await bootstrap.prepare(
            machine, order.pool, order.node, order.wish.image, self._phase, self._note
        )
        bootstrap.check_accelerators(prepared, order.node, order.wish.accelerator)
        self._prepared = prepared
        self.hostname = prepared.hostname
        self.accelerators, self.accelerator = prepared.accelerators, prepared.accelerator

    async def _launch(self, config: AgentConfig) -> None:
        assert self._machine is not None
        assert self._prepared is not None
        config.direct = self._machine.direct or ""
        if self._order.wish.vcpus:
            config.env.setdefault("OMP_NUM_THREADS", str(max(1, int(self._order.wish.vcpus))))
        self._phase("starting the agent")
        announced = await bootstrap.launch(self._machine, self._prepared, config)
        self._is_direct = await asyncio.to_thread(self._can_go_straight, announced.endpoint)
        self.endpoint = announced.endpoint

    def _can_go_straight(self, endpoints: str) -> bool:
        try:
            direct(self._straight(endpoints), DIRECT_SECONDS).close()
        except (OSError, LookupError):
            return False
        return True

    def _straight(self, endpoints: str) -> str:
        found = [each for each in endpoints.split() if each.startswith("tcp:")]
        if not found or self._machine is None or self._machine.direct is None:
            raise LookupError(endpoints)
        return f"tcp:{self._machine.direct}:{found[0].rpartition(':')[2]}"

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            try:
                self._refuse_if_stopped()
            except PoolStartError:
                work.close()
                raise
            future: concurrent.futures.Future[T] = loop.submit(self._noted(work))
            self._work = future
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise self._stopped_early() from None

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise self._stopped_early()

    def _stopped_early(self) -> PoolStartError:
        return PoolStartError(f"node {self._order.node} was stopped while it started")

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        return await work

    # Being there.

    def route(self, endpoints: str) -> str:
        """Of the places where something listens, the one that is used from here."""
        if self._is_direct:
            return self._straight(endpoints)
        return next(each for each in endpoints.split() if each.startswith("unix:"))

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """A connection to one of those places."""
        if endpoint.startswith("tcp:"):
            return direct(endpoint, seconds)
        assert self._machine is not None
        opening = loop.submit(self._machine.dial(endpoint))
        try:
            return opening.result(seconds)
        except concurrent.futures.TimeoutError:
            opening.cancel()
            raise TimeoutError(f"{endpoint} on {self._machine.id} was not reached") from None

    def looks_dead(self) -> bool:
        """What the provider said when it last knew; this asks again, without waiting."""
        machine = self._machine
        if machine is not None and (self._looking is None or self._looking.done()):
            self._looking = loop.submit(self._look(machine))
        return self._known_gone

    async def _look(self, machine: Machine) -> None:
        # Whatever goes wrong in asking says nothing about the machine.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ALIVE_SECONDS):
                self._known_gone = not await machine.alive()

    # Going.

    def stop(self, seconds: float) -> None:
        """Give the agent time to end by itself, then destroy the machine."""
        with self._lock:
            self._stopped = True
            work = self._work
        if work is not None and not work.done():
            # A provider that is about to fail leaves nothing; one cut short may have to be asked.
            self._settled.wait(SETTLE_SECONDS)
            work.cancel()
        with self._ending:
            if self._intended or self._may_have_remains:
                loop.submit(self._destroy(seconds)).result()

    async def _destroy(self, seconds: float) -> None:
        order, own = self._order, self._intended
        try:
            async with asyncio.timeout(DESTROY_SECONDS if own else LAST_TRY_SECONDS):
                if self._task is not None:
                    await asyncio.wait([self._task])
                machines = [self._machine] if self._machine is not None else []
                # Whether a machine was made is not known when its making was cut short.
                for machine in machines or await self._provider.find(order.pool):
                    if machine is not None and machine.node == order.node:
                        await bootstrap.take_down(machine, order.pool, seconds + ALIVE_SECONDS)
        except Exception as problem:
            if own:
                self._note(
                    f"node {order.node}: its machine could not be removed: "
                    f"{str(problem) or type(problem).__name__}; `sky down` tries again"
                )
            return
        self._intended = self._may_have_remains = False
        await asyncio.to_thread(self._journal.gone, order.pool, order.node)
