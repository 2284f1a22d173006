"""A node: its state, its host, its agent, its executors, and its life from start to end.

`Node.run` is a node's life. The state is one value: only the moves change it, each from the states
that it names, under the lock that the nodes of a pool share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from skyward import providers
from skyward.calls.dispatch import Dispatcher
from skyward.calls.lane import Lane
from skyward.calls.loop import Loop
from skyward.calls.relays import Neighbor, Relays
from skyward.calls.scheduler import Load, Prospects
from skyward.calls.task import Standing, Task
from skyward.console import Console
from skyward.errors import (
    ConfigurationError,
    HostKeyError,
    ImageError,
    LoginError,
    NodeLostError,
    PluginError,
    PoolStartError,
    SkywardError,
    UnavailableError,
    VersionMismatchError,
    WorkerDiedError,
)
from skyward.events import (
    EventStream,
    NodeChanged,
    NodeFailed,
    NodeLost,
    NodeReady,
    NodeStarting,
    NodeStopped,
)
from skyward.nodes.host import CUT_TRIES, Approach, Host, not_there
from skyward.nodes.kept import PoolKeeper, StartLease, found_machines
from skyward.nodes.records import KeptNode
from skyward.nodes.spec import PoolSpec
from skyward.nodes.stacks import STANDING_SECONDS, Stacks, node_stacks, standing_of
from skyward.providers import Allocation, Machine, connecting, in_thread
from skyward.wire import messages
from skyward.wire.channel import Channel, ServiceConnection
from skyward.wire.frames import Frame
from skyward.wire.handshake import Credentials, check_compatible, host_and_port, my_versions
from skyward.wire.messages import (
    Detach,
    ExecutorDown,
    ExecutorUp,
    Keep,
    Kill,
    Message,
    Ping,
    Reclaim,
    Shutdown,
)
from skyward.worker.config import AgentConfig

State = Literal[
    "starting", "ready", "reconnecting", "reclaimed", "draining", "lost", "failed", "stopped"
]
"""The state of a node.

- starting: its machine, agent or workers are not there yet
- ready: it runs tasks
- reconnecting: the client cannot reach its agent at the moment
- reclaimed: the provider takes its machine back; its tasks may finish, and it gets no others
- draining: it leaves the pool when its tasks are done
- lost: it will be started again soon
- failed: it did not start, or was lost too often
- stopped: it has left the pool
"""

MOVES: dict[State, frozenset[State]] = {
    "starting": frozenset({"ready", "draining", "lost", "failed", "stopped"}),
    "ready": frozenset({"reconnecting", "reclaimed", "draining", "lost", "failed", "stopped"}),
    "reconnecting": frozenset({"ready", "reclaimed", "draining", "lost", "failed", "stopped"}),
    "reclaimed": frozenset({"draining", "lost", "failed", "stopped"}),
    "draining": frozenset({"stopped"}),
    "lost": frozenset({"starting", "draining", "failed", "stopped"}),
    "failed": frozenset({"starting", "draining", "stopped"}),
    "stopped": frozenset(),
}
"""Which states may follow which."""

PING_SECONDS = 0.5
QUIET_SECONDS = 1.5
"""After so many seconds without an answer, the client asks whether the host still lives."""
LOST_SECONDS = 20.0
"""After so many seconds of silence, a node counts as lost, whatever the host says."""
STEADY_SECONDS = 60.0
"""After a node has served for so long, its earlier losses no longer count."""
START_ATTEMPTS = 3
"""How often a node is started at most if it is lost again and again."""
RETURN_SECONDS = 600.0
"""How long the client tries to start a lost node whose machine is out of reach."""
RETURN_PAUSES = (1.0, 30.0)
"""The shortest and the longest pause between two attempts to start such a node."""
RETRY_PAUSES = (5.0, 300.0)
"""The first and the longest pause before a node that did not start is tried again."""
BOUGHT_IN_VAIN = 3
"""After so many machines in a row that were bought and did not become ready, no more are bought."""
ENDING_SECONDS = 0.1
ENDING_TRIES = 20
"""How often the client tries an agent that ends the connection at once, or has it cut."""
SILENCE_SECONDS = 4.0
"""How long an agent may leave a heartbeat unanswered before the client reconnects."""
NEAR_SECONDS = 60.0
"""How long an executor on this machine may take to greet: it lives, as its agent has announced it.

It may wait for a processor; there is no second attempt, and with the process its state would go.
"""
MANY = 20
"""For so many executors of a node or more, the console shows how many there are while it starts."""
REPORT_SECONDS = 15.0
"""How long the agent's report of an executor's end may take after the end of its connection.

It comes at once, unless the machine is too busy for its agent.
"""
LAST_RESULTS_SECONDS = 1.0
"""After so long without another byte from a dead executor, its tasks count as lost."""
PLACE_LOOK_SECONDS = 0.05
"""How often an executor looks whether the place of the one before it is free."""
SPARE_SECONDS = 15.0
"""How long before a machine is taken back its tasks are given up, so that others can run them."""
RECLAIM_LOOK_SECONDS = 0.1


LASTING = (
    ConfigurationError,
    HostKeyError,
    ImageError,
    LoginError,
    PluginError,
    VersionMismatchError,
)
"""Failures of a start that only the user can mend."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The lanes and the agent's connection of a node when it was lost."""

    lanes: tuple[Lane, ...]
    control: Channel | None


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as the user sees it."""

    node: int
    state: State
    address: str
    accelerator: str | None
    accelerators: int
    running: tuple[str, ...]
    """The names of the tasks on the node."""


class Retries:
    """The starts of one node that failed; the caller holds the node's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.failed = 0
        """How many starts in a row have failed."""
        self.at: float | None = None
        """When the failed node is started again; None if it is not, or at the next call."""
        self.at_next_call = False
        """Whether the failed node is started again when a call waits for it."""
        self.may_help = True
        """Whether the last failure may pass without the user."""
        self._in_vain = 0
        self._clock = clock

    @property
    def exhausted(self) -> bool:
        """Whether too many machines were bought in vain."""
        return self._in_vain >= BOUGHT_IN_VAIN

    @property
    def is_due(self) -> bool:
        """Whether the node has waited long enough for its next start."""
        return self.at is not None and self._clock() >= self.at

    def fail(self, *, again: bool, may_help: bool) -> None:
        """Note that a start has failed; with `again`, the node is started again later."""
        self.at, self.at_next_call, self.may_help = None, False, may_help
        if again and not self.exhausted:
            first, longest = RETRY_PAUSES
            self.at = self._clock() + min(first * 2**self.failed, longest)
        self.failed += 1

    def buy_in_vain(self) -> None:
        """Note that a machine was bought and did not become ready."""
        self._in_vain += 1

    def await_call(self) -> None:
        """Start the node again at the next call, and not before."""
        self.at, self.at_next_call = None, True

    def begin(self) -> None:
        """Note that the node is started again."""
        self.at, self.at_next_call = None, False
        if self.exhausted:
            # Only the user starts such a node again.
            self._in_vain = 0

    def succeed(self) -> None:
        """Note that the node is ready."""
        self.failed = self._in_vain = 0


