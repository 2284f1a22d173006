"""A host: a provider's machine with an agent on it, the ways to the processes there, its cost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from skyward import bootstrap, providers
from skyward.bootstrap import Environment
from skyward.console.measures import duration
from skyward.errors import ConfigurationError, NodeLostError, PoolStartError
from skyward.nodes.records import Journal, KeptNode, NoJournal
from skyward.providers import Allocation, Equipment, Machine, Offer, Order, Provider, money
from skyward.wire.channel import Channel, ServiceConnection
from skyward.wire.handshake import (
    GREETING_SECONDS,
    PAUSES,
    Credentials,
    Dial,
    Dialer,
    connect,
    direct,
    host_and_port,
    my_versions,
    node_name,
    refused,
    refused_too_long,
)
from skyward.wire.messages import Hello, Welcome
from skyward.wire.native import Terms
from skyward.worker import detached
from skyward.worker.config import AgentConfig
from skyward.worker.process import kill_group

SETTLE_SECONDS = 2.0
"""How long the end of a node waits for the provider's `create` before it cancels it."""
CUT_TRIES = 3
"""How often a connection to a service is made that is cut before it is there or has answered."""
SETTLE_LOOK_SECONDS = 0.01
DESTROY_SECONDS = 60.0
LAST_TRY_SECONDS = 5.0
"""How long removing a lost host's machine may take; the host may be back."""
ALIVE_SECONDS = 10.0
DIRECT_SECONDS = 1.5
"""How long the client tries a direct connection before it uses the machine's `dial`."""

T = TypeVar("T")


def again_if_cut(ask: Callable[[], T]) -> T:
    """The answer to what may be asked again: that is done if the connection is lost meanwhile."""
    for _ in range(CUT_TRIES - 1):
        with contextlib.suppress(ConnectionError, TimeoutError, EOFError):
            return ask()
    return ask()


def not_there(index: int, there: Iterable[int]) -> ConfigurationError:
    """The error for a node that a pool does not have."""
    return ConfigurationError(f"node {index} is not there; the pool's nodes are {list(there)}")


