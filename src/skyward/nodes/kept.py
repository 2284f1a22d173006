"""A kept pool: what keeps it, how it is reached, and what keeps its record true.

Of the clients of a kept pool, one starts a lost node, wherever they are. An agent that is
left decides which: the first of the nodes that a client can reach. If there is none, a client knows
only of those on its own machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import getpass
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skyward import providers
from skyward.closing import Closing
from skyward.context import POOL_VARIABLE
from skyward.errors import (
    ConfigurationError,
    NodeLostError,
    PoolError,
    PoolStartError,
    SkywardError,
)
from skyward.nodes import records
from skyward.nodes.host import Host, again_if_cut, not_there
from skyward.nodes.records import Journal, KeptNode, KeptPool, NoJournal, encode
from skyward.nodes.spec import PoolSpec
from skyward.providers import (
    Allocation,
    Capabilities,
    Machine,
    Order,
    Provider,
    Request,
    collects,
    connecting,
    find_provider,
    holds_keys,
    is_here,
    moves,
    stops,
)
from skyward.spec import Image
from skyward.wire.channel import ServiceConnection
from skyward.wire.handshake import (
    KEPT_LIFETIME,
    LIFETIME,
    Authority,
    Credentials,
    SavedAuthority,
    dial_here,
    direct,
)
from skyward.wire.messages import Members
from skyward.worker.jobs import JOB

COMMAND_LENGTH = 200
LOOK_SECONDS = 0.2
ANSWER_SECONDS = 10.0
"""How long an agent may take to answer; after that, the next node's agent is asked."""
LONGEST_SECONDS = 1800.0
"""How long another client may take to start a node: it may wait in a queue for the machine."""

Agents = Callable[[], Mapping[int, Callable[[], ServiceConnection]]]
"""How to ask each of the agents that are connected, by the indexes of their nodes."""


def identity() -> dict[str, str]:
    """Who this client is, for the other clients of a pool."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    if job := os.environ.get(JOB):
        command = f"job {job}"
    else:
        command = " ".join([os.path.basename(sys.executable or "python"), *sys.argv])
    return {
        "user": user,
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "command": command[:COMMAND_LENGTH],
    }


class StartLease:
    """The right to start one node, and what others have told of its last start."""

    def __init__(
        self, node: int, connection: ServiceConnection | None = None, facts: Any = None
    ) -> None:
        self._node, self._connection = node, connection
        self.last: KeptNode | None = msgspec.convert(facts, KeptNode) if facts else None
        """The node as the client has told that started it last; None if none did."""
        self.record: KeptPool | None = None
        """The pool's record as it is now; None if the pool is not kept or has ended."""

    async def tell(self, facts: KeptNode | None) -> None:
        """Tell those who wait what the node is now."""
        if self._connection is None or facts is None:
            return
        # If the agent is lost, too, its node is started next, and so are those who asked it.
        with contextlib.suppress(SkywardError, OSError, EOFError):
            told = msgspec.to_builtins(facts)
            await _asked(self._connection, "started", node=self._node, facts=told)