class NodePreparer(Protocol):
    """What nodes tell of themselves and their executors, so that the plugins' hooks are entered."""

    def node_up(self, node: Node) -> None:
        """Prepare a node whose agent is connected."""

    def node_failed(self) -> None:
        """Do without a node that is not started again soon."""

    def lane_up(self, node: Node, lane: Lane) -> None:
        """Prepare an executor that is connected."""

    def lane_prepared(self, node: Node, lane: Lane, problem: str) -> None:
        """Take an executor's answer: it has entered the plugins' hooks, or one failed."""

    def lane_lost(self, node: Node, lane: Lane, reason: str) -> None:
        """Do without an executor."""

    def regroup(self) -> None:
        """Have the workers form a new group: a member is gone."""


class NodeFleet(Protocol):
    """The fleet as its nodes see it: what they share, and what they tell it."""

    spec: PoolSpec
    allocation: Allocation[Any]
    roster: Roster
    loop: Loop
    dispatcher: Dispatcher
    prospects: Prospects
    console: Console
    events: EventStream
    keeper: PoolKeeper
    credentials: Credentials | None
    client: str
    """The tenant that this client is, in a kept pool."""
    relays: Relays | None
    """How executors pass on what several of them need; None if they cannot."""

    def new_host(self, index: int, lost: Host | None = None) -> Host:
        """A host for a node; `lost` is the one that it replaces."""

    def agent_config(self, node: Node) -> AgentConfig:
        """The configuration that a node's agent starts with."""

    def lock_unused(self) -> contextlib.ExitStack:
        """Lock a pool that loses nodes; `PoolError` if others, a script or a call use it."""

    def executors_on(self, node: Node) -> int:
        """How many executors a node has."""

    def has_devices(self, node: Node) -> bool:
        """Whether a torch device is open on a node."""

    def deliver(self, node: Node) -> None:
        """Give a node that starts the client's files."""

    def hear(self, node: Node, message: Message) -> None:
        """Take what an agent tells of other things than its executors and its machine."""

    def node_joins(self, node: Node) -> None:
        """Tell all nodes of one whose executors are all prepared, and make it ready then."""

    def node_lost(self, node: Node, reason: str) -> None:
        """Note that what was open on a node is gone."""

    @property
    def preparer(self) -> NodePreparer:
        """Prepares the nodes and their executors."""


