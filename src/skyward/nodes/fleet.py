"""The fleet: a pool's nodes, how many there are, what they share, and the pulse of all."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import resource
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from skyward import providers
from skyward.calls.dispatch import Dispatcher
from skyward.calls.loop import Loop
from skyward.calls.packer import Packer
from skyward.calls.relays import Relays
from skyward.calls.scheduler import Prospects
from skyward.calls.task import Task
from skyward.console import Console
from skyward.errors import (
    ConfigurationError,
    NodeLostError,
    PoolClosedError,
    PoolError,
    PoolStartError,
    ProtocolError,
    SkywardError,
)
from skyward.events import CostCounted, EventStream, NodeStarting
from skyward.files.transfer import Synced
from skyward.functions import Pending
from skyward.nodes.briefing import Briefing, Preparer
from skyward.nodes.deliveries import Deliveries
from skyward.nodes.devices import PoolDevices
from skyward.nodes.host import DESTROY_SECONDS, Host, Ledger
from skyward.nodes.kept import (
    Adoption,
    PoolKeeper,
    authority_of,
    end_allocation,
    lock,
    new_record,
    note_pool,
)
from skyward.nodes.node import PING_SECONDS, Node, NodeView, Roster
from skyward.nodes.occupancy import check_jobs
from skyward.nodes.records import Journal, KeptNode, KeptPool, NoJournal
from skyward.nodes.spec import PoolSpec
from skyward.nodes.stacks import Stacks, read_stacks
from skyward.providers import Machine, Order, connecting
from skyward.spec import Nodes, Options
from skyward.state.link import OWNER, RemoteLink
from skyward.wire.channel import Channel, ServiceConnection
from skyward.wire.handshake import CLIENT, Credentials
from skyward.wire.messages import (
    Detach,
    DeviceDown,
    DeviceUp,
    Measure,
    Message,
    NodeEnded,
    Prepared,
    Usage,
    Written,
)
from skyward.worker.config import STALLED_SECONDS, AgentConfig

BEATS_BETWEEN_COSTS = 20
"""How many beats lie between two events of the cost: 10 s."""
PINGS_A_BEAT = 250
"""How many nodes get a heartbeat at one beat, if that is often enough for each of them."""
BEATS_MOST = 4
"""How many beats lie between two heartbeats of a node at most: 2 s. A node has 4 s to answer."""
READY_SECONDS = 120.0
"""How long a node may take from its machine to its workers."""
PREPARE_SECONDS = 1800.0
"""How much longer a start with an image or plugins may take: some download gigabytes."""
PART_SECONDS = 20.0
"""How long idle executors of a kept pool have to part from a client: they answer at once,
but on a busy machine their processors may be taken for seconds, and to replace them costs more."""
PART_LOOK_SECONDS = 0.005
SWEEP_SECONDS = 180.0
"""How long a provider may take to remove what a pool has besides machines."""
LEFT = "its client left the pool, which is kept; wait for results before you leave"
"""Why tasks fail that were not done when the client left."""
RUN_SECONDS = 5.0
"""How long the end of nodes waits for the ends of their lives, after those of their machines."""
BACKLOG_SECONDS = 1.0
"""How long tasks must wait before the pool starts another node."""
FILES_BESIDES = 256
"""Open files that the client, its provider and the user's program may need besides."""
FILES_ROOM = 2
"""How many times what a pool may need is asked for: other pools may start at the same time."""
FILES_DIALLED = 2
"""How many files a connection takes that a provider carries: both ends of a pair are here."""
MEASURE_SECONDS = 3.0
"""How long the client waits for a measurement."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """How busy one GPU is; `percent` is None if its driver does not say."""

    name: str
    percent: float | None
    memory_used: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """How busy a node is; in a container, all of it is the container's share."""

    cpu_percent: float
    """Of all processors that the node may use, since the measurement before."""
    memory_used: int
    memory_total: int
    gpus: tuple[GpuUsage, ...]
    network_received: int = 0
    """Bytes that the node has received since it was started, but for those from itself."""
    network_sent: int = 0