class PoolKeeper:
    """Owns the record of one pool in this process.

    `tell_head` of its methods tells the agent of the first node, and returns whether it can be
    reached.
    """

    def __init__(self, begun: KeptPool | None) -> None:
        """`begun` is the record of a kept pool."""
        self._lock = threading.Lock()
        self._begun = begun
        self._ended: dict[int, str] = {}
        """The nodes that others have ended, and who did."""
        self._untold: set[int] = set()
        """The nodes that have changed while the head could not be reached."""

    @property
    def begun(self) -> KeptPool | None:
        """The record as this client knows it; None while the pool is not kept yet."""
        return self._begun

    def begin(self, record: KeptPool) -> None:
        """Write the record of a kept pool from now on."""
        with self._lock:
            with records.changing(record.name):
                records.write(record, new=not _is_stopped(record.name))
            self._begun = record

    def add(self, facts: KeptNode, tell_head: Callable[[Members], bool]) -> KeptPool | None:
        """Have a node on the record of a kept pool; None if the pool does not."""
        with self._lock:
            record = self._begun
            if record is None:
                return None
            self._ended.pop(facts.index, None)
            if record.node(facts.index) != facts:
                self._change([facts], [], tell_head)
            elif self._untold:
                self._tell_changes(self._written() or record, tell_head)
            return record

    def remove(self, indexes: Iterable[int], tell_head: Callable[[Members], bool]) -> None:
        """Take nodes off the record that leave the pool."""
        with self._lock:
            if self._begun is not None:
                self._change([], indexes, tell_head)

    def note_end(self, index: int, by: str) -> None:
        """Note that somebody ends a node: an imported record would not say so."""
        self._ended[index] = by

    def check_expected(self, index: int) -> None:
        """Refuse a node that the pool no longer has, by its record: another client has ended it."""
        if self._begun is None:
            return
        if index in self._ended:
            raise PoolStartError(
                f"node {index} was ended by {self._ended[index]}; `sky ps` shows what there is"
            )
        record = self._written()
        if record is None or record.node(index) is None:
            raise PoolStartError(
                f"node {index} was taken out of the pool, or the pool has ended; `sky ps` shows "
                "what there is"
            )

    @contextlib.asynccontextmanager
    async def starting(
        self, index: int, agents: Agents, waits: Callable[[], bool]
    ) -> AsyncIterator[StartLease]:
        """Be the only client that starts a node, on this machine and as far as agents can say so.

        A new pool needs no lease. `waits` says whether the node is still to be started.
        """
        begun = self._begun
        if begun is None:
            yield StartLease(index)
            return
        async with records.starting(begun.name, index):
            record = self._written()
            async with leased(index, agents, waits) as lease:
                lease.record = record
                yield lease

    def _written(self) -> KeptPool | None:
        """The record as other clients see it; None if the pool has ended."""
        assert self._begun is not None
        try:
            found = records.read(self._begun.name)
        except PoolError:
            return None
        return found if found.id == self._begun.id else None

    def forget(self) -> None:
        """Remove the record: the pool has ended."""
        with self._lock:
            record, self._begun = self._begun, None
        if record is not None:
            records.forget(record.name, record.id)

    def _change(
        self, added: list[KeptNode], removed: Iterable[int], tell_head: Callable[[Members], bool]
    ) -> None:
        assert self._begun is not None
        with records.changing(self._begun.name):
            try:
                record = records.read(self._begun.name)
            except PoolError:
                # Another client has ended the pool.
                return
            if record.id != self._begun.id:
                return
            gone = {*removed, *(node.index for node in added)}
            left = [node for node in record.nodes if node.index not in gone]
            record.nodes = sorted([*left, *added], key=lambda node: node.index)
            records.write(record)
            self._begun = record
        self._untold |= gone
        self._tell_changes(record, tell_head)

    def _tell_changes(self, record: KeptPool, tell_head: Callable[[Members], bool]) -> None:
        """Tell the head: who looks at the pool from elsewhere has another copy of the record."""
        there = {node.index: msgspec.to_builtins(node) for node in record.nodes}
        came = [there[index] for index in sorted(self._untold & there.keys())]
        if tell_head(Members(came, sorted(self._untold - there.keys()))):
            self._untold = set()


@contextlib.asynccontextmanager
async def leased(
    index: int, agents: Agents, waits: Callable[[], bool]
) -> AsyncIterator[StartLease]:
    """Be the only client that starts a node, as far as an agent is left to say so."""
    async with contextlib.AsyncExitStack() as held:
        deadline = time.monotonic() + LONGEST_SECONDS
        silent: set[int] = set()
        found = None
        while found is None:
            asked = {each: ask for each, ask in agents().items() if each not in silent}
            if not asked or not waits() or time.monotonic() > deadline:
                found = StartLease(index)
                break
            first = next(iter(asked))
            try:
                found = await _granted(
                    index, asked[first], held, lambda: waits() and time.monotonic() < deadline
                )
            except TimeoutError:
                silent.add(first)
            except (SkywardError, OSError, EOFError):
                # The agent that was asked is gone.
                await asyncio.sleep(LOOK_SECONDS)
        yield found


async def _granted(
    index: int,
    agent: Callable[[], ServiceConnection],
    held: contextlib.AsyncExitStack,
    waits: Callable[[], bool],
) -> StartLease:
    """Wait for the lease that an agent grants to one client after the other."""
    opening = connecting.submit(agent)
    try:
        connection = await asyncio.wait_for(asyncio.wrap_future(opening), ANSWER_SECONDS)
    except (TimeoutError, asyncio.CancelledError):
        opening.add_done_callback(_close_late)
        raise
    held.callback(_close, connection)
    while True:
        told = await _asked(connection, "start", node=index)
        if told["granted"] or not waits():
            return StartLease(index, connection, told["facts"])
        await asyncio.sleep(LOOK_SECONDS)