class Node:
    """One node of a pool."""

    def __init__(
        self,
        index: int,
        host: Host,
        fleet: NodeFleet,
        clock: Callable[[], float] = time.monotonic,
        *,
        kept: tuple[KeptNode, Machine] | None = None,
    ) -> None:
        """`kept` is the agent and the machine that the node has when the client attaches."""
        self.index = index
        self.host = host
        self._fleet = fleet
        self._kept = kept
        """The agent and the machine that the node starts with; None from then on."""
        self.control: Channel | None = None
        """The connection to the node's agent."""
        self.lanes: dict[tuple[int, int], Lane] = {}
        self._announced: dict[tuple[int, int], int] = {}
        """The process that the agent has announced last at each place, while it runs."""
        self.failure: BaseException | None = None
        """Why the node did not start, or is not started again."""
        self.settled = threading.Event()
        """Set when the node is ready or has failed."""
        self.joined = False
        """Whether broadcasts include the node: it has been ready, or will be in a moment."""
        self.prepared = False
        """Whether the node's agent has entered the plugins' hooks."""
        self.lost_since: float | None = None
        """When the node was lost; None while it serves, and before it has served."""
        self.taken_back = ""
        """Why the provider takes the machine back, once it has said so."""
        self.retries = Retries(clock)
        """When the node is started again if its start fails."""
        self._judged: Host | None = None
        """The host that has become ready, or counts as bought in vain."""
        self._state: State = "starting"
        self._lock = fleet.roster.lock
        self._clock = clock
        self._heard = clock()
        """When the agent has sent a message last."""
        self._asked: float | None = None
        """Since when a heartbeat is unanswered."""
        self._pings = 0
        self._asked_stacks: Future[Stacks] | None = None
        """The look at the stacks of the node's processes that goes on now."""
        self._ready_since = 0.0
        self._starts = 0
        self._told_out_of_reach = False
        self._run: asyncio.Task[None] | None = None
        self._renewed: Future[None] = Future()
        """Done when the node gets another host, and begins again on it."""
        self._removal: Future[None] | None = None

    # The state.

    @property
    def state(self) -> State:
        """The node's state."""
        return self._state

    @property
    def serves(self) -> bool:
        """Whether the node's workers get tasks, now or after a reconnect."""
        return self._state in ("ready", "reconnecting")

    @property
    def leaves(self) -> bool:
        """Whether the node leaves the pool, or has left it."""
        return self._state in ("draining", "stopped")

    @property
    def may_get_tasks(self) -> bool:
        """Whether the node's executors may get tasks as soon as they are ready."""
        return not self.leaves and self._state != "reclaimed"

    @property
    def is_expected(self) -> bool:
        """Whether the node serves, or will serve without a call of the user's."""
        with self._lock:
            waits = self._state == "failed" and self.retries.at is not None
            others = ("failed", "draining", "stopped")
            return waits or self._state not in others

    @property
    def is_coming(self) -> bool:
        """Whether the node serves, or may serve without the user's help."""
        with self._lock:
            return self.is_expected and (self._state != "failed" or self.retries.may_help)

    def view(self) -> NodeView:
        """The node as it is now, for the user."""
        return NodeView(
            self.index,
            self._state,
            self.host.address,
            self.host.accelerator,
            self.host.accelerators,
            tuple(task.name for lane in self.lanes.values() for task in lane.load.started()),
        )

    def _move(self, to: State, *origins: State, why: str = "") -> bool:
        """Change the state if it is one of `origins`; without them, if `MOVES` allows it."""
        allowed = self._state in origins if origins else to in MOVES[self._state]
        if allowed:
            assert to in MOVES[self._state], f"{self._state} -> {to}"
            self._state = to
            if self._fleet.events.listened:
                self._tell_move(to, why)
        return allowed

    def _tell_move(self, state: State, why: str) -> None:
        emit, host = self._fleet.events.emit, self.host
        match state:
            case "starting":
                pass  # the start tells its phases
            case "ready":
                emit(NodeReady, self.index, host.address, host.accelerator, host.accelerators)
            case "lost":
                emit(NodeLost, self.index, why)
            case "failed":
                emit(NodeFailed, self.index, why)
            case "stopped":
                emit(NodeStopped, self.index)
            case _:
                emit(NodeChanged, self.index, state, why)

    def connect(self, control: Channel) -> bool:
        """Take the connection to a starting node's agent; False if the node has ended."""
        with self._lock:
            if self._state != "starting":
                return False
            self.control = control
            self._hear_agent()
            return True

    def join(self, executors: int) -> bool:
        """Count a starting node among those that know of each other, after its executors came.

        The other nodes are told before the node is ready: when the user sees a ready node, the
        others know of it.
        """
        with self._lock:
            if self._state != "starting" or not self._has_prepared(executors):
                return False
            self.joined = True
            return True

    def become_ready(self, executors: int) -> bool:
        """Make a starting node ready if so many executors are prepared."""
        with self._lock:
            if not self._has_prepared(executors) or not self._move("ready", "starting"):
                return False
            self._ready_since = self._clock()
            self.lost_since, self.failure = None, None
            self.retries.succeed()
            self._judged = self.host
            self.joined = True
            self.settled.set()
            return True

    def _has_prepared(self, executors: int) -> bool:
        return sum(lane.preparation.done for lane in self.lanes.values()) == executors

    def disconnect(self) -> bool:
        """Note that a ready node's agent is out of reach, and that the client reconnects."""
        with self._lock:
            return self._move("reconnecting", "ready")

    def reconnect(self) -> bool:
        """Note that the agent is within reach again."""
        with self._lock:
            self._hear_agent()
            return self._move("ready", "reconnecting")

    def reclaim(self, reason: str) -> bool:
        """Give the node no more tasks: the provider takes its machine back."""
        with self._lock:
            if not self._move("reclaimed", "ready", "reconnecting", why=reason):
                return False
            self.taken_back = reason
            return True

    def drain(self) -> bool:
        """Give the node no more tasks: it leaves the pool."""
        with self._lock:
            return self._move("draining")

    def lose(self, reason: str) -> Loss | None:
        """Mark the node as lost, and remove its machine; None if the loss was known.

        A node that has served will be started again, unless it was lost too often: then it has
        failed. A draining node stays draining.
        """
        with self._lock:
            before = self._state
            if before == "draining":
                if self.control is None and not self.lanes:
                    return None
            elif not self._move(
                "lost", "starting", "ready", "reconnecting", "reclaimed", why=reason
            ):
                return None
            if before == "reclaimed":
                # This is no fault of the node's.
                self._starts -= 1
            loss = Loss(tuple(self.lanes.values()), self.control)
            self.lanes.clear()
            self._announced.clear()
            self.control = None
            self.remove_machine()
            if before != "starting" and self._clock() - self._ready_since > STEADY_SECONDS:
                self._starts = 1
            if before != "draining":
                if self.joined:
                    self.lost_since = self.lost_since or self._clock()
                self._judge()
                if not self.joined or self._starts >= START_ATTEMPTS or self.retries.exhausted:
                    failure = PoolStartError(f"node {self.index} was lost: {reason}")
                    # As with any start that fails: others count on a node that has not served.
                    self.fail(failure, retry=not self.joined)
            return loss

    def await_return(self) -> float | None:
        """The pause before a lost node out of reach is tried again; None if it is not."""
        with self._lock:
            if self.lost_since is None or not self.host.may_return:
                return None
            gone = self._clock() - self.lost_since
            self._judge()
            if self.retries.exhausted or gone >= RETURN_SECONDS:
                return None
            if not self._move("lost", "starting"):
                return None
            # A start that did not reach the machine does not count.
            self._starts -= 1
            if self.host.made:
                self.remove_machine()
            shortest, longest = RETURN_PAUSES
            return max(shortest, min(gone / 4, longest))

    def fail(self, failure: BaseException, *, retry: bool, may_help: bool = True) -> bool:
        """Mark the node as failed: it did not start, or was lost too often.

        With `retry`, the node is started again later, unless too many machines were bought in vain.
        `may_help` says whether the failure may pass without the user.
        """
        with self._lock:
            if not self._move("failed", why=str(failure)):
                return False
            self._judge()
            self.retries.fail(again=retry, may_help=may_help)
            if self.retries.exhausted:
                failure = PoolStartError(
                    f"node {self.index}: {BOUGHT_IN_VAIN} machines in a row were bought and did "
                    f"not become ready, so no more are bought; compute.resize tries again. The "
                    f"last failure: {failure}"
                )
            self.failure = failure
            self.settled.set()
            return True

    def _judge(self) -> None:
        """Count the machine as bought in vain, unless it has become ready or counts already."""
        if self.host is not self._judged and self.host.was_bought:
            self.retries.buy_in_vain()
            self._judged = self.host

    def await_call(self) -> None:
        """Start a failed node again at the next call."""
        with self._lock:
            if self._state == "failed":
                self.retries.await_call()

    def start_again(self) -> bool:
        """Begin to start a lost or failed node on a new host; False if it leaves the pool."""
        with self._lock:
            # Without the lock, the end of the pool might stop only the old host.
            if self._fleet.roster.closed or not self._move("starting", "lost", "failed"):
                return False
            self.host = self._fleet.new_host(self.index, self.host)
            self.prepared = False
            self.failure = None
            self.retries.begin()
            self.settled.clear()
            self._fleet.prospects.expect(self.index)
            renewed, self._renewed = self._renewed, Future()
        renewed.set_result(None)
        return True

    def stop(self) -> None:
        """Mark the node as stopped: it has left the pool, or the pool is closed."""
        with self._lock:
            self._move("stopped")
            self.settled.set()

    # Its life.

    def start(self) -> None:
        """Begin the life of a new node."""
        self._fleet.prospects.expect(self.index)
        providers.submit(self.run()).add_done_callback(_show_failure)

    async def run(self) -> None:
        """Live, on the providers' loop, until the node leaves the pool and this is cancelled.

        The node gets a machine and an agent on it, or finds them. The agent starts executors, and
        with the last of them the node is ready. It serves until it is lost; a node that is lost,
        or did not start and is tried again, gets another host and begins again.
        """
        self._run = asyncio.current_task()
        while True:
            host, pause = self.host, None
            try:
                self._phase("starting")
                if (removal := self.begin_start()) is not None:
                    await asyncio.wait([asyncio.wrap_future(removal)])
                if not await self._finds_agent(host):
                    await self._make_agent(host)
            except Exception as problem:
                # Any exception of a provider: nothing else would notice that it never starts.
                pause = await in_thread(self._start_failed, host, problem)
            finally:
                self._fleet.allocation.expect_no_more(self.index)
            if pause is not None:
                await asyncio.sleep(pause)
                self.start_again()
            # From here on, the agent's messages and the pulse of the fleet say what happens.
            await self._another_host(host)

    def begin_start(self) -> Future[None] | None:
        """Count a start; the machine that is being removed must go first: both have one name."""
        self._starts += 1
        return self._removal

    async def _finds_agent(self, host: Host) -> bool:
        """Whether the node's agent runs already, in a kept pool, and is connected now.

        If it was lost and is known to be gone, the node has to be started anew.
        """
        first, self._kept = self._kept, None
        found = first or host.former
        if found is None:
            return False
        if first is None:
            self._fleet.keeper.check_expected(self.index)
        problem = await self._adopt(host, *found)
        if problem is not None and first is not None:
            raise PoolStartError(f"node {self.index}: its agent is gone ({problem})")
        return problem is None

    async def _make_agent(self, host: Host) -> None:
        """Have a machine made and prepared, launch the agent on it, and connect to it.

        Of several clients that have lost a node, one does so, and the others find its agent.
        """
        keeper = self._fleet.keeper
        async with keeper.starting(self.index, self._others, self._is_starting) as lease:
            if await self._finds_agent_of(lease, host):
                return
            if host.may_return:
                self._phase("creating")
            await host.prepare()
            await host.start(self._fleet.agent_config(self))
            self._phase("connecting")
            await self._reach(host)
            if self._fleet.spec.has_files:
                await self._bring_files(host)
            if lease.record is not None:
                await in_thread(self.stay)
                await lease.tell(host.facts(self.index))

    async def _finds_agent_of(self, lease: StartLease, host: Host) -> bool:
        """Whether another client has started the node meanwhile, and its agent is connected now."""
        record, former = lease.record, host.former
        if record is None:
            return False
        if lease.last is not None and (former is None or lease.last != former[0]):
            # A client on another machine, whose record this one does not see.
            others = [each for each in record.nodes if each.index != self.index]
            record = msgspec.structs.replace(record, nodes=[*others, lease.last])
        recorded = record.node(self.index)
        if former is not None:
            self._fleet.keeper.check_expected(self.index)
        if recorded is None or (former is not None and recorded == former[0]):
            return False
        machines = await in_thread(
            found_machines, record, self._fleet.spec.provider, self._fleet.allocation
        )
        found = machines.get(self.index)
        return found is not None and await self._adopt(host, *found) is None

    async def _adopt(self, host: Host, kept: KeptNode, machine: Machine) -> Exception | None:
        """Connect to an agent that runs; returns the problem if the agent has ended."""
        tries = ENDING_TRIES
        while True:
            try:
                await host.adopt(kept, machine)
                await in_thread(self._connect, host, adopted=True)
                return None
            except (OSError, EOFError, PoolStartError) as problem:
                ends = isinstance(problem, (ConnectionResetError, BrokenPipeError, EOFError))
                tries -= 1
                if not ends or host.may_return or not tries:
                    if await _is_over(host, problem):
                        return problem
                    raise
            # An agent that was killed a moment ago: soon nobody listens there.
            await asyncio.sleep(ENDING_SECONDS)

    async def _reach(self, host: Host) -> None:
        """Connect to an agent that was just launched; what is cut meanwhile is made again."""
        for tries in range(ENDING_TRIES, 0, -1):
            try:
                await in_thread(self._connect, host)
                break
            except (ConnectionResetError, BrokenPipeError, EOFError):
                if tries == 1:
                    raise
            await asyncio.sleep(ENDING_SECONDS)

    def _connect(self, host: Host, *, adopted: bool = False) -> None:
        fleet = self._fleet
        approach = host.approach(
            "control",
            host.routes.choose(host.endpoint),
            fleet.credentials,
            client=fleet.client,
            gone="its agent is gone",
        )
        control, welcome = approach.attempt()
        if not self.connect(control):
            control.close()
            raise PoolStartError(f"node {self.index} was stopped while it started")
        self._told_out_of_reach = False
        control.on_change(
            lambda connected: fleet.loop.call_soon(lambda: self._link_changed(control, connected))
        )
        for warning in check_compatible(my_versions(), welcome.versions, f"node {self.index}"):
            fleet.console.note(warning)
        self._phase("starting workers")
        # An agent that was adopted has its files: another client gave them to it.
        if adopted or not fleet.spec.has_files:
            fleet.preparer.node_up(self)
        fleet.loop.watch(control, self._hear, lambda problem: self._control_ended(control, problem))

    async def _bring_files(self, host: Host) -> None:
        """Give the node the client's files before its workers are prepared."""
        control = self.control
        bringing = asyncio.wrap_future(connecting.submit(self._fleet.deliver, self))
        # A machine that is lost meanwhile may leave this waiting for long.
        lost = asyncio.ensure_future(self._another_host(host))
        try:
            await asyncio.wait([bringing, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if not bringing.done():
            # It fails by and by, which concerns nobody any more.
            bringing.add_done_callback(lambda late: late.cancelled() or late.exception())
            return
        bringing.result()
        if self.control is control is not None:
            await in_thread(self._fleet.preparer.node_up, self)

    def _phase(self, phase: str) -> None:
        self._fleet.console.phase(self.index, phase)
        self._fleet.events.emit(NodeStarting, self.index, phase)

    def _is_starting(self) -> bool:
        return self._state == "starting"

    def _others(self) -> dict[int, Callable[[], ServiceConnection]]:
        """How to ask the other agents that are connected, by the indexes of their nodes."""
        others = [node for node in self._fleet.roster.nodes if node is not self]
        return {
            node.index: functools.partial(node.service, "clients")
            for node in others
            if node.is_connected
        }

    async def _another_host(self, host: Host) -> None:
        """Wait until the node has another host than this one."""
        with self._lock:
            renewed = self._renewed if self.host is host else None
        if renewed is not None:
            await asyncio.shield(asyncio.wrap_future(renewed))

    def end_run(self) -> Future[None]:
        """Begin to end the node's life; the future is done when it has ended."""
        return providers.submit(self._end_run())

    async def _end_run(self) -> None:
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run])

    # Failures of its start.

    def _start_failed(self, host: Host, problem: Exception) -> float | None:
        """Give a start up; returns after which pause it is tried again, if that is soon."""
        if self.host is not host:
            # The node was lost meanwhile, and is started on another host.
            return None
        out_of_reach = isinstance(problem, (OSError, EOFError))
        if isinstance(problem, SkywardError):
            failure: Exception = problem
        elif out_of_reach:
            failure = PoolStartError(
                f"node {self.index} cannot be reached: {problem}; see that its machine is up, "
                "and that this one may connect to it"
            )
        else:
            failure = PoolStartError(
                f"node {self.index} did not start: {problem!r}; this is a defect of its provider"
            )
            failure.__cause__ = problem
            self.give_up(failure, may_help=False)
            return None
        pause = self.return_pause(failure) if out_of_reach else None
        if pause is None:
            self.give_up(failure)
        return pause

    def return_pause(self, failure: Exception) -> float | None:
        """The pause before a lost node that is out of reach is tried again; None if it is not."""
        pause = None if self._fleet.roster.closed else self.await_return()
        if pause is None:
            return None
        if not self._told_out_of_reach:
            self._told_out_of_reach = True
            self._fleet.console.note(
                f"node {self.index} is out of reach: {failure}; it is tried again for "
                f"{RETURN_SECONDS / 60:g} minutes"
            )
        self._phase("out of reach")
        return pause

    def give_up(self, failure: BaseException, *, may_help: bool = True) -> None:
        """Give a start up; a node that has never been ready is started again later.

        So is a node whose machine the provider does not have at the moment. Without `may_help`,
        waiting is in vain, whatever the failure is.
        """
        fleet, roster = self._fleet, self._fleet.roster
        may_come = isinstance(failure, UnavailableError)
        may_help = may_help and may_pass(failure)
        with self._lock:
            is_missed = not roster.closed and not self.leaves
            served = self.lost_since is not None
            if served and is_missed:
                failure = PoolStartError(
                    f"node {self.index} was lost and did not come back: {failure}"
                )
            first = self.retries.failed == 0
            failed = self.fail(failure, retry=may_come or not self.joined, may_help=may_help)
            # Under the same lock: a caller who sees the failure may call again at once.
            given_up = self.retries.at is None
            awaits_call = failed and roster.awaits_call()
            moment = fleet.dispatcher.moment()
            control, lanes = self.release()
        self._drop(control, lanes, str(failure))
        self.remove_machine()
        if any(lane.preparation.begun for lane in lanes):
            fleet.preparer.regroup()
        if not failed:
            return
        failure = self.failure or failure
        fleet.console.phase(self.index, "failed")
        if given_up:
            self._tell_given_up(failure)
        if awaits_call:
            fleet.console.note(f"no node could be started: {failure}; the next call tries again")
            fleet.dispatcher.fail_waiting(failure, moment)
        elif not given_up and roster.serves and first:
            self.tell_retry()
        fleet.dispatcher.fail_unrunnable()
        fleet.preparer.node_failed()

    def _tell_given_up(self, failure: BaseException) -> None:
        """Tell the user, and the tasks that wait, that the node will not be started again."""
        if not self._fleet.roster.closed:
            self._fleet.console.note(str(failure))
        self._fleet.prospects.fail(self.index, failure, alike=self.retries.exhausted)

    def tell_retry(self) -> None:
        """Tell the user once that the node is missing and will be started again."""
        self._fleet.console.note(
            f"node {self.index} could not be started: {self.failure}; it is tried again, "
            "less and less often"
        )

    # Its losses.

    def plugin_failed(self, failure: PluginError) -> None:
        """Lose the node because a plugin's hook failed there, or too often in its workers."""
        if self._state == "starting":
            self.give_up(failure)
        else:
            self._fleet.console.note(str(failure))
            self.handle_loss(str(failure))

    def handle_loss(self, reason: str) -> None:
        """Lose the whole node: its tasks fail or are retried, and it is started again."""
        fleet, roster = self._fleet, self._fleet.roster
        with self._lock:
            if roster.closed:
                return
            served = self.joined
            if self._state == "reclaimed":
                reason = f"its machine was taken back ({self.taken_back})"
            loss = self.lose(reason)
        if loss is None:
            return
        fleet.console.phase(self.index, "lost")
        fleet.node_lost(self, f"node {self.index} was lost: {reason}")
        advice = "call again, or have `retries` do that"
        if self._state == "failed" and served:
            advice = "it was lost too often to be started anew: enter a new Compute"
        if self._state == "failed" and self.failure is not None and self.retries.at is None:
            self._tell_given_up(self.failure)
        elif self._state == "lost":
            fleet.console.note(f"node {self.index} was lost: {reason}; it is started anew")
        self._drop(loss.control, loss.lanes, f"{reason}; {advice}")
        for lane in loss.lanes:
            fleet.preparer.lane_lost(self, lane, reason)
        # Counted last: a caller that sees the count relies on no task being sent there any more.
        fleet.dispatcher.counts.nodes_lost += 1
        if self._state == "failed":
            fleet.dispatcher.fail_unrunnable()
            fleet.preparer.node_failed()
        elif self._state == "lost":
            self.start_again()

    def _drop(self, control: Channel | None, lanes: Iterable[Lane], reason: str) -> None:
        """Read these connections no more; the tasks of the executors fail or are retried."""
        if control is not None:
            self._fleet.loop.forget(control)
        for lane in lanes:
            self._fleet.loop.forget(lane.channel)
            self._fleet.dispatcher.lose(
                lane, lambda task: NodeLostError(f"{task.name} lost node {self.index}: {reason}")
            )

    def handle_reclaim(self, notice: Reclaim) -> None:
        """Let the node's tasks finish: the provider takes its machine back.

        Called on the loop's thread. The node is then started again on another machine.
        """
        if self.control is not None:
            deadline = self._clock() + max(0.0, notice.seconds - SPARE_SECONDS)
            self._begin_reclaim(self.control, notice, deadline)

    def _begin_reclaim(self, control: Channel, notice: Reclaim, deadline: float) -> None:
        fleet = self._fleet
        if fleet.roster.closed or self.control is not control:
            return
        if self._state == "starting":
            # Its start may succeed or fail as any other; a ready node can be replaced.
            fleet.loop.later(
                RECLAIM_LOOK_SECONDS, lambda: self._begin_reclaim(control, notice, deadline)
            )
            return
        with self._lock:
            if not self.reclaim(notice.reason):
                return
            lanes = list(self.lanes.values())
        fleet.console.note(
            f"node {self.index} is taken back in {notice.seconds:.0f} s ({notice.reason}): it gets "
            "no more tasks and is replaced"
        )
        fleet.console.phase(self.index, "taken back")
        for lane in lanes:
            fleet.dispatcher.drain(lane)
            fleet.dispatcher.recall(lane)
        self._look_reclaimed(control, deadline)

    def _look_reclaimed(self, control: Channel, deadline: float) -> None:
        """Replace the node when it has no tasks any more, or no time for them."""
        if self._fleet.roster.closed or self.control is not control or self._state != "reclaimed":
            return
        is_used = self._fleet.has_devices(self) or any(
            lane.tasks for lane in list(self.lanes.values())
        )
        if is_used and self._clock() < deadline:
            self._fleet.loop.later(
                RECLAIM_LOOK_SECONDS, lambda: self._look_reclaimed(control, deadline)
            )
        else:
            self.handle_loss(self.taken_back)

    # Its end.

    def remove_machine(self) -> None:
        """Begin to remove the machine; the next start, and the end of the node, wait for that."""
        self._removal = self.host.stop(0)

    def await_removal(self, until: float) -> None:
        """Wait for the end of the removal of a lost machine, or until that time.

        The process may end with the pool, and must not leave a lost machine half removed.
        """
        if self._removal is not None:
            wait([self._removal], max(0.0, until - time.monotonic()))

    def stay(self) -> None:
        """Let a node of a kept pool be on its record, and stay when this client leaves."""
        facts = self.host.facts(self.index)
        keeper = self._fleet.keeper
        record = keeper.add(facts, self._fleet.roster.tell_head) if facts is not None else None
        if record is not None:
            wait([self.let_stay(record.idle)])

    def let_stay(self, idle: float) -> Future[None]:
        """Let the node stay when this client leaves, and end after so many seconds without any."""
        self.host.keep()
        self.tell(Keep(idle))
        return self.host.after_start()

    def forget(self) -> None:
        """Use the node no more: its connections are not read, and tasks that it had fail."""
        fleet = self._fleet
        if self.control is not None:
            fleet.loop.forget(self.control)
        for lane in list(self.lanes.values()):
            fleet.loop.forget(lane.channel)
            fleet.dispatcher.lose(
                lane,
                lambda task: NodeLostError(
                    f"{task.name} was on node {self.index}, which was stopped; call it again"
                ),
            )

    # Its agent.

    def _hear(self, frame: Frame) -> None:
        """Take what the agent sends, on the loop's thread."""
        message = messages.decode(frame.kind, frame.meta)
        self._hear_agent()
        match message:
            case Ping():
                pass
            case ExecutorUp():
                self._announced[message.worker, message.slot] = message.pid
                connecting.run(functools.partial(self._executor_up, message))
            case ExecutorDown():
                self._executor_down(message)
            case Reclaim():
                self.handle_reclaim(message)
            case _:
                self._fleet.hear(self, message)

    def _control_ended(self, control: Channel, problem: BaseException) -> None:
        """Lose the node: its agent's connection has ended for good."""
        if self.control is control:
            self.handle_loss(str(problem) if control.resumes else "its agent is gone")

    def _link_changed(self, control: Channel, connected: bool) -> None:
        """Take note that the connection to the agent was lost, or was made again."""
        console = self._fleet.console
        if self.control is not control or self._state == "stopped" or control.expects_end:
            return
        if connected:
            self.reconnect()
            console.phase(self.index, self._state)
        else:
            self.disconnect()
            console.note(f"node {self.index}: connection lost, reconnecting")
            console.phase(self.index, "reconnecting")

    def _hear_agent(self) -> None:
        """Note that the agent has sent a message."""
        self._heard = self._clock()
        self._asked = None

    def ping(self) -> None:
        """Send a heartbeat; the answer is awaited from now on."""
        if self.is_connected:
            self._pings += 1
            self._asked = self._asked or self._clock()
            self.tell(Ping(self._pings))

    def forgive(self, seconds: float) -> None:
        """Do not count a time in which this process itself stood still as the node's silence."""
        now = self._clock()
        self._heard = min(now, self._heard + seconds)
        if self._asked is not None:
            self._asked = min(now, self._asked + seconds)

    def why_lost(self) -> str:
        """Why the node counts as lost; empty if it does not. Called at every beat."""
        control = self.control
        if control is None:
            return ""
        now, patience = self._clock(), self._fleet.spec.options.orphan_timeout
        silence = now - self._heard
        unanswered = 0.0 if self._asked is None else now - self._asked
        quiet = unanswered > QUIET_SECONDS
        cut_off = control.resumes and not control.connected
        dead = (quiet or cut_off) and self.host.looks_dead()
        if not control.resumes:
            return "it has stopped answering" if dead or silence > LOST_SECONDS else ""
        # The agent's last message from the client is a little older than the client's last message
        # from the agent.
        if silence > patience or (dead and silence > patience - 2 * PING_SECONDS):
            return (
                f"there was no contact for {patience:g} s (orphan_timeout), "
                "after which a node ends itself"
            )
        if dead:
            return "its agent is gone"
        if control.connected and unanswered > SILENCE_SECONDS:
            # If the agent's connection is dead, those of the executors probably are, too.
            for channel in (control, *(lane.channel for lane in list(self.lanes.values()))):
                channel.reconnect()
        return ""

    def service(self, name: str) -> ServiceConnection:
        """A connection to a service of the agent; the caller closes it."""
        for _ in range(CUT_TRIES - 1):
            began = self._clock()
            try:
                return self.host.service(name, self._fleet.credentials)
            except NodeLostError as problem:
                # The agent has answered meanwhile: this connection alone was silent.
                silent = isinstance(problem.__cause__, TimeoutError)
                if not silent or self._heard <= began:
                    raise
        return self.host.service(name, self._fleet.credentials)

    @property
    def is_connected(self) -> bool:
        """Whether the node's agent has a connection, as far as the client knows."""
        return self.control is not None and self.control.connected

    def tell(self, message: Message) -> bool:
        """Send to the agent, if there is a connection to it; returns whether there is."""
        control = self.control
        if control is not None:
            with contextlib.suppress(OSError):
                control.send(message)
                return True
        return False

    def shut_down(self) -> None:
        """Have the agent end its executors and itself."""
        self.tell(Shutdown())
        if self.control is not None:
            self.control.expect_end()
        for lane in list(self.lanes.values()):
            lane.channel.expect_end()

    def kill(self, lane: Lane, reason: str) -> None:
        """Have the agent end an executor and start a new one."""
        self.tell(Kill(lane.worker, lane.slot, lane.pid, reason))

    def find(self, lane: Lane, task: Task) -> Standing:
        """Where a task is in its code; waits for the agent.

        Tasks that are looked for at once share a look.
        """
        with self._lock:
            asked = self._asked_stacks
            if asked is None:
                mine: Future[Stacks] = Future()
                self._asked_stacks = mine
        if asked is None:
            try:
                service = self._fleet.roster.service
                mine.set_result(node_stacks(self.index, service, STANDING_SECONDS))
            except BaseException as problem:
                mine.set_exception(problem)
            finally:
                with self._lock:
                    self._asked_stacks = None
            asked = mine
        return standing_of(task.id, lane.pid, asked.result())

    def executor_prepared(self, lane: Lane, problem: str) -> None:
        """Take an executor's answer: it has entered the plugins' hooks, or one failed."""
        self._fleet.preparer.lane_prepared(self, lane, problem)

    def gets_memory_back(self, lane: Lane) -> None:
        """Have an executor told which memory it gets back; a finalizer may call this."""
        self._fleet.dispatcher.note_release(lane)

    def release(self) -> tuple[Channel | None, list[Lane]]:
        """Take the connections to agent and executors from the node; the caller ends them."""
        with self._lock:
            control, self.control = self.control, None
            lanes = list(self.lanes.values())
            self.lanes.clear()
            self._announced.clear()
            return control, lanes

    def enter_hooks(self) -> None:
        """Note that the agent has entered the plugins' hooks, or that there are none."""
        self.prepared = True

    def add_lane(self, lane: Lane) -> bool:
        """Add a connected executor; False if it has ended, or the node was lost or stopped."""
        place = lane.worker, lane.slot
        with self._lock:
            if self._state in ("lost", "failed", "stopped"):
                return False
            # Of two that came one after the other, the later one may be connected first.
            if self._announced.get(place) != lane.pid:
                return False
            self.lanes[place] = lane
            return True

    def remove_lane(self, lane: Lane) -> bool:
        """Remove an executor that has ended; False if that was known."""
        with self._lock:
            if self.lanes.get((lane.worker, lane.slot)) is not lane:
                return False
            del self.lanes[lane.worker, lane.slot]
            return True

    # Its executors.

    def _executor_up(self, up: ExecutorUp) -> None:
        """Connect to an executor that the agent has announced; waits for the first attempt."""
        near = self.host.routes.near(up.endpoint)
        approach = self.host.approach(
            "data",
            near or self.host.routes.choose(up.endpoint),
            None if near else self._fleet.credentials,
        )
        self._attempt(up, approach, self.control)

    def _attempt(self, up: ExecutorUp, approach: Approach, control: Channel | None) -> None:
        try:
            channel, _ = approach.attempt(NEAR_SECONDS)
        except (OSError, EOFError, SkywardError) as problem:
            pause, closed = approach.pause_after(problem), self._fleet.roster.closed
            persists = not closed and self.control is control is not None
            if pause is not None and persists:
                # Not on this thread: many nodes may be out of reach at a time.
                connecting.later(pause, lambda: self._attempt(up, approach, control))
            elif persists and self._state == "starting":
                # The executor may have ended just now: the agent then reports it and starts
                # another, to which the client connects.
                failure = self._unreachable(approach, problem)
                self._fleet.loop.later(
                    REPORT_SECONDS, lambda: self._give_up_without(up, control, failure)
                )
            elif not closed:
                # The agent starts a new executor, and the client then connects to that one.
                self.tell(Kill(up.worker, up.slot, up.pid, f"it was unreachable: {problem}"))
            return
        self._use_executor(up, channel)

    def _give_up_without(
        self, up: ExecutorUp, control: Channel | None, failure: PoolStartError
    ) -> None:
        """Give the start up for an executor that is out of reach, unless it has ended since."""
        with self._lock:
            is_there = self._announced.get((up.worker, up.slot)) == up.pid
        if is_there and self.control is control and self._state == "starting":
            self.give_up(failure)

    def _unreachable(self, approach: Approach, problem: Exception) -> PoolStartError:
        if approach.is_within_host:
            there, all_of_them = len(self.lanes), self._fleet.executors_on(self)
            return PoolStartError(
                f"node {self.index}: {there} of {all_of_them} worker processes are connected, and "
                f"another does not answer: {problem}; if that is too many for this machine, ask "
                "for fewer with sky.Worker(concurrency=...), or for threads of one process with "
                "executor='thread'"
            )
        return PoolStartError(
            f"node {self.index}: its worker cannot be reached, though its agent can: "
            f"{problem}; if a firewall is in between, let all ports through, or use "
            "sky.SSH(..., direct=False), which takes that of SSH alone"
        )

    def _use_executor(self, up: ExecutorUp, channel: Channel) -> None:
        fleet, worker = self._fleet, self._fleet.spec.worker
        if self._awaits_place(up):
            again = functools.partial(self._use_executor, up, channel)
            connecting.later(PLACE_LOOK_SECONDS, again)
            return
        if channel.shares_memory:
            fleet.dispatcher.packer.share()
        capacity = worker.concurrency if worker.executor == "thread" else 1
        address = _among(up.endpoint, self.host.address)
        lane = Lane(
            Load(self.index, up.worker, up.slot, capacity, open=False),
            channel,
            fleet.dispatcher.packer.store,
            self,
            pid=up.pid,
            port=up.port,
            neighbor=Neighbor(
                address, self.host.name, " ".join(self.host.routes.for_peers(up.endpoint))
            ),
            relays=fleet.relays,
        )
        lane.preparation.group = up.group
        if fleet.roster.closed or not self.add_lane(lane):
            if fleet.roster.closed and self.host.is_kept:
                # The next client uses it: it would refuse that one, and wait for this.
                with contextlib.suppress(OSError):
                    channel.send(Detach())
            channel.close()
            return
        self._show_progress()
        channel.on_change(
            lambda connected: fleet.loop.call_soon(lambda: self._lane_changed(lane, connected))
        )
        fleet.loop.watch(
            channel,
            functools.partial(fleet.dispatcher.receive, lane),
            lambda problem: self._lane_ended(lane, problem),
        )
        fleet.preparer.lane_up(self, lane)

    def _awaits_place(self, up: ExecutorUp) -> bool:
        """Whether the executor before this one has ended, and its last results may still come.

        It is lost then, in a moment; its tasks would be forgotten if this one took its place.
        """
        place = up.worker, up.slot
        with self._lock:
            there = self.lanes.get(place)
            if there is None or there.pid == up.pid or self._announced.get(place) != up.pid:
                return False
            return self._state != "stopped" and not self._fleet.roster.closed

    def _show_progress(self) -> None:
        """Show how many of the executors are there, at every tenth, if they are many."""
        count, expected = len(self.lanes), self._fleet.executors_on(self)
        tenth = count * 10 // expected > (count - 1) * 10 // expected
        if expected >= MANY and count < expected and tenth and self._state == "starting":
            self._fleet.console.phase(self.index, f"starting workers: {count} of {expected}")

    def executor_ready(self, lane: Lane) -> None:
        """Give an executor tasks from now on; after its last executor, the node is ready."""
        usable = self.may_get_tasks and not lane.preparation.replaced
        self._fleet.dispatcher.add(lane, usable=usable)
        if self._fleet.roster.serves and self.join(self._fleet.executors_on(self)):
            self._fleet.node_joins(self)
        else:
            self.ready_if_prepared()

    def ready_if_prepared(self) -> None:
        """Make the node ready if all of its executors are prepared."""
        if self.become_ready(self._fleet.executors_on(self)):
            self._fleet.console.phase(self.index, "ready")
            if self._fleet.keeper.begun is not None:
                # Not on the loop's thread: the record is a file.
                connecting.run(self.stay)

    def _lane_changed(self, lane: Lane, connected: bool) -> None:
        """Pause an executor that is cut off, unless its process has ended."""
        if connected:
            self._fleet.dispatcher.resume(lane)
        else:
            self._fleet.dispatcher.pause(lane)
            if lane.end_reason:
                self.lose_executor(lane, lane.end_reason)

    def _lane_ended(self, lane: Lane, problem: BaseException) -> None:
        """Handle the end of a connection; the agent reports why, unless it is gone, too."""
        if lane.lost or self._fleet.roster.closed:
            return
        self._fleet.dispatcher.drain(lane)
        resumes = lane.channel.resumes
        lane.close()
        if resumes:
            # The process waits for the client to reconnect, but the client will not reconnect.
            lane.given_up = True
            self.kill(lane, f"its connection was given up: {problem}")
        if lane.end_reason:
            self.lose_executor(lane, lane.end_reason)
            return
        # If no report comes, the link itself broke.
        self._fleet.loop.later(
            REPORT_SECONDS, lambda: self.lose_executor(lane, "its connection was lost")
        )

    def _executor_down(self, down: ExecutorDown) -> None:
        """Handle the agent's report that an executor has ended."""
        place = down.worker, down.slot
        with self._lock:
            lane = self.lanes.get(place)
            if self._announced.get(place) == down.pid:
                del self._announced[place]
        if lane is not None and lane.pid == down.pid:
            # Results that the executor sent before it ended come before the end of its connection,
            # unless a process that it left behind keeps the connection open.
            lane.process_ended(down.reason)
            if lane.lost or lane.channel.exhausted:
                self._fleet.loop.later(0.0, lambda: self.lose_executor(lane, down.reason))
            else:
                self._lose_after_results(lane, down.reason)
        if not down.restarting:
            self._do_without(self.host, f"worker {down.worker} cannot run: {down.reason}")
        elif self._state == "starting" and lane is None:
            self._fleet.console.note(f"node {self.index}: worker {down.worker}: {down.reason}")

    def _do_without(self, host: Host, failure: str) -> None:
        """Give up or replace a node on that host: one of its workers cannot run."""
        if self.host is not host:
            return
        if any(lane.end_reason for lane in list(self.lanes.values())):
            # Their last results may still come; without these, calls that have run fail.
            again = functools.partial(self._do_without, host, failure)
            self._fleet.loop.later(PLACE_LOOK_SECONDS, again)
        elif self._state == "starting":
            self.give_up(PoolStartError(f"node {self.index} {failure}"))
        else:
            # Its calls, and broadcasts, would wait for it for ever.
            self._replace(failure)

    def _replace(self, failure: str) -> None:
        """Lose the node, with its agent: that of a kept pool goes unless others use the pool.

        Otherwise the node would be found again as it is.
        """
        host, fleet = self.host, self._fleet

        def lose() -> None:
            if self.host is host:
                self.handle_loss(failure)

        def lose_with_agent() -> None:
            try:
                with fleet.lock_unused():
                    host.condemn()
            except (SkywardError, OSError, EOFError) as problem:
                fleet.console.note(f"node {self.index}: its agent goes on: {problem}")
            finally:
                fleet.loop.call_soon(lose)

        if host.is_kept:
            connecting.run(lose_with_agent)
        else:
            lose()

    def _lose_after_results(self, lane: Lane, reason: str) -> None:
        """Remove an executor that is gone once nothing comes of it any more."""
        received = lane.channel.bytes_received

        def look() -> None:
            if lane.lost or lane.channel.bytes_received == received:
                self.lose_executor(lane, reason)
            else:
                self._lose_after_results(lane, reason)

        self._fleet.loop.later(LAST_RESULTS_SECONDS, look)

    def lose_executor(self, lane: Lane, reason: str) -> None:
        """Remove an executor that is gone; its tasks fail or are retried."""
        if not self.remove_lane(lane):
            return
        fleet = self._fleet
        if lane.tasks:
            fleet.dispatcher.counts.workers_died += 1
        fleet.preparer.lane_lost(self, lane, reason)
        fleet.loop.forget(lane.channel)
        fleet.dispatcher.lose(
            lane,
            lambda task: WorkerDiedError(f"{task.name} lost its worker on {lane.where}: {reason}"),
            all_read=bool(lane.end_reason) and not lane.given_up,
        )


