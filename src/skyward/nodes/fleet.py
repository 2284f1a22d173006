"""The fleet: a pool's nodes, and the parts that start, watch, resize and end them."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable

from skyward.calls.dispatch import Dispatcher
from skyward.calls.lane import Lane
from skyward.calls.loop import Loop
from skyward.calls.prospects import Prospects
from skyward.console import Console
from skyward.errors import NodeLostError, PoolError, ProtocolError
from skyward.events import CostCounted, EventStream
from skyward.nodes import descriptors
from skyward.nodes.briefing import Briefing
from skyward.nodes.capacity import Capacity
from skyward.nodes.contact import Contacts, connecting
from skyward.nodes.deliveries import Deliveries
from skyward.nodes.ending import Ending
from skyward.nodes.executors import Executors
from skyward.nodes.joining import Joining
from skyward.nodes.journal import Journal, NoJournal
from skyward.nodes.keeper import PoolKeeper, authority_of, new_record, note_pool
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.leaving import leave
from skyward.nodes.ledger import Ledger
from skyward.nodes.losses import Losses
from skyward.nodes.membership import Membership
from skyward.nodes.node import Node
from skyward.nodes.occupancy import check_jobs
from skyward.nodes.pool_devices import PoolDevices
from skyward.nodes.preparing import Preparer
from skyward.nodes.pulse import Pulse
from skyward.nodes.reaching import Adoption, lock
from skyward.nodes.reclaims import Reclaims
from skyward.nodes.roster import Roster
from skyward.nodes.scaling import Scaler
from skyward.nodes.services import ServiceDesk
from skyward.nodes.spec import PoolSpec
from skyward.nodes.standings import Standings
from skyward.nodes.starts import Starts
from skyward.nodes.startup import Callbacks, Startup
from skyward.nodes.sweeping import swept
from skyward.nodes.usage import NodeUsage, UsageDesk
from skyward.nodes.view import NodeView, view_of
from skyward.spec import Nodes
from skyward.wire import messages
from skyward.wire.frames import Frame
from skyward.wire.identity import CLIENT
from skyward.wire.messages import (
    DeviceDown,
    DeviceUp,
    ExecutorDown,
    ExecutorUp,
    Message,
    NodeEnded,
    Ping,
    Prepared,
    Reclaim,
    Usage,
    Written,
)

BEATS_BETWEEN_COSTS = 20
"""How many beats lie between two events of the cost: 10 s."""
PART_SECONDS = 20.0
"""How long idle executors of a pool that stays have to part from a client: they answer at once,
but on a busy machine their processors may be taken for seconds, and to replace them costs more."""


class Fleet:
    """Owns the nodes of a pool."""

    def __init__(
        self,
        pool_id: str,
        spec: PoolSpec,
        loop: Loop,
        dispatcher: Dispatcher,
        prospects: Prospects,
        console: Console,
        events: EventStream,
        adoption: Adoption | None = None,
    ) -> None:
        """`adoption` is how the fleet comes by the nodes of a pool that stays."""
        self._events, self._adoption = events, adoption
        self._id, self._spec = pool_id, spec
        self._loop, self._dispatcher, self._console = loop, dispatcher, console
        self._prospects = prospects
        self._is_here = spec.provider.capabilities.here
        self._opened = False
        """Whether the provider may have been asked for machines."""
        ends_with_client = self._is_here and spec.keep is None
        self._journal = NoJournal() if ends_with_client else Journal()
        self.ledger = Ledger(lambda: spec.provider.price(spec.request))
        """What the machines cost."""
        authority = None
        if spec.provider.capabilities.encrypted:
            authority = authority_of(pool_id, spec, adoption.record if adoption else None)
        self._credentials = authority.issue(CLIENT) if authority else None
        self._client = ""
        if spec.keep is not None:
            self._client = adoption.client if adoption else secrets.token_hex(8)
        known = adoption.record if adoption else None
        self._keeper = PoolKeeper(self._make_record, known, self._tell_head)
        # Executors on one host share memory with the client; over a network they help each other.
        clustered = authority is not None and spec.options.cluster
        self._roster = Roster()
        self._briefing = Briefing(
            pool_id, spec, authority, self._roster, clustered=clustered, client=self._client
        )
        self.capacity = Capacity(spec, self._roster, self._briefing)
        """How many tasks the nodes run at once."""
        self._ending = Ending(loop, dispatcher, self._keeper)
        self._joining = Joining(self._briefing, console, self._node_ready)
        contacts = Contacts(loop, dispatcher, console, spec.options.orphan_timeout)
        self.preparer = Preparer(
            spec.preparations,
            loop,
            self._roster,
            self._briefing,
            drain=functools.partial(dispatcher.drain, nested=True),
            ready=self._executor_ready,
            failed=lambda node, failure: self._losses.plugin_failed(node, failure),
            note=console.note,
        )
        """Prepares the workers, and has them form groups."""
        self.services = ServiceDesk(pool_id, self._roster, self._credentials)
        """The services of the nodes' agents."""
        self._startup = Startup(
            pool_id,
            spec,
            self._roster,
            loop,
            dispatcher,
            prospects,
            console,
            self._journal,
            self.ledger,
            self._briefing,
            contacts,
            self.preparer,
            self._credentials,
            Callbacks(
                self._on_control,
                lambda node, control, why: self._losses.control_ended(node, control, why),
            ),
            events,
            client=self._client,
            adopting=adoption.machines if adoption else {},
            keeper=self._keeper,
            starts=Starts(self._roster, self.services.open),
            deliver=self._deliver if spec.folders or spec.volumes else None,
        )
        self._executors = Executors(
            pool_id,
            spec.worker,
            self.capacity,
            self._roster,
            loop,
            dispatcher,
            console,
            contacts,
            self.preparer,
            credentials=self._credentials,
            clustered=clustered,
            give_up=self._startup.give_up,
            look=Standings(self.services.open).find,
        )
        self._authority = authority
        self.devices = PoolDevices(
            pool_id, spec, self._roster, authority, self._credentials, events, console
        )
        """The torch devices of the nodes."""
        self._usage = UsageDesk(self._ask_node)
        self.deliveries = Deliveries(spec.folders, spec.volumes, self.services.open)
        """The folders that nodes get from the client."""
        self._losses = Losses(
            self._roster,
            loop,
            dispatcher,
            prospects,
            console,
            self.devices.desk,
            self.preparer,
            self._startup,
        )
        self._pulse = Pulse(
            loop,
            self._roster,
            contacts,
            self._losses,
            spec.options.orphan_timeout,
            also=self._at_beat,
        )
        self._reclaims = Reclaims(
            self._roster, loop, dispatcher, console, self.devices.desk, self._losses
        )
        self._membership = Membership(
            self._roster,
            self._startup,
            dispatcher,
            prospects,
            self._briefing,
            self.preparer,
            self.capacity,
            is_slow=not self._is_here or bool(spec.preparations),
            stop_nodes=self._ending.end,
        )
        self._scaler = Scaler(
            spec.nodes,
            spec.options,
            dispatcher,
            console,
            grow=self._membership.grow,
            shrink=self._shrink,
        )

    @property
    def nodes(self) -> list[Node]:
        """The nodes, by index."""
        return self._roster.nodes

    @property
    def closed(self) -> bool:
        """Whether the pool was taken down."""
        return self._roster.closed

    def start(self) -> None:
        """Start all nodes in parallel; raises the first failure that leaves too few nodes."""
        provider, nodes = self._spec.provider, self._spec.nodes
        self._allow_descriptors(nodes.ceiling)
        self._opened = True
        self._journal.open_pool(
            self._id, self._spec.name, provider.name, provider.describe(), self.ledger.price
        )
        self._need(nodes)
        self._pulse.ping_while_starting()
        self._membership.start(nodes.desired, max(nodes.floor, min(1, nodes.desired)))
        # The addresses of the nodes, and which nodes are there, are known only now.
        self._briefing.tell_all()
        self._pulse.begin()

    # Pools that stay.

    def _make_record(self, nodes: list[KeptNode]) -> KeptPool:
        cost = self.ledger.hourly_cost
        return new_record(self._id, self._spec, self._authority, self._credentials, cost, nodes)

    def attach(self) -> None:
        """Connect to the nodes of a pool that stays; raises if none of them can be reached."""
        assert self._adoption is not None
        self._allow_descriptors(len(self._adoption.machines))
        self._opened = True
        note_pool(self._journal, self._adoption.record)
        self._need(Nodes(1))
        self._pulse.ping_while_starting()
        self._membership.attach(sorted(self._adoption.machines))
        self._briefing.tell_all()
        self._pulse.begin()

    def keep(self) -> None:
        """Write the pool's record, and let its nodes stay."""
        self._keeper.begin(self.nodes)

    def _tell_head(self, message: Message) -> bool:
        return any(head.tell(message) for head in self.nodes[:1])

    @property
    def stays(self) -> bool:
        """Whether the pool stays when this client leaves."""
        return self._keeper.begun is not None

    @property
    def record(self) -> KeptPool | None:
        """The record of a pool that stays."""
        return self._keeper.begun

    def _node_ready(self, node: Node) -> None:
        if self.stays:
            # Not on the loop's thread: the record is a file.
            connecting.run(functools.partial(self._keeper.add, node))

    def lock(self, *, force: bool) -> contextlib.ExitStack:
        """Keep other clients from changing the pool; the caller closes what this returns."""
        held = contextlib.ExitStack()
        if self.stays:
            for node in self.nodes:
                # A pool whose agents do not answer cannot be locked, but can be ended.
                with contextlib.suppress(NodeLostError):
                    head = self.services.open(node.index, "clients")
                    held.enter_context(lock(head, self._spec.name, self._client, force=force))
                    break
        return held

    def _lock_unused(self) -> contextlib.ExitStack:
        """Lock a pool that loses nodes; `PoolError` if others, a script or a call use it."""
        with self.lock(force=False) as held:
            if self.stays:
                indexes = [node.index for node in self.nodes]
                check_jobs(self._spec.name, indexes, self.services.open)
            return held.pop_all()

    def _shrink(self, target: Callable[[int], int]) -> int:
        """Remove idle nodes, unless they are those of other clients, too."""
        try:
            with self._lock_unused():
                return self._membership.shrink(target)
        except PoolError:
            self._scaler.keep()
            return len(self.nodes)

    def detach(self, seconds: float) -> None:
        """Leave the nodes to other clients: idle executors stay as they are."""
        self._roster.close()
        self.devices.desk.close("its client left the pool")
        leave(self.nodes, self.preparer.entered_by, max(seconds, PART_SECONDS))
        strays = [node for node in self.nodes if not node.host.stays]
        self._ending.end(strays, 0)
        for node in self.nodes:
            node.stop()
            self._ending.forget(node)
        self._startup.close()

    def resize(self, nodes: int | Nodes, *, force: bool) -> None:
        """Change the number of nodes, and with `Nodes` the bounds of an elastic pool as well.

        Without `force`, `PoolError` if nodes would go while another client, a script or a call by
        name uses the pool.
        """
        count = nodes if isinstance(nodes, int) else nodes.desired
        goes = count < len(self.nodes) and not force
        with self._lock_unused() if goes else self.lock(force=True):
            self._resize(nodes)

    def _resize(self, nodes: int | Nodes) -> None:
        self._allow_descriptors(nodes if isinstance(nodes, int) else nodes.ceiling)
        if isinstance(nodes, int):
            self._scaler.keep()
            self._membership.resize(nodes, nodes)
            self._roster.need(min(self._roster.needed, nodes))
            self._prospects.need(self._roster.needed)
            return
        # First, so that the pool does not meanwhile shrink below its new bounds.
        before = self._scaler.bound(nodes)
        self._prospects.grow_up_to(0 if nodes.floor else nodes.ceiling)
        try:
            self._membership.resize(nodes.desired, nodes.floor)
        except BaseException:
            self._scaler.bound(before)
            self._prospects.grow_up_to(0 if before.floor else before.ceiling)
            raise
        self._need(nodes)

    def _allow_descriptors(self, nodes: int) -> None:
        executors = self.capacity.executors_of_a_node()
        secret = self._credentials is not None
        more = max(0, nodes - len(self.nodes))
        count = descriptors.connections(more, executors, encrypted=secret)
        descriptors.allow(count, nodes, dialled=not self._is_here)

    def _need(self, nodes: Nodes) -> None:
        """Say without how many nodes the pool is of no use, and how many it may have."""
        needed = max(1, nodes.floor)
        self._roster.need(needed)
        self._prospects.need(needed)
        self._prospects.grow_up_to(0 if nodes.floor else nodes.ceiling)

    def wake(self) -> None:
        """Have at least one node, and wait until it is ready."""
        if not any(node.joined for node in self.nodes):
            self._scaler.keep()
            self._membership.wake()

    def close(self, seconds: float) -> None:
        """End every node, in parallel."""
        self._roster.close()
        self.devices.desk.close("its pool was closed")
        # A stopped pool that could not be started is stopped again, with all that it has.
        spare = bool(self._spec.id) and not self.stays and self._spec.provider.capabilities.stops
        self._ending.end(self.nodes, seconds, spare=spare)
        self._startup.close()
        if spare:
            return
        self._keeper.forget()
        provider, note = self._spec.provider, self._console.note
        if not self._opened or swept(provider, self._id, self._journal, note):
            self._journal.close_pool(self._id)

    def hurry(self) -> None:
        """End every machine now, even if another thread gives the agents time to end."""
        self.devices.desk.hurry()
        for node in self.nodes:
            node.host.stop(0)

    # How busy nodes are.

    def usage(self, node: int) -> NodeUsage | None:
        """How busy a node is; None if it does not answer now."""
        return self._usage.get(node)

    def usages(self, nodes: Iterable[int], seconds: float) -> dict[int, NodeUsage]:
        """How busy these nodes are; those that do not answer in so many seconds are left out."""
        return self._usage.get_all(nodes, seconds)

    def _ask_node(self, index: int, message: Message) -> bool:
        node = self._roster.get(index)
        if node is None or not node.serves:
            return False
        node.tell(message)
        return True

    # What agents and executors send.

    def _deliver(self, node: Node) -> None:
        self.deliveries.deliver(node.index, lambda what: self._console.phase(node.index, what))

    def _on_control(self, node: Node, frame: Frame) -> None:
        message = messages.decode(frame.kind, frame.meta)
        node.heartbeats.hear()
        match message:
            case Ping():
                pass
            case ExecutorUp():
                connecting.run(functools.partial(self._executors.up, node, message))
            case ExecutorDown():
                self._executors.down(node, message)
            case Prepared():
                self.preparer.node_prepared(node, message.problem)
            case DeviceUp() | DeviceDown():
                self.devices.desk.heard(message)
            case Usage():
                self._usage.heard(message)
            case NodeEnded():
                self._keeper.note_end(node.index, message.by)
            case Reclaim():
                self._reclaims.heard(node, message)
            case Written():
                self._console.output(
                    message.text, message.stream, node.index, 0, "", message.transient
                )
                self._dispatcher.teller.output(message, node.index, 0, "")
            case _:
                raise ProtocolError(f"an agent does not send {type(message).__name__}")

    def _executor_ready(self, node: Node, lane: Lane) -> None:
        """Give an executor tasks from now on; after its last executor, the node is ready."""
        self._dispatcher.add(lane, usable=node.may_get_tasks and not lane.preparation.replaced)
        expected = self.capacity.executors_on(node)
        if self._roster.serves and node.join(expected):
            self._joining.add(node, expected)
            connecting.run(self._joining.tell)
        else:
            self._joining.become_ready(node, expected)

    # At every beat: the cost, tasks behind slow ones or streams, failed nodes, scaling.

    def _at_beat(self, number: int) -> None:
        if self._events.listened and number % BEATS_BETWEEN_COSTS == 0:
            self._tell_cost()
        self._dispatcher.recall_stuck()
        self._membership.retry_failed()
        count, coming = len(self.nodes), len(self._roster.coming)
        self._scaler.look(count, coming=coming, slots=self.capacity.slots_of_a_node())
        may_grow = self._scaler.may_grow(count) or not all(node.joined for node in self.nodes)
        self._dispatcher.held.look(slots=self.capacity.slots(), may_grow=may_grow)

    def _tell_cost(self) -> None:
        cost, hourly = self.ledger.cost, self.ledger.hourly_cost
        if cost and hourly is not None:
            self._events.emit(CostCounted, cost, hourly)

    # Looking.

    def views(self) -> list[NodeView]:
        """The nodes as a user sees them."""
        with self._roster.lock:
            return [view_of(node) for node in self.nodes]