async def _asked(connection: ServiceConnection, what: str, **arguments: Any) -> Any:
    asked = connecting.submit(connection.ask, what, **arguments)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(asked), ANSWER_SECONDS)
    except TimeoutError:
        # Frees the thread that waits for the answer.
        connection.channel.abort()
        raise


def _close_late(opening: Future[ServiceConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        _close(opening.result())


def _close(connection: ServiceConnection) -> None:
    with contextlib.suppress(OSError):
        connection.close()


def _is_stopped(name: str) -> bool:
    try:
        return records.read(name).stopped
    except PoolError:
        return False


def authority_of(pool: str, spec: PoolSpec, record: KeptPool | None) -> Authority:
    """The authority of a pool: a new one, or that of its record."""
    if record is not None and record.authority is not None:
        return Authority(pool, SavedAuthority(*record.authority))
    return Authority(pool, lifetime=LIFETIME if spec.keep is None else KEPT_LIFETIME)


def new_record(
    pool: str,
    spec: PoolSpec,
    authority: Authority | None,
    client: Credentials | None,
    hourly_cost: float | None,
    nodes: list[KeptNode],
) -> KeptPool:
    """The first record of a kept pool; `client` are its client's credentials."""
    saved = authority.save() if authority is not None else None
    ttl = spec.request.ttl
    return KeptPool(
        id=pool,
        name=spec.name,
        provider=spec.provider.name,
        arguments=dict(spec.provider.describe()),
        created=time.time(),
        idle=spec.keep or 0.0,
        ends=None if ttl is None else time.time() + ttl,
        hourly_cost=hourly_cost,
        authority=(saved.certificate, saved.key) if saved else None,
        credentials=(client.authority, client.certificate, client.key) if client else None,
        spec=spec.recorded,
        nodes=nodes,
    )


def note_pool(journal: Journal, record: KeptPool) -> None:
    """Have the journal know a kept pool that was made on another machine."""
    if any(pool.id == record.id for pool in journal.pools()):
        return
    cost = record.hourly_cost
    price = cost / len(record.nodes) if cost is not None and record.nodes else None
    journal.open_pool(record.id, record.name, record.provider, record.arguments, price)
    for node in record.nodes:
        journal.intend(record.id, node.index)
        journal.made(record.id, node.index, node.machine, node.address, price, record.created)


# On a node of the pool.


CONNECT_SECONDS = 10.0


def record_for_nodes(record: KeptPool) -> KeptPool | None:
    """The record for processes on the pool's nodes; None if they cannot reach each other.

    They may do what a client does, but not make nodes: the key of the authority stays here.
    """
    if record.credentials is None:
        return None
    return msgspec.structs.replace(record, inside=True, arguments={}, authority=None)


def way_back(record: KeptPool) -> tuple[dict[str, str], dict[str, str]]:
    """The variables and private texts with which `sky.attach()` in a job finds the job's pool.

    On this machine, the job can read the record itself.
    """
    variables = {POOL_VARIABLE: record.name}
    theirs = record_for_nodes(record)
    if theirs is None:
        return variables, {}
    place = f"state/pools/{record.name}.json"
    return variables | {"SKYWARD_STATE": "{folder}/state"}, {place: encode(theirs).decode()}


class InsideProvider:
    """The nodes of a pool, as they are: none is made, and none is removed."""

    name = "inside"
    capabilities = Capabilities()

    def __init__(self, record: KeptPool) -> None:
        self._record = record

    def check(self, request: Request) -> None:
        """Nothing is asked for."""

    def describe(self) -> Mapping[str, Any]:
        """No arguments."""
        return {}

    def price(self, request: Request) -> float | None:
        """None: the pool's own provider knows."""
        return None

    def allocate(self, pool: str) -> Allocation[InsideMachine]:
        """The nodes that the record has."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> InsideMachine:
        """Refuse: only the pool's provider makes machines."""
        raise PoolStartError(
            f"node {order.node}: a script on the pool cannot start nodes, since it has no access "
            f"to the provider {self._record.provider}; do that from where the pool was made"
        )

    async def find(self, pool: str) -> Sequence[InsideMachine]:
        """The nodes that the record has."""
        return [InsideMachine(node, self._record.name) for node in self._record.nodes]


class InsideMachine(Machine):
    """A node of the pool, seen from another one, or from itself."""

    may_be_here = True

    def __init__(self, node: KeptNode, pool: str) -> None:
        self._pool = pool
        self.id, self.node, self.address = node.machine, node.index, node.address
        self.forwards_to = node.address

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Refuse: the node's agent runs commands."""
        raise PoolStartError(f"node {self.node} is not prepared from inside the pool")

    async def forward(self, endpoint: str) -> socket.socket:
        """Connect to where the node listens for other nodes."""
        return await asyncio.to_thread(direct, endpoint, CONNECT_SECONDS)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect to a socket of this very host."""
        if endpoint.startswith("unix:"):
            return dial_here(endpoint)
        return await self.forward(endpoint)

    async def alive(self) -> bool:
        """True: nobody here can know better."""
        return True

    async def destroy(self) -> None:
        """Refuse: the machine is the provider's."""
        raise PoolStartError(
            f"node {self.node}: a script on the pool cannot remove its machines; `sky down "
            f"{self._pool}` does, from where the pool was made"
        )


# Reaching the pool.


_NOTHING = Request(None, None, None, Image(), ())
"""Nothing is ordered: the machines are there."""
CLOSE_SECONDS = 30.0
"""How long the end of a pool waits for what its provider still does."""
FIND_SECONDS = 60.0
"""How long a provider may take to find the machines of a pool."""
CALLS_NAMED = 5
"""How many calls by name an error names."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a client needs to attach to a kept pool."""

    record: KeptPool
    machines: Mapping[int, tuple[KeptNode, Machine]]
    client: str
    """The tenant that the client is."""
    allocation: Allocation[Any]
    """What found the machines; the client closes it."""


def provider_of(record: KeptPool) -> Provider:
    """The provider that has made the machines of a pool, or what a node has in its place."""
    if record.inside:
        return InsideProvider(record)
    provider: Provider = find_provider(record.provider)(**record.arguments)
    return provider


def found_machines(
    record: KeptPool, provider: Provider, allocation: Allocation[Any]
) -> dict[int, tuple[KeptNode, Machine]]:
    """The machines of a pool's nodes that run, as far as its provider has them still."""
    there = _machines(record, provider, allocation)
    return {index: found for index, found in there.items() if not found[1].ended}


def stopped_machines(record: KeptPool, provider: Provider) -> list[Machine]:
    """The machines of a pool of which none runs, but some can be started again."""
    if not stops(provider):
        return []
    allocation = provider.allocate(record.id)
    try:
        found = [machine for _, machine in _machines(record, provider, allocation).values()]
    finally:
        end_allocation(allocation)
    return found if all(machine.ended for machine in found) else []


def _machines(
    record: KeptPool, provider: Provider, allocation: Allocation[Any]
) -> dict[int, tuple[KeptNode, Machine]]:
    if is_here(provider):
        return {node.index: (node, provider.machine_at(node.machine)) for node in record.nodes}
    finding = providers.submit(allocation.find())
    try:
        found = finding.result(FIND_SECONDS)
    except concurrent.futures.TimeoutError:
        finding.cancel()
        raise PoolError(
            f"{record.name}: the provider {record.provider} did not find its machines within "
            f"{FIND_SECONDS:.0f} s; see whether it can be reached, and try again"
        ) from None
    # One that runs goes before another of the same node that does not.
    ordered = sorted(found, key=lambda machine: machine.ended, reverse=True)
    machines = {machine.node: machine for machine in ordered}
    return {
        node.index: (node, machines[node.index]) for node in record.nodes if node.index in machines
    }


def end_allocation(allocation: Allocation[Any]) -> None:
    """End what a provider still does for a pool."""
    with contextlib.suppress(TimeoutError):
        providers.submit(allocation.close()).result(CLOSE_SECONDS)


def exported(record: KeptPool) -> bytes:
    """The record with the provider's keys of the pool, for another machine.

    Raises `PoolError` if the pool can only be used on this machine.
    """
    provider = provider_of(record)
    if record.inside:
        raise PoolError(
            f"{record.name}: the record on a node of the pool has no access to the provider "
            f"{record.provider}; export the pool's record on the machine that made the pool"
        )
    if is_here(provider):
        raise PoolError(
            f"{record.name}: its nodes are processes of this machine, so no other machine can use "
            "it; make a pool of this machine for others with sky.SSH"
        )
    keys = dict(provider.export_keys(record.id)) if holds_keys(provider) else {}
    return records.encode(msgspec.structs.replace(record, keys=keys, home=str(Path.home())))


def imported(
    data: bytes, where: str, name: str | None = None, given: Mapping[str, str] | None = None
) -> KeptPool:
    """Write down a record that was exported, under a name of its own if one is given.

    `given` are arguments of its provider that are others on this machine. Raises a `SkywardError`,
    and writes nothing down, if the pool cannot be used from here.
    """
    told = records.decode(data, where)
    name, given = name or told.name, given or {}
    for each in given:
        if each not in told.arguments:
            raise ConfigurationError(
                f"{name}: the provider {told.provider} has no argument {each!r}; it has "
                f"{', '.join(told.arguments)}"
            )
    kind: Any = find_provider(told.provider)
    here: Mapping[str, Any] = told.arguments
    if moves(kind):
        here = kind.arguments_here(told.arguments, told.home)
    try:
        # A provider is a value, and describes what it has found in the environment, too.
        provider: Provider = kind(**{**here, **{key: text or None for key, text in given.items()}})
        record = msgspec.structs.replace(
            told, name=name, arguments=dict(provider.describe()), keys={}, home=""
        )
        records.write(record, new=True)
        try:
            if told.keys and holds_keys(provider):
                provider.import_keys(record.id, told.keys)
            if record.nodes and not record.stopped:
                _check_reached(record, provider)
        except BaseException:
            records.forget(record.name, record.id)
            raise
    except SkywardError as problem:
        for each, value in told.arguments.items():
            if here.get(each) != value and each not in given:
                problem.add_note(
                    f"{each} was {value!r} on the other machine, and is {here.get(each)!r} here; "
                    f"--with {each}=... names another"
                )
        raise
    return record


def _check_reached(record: KeptPool, provider: Provider) -> None:
    """Raise a `SkywardError` unless an agent of the pool answers, or its machines are stopped."""
    try:
        with ReachedPool(record) as pool, pool.head():
            pass
    except MachinesStopped:
        pass
    except MachinesGone:
        place = provider.where if collects(provider) else provider.name
        raise PoolError(
            f"{record.name}: there is no machine of the pool: {place}; if that is not where the "
            f"pool was made, --with names the argument of {record.provider} that differs"
        ) from None


class MachinesGone(PoolError):
    """The machines of a kept pool are gone, and only its record is left."""


class MachinesStopped(PoolError):
    """The machines of a kept pool are stopped, though `sky stop` did not stop them."""


def check_here(record: KeptPool, provider: Provider) -> None:
    """Refuse a pool of another machine's own processes: homes may be shared by machines."""
    places = {node.hostname for node in record.nodes}
    here = socket.gethostname()
    if not record.inside and is_here(provider) and places and here not in places:
        raise PoolError(
            f"{record.name}: it is kept on {', '.join(sorted(places))}, and this is {here}; a pool "
            "of sky.Local is used on its own machine"
        )


class ReachedPool(Closing):
    """A kept pool, without being its client: for its services alone."""

    def __init__(self, record: KeptPool, *, forget: bool = False) -> None:
        """With `forget`, the record of a pool whose machines are gone is removed."""
        self.record, self._forget = record, forget
        provider = self._provider = provider_of(record)
        check_here(record, provider)
        self._hosts: dict[int, Host] = {}
        self._allocation: Allocation[Any] | None = provider.allocate(record.id)
        try:
            self._adopt(provider, self._allocation)
        except BaseException:
            self.close()
            raise
        self.credentials = Credentials(*record.credentials) if record.credentials else None

    def _adopt(self, provider: Provider, allocation: Allocation[Any]) -> None:
        """Find out how the machines are reached."""
        record = self.record
        # Twice: the answer of some providers lags behind.
        self.machines = found_machines(record, provider, allocation) or found_machines(
            record, provider, allocation
        )
        if record.nodes and not self.machines:
            raise self._unused()
        adopting = []
        for index, (kept, machine) in sorted(self.machines.items()):
            host = Host(provider, allocation, Order(record.id, index, _NOTHING), NoJournal())
            adopting.append(providers.submit(host.adopt(kept, machine)))
            self._hosts[index] = host
        late = concurrent.futures.wait(adopting, FIND_SECONDS).not_done
        for each in late:
            each.cancel()
        if late:
            raise PoolError(
                f"{record.name}: {len(late)} of its {len(adopting)} machines did not answer within "
                f"{FIND_SECONDS:.0f} s; see whether they can be reached, and try again"
            )
        for each in adopting:
            each.result()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The indexes of the nodes."""
        return tuple(self._hosts)

    def service(self, node: int, name: str) -> ServiceConnection:
        """A connection to a service of a node's agent; the caller closes it."""
        if node not in self._hosts:
            raise not_there(node, self.nodes)
        return self._hosts[node].service(name, self.credentials)

    def head(self) -> ServiceConnection:
        """A connection to the service that knows the clients; `PoolError` if no agent is left."""
        problem: SkywardError | None = None
        for index in self.nodes:
            try:
                return self.service(index, "clients")
            except NodeLostError as failure:
                problem = problem or failure
        if all(host.has_ended() for host in self._hosts.values()):
            raise self._unused()
        raise PoolError(
            f"{self.record.name}: none of its {len(self.nodes)} agents answers: {problem}; try "
            f"again, or end it with `sky down {self.record.name}`"
        )

    def _unused(self) -> PoolError:
        """Why no machine of the pool can be used: they are stopped, or gone."""
        name = self.record.name
        if stopped := stopped_machines(self.record, self._provider):
            ids = ", ".join(sorted(machine.id for machine in stopped))
            return MachinesStopped(
                f"{name} is stopped: its machines do not run any more ({ids}); `sky start {name}` "
                f"starts them again, and `sky down {name}` removes them"
            )
        if not self._forget:
            return MachinesGone(f"{name}: its machines are gone; `sky down {name}` removes it")
        records.forget(name, self.record.id)
        return MachinesGone(
            f"{name}: its machines are gone, so its record is, too; `sky up {name}` or "
            "Compute(keep=True) makes it anew"
        )

    def adoption(self) -> Adoption:
        """What a new client of the pool needs."""
        try:
            # A name that no client comes with is forgotten.
            client = again_if_cut(self._choose)
        except (OSError, EOFError) as problem:
            raise _cut(self.record.name, problem) from problem
        allocation, self._allocation = self._allocation, None
        assert allocation is not None
        return Adoption(self.record, self.machines, client, allocation)

    def _choose(self) -> str:
        with self.head() as head:
            return str(head.ask("choose", identity=identity()))

    def lock(self, client: str = "", *, force: bool = False) -> ServiceConnection:
        """Keep others from changing the pool until the connection is closed.

        `PoolError` if another client does, or without `force` if others are attached or calls by
        name go on.
        """
        return lock(self.head(), self.record.name, client, force=force)

    def tell_end(self) -> None:
        """Have the agents tell their clients that this client ends the pool."""
        for index in self.nodes:
            # Whoever does not answer has no client who would hear of it.
            with (
                contextlib.suppress(NodeLostError, OSError, EOFError),
                self.service(index, "clients") as service,
            ):
                service.ask("ending", identity=identity())

    def close(self) -> None:
        """End what found the machines, unless a client has it now."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            end_allocation(allocation)


def lock(
    head: ServiceConnection, name: str, client: str, *, force: bool = False
) -> ServiceConnection:
    """Take the pool's lock over a connection to its head, and return the connection."""
    try:
        head.ask("lock", identity=identity(), client=client, force=force)
        calls = () if force else head.ask("who")["calls"]
    except PoolError as problem:
        head.close()
        raise PoolError(
            f"{name}: {problem}; have them leave it, or pass --force (in Python, force=True)"
        ) from None
    except BaseException as problem:
        with contextlib.suppress(OSError):
            head.close()
        if isinstance(problem, OSError | EOFError):
            raise _cut(name, problem) from problem
        raise
    if calls:
        head.close()
        raise PoolError(f"{name}: {_called(name, calls)}, or pass --force (in Python, force=True)")
    return head


def _cut(pool: str, problem: Exception) -> PoolError:
    """An agent was lost while it was asked, or the way to it."""
    return PoolError(f"{pool}: the connection to its agent was lost: {problem}; try again")


def _called(pool: str, calls: Sequence[dict[str, str]]) -> str:
    """Which calls by name wait or run, and how to end them."""
    shown = [f"{each['name']} of {each['by'] or 'an unknown user'}" for each in calls[:CALLS_NAMED]]
    if len(calls) > CALLS_NAMED:
        shown.append(f"{len(calls) - CALLS_NAMED} more")
    if len(calls) == 1:
        return (
            f"runs the call {shown[0]}; wait until it ends, end it with "
            f"`sky cancel {pool} {calls[0]['name']}`"
        )
    return (
        f"runs the calls {', '.join(shown)}; wait until they end, end each with "
        f"`sky cancel {pool} NAME`"
    )