async def _is_over(host: Host, problem: Exception) -> bool:
    """Whether a failure to connect says that the agent has ended, or its machine has."""
    if isinstance(problem, (ConnectionRefusedError, FileNotFoundError)):
        return True
    return await host.is_over()


def _show_failure(run: Future[None]) -> None:
    """Show an error of Skyward itself: nobody else looks at it."""
    if not run.cancelled() and (problem := run.exception()) is not None:
        traceback.print_exception(problem, file=sys.stderr)


def _among(endpoints: str, address: str) -> str:
    """The endpoint of an executor that has its node's address for other nodes."""
    wanted = address.removeprefix("[").removesuffix("]")
    places = (each for each in endpoints.split() if each.startswith("tcp:"))
    return next((each for each in places if host_and_port(each)[0] == wanted), "")


def may_pass(failure: BaseException) -> bool:
    """Whether a start that failed so may succeed later, though the user changes nothing."""
    if isinstance(failure, UnavailableError):
        return failure.passing
    return not isinstance(failure, LASTING)


class Roster:
    """The nodes of a pool, in the order of their indexes."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards the list of nodes and their states."""
        self.nodes: list[Node] = []
        self.closed = False
        self.needed = 1
        """How many nodes the pool needs at least."""
        self._serves = False

    def need(self, count: int) -> None:
        """Set how many nodes the pool needs at least."""
        self.needed = count

    def add(self, nodes: list[Node]) -> None:
        """Add nodes that will be started."""
        with self.lock:
            self.nodes = [*self.nodes, *nodes]

    def remove(self, nodes: list[Node]) -> None:
        """Remove nodes that have left."""
        with self.lock:
            leaving = set(nodes)
            self.nodes = [node for node in self.nodes if node not in leaving]

    def get(self, index: int) -> Node | None:
        """The node of that index."""
        nodes = self.nodes
        if 0 <= index < len(nodes) and nodes[index].index == index:
            # As usual: only a pool from whose middle a node was removed has it elsewhere.
            return nodes[index]
        return next((node for node in nodes if node.index == index), None)

    def tell(self, index: int, message: Message) -> bool:
        """Send to the agent of a node that serves; returns whether it does."""
        node = self.get(index)
        if node is None or not node.serves:
            return False
        node.tell(message)
        return True

    def tell_head(self, message: Message) -> bool:
        """Tell the agent of the first node; returns whether it can be reached."""
        return any(head.tell(message) for head in self.nodes[:1])

    def service(self, index: int, name: str) -> ServiceConnection:
        """A connection to a service of a node's agent; the caller closes it."""
        node = self.get(index)
        if node is None:
            raise not_there(index, [each.index for each in self.nodes])
        if not node.host.endpoint:
            why = node.failure or f"it is {node.state}"
            raise NodeLostError(f"node {index} has no agent: {why}; see `compute.nodes`")
        return node.service(name)

    def begin_serving(self) -> None:
        """Note that enough nodes are ready for the pool to serve."""
        self._serves = True

    @property
    def serves(self) -> bool:
        """Whether enough nodes have been ready for the pool to serve."""
        return self._serves

    def close(self) -> None:
        """Close the pool: no node is started any more."""
        with self.lock:
            self.closed = True

    def members(self, but_also: Node | None = None) -> list[Node]:
        """The nodes that know of each other.

        While a pool starts, these are all nodes. Later, these are the nodes that have been ready,
        and `but_also`, which is about to be ready.
        """
        with self.lock:
            return [
                node
                for node in self.nodes
                if node.joined or node is but_also or (not self._serves and node.failure is None)
            ]

    @property
    def coming(self) -> list[Node]:
        """The nodes that have never been ready."""
        return [node for node in self.nodes if not node.joined]

    def awaits_call(self) -> bool:
        """Whether only the user can help the pool; then its nodes are tried again at a call."""
        with self.lock:
            if self.closed or not self.serves or any(node.is_coming for node in self.nodes):
                return False
            waiting = [node for node in self.nodes if node.is_expected]
            for node in waiting:
                node.await_call()
            return bool(waiting)