class Fleet:
    """Owns the nodes of a pool, and the dispatcher of the tasks on them, to their end."""

    def __init__(
        self,
        spec: PoolSpec,
        console: Console,
        broadcast: Callable[[Fleet, Pending[Any], Callable[[list[Task]], None]], list[Any]],
        adoption: Adoption | None = None,
    ) -> None:
        """`broadcast` makes the broadcasts that tasks ask for.

        `adoption` is how the fleet comes by the nodes of a kept pool.
        """
        self.spec, self.console = spec, console
        self.id = spec.id or uuid.uuid4().hex[:12]
        self.loop = Loop()
        self.prospects = Prospects(grouped=spec.preparations.together)
        self.events = EventStream(spec.name)
        """What happens in the pool."""
        self.roster = Roster()
        allocate = spec.provider.allocate
        self.allocation = adoption.allocation if adoption else allocate(self.id)
        self._adoption = adoption
        self._is_here = spec.provider.capabilities.here
        self._opened = False
        """Whether the provider may have been asked for machines."""
        ends_with_client = self._is_here and spec.keep is None
        self._journal = NoJournal() if ends_with_client else Journal()
        self.ledger = Ledger(lambda: spec.provider.price(spec.request))
        """What the machines cost."""
        self._authority = None
        self.credentials: Credentials | None = None
        record = adoption.record if adoption else None
        if record is not None and record.inside:
            self.credentials = Credentials(*record.credentials) if record.credentials else None
        elif spec.provider.capabilities.encrypted:
            self._authority = authority_of(self.id, spec, record)
            self.credentials = self._authority.issue(CLIENT)
        self.client = ""
        if spec.keep is not None:
            self.client = adoption.client if adoption else secrets.token_hex(8)
        self.keeper = PoolKeeper(adoption.record if adoption else None)
        # Executors on one host share memory with the client; over a network they help each other.
        clustered = self.credentials is not None and spec.options.cluster
        self.relays = Relays() if clustered else None
        self.devices = PoolDevices(
            self.id, spec, self.roster, self._authority, self.credentials, self.events, console
        )
        """The torch devices of the nodes."""
        self.dispatcher = Dispatcher(
            self.loop,
            console,
            Packer(encrypted=spec.provider.capabilities.encrypted, relayed=clustered),
            self.prospects,
            self.events,
            spec.options,
            self.devices,
            functools.partial(broadcast, self),
        )
        self._briefing = Briefing(
            self.id, spec, self._authority, self.roster, clustered=clustered, client=self.client
        )
        self.preparer = Preparer(
            spec.preparations, self.loop, self.roster, self._briefing, self.dispatcher, console
        )
        """Prepares the workers, and has them form groups."""
        self._state = RemoteLink(self._connect_to_state, f"the client (process {os.getpid()})")
        self._measurements = itertools.count(1)
        self._measuring: dict[int, queue.SimpleQueue[Usage]] = {}
        """Who waits for a measurement of an agent, by its number."""
        self.deliveries = Deliveries(spec.folders, spec.volumes, self.roster.service)
        """The folders that nodes get from the client."""
        # A node needs a new machine, or plugins, before it is ready.
        is_slow = not self._is_here or bool(spec.preparations)
        self._ready_seconds = READY_SECONDS + (PREPARE_SECONDS if is_slow else 0.0)
        self._resizing = threading.Lock()
        self._scaler = Scaler(spec.nodes, spec.options, self.dispatcher)
        self._shrinking = False
        """Whether a thread removes an idle node."""
        self._joining: deque[Node] = deque()
        """Nodes that all others are about to be told of."""
        self._telling = threading.Lock()
        self._beats, self._beaten = 0, 0.0
        """How many beats there were, and when the last one was."""
        self._begun = False
        """Whether the pulse beats: the pool has started."""
        self._expired = ""
        """Why the pool ended by itself; empty if it did not."""
        self._closing = threading.Lock()
        self._ended = threading.Event()
        """Set when everything has been taken down."""

    @property
    def nodes(self) -> list[Node]:
        """The nodes, by index."""
        return self.roster.nodes

    @property
    def closed(self) -> bool:
        """Whether the pool was taken down."""
        return self.roster.closed

    @property
    def head(self) -> int:
        """The first node."""
        return min((node.index for node in self.nodes), default=0)

    def service(self, index: int, name: str) -> ServiceConnection:
        """A connection to a service of a node's agent; the caller closes it."""
        self.dispatcher.check_open()
        return self.roster.service(index, name)

    @property
    def state(self) -> RemoteLink:
        """The way to the shared state."""
        self.dispatcher.check_open()
        return self._state

    def _connect_to_state(self) -> Channel:
        self.wake()
        return self.service(OWNER, "state").channel

    # Starting.

    def start(self) -> None:
        """Start the nodes, or connect to those of a kept pool.

        Raises the first failure that leaves too few nodes.
        """
        ttl = self.spec.request.ttl
        if ttl is not None:
            ends = self._adoption.record.ends if self._adoption is not None else None
            left = ttl if ends is None else ends - time.time()
            self.loop.later(max(0.0, left), lambda: self._expire(ttl))
        try:
            if self._adoption is None:
                self._start_all()
            else:
                self._attach(self._adoption)
        except PoolClosedError as problem:
            if self._expired:
                raise PoolStartError(f"{self.spec.name} did not start: {self._expired}") from None
            raise problem

    def _expire(self, ttl: float) -> None:
        """End the pool, because its time to live is over; the loop's thread must not wait."""
        self._expired = (
            f"the pool's time to live of {ttl:g} s is over; give Compute a larger ttl, or none"
        )
        self.console.note(f"{self.spec.name}: its time to live of {ttl:g} s is over; it ends")
        threading.Thread(target=self.close, name="skyward-expiry", daemon=True).start()

    def _start_all(self) -> None:
        """Start all nodes in parallel."""
        provider, nodes = self.spec.provider, self.spec.nodes
        self._allow_descriptors(nodes.ceiling)
        self._opened = True
        self._journal.open_pool(
            self.id, self.spec.name, provider.name, provider.describe(), self.ledger.price
        )
        self._need(nodes)
        self.loop.later(PING_SECONDS, self._ping_while_starting)
        added = self._add(nodes.desired)
        self._await_ready(added, max(nodes.floor, min(1, nodes.desired)))
        self.roster.begin_serving()
        for node in added:
            if node.state == "failed":
                node.tell_retry()
        self._begin_pulse()

    def _attach(self, adoption: Adoption) -> None:
        """Connect to the nodes of a kept pool; raises if none of them can be reached."""
        self._allow_descriptors(len(adoption.machines))
        self._opened = True
        note_pool(self._journal, adoption.record)
        self._need(Nodes(1))
        self.loop.later(PING_SECONDS, self._ping_while_starting)
        added = self._add_nodes(sorted(adoption.machines), adoption.machines)
        self._await_ready(added, 1)
        deadline = time.monotonic() + self._ready_seconds
        for node in added:
            while not node.settled.wait(0.1) and not self.closed:
                if time.monotonic() > deadline:
                    break
        self.roster.begin_serving()
        self._begin_pulse()

    def _need(self, nodes: Nodes) -> None:
        """Say without how many nodes the pool is of no use, and how many it may have."""
        needed = max(1, nodes.floor)
        self.roster.need(needed)
        self.prospects.need(needed)
        self.prospects.grow_up_to(0 if nodes.floor else nodes.ceiling)

    def _allow_descriptors(self, nodes: int) -> None:
        executors = self._executors_of_a_node()
        secret = self.credentials is not None
        more = max(0, nodes - len(self.nodes))
        count = connections(more, executors, encrypted=secret)
        allow_connections(count, nodes, dialled=not self._is_here)

    def _add(self, count: int) -> list[Node]:
        with self.roster.lock:
            first = 1 + max((node.index for node in self.nodes), default=-1)
            return self._add_nodes(range(first, first + count))

    def _add_nodes(
        self,
        indexes: Sequence[int],
        there: Mapping[int, tuple[KeptNode, Machine]] = MappingProxyType({}),
    ) -> list[Node]:
        """Add nodes and begin to start them; some may have agents and machines already."""
        # Under the lock: whoever closes the pool ends these nodes, or none is added.
        with self.roster.lock:
            if self.closed:
                return []
            self.allocation.expect(indexes)
            added = [
                Node(index, self.new_host(index), self, kept=there.get(index)) for index in indexes
            ]
            self.roster.add(added)
        for node in added:
            node.start()
        return added

    def _await_ready(self, nodes: list[Node], needed: int) -> None:
        """Wait until so many of these nodes are ready; raises when too many have failed.

        The wait for a machine has no limit here: it may be in a queue, and its provider says how
        long it waits. Nor is a node late whose executors come one after the other.
        """
        began = time.monotonic()
        most: dict[int, tuple[int, float]] = {}
        """How many executors each node had at most, and since when."""

        def is_late(node: Node) -> bool:
            made, now = node.host.made_at, time.monotonic()
            count, since = most.get(node.index, (0, began))
            if len(node.lanes) > count:
                most[node.index] = len(node.lanes), now
                return False
            return made is not None and now > max(since, made) + self._ready_seconds

        while sum(node.serves for node in nodes) < needed:
            if self.closed:
                raise PoolClosedError("this pool was closed while it started")
            failures = [node.failure for node in nodes if node.failure is not None]
            if len(nodes) - len(failures) < needed:
                raise failures[0]
            starting = [node for node in nodes if not node.serves and node.failure is None]
            late = [node for node in starting if is_late(node)]
            if late and len(nodes) - len(failures) - len(late) < needed:
                raise self._lateness(late[0])
            waiting = [node for node in nodes if not node.settled.is_set()]
            # Short waits, so that a Ctrl-C and the failure of another node are noticed. For the
            # last node: with the first, each of many nodes would end a wait, and be counted again.
            if waiting:
                waiting[-1].settled.wait(0.1)
            else:
                time.sleep(0.01)

    def _lateness(self, node: Node) -> PoolStartError:
        there = len(node.lanes)
        expected = there if node.control is None else self.executors_on(node)
        if there < expected:
            return PoolStartError(
                f"node {node.index}: {there} of {expected} worker processes are connected, and in "
                f"{self._ready_seconds:.0f} s no other came; see what its machine does, and if "
                "that is too many for it, ask for fewer with sky.Worker(concurrency=...), or for "
                "threads of one process with executor='thread'"
            )
        return PoolStartError(
            f"node {node.index} was not ready {self._ready_seconds:.0f} s after its machine was "
            "there; see what its machine does, and try again"
        )

    # How many nodes there are.

    def resize(self, nodes: int | Nodes, *, force: bool) -> None:
        """Change the number of nodes, and with `Nodes` the bounds of an elastic pool as well.

        Without `force`, `PoolError` if nodes would go while another client, a script or a call by
        name uses the pool.
        """
        self.dispatcher.check_open()
        count = nodes if isinstance(nodes, int) else nodes.desired
        goes = count < len(self.nodes) and not force
        with self.lock_unused() if goes else self.lock(force=True):
            self._resize(nodes)

    def _resize(self, nodes: int | Nodes) -> None:
        self._allow_descriptors(nodes if isinstance(nodes, int) else nodes.ceiling)
        if isinstance(nodes, int):
            self._scaler.keep()
            self._change_size(nodes, nodes)
            self.roster.need(min(self.roster.needed, nodes))
            self.prospects.need(self.roster.needed)
            return
        # First, so that the pool does not meanwhile shrink below its new bounds.
        before = self._scaler.bound(nodes)
        self.prospects.grow_up_to(0 if nodes.floor else nodes.ceiling)
        try:
            self._change_size(nodes.desired, nodes.floor)
        except BaseException:
            self._scaler.bound(before)
            self.prospects.grow_up_to(0 if before.floor else before.ceiling)
            raise
        self._need(nodes)

    def _change_size(self, count: int, needed: int) -> None:
        """Grow or shrink to so many nodes; a leaving node first finishes its tasks.

        A pool that does not shrink starts its failed nodes again, and this returns when as many
        nodes as needed are ready. If they cannot be started, the pool has the nodes it had.
        """
        with self._resizing:
            nodes = self.nodes
            if count < len(nodes):
                self._retire(nodes[count:])
                return
            for node in nodes:
                if node.state == "failed":
                    node.start_again()
            added = self._add(count - len(nodes))
            try:
                self._await_ready([*nodes, *added], needed)
            except BaseException:
                self._drop(added)
                raise
            self._briefing.tell_all()

    def wake(self) -> None:
        """Have at least one node, and wait until it is ready."""
        self.dispatcher.check_open()
        if any(node.joined for node in self.nodes):
            return
        self._scaler.keep()
        with self._resizing:
            nodes = self.nodes or self._add(1)
            with self.roster.lock:
                failed = [node for node in nodes if node.retries.at_next_call]
            for node in failed:
                node.start_again()
            self._await_ready(nodes, 1)

    def _grow(self, count: int) -> None:
        """Begin to add nodes until there are so many, unless the user changes the number now."""
        if self._resizing.acquire(blocking=False):
            try:
                self._add(count - len(self.nodes))
            finally:
                self._resizing.release()

    def _shrink_idle(self) -> None:
        try:
            if self._shrink(self._scaler.target) == 0:
                self.console.note("the pool has no nodes now; the next call starts one")
        except SkywardError as problem:
            self.console.note(f"an idle node could not be removed: {problem}")
        finally:
            self._shrinking = False

    def _shrink(self, target: Callable[[int], int]) -> int:
        """Remove idle nodes, unless they are those of other clients, too; returns how many stay.

        `target` says how many of the present number are to stay; it is asked after a resize by
        the user has ended.
        """
        try:
            with self.lock_unused(), self._resizing:
                nodes = self.nodes
                self._retire(nodes[target(len(nodes)) :])
        except PoolError:
            self._scaler.keep()
        return len(self.nodes)

    def _retire(self, leaving: list[Node]) -> None:
        if not leaving:
            return
        with self.roster.lock:
            lanes = [lane for node in leaving for lane in node.lanes.values()]
            for node in leaving:
                node.drain()
                self.prospects.leave(node.index)
        for lane in lanes:
            self.dispatcher.drain(lane)
        self.dispatcher.fail_unrunnable()
        while any(lane.tasks for lane in lanes if not lane.lost) and not self.closed:
            time.sleep(0.01)
        if any(node.index == OWNER and node.joined for node in leaving):
            self._tell_state_ends()
        self.roster.remove(leaving)
        self._briefing.tell_all()
        self.preparer.regroup()
        self._end(leaving, 5.0)

    def _tell_state_ends(self) -> None:
        """Tell the user of shared objects that leave with their owner."""
        count = self._state.count()
        if count:
            objects = "1 shared object" if count == 1 else f"{count} shared objects"
            self.console.note(
                f"{objects} (sky.dict and others) ended with the pool's last node; "
                "nodes=(1, ...) keeps one, or save before what is to stay"
            )

    def _drop(self, nodes: list[Node]) -> None:
        """Remove nodes that were added together and did not all start."""
        self.roster.remove(nodes)
        for node in nodes:
            self.prospects.leave(node.index)
        self._end(nodes, 0)
        self.dispatcher.fail_unrunnable()
        self._briefing.tell_all()

    def lock(self, *, force: bool) -> contextlib.ExitStack:
        """Keep other clients from changing the pool; the caller closes what this returns."""
        held = contextlib.ExitStack()
        if self.is_kept:
            for node in self.nodes:
                # A pool whose agents do not answer cannot be locked, but can be ended.
                with contextlib.suppress(NodeLostError):
                    head = self.roster.service(node.index, "clients")
                    held.enter_context(lock(head, self.spec.name, self.client, force=force))
                    break
        return held

    def lock_unused(self) -> contextlib.ExitStack:
        """Lock a pool that loses nodes; `PoolError` if others, a script or a call use it."""
        with self.lock(force=False) as held:
            if self.is_kept:
                indexes = [node.index for node in self.nodes]
                check_jobs(self.spec.name, indexes, self.service)
            return held.pop_all()

    # How many tasks the nodes run at once.

    def workers(self) -> list[tuple[int, int]]:
        """Every (node, worker) that serves or will come back, in rank order."""
        return [
            (node.index, worker)
            for node in self.nodes
            if node.joined
            for worker in range(self._briefing.workers_on(node))
        ]

    def slots(self) -> int:
        """How many tasks the pool can run at once."""
        return max(1, len(self.workers()) * self.spec.worker.concurrency)

    def _slots_of_a_node(self) -> int:
        """How many tasks a node runs at once, or probably will, before there is one."""
        there = len(self.nodes) - len(self.roster.coming)
        if there:
            return -(-self.slots() // there)
        return self._workers_of_a_node() * self.spec.worker.concurrency

    def executors_on(self, node: Node) -> int:
        """How many executors a node has."""
        return self._briefing.workers_on(node) * self._processes

    def _executors_of_a_node(self) -> int:
        """How many executors a node will probably have, before there is one."""
        return self._workers_of_a_node() * self._processes

    def _workers_of_a_node(self) -> int:
        per_node, accelerator = self.spec.worker.per_node, self.spec.accelerator
        if per_node != "accelerator":
            return per_node
        return 1 if accelerator is None else accelerator.count

    @property
    def _processes(self) -> int:
        """How many executors a worker has."""
        worker = self.spec.worker
        return 1 if worker.executor == "thread" else worker.concurrency

    # The pulse.

    def _ping_while_starting(self) -> None:
        """Have agents know that the client is there, however long plugins take to start."""
        if self.closed or self._begun:
            return
        self.loop.later(PING_SECONDS, self._ping_while_starting)
        for node in self.nodes:
            if node.control is not None:
                node.ping()

    def _begin_pulse(self) -> None:
        # The addresses of the nodes, and which nodes are there, are known only now.
        self._briefing.tell_all()
        self._begun, self._beaten = True, time.monotonic()
        self.loop.later(PING_SECONDS, self._beat)

    def _beat(self) -> None:
        """Send heartbeats to some nodes, and lose silent ones; then see to the whole pool."""
        if self.closed:
            return
        self.loop.later(PING_SECONDS, self._beat)
        self._beats += 1
        nodes = self.nodes
        now = time.monotonic()
        stood_still, self._beaten = now - self._beaten, now
        if stood_still > STALLED_SECONDS:
            for node in nodes:
                node.forgive(stood_still)
        between = beats_between_pings(len(nodes), self.spec.options.orphan_timeout)
        for node in nodes:
            if node.control is None:
                continue
            if (node.index + self._beats) % between == 0:
                node.ping()
            reason = node.why_lost()
            if reason:
                node.handle_loss(reason)
        if self.events.listened and self._beats % BEATS_BETWEEN_COSTS == 0:
            self._tell_cost()
        self.dispatcher.recall_stuck()
        self._retry_failed()
        self._scale()

    def _retry_failed(self) -> None:
        """Start failed nodes again that have waited long enough, or for a call."""
        if self.roster.serves:
            is_called = self.dispatcher.backlog > 0
            for node in self.nodes:
                if node.retries.is_due or (node.retries.at_next_call and is_called):
                    node.start_again()

    def _scale(self) -> None:
        """Grow or shrink an elastic pool, and free workers that tasks hold while others wait."""
        count, coming = len(self.nodes), len(self.roster.coming)
        wanted = self._scaler.look(count, coming=coming, slots=self._slots_of_a_node())
        if wanted > count and not self._shrinking:
            self._grow(wanted)
        elif wanted < count and not self._shrinking:
            self._shrinking = True
            threading.Thread(target=self._shrink_idle, name="skyward-scaling", daemon=True).start()
        may_grow = self._scaler.may_grow(count) or not all(node.joined for node in self.nodes)
        self.dispatcher.fail_held(slots=self.slots(), may_grow=may_grow)

    def _tell_cost(self) -> None:
        cost, hourly = self.ledger.cost, self.ledger.hourly_cost
        if cost and hourly is not None:
            self.events.emit(CostCounted, cost, hourly)

    # What nodes share, and what they tell.

    def new_host(self, index: int, lost: Host | None = None) -> Host:
        """A host for a node; `lost` is the one that it replaces."""

        def phase(phase: str) -> None:
            self.console.phase(index, phase)
            self.events.emit(NodeStarting, index, phase)

        return Host(
            self.spec.provider,
            self.allocation,
            Order(
                self.id,
                index,
                self.spec.request,
                tell=phase,
                note=self.console.note,
                name=self.spec.name,
            ),
            self._journal,
            lost=lost,
            ledger=self.ledger,
        )

    def agent_config(self, node: Node) -> AgentConfig:
        """The configuration that a node's agent starts with."""
        return self._briefing.agent_config(node, self.dispatcher.packer.cap)

    def has_devices(self, node: Node) -> bool:
        """Whether a torch device is open on a node."""
        return self.devices.has_open(node.index)

    def deliver(self, node: Node) -> None:
        """Give a node that starts the client's files."""
        self.deliveries.deliver(node.index, lambda what: self.console.phase(node.index, what))

    def hear(self, node: Node, message: Message) -> None:
        """Take what an agent tells of other things than its executors and its machine."""
        match message:
            case Prepared():
                self.preparer.node_prepared(node, message.problem)
            case DeviceUp() | DeviceDown():
                self.devices.heard(message)
            case Usage():
                waiting = self._measuring.get(message.number)
                if waiting is not None:
                    waiting.put(message)
            case NodeEnded():
                self.keeper.note_end(node.index, message.by)
            case Written():
                self.console.output(
                    message.text, message.stream, node.index, 0, "", message.transient
                )
                self.dispatcher.teller.output(message, node.index, 0, "")
            case _:
                raise ProtocolError(f"an agent does not send {type(message).__name__}")

    def node_joins(self, node: Node) -> None:
        """Tell all nodes of one whose executors are all prepared, and make it ready then."""
        self._joining.append(node)
        connecting.run(self._tell_joining)

    def _tell_joining(self) -> None:
        """Make nodes known that have come together, all at once: each is told of each other one.

        If another thread does so, it goes on with those that came meanwhile.
        """
        while self._joining and self._telling.acquire(blocking=False):
            try:
                joined = [self._joining.popleft() for _ in range(len(self._joining))]
                self._briefing.tell_all()
                for node in joined:
                    node.ready_if_prepared()
            finally:
                self._telling.release()

    def node_lost(self, node: Node, reason: str) -> None:
        """Note that what was open on a node is gone."""
        self.devices.node_lost(node.index, reason)

    # Kept pools.

    def keep(self) -> None:
        """Write the pool's record, and keep its nodes."""
        serving = [node for node in self.nodes if node.serves]
        facts = [node.host.facts(node.index) for node in serving]
        record = new_record(
            self.id,
            self.spec,
            self._authority,
            self.credentials,
            self.ledger.hourly_cost,
            [each for each in facts if each is not None],
        )
        self.keeper.begin(record)
        wait([node.let_stay(record.idle) for node in serving])

    @property
    def is_kept(self) -> bool:
        """Whether the pool is still there when this client has left."""
        return self.keeper.begun is not None

    @property
    def record(self) -> KeptPool | None:
        """The record of a kept pool."""
        return self.keeper.begun

    # Files.

    def reachable(self) -> list[int]:
        """The nodes whose agents can be asked."""
        return [node.index for node in self.nodes if node.joined and node.host.endpoint]

    def sync(self) -> Synced:
        """Make the folders that nodes got from this machine as they are here now."""
        self.dispatcher.check_open()
        return self.deliveries.sync(self.reachable())

    def write_back(self, *, last: bool = False) -> Synced:
        """Write what functions have written into volumes to where the volumes come from."""
        return self.deliveries.write_back(self.reachable(), self.console.note, last=last)

    def before_calls(self) -> None:
        """Send what has changed, if the user wants that before every call."""
        self.deliveries.before_calls(self.reachable)

    def _bring_back(self, *, last: bool) -> None:
        """Write back what functions have written; what fails is told, and stops nothing."""
        if not self.deliveries.comes_back:
            return
        try:
            self.write_back(last=last)
        except Exception as problem:
            self.console.note(f"{self.spec.name}: not everything was written back: {problem}")

    # Ending.

    def detach(self, seconds: float = 5.0) -> None:
        """Leave a kept pool; tasks that are not done are cancelled, and fail."""
        self._end_once(lambda: self._detach(seconds))

    def close(self, seconds: float = 5.0) -> None:
        """End the nodes and remove their machines; tasks that are not done fail.

        If another thread does that, waits for it.
        """
        self._end_once(lambda: self._close(seconds))

    def _end_once(self, end: Callable[[], None]) -> None:
        if self._closing.acquire(blocking=False):
            try:
                end()
            finally:
                self._ended.set()
        elif not self.dispatcher.results.is_current:
            # The thread that closes waits for the one that runs callbacks of the user's.
            self._ended.wait()

    def _detach(self, seconds: float) -> None:
        self._state.close()
        self.dispatcher.cancel_all(LEFT, seconds / 2)
        if self._adoption is None or not self._adoption.record.inside:
            # Now: nobody else brings folders back to this machine.
            self._bring_back(last=False)
        self.dispatcher.close(LEFT)
        try:
            self._leave_nodes(seconds)
        finally:
            self._end_threads()

    def _close(self, seconds: float) -> None:
        try:
            # Before anything else ends: functions are done, and the nodes still answer.
            self._bring_back(last=True)
        finally:
            # Also when the user interrupts that: machines that are left would cost.
            self._state.close()
            self.dispatcher.close(self._expired, self._expired)
            try:
                self._end_nodes(seconds)
            finally:
                self._end_threads()

    def _end_threads(self) -> None:
        self.loop.stop()
        for node in self.nodes:
            if node.control is not None:
                node.control.close()
        self.dispatcher.end_threads()

    def _leave_nodes(self, seconds: float) -> None:
        """Leave the nodes to other clients: idle executors stay as they are."""
        self.roster.close()
        self.devices.close("its client left the pool")
        self._part(max(seconds, PART_SECONDS))
        self._end([node for node in self.nodes if not node.host.is_kept], 0)
        for node in self.nodes:
            node.stop()
        wait([node.end_run() for node in self.nodes], RUN_SECONDS)
        for node in self.nodes:
            node.forget()
        self._await_resize()
        end_allocation(self.allocation)

    def _part(self, seconds: float) -> None:
        """Part from all executors, then from the agents; each waits for so many seconds at most.

        An executor that still runs a task, or does not answer, is replaced.
        """
        serving = [node for node in self.nodes if node.control is not None and node.host.is_kept]
        groups = {node: self.preparer.entered_by(node) for node in serving}
        lanes = [(node, lane) for node in serving for lane in list(node.lanes.values())]
        deadline = time.monotonic() + seconds
        idle = [lane for _, lane in lanes if not lane.tasks and not lane.lost]
        for lane in idle:
            lane.channel.expect_end()
            lane.tell(Detach())
        parted = _ended([lane.channel for lane in idle], deadline)
        left = [(node, lane) for node, lane in lanes if lane.channel not in parted]
        for node, lane in left:
            node.kill(lane, "its client left the pool while it ran a task")
        controls = [node.control for node in serving if node.control is not None]
        for control in controls:
            control.expect_end()
        for node in serving:
            # If a member of a group is replaced, the group is of no use to the next client.
            node.tell(Detach("" if left else groups[node]))
        _ended(controls, deadline)

    def _end_nodes(self, seconds: float) -> None:
        """End every node, in parallel."""
        self.roster.close()
        self.devices.close("its pool was closed")
        # A stopped pool that could not be started is stopped again, with all that it has.
        spare = bool(self.spec.id) and not self.is_kept and self.spec.provider.capabilities.stops
        try:
            self._end(self.nodes, seconds, spare=spare)
            self._await_resize()
        finally:
            # Also if a node's end has failed: the rest would be left, and cost.
            if not spare:
                self.keeper.forget()
            swept = not spare and (not self._opened or self._swept())
            try:
                end_allocation(self.allocation)
            finally:
                if swept:
                    self._journal.close_pool(self.id)

    def _await_resize(self) -> None:
        """Wait for a thread that removes nodes, such as idle ones: the process may end next."""
        if self._resizing.acquire(timeout=DESTROY_SECONDS):
            self._resizing.release()

    def _swept(self) -> bool:
        """Have the provider remove what the pool has besides machines, when the last is gone.

        False if something may be left.
        """
        if self._journal.has_machines(self.id):
            return False
        sweeping = providers.submit(self.allocation.sweep())
        try:
            sweeping.result(SWEEP_SECONDS)
        except Exception as problem:
            sweeping.cancel()
            self.console.note(
                "what the pool had besides its machines could not be removed: "
                f"{str(problem) or type(problem).__name__}; `sky down` tries again"
            )
            return False
        return True

    def hurry(self) -> None:
        """End every machine now, even if another thread gives the agents time to end."""
        self.devices.hurry()
        for node in self.nodes:
            node.host.stop(0)

    def _end(self, nodes: Sequence[Node], seconds: float, *, spare: bool = False) -> None:
        """End nodes in parallel, also if they would stay; agents have so many seconds to end.

        With `spare`, the machines are not removed.
        """
        self.keeper.remove([node.index for node in nodes], self.roster.tell_head)
        for node in nodes:
            if spare:
                node.host.keep()
            else:
                node.host.condemn()
        ends = []
        for node in nodes:
            node.stop()
            node.shut_down()
            # An agent without a connection was not told to end, and will not end by itself.
            ends.append(node.host.stop(seconds if node.is_connected else 0))
        problems = []
        for end in ends:
            try:
                end.result()
            except Exception as problem:
                # The other nodes end all the same.
                problems.append(problem)
        until = time.monotonic() + DESTROY_SECONDS
        for node in nodes:
            node.await_removal(until)
        # Only now: to cancel a provider's work early would leave it unknown what it has made.
        wait([node.end_run() for node in nodes], RUN_SECONDS)
        for node in nodes:
            node.forget()
        if problems:
            raise problems[0]

    # Looking.

    def stacks(self) -> Stacks:
        """Where every process of the nodes that have started is."""
        return read_stacks(self.reachable(), self.service)

    def views(self) -> list[NodeView]:
        """The nodes as a user sees them."""
        with self.roster.lock:
            return [node.view() for node in self.nodes]

    def usage(self, node: int) -> NodeUsage | None:
        """How busy a node is; None if it does not answer now."""
        return self.usages([node], MEASURE_SECONDS).get(node)

    def usages(self, nodes: Iterable[int], seconds: float) -> dict[int, NodeUsage]:
        """How busy these nodes are; those that do not answer in so many seconds are left out."""
        answers: queue.SimpleQueue[Usage] = queue.SimpleQueue()
        asked: dict[int, int] = {}
        found: dict[int, NodeUsage] = {}
        deadline = time.monotonic() + seconds
        try:
            for node in nodes:
                number = next(self._measurements)
                self._measuring[number] = answers
                asked[number] = node
                if not self.roster.tell(node, Measure(number)):
                    del asked[number], self._measuring[number]
            while len(found) < len(asked):
                told = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                found[asked[told.number]] = _usage(told)
        except queue.Empty:
            pass
        finally:
            for number in asked:
                self._measuring.pop(number, None)
        return found


class Scaler:
    """Says when a pool grows, because tasks wait, and shrinks after `idle_timeout`."""

    def __init__(
        self,
        nodes: Nodes,
        options: Options,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._options, self._dispatcher = nodes, options, dispatcher
        self._clock = clock
        self._no_backlog = self._last_busy = clock()
        self._there = 0

    def bound(self, nodes: Nodes) -> Nodes:
        """Set new bounds, and return the old ones; the idle time counts from now."""
        old, self._nodes = self._nodes, nodes
        self.keep()
        return old

    def keep(self) -> None:
        """Count the idle time from now: the user has just said how many nodes there should be."""
        self._last_busy = self._clock()

    def target(self, count: int) -> int:
        """How many of so many nodes are to stay: one less when all have been idle for long."""
        if self._clock() - self._last_busy <= self._options.idle_timeout:
            return count
        return min(count, max(self._nodes.floor, count - 1))

    def may_grow(self, count: int) -> bool:
        """Whether a pool with so many nodes gets more while tasks wait."""
        return self._nodes.elastic and count < self._nodes.ceiling

    def look(self, count: int, *, coming: int, slots: int) -> int:
        """How many nodes a pool with so many should have; called at every beat.

        `coming` is how many of the nodes have never been ready, `slots` how many tasks a node runs
        at once. Before it shrinks, the pool asks `target`: that may take a while.
        """
        if not self._nodes.elastic:
            return count
        now = self._clock()
        backlog = self._dispatcher.backlog
        busy = backlog or any(lane.tasks for lane in self._dispatcher.lanes)
        if not backlog or count - coming > self._there:
            # A node that has just become ready may not have got its tasks yet.
            self._no_backlog = now
        self._there = count - coming
        if busy:
            self._last_busy = now
        if backlog and (not count or now - self._no_backlog > BACKLOG_SECONDS):
            return max(count, min(self._nodes.ceiling, count - coming + -(-backlog // slots)))
        return count if busy else self.target(count)


def _usage(told: Usage) -> NodeUsage:
    gpus = tuple(GpuUsage(*each) for each in told.gpus)
    return NodeUsage(
        told.cpu_percent,
        told.memory_used,
        told.memory_total,
        gpus,
        told.network_received,
        told.network_sent,
    )


def beats_between_pings(nodes: int, orphan_timeout: float) -> int:
    """How many beats there are between two heartbeats of a node: more in a large pool."""
    often = int(orphan_timeout / (4 * PING_SECONDS))
    return max(1, min(-(-nodes // PINGS_A_BEAT), BEATS_MOST, often))


def _ended(channels: list[Channel], deadline: float) -> set[Channel]:
    """Wait until the other ends have closed these channels; returns those that they have."""
    while True:
        ended = {channel for channel in channels if channel.ended}
        if len(ended) == len(channels) or time.monotonic() > deadline:
            return ended
        time.sleep(PART_LOOK_SECONDS)


def connections(nodes: int, executors: int, *, encrypted: bool) -> int:
    """How many connections a client has to so many nodes, with so many executors on each.

    There is one to each agent and to each executor, or two if they are encrypted.
    """
    return nodes * (1 + executors) * (2 if encrypted else 1)


def allow_connections(count: int, nodes: int, *, dialled: bool) -> None:
    """Raise this process's limit of open files if so many more connections may exceed it.

    `dialled` says whether the provider may carry the connections, and `nodes` is for the message.
    Only a limit that is certainly too low is an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = open_files()
    least = opened + count
    enough = opened + count * FILES_ROOM * (FILES_DIALLED if dialled else 1) + FILES_BESIDES
    if soft == resource.RLIM_INFINITY or enough <= soft:
        return
    highest = enough if hard == resource.RLIM_INFINITY else hard
    for limit in (min(enough, highest), least):
        if max(least, soft) <= limit <= highest and _set(limit, hard):
            return
    if least > soft:
        # The kernel may have a limit of its own that is lower.
        allowed = hard if least > highest else soft
        raise ConfigurationError(
            f"nodes={nodes}: the client needs at least {least} open files, and this process may "
            f"have {allowed}; raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a service), or "
            "start fewer nodes, or fewer processes on each (sky.Worker(concurrency=...))"
        )


def _set(soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (ValueError, OSError):
        return False
    return True


def open_files() -> int:
    """How many files this process has open; 0 if the system does not say."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0