class Host:
    """The machine of one node, and the agent on it.

    The coroutines run on the providers' loop, like the provider's own; any thread may call the
    other methods.
    """

    def __init__(
        self,
        provider: Provider,
        allocation: Allocation[Any],
        order: Order,
        journal: Journal,
        *,
        lost: Host | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`lost` is the host that this one replaces; remains of its machine are removed first.

        The cost of the machine goes into the ledger.
        """
        self.endpoint = ""
        """Where the agent listens: one place, or several separated by spaces."""
        self.address = "127.0.0.1" if provider.capabilities.here else ""
        """How the other nodes reach this one."""
        self.hostname = ""
        # Until the new machine has been asked, it counts as the one that it replaces.
        self.accelerators: int = lost.accelerators if lost else 0
        self.accelerator: str | None = lost.accelerator if lost else None
        self.agent_pid = 0
        """The number of the agent's process on its machine."""
        self.may_return = not provider.capabilities.here
        """Whether a machine that is out of reach may come back."""
        self._provider, self._allocation = provider, allocation
        self._order = dataclasses.replace(order, bought=self._bought)
        self._journal = journal
        self.made_at: float | None = None
        """When the provider had made the machine; before that, it may wait in a queue."""
        self._machine: Machine | None = None
        self._child: ChildAgent | DetachedAgent | None = None
        """The agent, if it runs on this machine."""
        self._environment: Environment | None = None
        self._routes: Routes | None = None
        self._known_gone = False
        self._looking: concurrent.futures.Future[None] | None = None
        self._work: concurrent.futures.Future[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        """The provider's task; after a cancellation, it ends later than its future."""
        self._stopped = False
        self._intended = False
        self._lost = lost
        self._kept = False
        """Whether the machine stays if this client loses sight of it, or leaves."""
        self._condemned = False
        """Whether the machine is to be removed although it stays otherwise."""
        self._ledger = ledger or Ledger(lambda: None)
        self._charge: Charge | None = None
        self._bought_id = ""
        self._noting: concurrent.futures.Future[None] | None = None
        """The writing of what was bought into the journal."""
        self._may_have_remains = False
        """Whether remains of a lost machine may still be there."""
        self._settled = threading.Event()
        """Set, except while the provider's `create` runs: then nobody knows if a machine exists."""
        self._settled.set()
        self._lock = threading.Lock()
        self._ending = asyncio.Lock()

    @property
    def made(self) -> bool:
        """Whether there is a machine to remove."""
        return self._machine is not None

    @property
    def was_bought(self) -> bool:
        """Whether a machine was bought for the node, even if it is gone again."""
        return self._charge is not None and self._provider.capabilities.sells

    # Starting.

    async def prepare(self) -> None:
        """Make the machine and its environment."""
        lost, self._lost = self._lost, None
        with self._lock:
            self._refuse_if_stopped()
            self._may_have_remains = lost is not None and (
                lost._intended or lost._may_have_remains or lost._kept
            )
            self._intended = True
            self._settled.clear()
            # A kept machine that was tried in vain: this host makes another one.
            former = self._machine if self._kept else None
            self._machine, self._kept = None, False
        if former is None and lost is not None and lost._kept:
            former = lost._machine
        await self._do(self._prepare(former))

    async def adopt(self, kept: KeptNode, machine: Machine) -> None:
        """Use a machine of a kept pool, and the agent that runs on it."""
        await self._do(self._adopt(kept, machine))

    def keep(self) -> None:
        """Let the machine stay if this client loses sight of it, or leaves."""
        self._kept = True

    def after_start(self) -> concurrent.futures.Future[None]:
        """Begin to have the machine go with its pool again: its agent is on record now."""
        return providers.submit(self._after_start())

    async def _after_start(self) -> None:
        machine = self._machine
        if machine is None:
            return
        try:
            async with asyncio.timeout(DESTROY_SECONDS):
                await machine.after_start()
        except Exception as problem:
            self._order.note(
                f"node {self._order.node}: when the pool ends by itself, {machine.id} is stopped "
                f"and not removed: {str(problem) or type(problem).__name__}; `sky down` removes it"
            )

    def condemn(self) -> None:
        """Have `stop` remove the machine also if it stays."""
        with self._lock:
            self._condemned = True
            self._intended = self._intended or self._machine is not None

    @property
    def is_kept(self) -> bool:
        """Whether the machine stays when this client leaves."""
        return self._kept

    def facts(self, node: int) -> KeptNode | None:
        """What another client needs to know of the node; None if there is no agent."""
        if self._machine is None or not self.endpoint:
            return None
        return KeptNode(
            index=node,
            endpoint=self.endpoint,
            pid=self.agent_pid,
            hostname=self.hostname,
            address=self.address,
            accelerators=self.accelerators,
            accelerator=self.accelerator,
            machine=self._machine.id,
        )

    @property
    def former(self) -> tuple[KeptNode, Machine] | None:
        """The agent and the machine of the lost host, if these stay."""
        lost = self._lost
        if lost is None or not lost._kept or lost._machine is None:
            return None
        facts = lost.facts(self._order.node)
        return None if facts is None else (facts, lost._machine)

    async def _adopt(self, kept: KeptNode, machine: Machine) -> None:
        self._machine, self._kept = machine, True
        self.made_at = time.monotonic()
        self.address, self.hostname = kept.address, kept.hostname
        self.accelerators, self.accelerator = kept.accelerators, kept.accelerator
        equipment = machine.equipment
        routes = self._routes = Routes(machine, kept.address, here=equipment is not None)
        if equipment is not None:
            self._child = DetachedAgent(machine, equipment)
        else:
            await machine.reach()
            await asyncio.to_thread(routes.try_direct, kept.endpoint)
        self.endpoint, self.agent_pid = kept.endpoint, kept.pid

    async def start(self, config: AgentConfig) -> None:
        """Start the agent, and find out how to connect to it."""
        config.vcpus = self._order.request.vcpus
        await self._do(self._launch(config))

    async def _prepare(self, former: Machine | None = None) -> None:
        order = self._order
        if former is not None and former.equipment is not None:
            await former.destroy()
        try:
            await self._recorded(self._journal.intend, order.pool, order.node)
        except PoolStartError:
            with self._lock:
                self._intended = False
            self._settled.set()
            raise
        try:
            machine = self._machine = await self._allocation.get(order)
        except Exception as problem:
            if isinstance(problem, PoolStartError) and problem.leaves_machine:
                raise  # The end of this node looks for the machine, and so does `sky down`.
            was_bought = self._end_charge()
            await self._noted_purchase()
            # A `create` that fails leaves no machine, but an earlier machine may have remains.
            if was_bought or not self._may_have_remains:
                await self._recorded(self._journal.gone, order.pool, order.node)
            if was_bought and self._may_have_remains:
                await self._recorded(self._journal.intend, order.pool, order.node)
            raise
        finally:
            self._settled.set()
        self.made_at = time.monotonic()
        await self._noted_purchase()
        charge = self._charge = self._charge or self._ledger.begin(machine.offer)
        await self._recorded(
            self._journal.made,
            order.pool,
            order.node,
            machine.id,
            machine.address,
            charge.hourly_cost,
        )
        self.address = machine.address
        equipment = machine.equipment
        self._routes = Routes(machine, machine.address, here=equipment is not None)
        if equipment is not None:
            agent = DetachedAgent if order.request.keep else ChildAgent
            self._child = agent(machine, equipment)
            self.hostname = equipment.hostname
            self.accelerators, self.accelerator = equipment.accelerators, equipment.accelerator
            return
        if self._may_have_remains or order.request.keep:
            # On a host that came back, this removes the old agent's folder, and ends the old agent.
            # So may a machine be that stays, and ended without `sky stop`.
            await bootstrap.remove(machine, order.pool, order.node)
            self._may_have_remains = False
        environment = await bootstrap.prepare(
            machine, order.pool, order.node, order.request.image, self._order.tell, self._order.note
        )
        bootstrap.check_accelerators(environment, order.node, order.request.accelerator)
        self._environment = environment
        self.hostname = environment.hostname
        self.accelerators, self.accelerator = environment.accelerators, environment.accelerator

    def _bought(self, machine: str, offer: Offer | None) -> None:
        """Charge for a machine from now on; the provider calls this, on any thread."""
        with self._lock:
            if not self._intended or machine == self._bought_id:
                return
            if self._charge is not None:
                self._ledger.end(self._charge)
            self._bought_id = machine
            charge = self._charge = self._ledger.begin(offer)
            writing = self._note_purchase(self._noting, machine, charge, time.time())
            self._noting = providers.submit(writing)

    async def _note_purchase(
        self,
        earlier: concurrent.futures.Future[None] | None,
        machine: str,
        charge: Charge,
        bought: float,
    ) -> None:
        if earlier is not None:
            await asyncio.wrap_future(earlier)
        order = self._order
        await self._recorded(
            self._journal.made, order.pool, order.node, machine, None, charge.hourly_cost, bought
        )

    async def _noted_purchase(self) -> None:
        """Wait until the journal knows what was bought."""
        if self._noting is not None:
            # Shielded: a `create` that is cancelled meanwhile must not cancel the writing.
            await asyncio.shield(asyncio.wrap_future(self._noting))

    def _end_charge(self) -> bool:
        """Note that the machine is gone, and say whether one was bought."""
        with self._lock:
            self._intended = False
            charge = self._charge
        if charge is not None:
            self._ledger.end(charge)
        return charge is not None

    async def _recorded(self, write: Callable[..., None], *what: object) -> None:
        """Write to the journal on another thread, because the write may wait for a lock."""
        if isinstance(self._journal, NoJournal):
            return
        writing = asyncio.create_task(asyncio.to_thread(write, *what))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread goes on, and what is written next must come after it.
            await asyncio.wait([writing])
            raise

    async def _launch(self, config: AgentConfig) -> None:
        machine = self._machine
        assert machine is not None
        config.notice = machine.notice
        if self._child is not None:
            config.address = machine.address if self._provider.capabilities.encrypted else "unix"
            self.endpoint = await self._child.start(config)
            self.agent_pid = self._child.pid
            return
        assert self._environment is not None
        config.direct = (machine.listens or machine.direct) if machine.direct else ""
        config.forwarded = machine.forwards_to
        self._order.tell("starting the agent")
        announced = await bootstrap.launch(machine, self._environment, config)
        await asyncio.to_thread(self.routes.try_direct, announced.endpoint)
        self.endpoint, self.agent_pid = announced.endpoint, announced.pid

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            try:
                self._refuse_if_stopped()
            except PoolStartError:
                work.close()
                raise
            future: concurrent.futures.Future[T] = providers.submit(self._noted(work))
            self._work = future
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # The node's own end, and not that of this host alone.
            raise self._stopped_early() from None

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise self._stopped_early()

    def _stopped_early(self) -> PoolStartError:
        return PoolStartError(f"node {self._order.node} was stopped while it started")

    async def _noted(self, work: Coroutine[Any, Any, T]) -> T:
        self._task = asyncio.current_task()
        return await work

    # Serving.

    @property
    def routes(self) -> Routes:
        """The ways to the processes of the node; raises as long as there is no machine."""
        if self._routes is None:
            raise NodeLostError(f"node {self._order.node} has no machine now; see `compute.nodes`")
        return self._routes

    @property
    def name(self) -> str:
        """The name in the certificate of the node's processes."""
        return node_name(self._order.pool, self._order.node)

    def approach(
        self,
        role: str,
        endpoint: str,
        credentials: Credentials | None,
        *,
        client: str = "",
        gone: str = "",
        patience: float = math.inf,
        terms: Terms | None = None,
    ) -> Approach:
        """The attempts to connect to a process of the node at one of its endpoints."""
        return Approach(
            endpoint,
            Hello(self._order.pool, role, versions=my_versions(), pid=os.getpid(), client=client),
            credentials,
            self.name,
            self.routes.dial,
            gone=gone,
            patience=patience,
            terms=terms,
        )

    def service(self, name: str, credentials: Credentials | None) -> ServiceConnection:
        """A connection to a service of the agent; the caller closes it."""
        for tries in range(CUT_TRIES, 0, -1):
            try:
                channel, _ = connect(
                    self.routes.choose(self.endpoint),
                    Hello(self._order.pool, f"service-{name}", pid=os.getpid()),
                    credentials,
                    self.name,
                    dial=self.routes.dial,
                )
                break
            except (OSError, EOFError) as problem:
                # One that is cut while it is made has asked for nothing yet.
                if tries > 1 and isinstance(problem, ConnectionResetError | EOFError):
                    continue
                raise NodeLostError(
                    f"the agent of node {self._order.node} cannot be reached: {problem}; see "
                    "`compute.nodes`"
                ) from problem
        return ServiceConnection(channel)

    def looks_dead(self) -> bool:
        """Whether the agent or its machine is known to have ended or stopped.

        Does not wait for the provider: the result is the provider's last answer.
        """
        if self._child is not None:
            return self._child.looks_dead()
        machine = self._machine
        if machine is not None and (self._looking is None or self._looking.done()):
            self._looking = providers.submit(self._look(machine))
        return self._known_gone

    def has_ended(self) -> bool:
        """Whether the agent or its machine is known to have ended; one that is stopped has not."""
        if isinstance(self._child, DetachedAgent):
            return not self._child.pid
        return self.looks_dead()

    async def is_over(self) -> bool:
        """Whether the machine is known now to be gone for good, or the agent on it to have ended.

        Some providers connect to a socket where nobody listens, and then have nothing to say.
        """
        machine = self._machine
        if machine is None:
            return False
        await self._look(machine)
        if self._known_gone or not self.agent_pid:
            return self._known_gone
        # If the question fails, that says nothing about the agent.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ALIVE_SECONDS):
                command = ["sh", "-c", f"kill -0 {self.agent_pid} 2>/dev/null || exit 3"]
                return await machine.run(command) == 3
        return False

    async def _look(self, machine: Machine) -> None:
        # If the question fails, that says nothing about the machine.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ALIVE_SECONDS):
                self._known_gone = not await machine.alive()

    # Ending.

    def stop(self, seconds: float) -> concurrent.futures.Future[None]:
        """Begin to give the agent time to end by itself, and then to destroy the machine."""
        with self._lock:
            self._stopped = True
            work, child = self._work, self._child
        return providers.submit(self._end(seconds, work, child))

    async def _end(
        self,
        seconds: float,
        work: concurrent.futures.Future[Any] | None,
        child: ChildAgent | DetachedAgent | None,
    ) -> None:
        if work is not None and not work.done():
            # A provider that is about to fail leaves nothing; one that is cancelled may have to be
            # asked what it has made.
            deadline = time.monotonic() + SETTLE_SECONDS
            while not self._settled.is_set() and time.monotonic() < deadline:
                await asyncio.sleep(SETTLE_LOOK_SECONDS)
            work.cancel()
        if self._kept and not self._condemned:
            return
        if not seconds and child is not None:
            # Another caller may be waiting for the agent to end by itself.
            child.terminate()
        async with self._ending:
            lost = self._lost
            if lost is not None and not lost._kept:
                # Nothing was made here yet, and removing the lost machine may have failed.
                async with lost._ending:
                    self._may_have_remains = lost._intended or lost._may_have_remains
            if self._intended or self._may_have_remains:
                await self._destroy(seconds)

    async def _destroy(self, seconds: float) -> None:
        order, own = self._order, self._intended
        try:
            async with asyncio.timeout(DESTROY_SECONDS if own else LAST_TRY_SECONDS):
                if self._task is not None:
                    await asyncio.wait([self._task])
                if self._child is not None:
                    await self._child.end(seconds)
                machines = [self._machine] if self._machine is not None else []
                # Whether a machine was made is not known when its order was cancelled.
                for machine in machines or await self._allocation.find():
                    if machine.node != order.node:
                        continue
                    if machine.equipment is not None:
                        await machine.destroy()
                    else:
                        await bootstrap.take_down(machine, order.pool, seconds + ALIVE_SECONDS)
        except Exception as problem:
            if own:
                self._order.note(
                    f"node {order.node}: its machine could not be removed: "
                    f"{str(problem) or type(problem).__name__}; `sky down` tries again"
                )
            return
        self._may_have_remains = False
        self._end_charge()
        await self._noted_purchase()
        await self._recorded(self._journal.gone, order.pool, order.node)


class Routes:
    """The ways to one machine; processes there listen at endpoints, separated by spaces."""

    def __init__(self, machine: Machine, address: str, *, here: bool) -> None:
        """`address` is the machine's for other nodes; `here` says if it is the client's machine."""
        self._machine, self._address, self._here = machine, address, here
        self._is_direct = here and machine.direct is not None

    def try_direct(self, endpoints: str) -> None:
        """Find out whether a direct connection can be made, and use one from now on if so."""
        try:
            direct(self._direct_endpoint(endpoints), DIRECT_SECONDS).close()
        except (OSError, LookupError):
            self._is_direct = False
        else:
            self._is_direct = True

    def _direct_endpoint(self, endpoints: str) -> str:
        found = [each for each in endpoints.split() if each.startswith("tcp:")]
        if not found or self._machine.direct is None:
            raise LookupError(endpoints)
        return f"tcp:{self._machine.direct}:{found[0].rpartition(':')[2]}"

    def choose(self, endpoints: str) -> str:
        """The endpoint for the client to connect to."""
        if self._here:
            return endpoints.split()[0]
        if self._is_direct:
            return self._direct_endpoint(endpoints)
        if self._machine.forwards_to:
            listens = f":{self._machine.forwards_to}:"
            return next(each for each in endpoints.split() if listens in each)
        return next(each for each in endpoints.split() if each.startswith("unix:"))

    def near(self, endpoints: str) -> str:
        """The Unix socket, if the machine turns out to be the client's; else empty."""
        if self._here or not self._machine.may_be_here:
            return ""
        for endpoint in endpoints.split():
            path = endpoint.removeprefix("unix:")
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as end:
                if path != endpoint and os.stat(path).st_uid == os.getuid():
                    end.settimeout(DIRECT_SECONDS)
                    end.connect(path)
                    return endpoint
        return ""

    def for_peers(self, endpoints: str) -> tuple[str, ...]:
        """The endpoints that processes of other nodes may try.

        A Unix socket is for those on the same machine; the machine's own loopback is for none.
        """
        places = endpoints.split()
        found = [each for each in places if each.startswith("unix:")]
        found += [each for each in places if each.startswith("tcp:") and self._is_at(each)]
        if not self._here:
            with contextlib.suppress(LookupError):
                found.append(self._direct_endpoint(endpoints))
        return tuple(dict.fromkeys(found))

    def _is_at(self, endpoint: str) -> bool:
        wanted = self._address.removeprefix("[").removesuffix("]")
        return host_and_port(endpoint)[0] == wanted

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """Connect to an endpoint.

        Raises `ConnectionRefusedError` only if it is known that no process listens there.
        """
        if self._is_direct and endpoint.startswith("tcp:"):
            return direct(endpoint, seconds)
        if endpoint.startswith("tcp:") and self._machine.forwards_to:
            opening = providers.submit(self._machine.forward(endpoint))
        else:
            opening = providers.submit(self._machine.dial(endpoint))
        try:
            return opening.result(seconds)
        except BaseException as problem:
            # Not cancelled: the socket of a connection that is just being made would be lost.
            opening.add_done_callback(_close_late)
            if isinstance(problem, concurrent.futures.TimeoutError):
                where = f"{endpoint} on {self._machine.id}"
                raise TimeoutError(f"{where} was not reached in {seconds:g} s") from None
            raise


def _close_late(opening: concurrent.futures.Future[socket.socket]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class Approach:
    """The attempts to make the first connection to a process of a node."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        credentials: Credentials | None,
        name: str,
        dial: Dial,
        *,
        gone: str = "",
        patience: float = math.inf,
        terms: Terms | None = None,
    ) -> None:
        """`gone`, `patience` and `terms` are a `Dialer`'s."""
        self._dialer: Dialer | None = None
        if credentials is not None:
            self._dialer = Dialer(
                endpoint,
                hello,
                credentials,
                name,
                dial,
                gone=gone,
                patience=patience,
                terms=terms,
            )
        self._endpoint, self._hello, self._name = endpoint, hello, name
        self._refused_since: float | None = None
        self._pause, self._longest = PAUSES

    @property
    def is_within_host(self) -> bool:
        """Whether no network is in between, and no firewall."""
        return self._dialer is None

    def attempt(self, near_seconds: float = GREETING_SECONDS) -> tuple[Channel, Welcome]:
        """Connect; over a network, the channel outlives its connections.

        Within a host, the greeting may take `near_seconds`.
        """
        if self._dialer is None:
            return connect(self._endpoint, self._hello, None, self._name, near_seconds)
        return self._dialer.open()

    def pause_after(self, problem: BaseException) -> float | None:
        """How long to wait before the next attempt; None if that is hopeless."""
        self._refused_since = refused(problem, self._refused_since)
        impostor = isinstance(problem.__cause__, ssl.SSLCertVerificationError)
        if self._dialer is None or impostor or refused_too_long(self._refused_since):
            return None
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause


# What machines cost.


@dataclass(slots=True, eq=False)
class Charge:
    """One machine in the ledger."""

    what: str
    """The type of the machine, and how it was bought; empty if it was not bought."""
    hourly_cost: float | None
    began: float
    ended: float | None = None


class Ledger:
    """Counts what machines cost; any thread may write."""

    def __init__(
        self, price: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`price` returns the price of a machine that was bought without an offer."""
        self._ask_price, self._clock = price, clock
        self._charges: list[Charge] = []
        self._lock = threading.Lock()

    @functools.cached_property
    def price(self) -> float | None:
        """The price of a machine without an offer; may ask the provider, once."""
        return self._ask_price()

    def begin(self, offer: Offer | None) -> Charge:
        """Note that a machine was made; if its offer has no price, the price is unknown."""
        if offer is None:
            what, cost = "", self.price
        else:
            how = "spot" if offer.allocation == "spot" else "on demand"
            what, cost = f"{offer.instance_type} {how}", offer.hourly_cost
        charge = Charge(what, cost, self._clock())
        with self._lock:
            self._charges.append(charge)
        return charge

    def end(self, charge: Charge) -> None:
        """Note that a machine is gone."""
        if charge.ended is None:
            charge.ended = self._clock()

    @property
    def cost(self) -> float | None:
        """What the machines have cost so far, in US dollars; None if a price is unknown."""
        return _sum(self._cost_of(charge) for charge in self._all())

    @property
    def hourly_cost(self) -> float | None:
        """What the machines that are there cost in an hour; None if a price is unknown."""
        return _sum(charge.hourly_cost for charge in self._all() if charge.ended is None)

    def receipt(self) -> str:
        """What was bought, for how long, and the cost; empty for machines that cost nothing.

        >>> Ledger(lambda: None).receipt()
        ''
        """
        charges = [charge for charge in self._all() if charge.what or charge.hourly_cost]
        if not charges:
            return ""
        known = [cost for charge in charges if (cost := self._cost_of(charge)) is not None]
        total = money(sum(known)) if known else "unknown"
        if 0 < len(known) < len(charges):
            total = f"at least {total}"
        kinds = dict.fromkeys(charge.what for charge in charges)
        bought = [self._line([e for e in charges if e.what == what]) for what in kinds]
        return f"cost {total}: {', '.join(bought)}"

    def _line(self, charges: list[Charge]) -> str:
        total = duration(sum(self._seconds(charge) for charge in charges))
        spans = total if len(charges) == 1 else f"{total} in all"
        what = charges[0].what or ("machine" if len(charges) == 1 else "machines")
        count = f"{len(charges)} x " if charges[0].what else f"{len(charges)} "
        return f"{count}{what} for {spans}"

    def _all(self) -> list[Charge]:
        with self._lock:
            return list(self._charges)

    def _seconds(self, charge: Charge) -> float:
        return (self._clock() if charge.ended is None else charge.ended) - charge.began

    def _cost_of(self, charge: Charge) -> float | None:
        if charge.hourly_cost is None:
            return None
        return charge.hourly_cost * self._seconds(charge) / 3600


def _sum(costs: Iterable[float | None]) -> float | None:
    known: list[float] = []
    for cost in costs:
        if cost is None:
            return None
        known.append(cost)
    return sum(known, 0.0)


# Agents on the client's own machine.


START_SECONDS = 60.0
LOOK_SECONDS = 0.02
TERMINATE_SECONDS = 2.0
"""How long an agent may take to end after a SIGTERM before it is killed."""
QUOTED = 2000
"""How many bytes of an agent's output, the last ones, the error of a failed start shows."""


class ChildAgent:
    """An agent that is a child process of the client.

    Its methods run on the providers' loop, unless they say "any thread".
    """

    def __init__(self, machine: Machine, equipment: Equipment) -> None:
        self.pid = 0
        self._machine, self._equipment = machine, equipment
        self._said = b""
        self._news = asyncio.Event()
        self._running: asyncio.Task[int] | None = None

    async def start(self, config: AgentConfig) -> str:
        """Start the process and return the endpoint that it announces."""
        config.folder = self._equipment.folder
        config.client_pid = os.getpid()
        work = self._equipment.working_directory
        if work is None and config.own_directory:
            work = os.path.join(config.folder, "work")
            os.makedirs(work, exist_ok=True)
        if work is not None:
            config.search_path.insert(0, work)
            config.working_directory = work
        command = [self._machine.python or "python3", "-P", "-m", "skyward.worker.agent"]
        told = msgspec.json.encode(config) + b"\n"
        running = self._machine.run(command, input=told, output=self._hear)
        self._running = asyncio.create_task(self._run(running))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while not (self._announcement or self._running.done()):
                    await self._news.wait()
                    self._news.clear()
        if not self._announcement:
            raise self._failure()
        announced = msgspec.json.decode(self._announcement)
        self.pid = int(announced["pid"])
        return str(announced["endpoint"])

    async def _run(self, running: Coroutine[Any, Any, int]) -> int:
        try:
            return await running
        finally:
            self._news.set()

    def _hear(self, data: bytes) -> None:
        if not self._announcement:
            self._said = (self._said + data)[-(1 << 20) :]
            self._news.set()

    @property
    def _announcement(self) -> bytes:
        for line in self._said.splitlines(keepends=True):
            if line.startswith(b'{"endpoint":') and line.endswith(b"\n"):
                return line
        return b""

    def _failure(self) -> PoolStartError:
        assert self._running is not None
        if not self._running.done():
            problem = f"did not start within {START_SECONDS:.0f} s"
        elif (raised := self._running.exception()) is not None:
            problem = f"could not be run: {raised}"
        else:
            problem = f"ended with exit status {self._running.result()}"
        said = self._said.decode(errors="replace").strip()[-QUOTED:]
        return PoolStartError(
            f"node {self._machine.node}: its agent {problem}"
            + (f"; it said:\n{said}" if said else "")
        )

    def looks_dead(self) -> bool:
        """Whether the process has ended or is stopped by a signal; on any thread."""
        if self._running is None or self._running.done():
            return True
        if not self.pid:
            return False
        # Imported here: few pools ask, and it takes a client 20 ms to start.
        import psutil

        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return True

    def terminate(self) -> None:
        """Ask the process to end; on any thread."""
        if self.pid and self._running is not None and not self._running.done():
            # A stopped process handles a SIGTERM only after it is continued.
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    async def end(self, seconds: float) -> None:
        """Wait for the process to end by itself, then ask it to end, then kill it."""
        running = self._running
        if running is None:
            return
        await asyncio.wait({running}, timeout=seconds)
        if not running.done():
            self.terminate()
            await asyncio.wait({running}, timeout=TERMINATE_SECONDS if self.pid else 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class DetachedAgent:
    """An agent that lives on when the client ends.

    Its methods run on the providers' loop, unless they say "any thread".
    """

    def __init__(self, machine: Machine, equipment: Equipment) -> None:
        self._machine, self._equipment = machine, equipment

    @property
    def pid(self) -> int:
        """The process number; 0 if the agent does not run."""
        return detached.running(Path(self._equipment.folder))

    async def start(self, config: AgentConfig) -> str:
        """Start the process and return the endpoint that it announces."""
        config.folder = self._equipment.folder
        config.client_pid = os.getpid()
        work = self._equipment.working_directory
        if work is not None:
            config.search_path.insert(0, work)
            config.working_directory = work
        command = [
            self._machine.python or "python3",
            "-P",
            "-m",
            "skyward.worker.agent",
            "--detached",
        ]
        said: list[bytes] = []
        told = msgspec.json.encode(config)
        code = await self._machine.run(command, input=told, output=said.append)
        words = b"".join(said)
        for line in reversed(words.splitlines()):
            if code == 0 and line.startswith(b'{"endpoint":'):
                return str(msgspec.json.decode(line)["endpoint"])
        raise PoolStartError(
            f"node {self._machine.node}: its agent did not start (exit status {code}); it said:\n"
            + words.decode(errors="replace").strip()[-QUOTED:]
        )

    def looks_dead(self) -> bool:
        """Whether the process has ended or is stopped by a signal; on any thread."""
        pid = self.pid
        if not pid:
            return True
        import psutil

        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return True

    def terminate(self) -> None:
        """Ask the process to end; on any thread."""
        pid = self.pid
        if pid:
            # A stopped process handles a SIGTERM only after it is continued.
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    async def end(self, seconds: float) -> None:
        """Wait for the process to end by itself, then ask it to end, then kill it."""
        if not await self._ended(seconds):
            self.terminate()
            if not await self._ended(TERMINATE_SECONDS):
                pid = self.pid
                if pid:
                    kill_group(pid)

    async def _ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pid:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True
