"""A node as the client sees it: its state, its host, its agent, its lanes.

The state is one value. Only the methods of `Node` change it, each from the states that it names,
under the lock that the nodes of a pool share.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Literal

from skyward.calls.lane import Lane
from skyward.errors import PoolStartError
from skyward.events import (
    EventStream,
    NodeChanged,
    NodeFailed,
    NodeLost,
    NodeReady,
    NodeStopped,
)
from skyward.nodes.heartbeats import Heartbeats
from skyward.nodes.host import Host
from skyward.nodes.retries import BOUGHT_IN_VAIN, Retries
from skyward.wire.channel import Channel
from skyward.wire.messages import Kill, Message, Shutdown

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


@dataclass(frozen=True, slots=True)
class Loss:
    """The lanes and the agent's connection of a node when it was lost."""

    lanes: tuple[Lane, ...]
    control: Channel | None


class Node:
    """One node of a pool."""

    def __init__(
        self,
        index: int,
        host: Host,
        lock: threading.RLock | None = None,
        clock: Callable[[], float] = time.monotonic,
        events: EventStream | None = None,
    ) -> None:
        self._events = events or EventStream()
        self.index = index
        self.host = host
        self.control: Channel | None = None
        """The connection to the node's agent."""
        self.lanes: dict[tuple[int, int], Lane] = {}
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
        self.heartbeats = Heartbeats(clock)
        self.retries = Retries(clock)
        """When the node is started again if its start fails."""
        self._judged: Host | None = None
        """The host that has become ready, or counts as bought in vain."""
        self._state: State = "starting"
        self._lock = lock or threading.RLock()
        self._clock = clock
        self._ready_since = 0.0
        self._starts = 0
        self._launch: Future[None] | None = None
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

    def _move(self, to: State, *origins: State, why: str = "") -> bool:
        """Change the state if it is one of `origins`; without them, if `MOVES` allows it."""
        allowed = self._state in origins if origins else to in MOVES[self._state]
        if allowed:
            assert to in MOVES[self._state], f"{self._state} -> {to}"
            self._state = to
            if self._events.listened:
                self._tell(to, why)
        return allowed

    def _tell(self, state: State, why: str) -> None:
        emit, host = self._events.emit, self.host
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
            self.heartbeats.hear()
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
            self.heartbeats.hear()
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
            self.control = None
            self.remove_machine()
            if before != "starting" and self._clock() - self._ready_since > STEADY_SECONDS:
                self._starts = 1
            never_served = before == "starting" and self.lost_since is None
            if before != "draining":
                self.lost_since = self.lost_since or self._clock()
                self._judge()
                if never_served or self._starts >= START_ATTEMPTS or self.retries.exhausted:
                    failure = PoolStartError(f"node {self.index} was lost: {reason}")
                    self.fail(failure, retry=never_served)
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

    def start_again(self, host: Callable[[Host], Host]) -> bool:
        """Mark a lost or failed node as starting, on a new host made from the old one."""
        with self._lock:
            if not self._move("starting", "lost", "failed"):
                return False
            self.host = host(self.host)
            self.prepared = False
            self.failure = None
            self.retries.begin()
            self.settled.clear()
            return True

    def stop(self) -> None:
        """Mark the node as stopped: it has left the pool, or the pool is closed."""
        with self._lock:
            self._move("stopped")
            self.settled.set()

    # Starting and ending its host.

    def launch(self, bring_up: Callable[[Node], Future[None]]) -> None:
        """Begin to start the node."""
        with self._lock:
            self._launch = bring_up(self)

    def begin_start(self) -> Future[None] | None:
        """Count a start; the machine that is being removed must go first: both have one name."""
        self._starts += 1
        return self._removal

    def remove_machine(self) -> None:
        """Begin to remove the machine; the next start, and the end of the node, wait for that."""
        self._removal = self.host.stop(0)

    def await_removal(self, until: float) -> None:
        """Wait for the end of the removal of a lost machine, or until that time.

        The process may end with the pool, and must not leave a lost machine half removed.
        """
        if self._removal is not None:
            wait([self._removal], max(0.0, until - time.monotonic()))

    def await_launch(self, until: float) -> None:
        """Wait for the end of the start of the node, or until that time."""
        if self._launch is not None:
            wait([self._launch], max(0.0, until - time.monotonic()))

    # Its agent and executors.

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

    def release(self) -> tuple[Channel | None, list[Lane]]:
        """Take the connections to agent and executors from the node; the caller ends them."""
        with self._lock:
            control, self.control = self.control, None
            lanes = list(self.lanes.values())
            self.lanes.clear()
            return control, lanes

    def enter_hooks(self) -> None:
        """Note that the agent has entered the plugins' hooks, or that there are none."""
        self.prepared = True

    def add_lane(self, lane: Lane) -> bool:
        """Add a connected executor; False if the node has been lost or stopped."""
        with self._lock:
            if self._state in ("lost", "failed", "stopped"):
                return False
            self.lanes[lane.worker, lane.slot] = lane
            return True

    def remove_lane(self, lane: Lane) -> bool:
        """Remove an executor that has ended; False if that was known."""
        with self._lock:
            if self.lanes.get((lane.worker, lane.slot)) is not lane:
                return False
            del self.lanes[lane.worker, lane.slot]
            return True

    def ping(self) -> None:
        """Send a heartbeat."""
        if self.is_connected:
            self.tell(self.heartbeats.ask())
