"""Events: what happens in a pool, as values that a program can read.

A pool makes events only while somebody listens.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a pool; `time` is in seconds since 1970."""

    time: float
    pool: str
    """The name of the pool."""


@dataclass(frozen=True, slots=True)
class PoolStarted(Event):
    """A pool has begun to start its nodes."""

    provider: str
    nodes: int


@dataclass(frozen=True, slots=True)
class PoolReady(Event):
    """A pool can be used."""

    nodes: int
    seconds: float
    """How long the start took."""


@dataclass(frozen=True, slots=True)
class PoolClosed(Event):
    """A pool was taken down; `cost` is in US dollars, or None if a price is unknown."""

    cost: float | None


@dataclass(frozen=True, slots=True)
class NodeEvent(Event):
    """Something that happened to a node; `node` is its index."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeStarting(NodeEvent):
    """A node has entered a phase of its start, such as "creating" or "connecting"."""

    phase: str


@dataclass(frozen=True, slots=True)
class NodeReady(NodeEvent):
    """A node runs tasks from now on, or again after a lost connection."""

    address: str
    accelerator: str | None
    accelerators: int


@dataclass(frozen=True, slots=True)
class NodeChanged(NodeEvent):
    """A node is "reconnecting", "reclaimed" by its provider, or "draining" to leave the pool."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeLost(NodeEvent):
    """A node is gone; it will be started again."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeFailed(NodeEvent):
    """A node did not start, or was lost too often."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeStopped(NodeEvent):
    """A node has left the pool."""


@dataclass(frozen=True, slots=True)
class CallEvent(Event):
    """Something that happened to a call; `call` is its number in the pool."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class CallSubmitted(CallEvent):
    """A call waits for a worker."""


@dataclass(frozen=True, slots=True)
class CallStarted(CallEvent):
    """A call was given to a worker, which runs it at once or after other short calls."""

    node: int
    worker: int


@dataclass(frozen=True, slots=True)
class CallRetried(CallEvent):
    """A call lost its worker and waits for another."""

    reason: str


@dataclass(frozen=True, slots=True)
class CallEnded(CallEvent):
    """The end of a call; a call that no worker was given has no node and no worker."""

    node: int | None
    worker: int | None


@dataclass(frozen=True, slots=True)
class CallFinished(CallEnded):
    """A call has returned."""

    seconds: float
    """How long the function itself ran."""


@dataclass(frozen=True, slots=True)
class CallFailed(CallEnded):
    """A call has raised an exception, or could not be run."""

    seconds: float
    error: str
    """The type and the message of the exception."""


@dataclass(frozen=True, slots=True)
class CallCancelled(CallEnded):
    """A call was cancelled."""


@dataclass(frozen=True, slots=True)
class OutputWritten(Event):
    """A call has written one line; `call` is 0 for a line that belongs to no call."""

    node: int
    worker: int
    call: int
    name: str
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class NumbersLogged(Event):
    """`sky.log` was called; on the client, there is no node and no worker, and `call` is 0."""

    step: int
    values: dict[str, float]
    node: int | None
    worker: int | None
    call: int
    name: str
    rank: int | None
    """The number of the worker in its broadcast, from 0; None if it is none."""


@dataclass(frozen=True, slots=True)
class Transferred(CallEvent):
    """A call's large arguments have gone to a node, or its large result has come from it."""

    node: int
    worker: int
    direction: Literal["sent", "received"]
    bytes: int


@dataclass(frozen=True, slots=True)
class DeviceEvent(Event):
    """Something that happened to a torch device; `device` is its index, as in "sky:0"."""

    node: int
    device: int


@dataclass(frozen=True, slots=True)
class DeviceOpened(DeviceEvent):
    """A torch device was opened."""

    kind: str


@dataclass(frozen=True, slots=True)
class DeviceClosed(DeviceEvent):
    """A torch device was closed."""

    reason: str


@dataclass(frozen=True, slots=True)
class CostCounted(Event):
    """What the pool's machines have cost so far, and cost in an hour, in US dollars."""

    cost: float
    hourly_cost: float


@dataclass(frozen=True, slots=True)
class EventsDropped(Event):
    """So many events were left out here, because the listener was too slow for them."""

    count: int


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_PARENTS = (Event, NodeEvent, CallEvent, CallEnded, DeviceEvent)
NAMES: dict[type[Event], str] = {
    kind: _snake(name)
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in _PARENTS
}
"""The name of each kind of event in JSON: "call_started" for `CallStarted`."""
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in NAMES}


def as_dict(event: Event) -> dict[str, Any]:
    """An event as a dictionary that JSON can have; "event" is the name of its kind.

    >>> as_dict(CallSubmitted(1.0, "train", 7, "step"))["event"]
    'call_submitted'
    """
    kind = type(event)
    found = {"event": NAMES[kind]} | {name: getattr(event, name) for name in _FIELDS[kind]}
    if isinstance(event, NumbersLogged):
        found["values"] = {name: in_json(value) for name, value in event.values.items()}
    return found


def in_json(value: float) -> float | str:
    """A number as JSON can have it: "NaN", "Infinity" and "-Infinity" are text.

    >>> in_json(0.5), in_json(float("-inf"))
    (0.5, '-Infinity')
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


Sink = Callable[[Event], None]
"""Takes events on the threads that make them: must be quick, and raise nothing."""


class EventStream:
    """The events of one pool; any thread may emit them, and add or remove sinks."""

    __slots__ = ("_lock", "_sinks", "listened", "pool")

    def __init__(self, pool: str = "") -> None:
        self.pool = pool
        self.listened = False
        """Whether anybody listens; if not, nobody needs to make an event."""
        self._sinks: tuple[Sink, ...] = ()
        self._lock = threading.Lock()

    def add(self, sink: Sink) -> None:
        """Have a sink get every event from now on."""
        with self._lock:
            self._sinks = (*self._sinks, sink)
            self.listened = True

    def remove(self, sink: Sink) -> None:
        """Give a sink no more events."""
        with self._lock:
            self._sinks = tuple(each for each in self._sinks if each != sink)
            self.listened = bool(self._sinks)

    def emit(self, kind: type[Event], *values: Any) -> None:
        """Make an event of this kind with the values of its fields, if anybody listens."""
        if self._sinks:
            self.pass_on(kind(time.time(), self.pool, *values))

    def pass_on(self, event: Event) -> None:
        """Give an event to those who listen."""
        for sink in self._sinks:
            sink(event)
