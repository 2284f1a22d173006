"""A node as the client sees it: its state, its host, its agent, its lanes.

The state is one value. Only the methods here change it, each from the states that it names, under
the lock that the nodes of a pool share.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from skyward.calls.lane import Lane
from skyward.errors import PoolStartError
from skyward.nodes.host import Host
from skyward.wire.channel import Channel
from skyward.wire.messages import Kill, Message, Ping

State = Literal["starting", "ready", "reconnecting", "draining", "lost", "failed", "stopped"]
"""Where a node stands.

- starting: its machine, agent or workers are on their way
- ready: it runs tasks
- reconnecting: its agent cannot be reached at the moment
- draining: it leaves the pool once its tasks are done
- lost: it is about to be started again
- failed: it did not start, or was lost too often
- stopped: it has left
"""

MOVES: dict[State, frozenset[State]] = {
    "starting": frozenset({"ready", "draining", "lost", "failed", "stopped"}),
    "ready": frozenset({"reconnecting", "draining", "lost", "failed", "stopped"}),
    "reconnecting": frozenset({"ready", "draining", "lost", "failed", "stopped"}),
    "draining": frozenset({"stopped"}),
    "lost": frozenset({"starting", "draining", "failed", "stopped"}),
    "failed": frozenset({"starting", "draining", "stopped"}),
    "stopped": frozenset(),
}
"""Which states may follow which."""

PING_SECONDS = 0.5
QUIET_SECONDS = 1.5
"""After so much silence the host is asked whether it still lives."""
LOST_SECONDS = 20.0
"""After so much silence a node counts as lost whatever the host says."""
STEADY_SECONDS = 60.0
"""A node that has served this long is not held to its earlier losses."""
START_ATTEMPTS = 3
"""How often a node is started that is lost again and again."""
RETURN_SECONDS = 600.0
"""How long a node that was lost is tried again while its machine cannot be reached."""
RETURN_PAUSES = (1.0, 30.0)
"""The shortest and the longest pause between two such attempts."""
RETRY_PAUSES = (5.0, 300.0)
"""The first and the longest pause before a node that did not start is tried again."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a node had when it was lost."""

    before: State
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
    ) -> None:
        self.index = index
        self.host = host
        self.control: Channel | None = None
        """The connection to its agent."""
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.failure: BaseException | None = None
        """Why it did not start, or is not started again."""
        self.settled = threading.Event()
        """Set when it is ready or has failed."""
        self.joined = False
        """Whether it has ever been ready, or is about to be, so that broadcasts count on it."""
        self.prepared = False
        """Whether its agent has entered the plugins' hooks."""
        self.lost_since: float | None = None
        """When it was lost; None while it serves, and before it ever did."""
        self.retry_at: float | None = None
        """When a failed node is tried again; None when it is not."""
        self.failed_starts = 0
        """How often in a row it did not start."""
        self._state: State = "starting"
        self._lock = lock or threading.RLock()
        self._clock = clock
        self._heard = clock()
        self._ready_since = 0.0
        self._starts = 0
        self._launch: threading.Thread | None = None
        self._removal: threading.Thread | None = None
        self._pings = 0
        self._asked: float | None = None

    # The state.

    @property
    def state(self) -> State:
        """Where it stands."""
        return self._state

    @property
    def serves(self) -> bool:
        """Whether it has workers that tasks are sent to, now or after a reconnect."""
        return self._state in ("ready", "reconnecting")

    @property
    def leaves(self) -> bool:
        """Whether nobody needs it any more."""
        return self._state in ("draining", "stopped")

    @property
    def is_expected(self) -> bool:
        """Whether it serves, or will without anybody's doing."""
        with self._lock:
            waits = self._state == "failed" and self.retry_at is not None
            return waits or self._state in ("starting", "ready", "reconnecting", "lost")

    def _move(self, to: State, *origins: State) -> bool:
        """Change the state if it is one of these, or one from which the table allows it."""
        allowed = self._state in origins if origins else to in MOVES[self._state]
        if allowed:
            assert to in MOVES[self._state], f"{self._state} -> {to}"
            self._state = to
        return allowed

    def connect(self, control: Channel) -> bool:
        """The agent of a starting node is connected; False if the node was ended meanwhile."""
        with self._lock:
            if self._state != "starting":
                return False
            self.control = control
            self.hear()
            return True

    def join(self, executors: int) -> bool:
        """Count a starting node among those that know of each other, once its executors are there.

        The others are told so before the node is ready: who sees it ready finds them told.
        """
        with self._lock:
            if self._state != "starting" or not self._has_prepared(executors):
                return False
            self.joined = True
            return True

    def become_ready(self, executors: int) -> bool:
        """A starting node is ready once so many executors are prepared."""
        with self._lock:
            if not self._has_prepared(executors) or not self._move("ready", "starting"):
                return False
            self._ready_since = self._clock()
            self.lost_since, self.failure, self.failed_starts = None, None, 0
            self.joined = True
            self.settled.set()
            return True

    def _has_prepared(self, executors: int) -> bool:
        return sum(lane.preparation.done for lane in self.lanes.values()) == executors

    def disconnect(self) -> bool:
        """The agent of a ready node cannot be reached; its connection is being made again."""
        with self._lock:
            return self._move("reconnecting", "ready")

    def reconnect(self) -> bool:
        """The agent can be reached again."""
        with self._lock:
            self.hear()
            return self._move("ready", "reconnecting")

    def drain(self) -> bool:
        """The node gets no more tasks, because it leaves the pool."""
        with self._lock:
            return self._move("draining")

    def lose(self, reason: str) -> Loss | None:
        """The node is gone, and its machine is removed; None if that was known.

        A node that serves, or was lost before, is to be started again unless that happened too
        often: then it has failed. A draining node stays what it is.
        """
        with self._lock:
            before = self._state
            if before == "draining":
                if self.control is None and not self.lanes:
                    return None
            elif not self._move("lost", "starting", "ready", "reconnecting"):
                return None
            loss = Loss(before, tuple(self.lanes.values()), self.control)
            self.lanes.clear()
            self.control = None
            self._remove_machine()
            if before != "starting" and self._clock() - self._ready_since > STEADY_SECONDS:
                self._starts = 1
            never_served = before == "starting" and self.lost_since is None
            if before != "draining":
                self.lost_since = self.lost_since or self._clock()
                if never_served or self._starts >= START_ATTEMPTS:
                    failure = PoolStartError(f"node {self.index} was lost: {reason}")
                    self.fail(failure, retry=never_served)
            return loss

    def await_return(self) -> float | None:
        """A lost node cannot be reached: the pause before it is tried again, None if it is not."""
        with self._lock:
            if self.lost_since is None or not self.host.may_return:
                return None
            gone = self._clock() - self.lost_since
            if gone >= RETURN_SECONDS or not self._move("lost", "starting"):
                return None
            # Only starts that came so far as to be lost again are counted.
            self._starts -= 1
            if self.host.made:
                self._remove_machine()
            shortest, longest = RETURN_PAUSES
            return max(shortest, min(gone / 4, longest))

    def fail(self, failure: BaseException, *, retry: bool) -> bool:
        """The node did not start, or was lost too often; with `retry` it is tried again later."""
        with self._lock:
            if not self._move("failed"):
                return False
            self.failure = failure
            self.retry_at = None
            if retry:
                first, longest = RETRY_PAUSES
                self.retry_at = self._clock() + min(first * 2**self.failed_starts, longest)
            self.failed_starts += 1
            self.settled.set()
            return True

    @property
    def retry_is_due(self) -> bool:
        """Whether a failed node has waited long enough to be tried again."""
        due = self.retry_at
        return self._state == "failed" and due is not None and self._clock() >= due

    def start_again(self, host: Callable[[Host], Host]) -> bool:
        """A lost or failed node is to be started on a new host, made from the old one."""
        with self._lock:
            if not self._move("starting", "lost", "failed"):
                return False
            self.host = host(self.host)
            self.prepared = False
            self.failure = self.retry_at = None
            self.settled.clear()
            return True

    def stop(self) -> None:
        """The node has left the pool, or the pool is closed."""
        with self._lock:
            self._move("stopped")
            self.settled.set()

    # Starting and ending its host.

    def launch(self, bring_up: Callable[[Node], None]) -> None:
        """Bring the node up on a thread of its own."""
        with self._lock:
            self._launch = threading.Thread(
                target=bring_up, args=(self,), name=f"skyward-node-{self.index}", daemon=True
            )
            self._launch.start()

    def begin_start(self) -> None:
        """Count a start, and wait until the machine that was lost is gone: both have one name."""
        self._starts += 1
        if self._removal is not None:
            self._removal.join()

    def _remove_machine(self) -> None:
        self._removal = threading.Thread(target=self.host.stop, args=(0,), daemon=True)
        self._removal.start()

    def await_end(self, removal_seconds: float, launch_seconds: float) -> None:
        """Wait for the threads that remove a lost machine and that bring the node up.

        The process may end with the pool, and would leave a lost machine half removed.
        """
        if self._removal is not None:
            self._removal.join(removal_seconds)
        if self._launch is not None and self._launch is not threading.current_thread():
            self._launch.join(launch_seconds)

    # Its agent and executors.

    @property
    def is_connected(self) -> bool:
        """Whether its agent can be told something, as far as known."""
        return self.control is not None and self.control.connected

    def tell(self, message: Message) -> None:
        """Send to the agent, if there is a connection to it."""
        control = self.control
        if control is not None:
            with contextlib.suppress(OSError):
                control.send(message)

    def kill(self, lane: Lane, reason: str) -> None:
        """Have the agent end an executor; it starts a new one."""
        self.tell(Kill(lane.worker, lane.slot, lane.pid, reason))

    def release(self) -> tuple[Channel | None, list[Lane]]:
        """Take the connections to the agent and its executors away from the node, to end them."""
        with self._lock:
            control, self.control = self.control, None
            lanes = list(self.lanes.values())
            self.lanes.clear()
            return control, lanes

    def enter_hooks(self) -> None:
        """The agent has entered the plugins' hooks, or there are none."""
        self.prepared = True

    def add_lane(self, lane: Lane) -> bool:
        """An executor is connected; False if the node is gone by now."""
        with self._lock:
            if self._state in ("lost", "failed", "stopped"):
                return False
            self.lanes[lane.worker, lane.slot] = lane
            return True

    def remove_lane(self, lane: Lane) -> bool:
        """An executor has ended; False if that was known."""
        with self._lock:
            if self.lanes.get((lane.worker, lane.slot)) is not lane:
                return False
            del self.lanes[lane.worker, lane.slot]
            return True

    # Heartbeats.

    def ping(self) -> None:
        """Send a heartbeat."""
        if not self.is_connected:
            return
        self._pings += 1
        self._asked = self._asked or self._clock()
        self.tell(Ping(self._pings))

    def hear(self) -> None:
        """The agent has sent something."""
        self._heard = self._clock()
        self._asked = None

    @property
    def silence(self) -> float:
        """For how long the agent has sent nothing."""
        return self._clock() - self._heard

    @property
    def unanswered(self) -> float:
        """For how long a heartbeat has gone unanswered; a client that slept has asked nothing."""
        return 0.0 if self._asked is None else self._clock() - self._asked


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a user sees of a node."""

    node: int
    state: State
    address: str
    accelerator: str | None
    accelerators: int
    running: tuple[str, ...]
    """Names of the tasks on it."""
