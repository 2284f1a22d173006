"""A node as the client sees it: its machine, its agent, its lanes."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Literal

from skyward.pool.lane import Lane
from skyward.providers import Host, OwnWay
from skyward.wire.channel import Channel
from skyward.wire.identity import Dial, direct
from skyward.wire.messages import Kill, Message, Ping

State = Literal["starting", "ready", "reconnecting", "draining", "lost", "stopped"]

PING_SECONDS = 0.5
DOUBT_SECONDS = 1.5
"""After so much silence the provider is asked whether the machine still lives."""
RETURN_SECONDS = 600.0
"""How long a node that was lost is tried again while its machine cannot be reached."""
RETURN_PAUSES = (1.0, 30.0)
"""The shortest and the longest pause between two such attempts."""
LOST_SECONDS = 20.0
"""After so much silence it counts as lost whatever the provider says."""


class Node:
    """One node of a pool."""

    def __init__(self, index: int, machine: Host) -> None:
        self.index = index
        self.machine = machine
        self.state: State = "starting"
        self.control: Channel | None = None
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.heard = time.monotonic()
        self.cut_off = False
        """Whether its agent cannot be reached, which may pass."""
        self.failure: BaseException | None = None
        self.ready = threading.Event()
        """Set when it is usable, or has failed for good."""
        self.launch: threading.Thread | None = None
        """Brings it up, also anew after a loss."""
        self.ending: threading.Thread | None = None
        """Removes the machine that was lost."""
        self.prepared = False
        """Whether the plugins' hooks for the node are entered."""
        self.ready_since = 0.0
        self.lost_since: float | None = None
        """When it was lost; None while it serves, and before it ever did."""
        self.waited_for = False
        """Whether it was told that it is out of reach."""
        self.starts = 0
        self._pings = 0
        self._asked: float | None = None

    @property
    def dial(self) -> Dial:
        """How its processes are connected to."""
        machine = self.machine
        return machine.dial if isinstance(machine, OwnWay) else direct

    @property
    def reachable(self) -> bool:
        """Whether its agent can be told something, as far as known."""
        return self.control is not None and not self.cut_off

    def route(self, endpoints: str) -> str:
        """Of the places where something on it listens, the one to connect to."""
        return self.machine.route(endpoints) if isinstance(self.machine, OwnWay) else endpoints

    def tell(self, message: Message) -> None:
        """Send to the agent, if there is one to send to."""
        if self.control is not None:
            with contextlib.suppress(OSError):
                self.control.send(message)

    def ping(self) -> None:
        """Send a heartbeat."""
        if self.cut_off:
            return
        self._pings += 1
        self._asked = self._asked or time.monotonic()
        self.tell(Ping(self._pings))

    def end_machine(self) -> None:
        """Have the machine that was lost removed; with the fleet's lock held, as others join it."""
        self.ending = threading.Thread(target=self.machine.stop, args=(0,), daemon=True)
        self.ending.start()

    def kill(self, lane: Lane, reason: str) -> None:
        """Have the agent end an executor; it starts a new one."""
        self.tell(Kill(lane.worker, lane.slot, lane.pid, reason))

    def hear(self) -> None:
        """Its agent has said something."""
        self.heard = time.monotonic()
        self._asked = None

    def pause_before_return(self) -> float | None:
        """How long to wait before it is tried again; None if it was not lost, or too long ago."""
        gone = time.monotonic() - self.lost_since if self.lost_since is not None else RETURN_SECONDS
        shortest, longest = RETURN_PAUSES
        return None if gone >= RETURN_SECONDS else max(shortest, min(gone / 4, longest))

    @property
    def unanswered(self) -> float:
        """For how long a heartbeat has gone unanswered; a client that slept has asked nothing."""
        return 0.0 if self._asked is None else time.monotonic() - self._asked

    @property
    def silent_too_long(self) -> bool:
        """Whether the agent must be taken for dead."""
        silence = time.monotonic() - self.heard
        if silence < DOUBT_SECONDS:
            return False
        return silence > LOST_SECONDS or self.machine.looks_dead()


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
