"""Events: what happens in a pool, as values that a program can read, and who listens to them.

A pool makes events only while somebody listens: the user's callbacks, logs of events, and trackers
of the user's numbers, each with a thread of its own. Curves keep what a page draws of the numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import IO, Any, Literal, Protocol

from skyward.errors import ConfigurationError

WAITING_MOST = 10_000
"""How many events may wait for a listener; those that come then are dropped."""
PATIENCE = 5.0
"""After so many seconds without an event taken, `close` stops waiting for a listener."""
POINTS = 1000
"""How many points a curve has at most; of a longer one, every second is kept, then every fourth."""
CURVES = 200
"""How many curves a pool keeps for pages."""
STEPS = 10_000
"""Of how many further curves a pool counts the steps."""

Place = tuple[int, int] | None
"""The node and the worker that have logged something; None stands for the client."""
Told = dict[tuple[str, Place], tuple[int, int, int]]
Point = tuple[int, float]
"""A step and a value."""
News = tuple[str, Place, int, list[Point], Point]
"""Name and place of a curve; which of its points come in place of all from that number on; and the
last point, which may not be kept."""


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


# Who listens.


class EventListener:
    """Gives events to a callback, in order, on a thread of its own.

    A callback that fails is reported once, and gets the next events. One that is too slow misses
    events; `EventsDropped` stands where they were.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[..., object],
        note: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
        idle: Callable[[], None] = lambda: None,
        advice: str = "have it do less, or put events into a queue of its own",
    ) -> None:
        """`name` stands for the callback in messages; `note` shows one; `ended` frees things.

        `idle` is called when no event waits; `advice` is for a user whose callback is too slow.
        """
        self._name, self._callback, self._note, self._ended = name, callback, note, ended
        self._idle, self._advice = idle, advice
        self._waiting: queue.SimpleQueue[tuple[Any, ...] | threading.Event | None]
        self._waiting = queue.SimpleQueue()
        self._dropped = 0
        self._taken = 0
        self._hangs_after = -1
        """How many were taken when `drain` gave up; while no more are, nobody waits."""
        self._told_failure = self._told_dropped = self._told_hangs = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="skyward-events", daemon=True)
        self._thread.start()

    def take(self, event: Event, *about: Any) -> None:
        """Have the callback get an event, and what belongs to it; dropped if too many wait."""
        if self._waiting.qsize() >= WAITING_MOST:
            with self._lock:
                self._dropped += 1
        else:
            self._waiting.put((event, *about))

    def close(self) -> None:
        """End when the events that wait are taken; a callback that hangs is not waited for."""
        self._waiting.put(None)
        self._while_moving(self._thread.join)

    def drain(self) -> None:
        """Wait until the events so far are taken; a callback that hangs is not waited for again."""
        if self._taken == self._hangs_after:
            return
        done = threading.Event()
        self._waiting.put(done)
        self._while_moving(done.wait, done.is_set)
        own = threading.current_thread() is self._thread
        if not (done.is_set() or own) and self._thread.is_alive():
            self._hangs_after = self._taken
            if not self._told_hangs:
                self._told_hangs = True
                self._note(
                    f"{self._name} hangs: it has taken nothing for {PATIENCE:g} s, and nobody "
                    "waits for it until it goes on"
                )

    def _while_moving(
        self, wait: Callable[[float], object], is_over: Callable[[], bool] = lambda: False
    ) -> None:
        before = -1
        while (
            threading.current_thread() is not self._thread
            and self._thread.is_alive()
            and not is_over()
            and self._taken != before
        ):
            before = self._taken
            wait(PATIENCE)

    def _run(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                if isinstance(event, threading.Event):
                    self._attempt(self._idle, "the end")
                    event.set()
                    continue
                self._give(*event)
                if self._waiting.empty():
                    self._attempt(self._idle, type(event[0]).__name__)
                if self._dropped and self._waiting.qsize() < WAITING_MOST // 2:
                    self._tell_dropped(event[0])
        finally:
            self._ended()

    def _give(self, event: Event, *about: Any) -> None:
        self._attempt(lambda: self._callback(event, *about), type(event).__name__)

    def _attempt(self, action: Callable[[], object], at: str) -> None:
        try:
            action()
        except Exception as problem:
            if not self._told_failure:
                self._told_failure = True
                self._note(
                    f"{self._name} failed at {at}: {problem!r}; it gets the next "
                    "events, and further failures are not reported"
                )
        self._taken += 1

    def _tell_dropped(self, last: Event) -> None:
        with self._lock:
            count, self._dropped = self._dropped, 0
        if not self._told_dropped:
            self._told_dropped = True
            self._note(f"{self._name} is too slow: {count} events were dropped; {self._advice}")
        self._give(EventsDropped(time.time(), last.pool, count))


def json_log(where: str, note: Callable[[str], None]) -> EventListener:
    """A listener that writes every event as one line of JSON to a file, or to stderr for "-"."""
    if where == "-":
        return EventListener("the log on stderr", lambda event: _write(sys.stderr, event), note)
    try:
        file = open(where, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    except OSError as problem:
        raise ConfigurationError(
            f"the log {where!r} cannot be written: {problem.strerror}; give Options(log=...) or "
            "SKYWARD_LOG a file in a folder that is there, or '-' for stderr"
        ) from None

    def close() -> None:
        with contextlib.suppress(OSError):
            file.close()

    return EventListener(f"the log {where!r}", lambda event: _write(file, event), note, close)


def _write(file: IO[str], event: Event) -> None:
    # One write for each line: other pools and processes may append to the same file.
    file.write(json.dumps(as_dict(event), ensure_ascii=False) + "\n")
    file.flush()


# Trackers: programs of others that draw the user's numbers. Their packages are the user's.


class _Tracker(Protocol):
    called: str
    run_ends: bool
    """Whether numbers that come after the end of their run are lost."""

    def run(self) -> Any:
        """The run that numbers of this moment belong to; None if there is none."""

    def write(self, event: NumbersLogged, run: Any) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def _named(event: NumbersLogged) -> dict[str, float]:
    """The values under their names in a tracker: ranks of a broadcast but the first say theirs."""
    if not event.rank:
        return event.values
    return {f"rank{event.rank}/{name}": value for name, value in event.values.items()}


class _WandB:
    """The run of Weights & Biases that the program has begun, if there is one."""

    called = "Weights & Biases"
    run_ends = True
    STEP = "sky/step"

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def run(self) -> Any:
        return getattr(sys.modules.get("wandb"), "run", None)

    def write(self, event: NumbersLogged, run: Any) -> None:
        values = _named(event)
        for name in values:
            if (run.id, name) not in self._known:
                # A step of W&B's own only grows, and ranks are not all at the same step.
                self._known.add((run.id, name))
                run.define_metric(name, step_metric=self.STEP)
        run.log({**values, self.STEP: event.step})

    def flush(self) -> None:
        """Nothing: W&B has a process of its own for that."""

    def close(self) -> None:
        """Nothing: the run is the user's."""


class _MLflow:
    """The active run of MLflow, if there is one; what comes at once is written at once."""

    called = "MLflow"
    run_ends = False
    MOST = 1000
    """MLflow takes no more metrics at a time."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._run = ""

    def run(self) -> Any:
        fluent = sys.modules.get("mlflow.tracking.fluent")
        # `active_run` knows runs of the same thread alone.
        find = getattr(fluent, "_get_latest_active_run", getattr(fluent, "active_run", None))
        run = None if find is None else find()
        return None if run is None else run.info.run_id

    def write(self, event: NumbersLogged, run: str) -> None:
        from mlflow.entities import Metric

        if run != self._run or len(self._waiting) >= self.MOST - len(event.values):
            self.flush()
        self._run, now = run, int(event.time * 1000)
        self._waiting += [Metric(*each, now, event.step) for each in _named(event).items()]

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            from mlflow import MlflowClient

            client = MlflowClient()
            for at in range(0, len(waiting), self.MOST):
                client.log_batch(self._run, metrics=waiting[at : at + self.MOST])

    def close(self) -> None:
        self.flush()


class _TensorBoard:
    """A folder that TensorBoard reads."""

    called = "TensorBoard"
    run_ends = False

    def __init__(self, folder: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Point
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._point, self._summary = Point, Summary
        self._file = EventFileWriter(folder)

    def run(self) -> Any:
        return self._file

    def write(self, event: NumbersLogged, run: Any) -> None:
        value = self._summary.Value
        values = [value(tag=name, simple_value=each) for name, each in _named(event).items()]
        summary = self._summary(value=values)
        run.add_event(self._point(wall_time=event.time, step=event.step, summary=summary))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Tracking:
    """Passes the numbers of a pool on to the trackers that are set up, each on its own thread.

    W&B and MLflow are set up when the program has begun a run, TensorBoard when there is a folder.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._lock = note, threading.Lock()
        self._trackers: dict[str, _Tracker] = {}
        self._listeners: dict[str, EventListener] = {}
        """For each tracker that has had a run."""

    def write_to(self, folder: str) -> None:
        """Have TensorBoard's files in a folder get the numbers."""
        try:
            tracker = self._trackers["tensorboard"] = _TensorBoard(folder)
            self._listener("tensorboard", tracker)
        except ImportError:
            raise ConfigurationError(
                f"Options(tensorboard={folder!r}): the package tensorboard is not "
                "installed here; run pip install tensorboard, or leave the option out"
            ) from None
        except OSError as problem:
            raise ConfigurationError(
                f"Options(tensorboard={folder!r}): the folder cannot be written: "
                f"{problem.strerror}; give a folder that can"
            ) from None

    def take(self, events: Sequence[NumbersLogged], *, here: bool = False) -> None:
        """Pass numbers on to the runs of this moment; those of the client are logged `here`."""
        for module, kind in _RUNS.items():
            if module in sys.modules and module not in self._trackers:
                self._trackers.setdefault(module, kind())
        for module, tracker in self._trackers.copy().items():
            try:
                run = tracker.run()
            except Exception as problem:
                _report(tracker, problem, self._note)
                continue
            if run is None:
                continue
            listener = self._listener(module, tracker)
            for event in events:
                listener.take(event, run)
            if here and tracker.run_ends:
                # The program may end the run right after.
                listener.drain()

    def _listener(self, module: str, tracker: _Tracker) -> EventListener:
        def write(event: Event, run: Any = None) -> None:
            if isinstance(event, NumbersLogged):
                tracker.write(event, run)

        with self._lock:
            if module not in self._listeners:
                self._listeners[module] = EventListener(
                    tracker.called,
                    write,
                    self._note,
                    ended=tracker.close,
                    idle=tracker.flush,
                    advice="log every tenth step, for example",
                )
            return self._listeners[module]

    def drain(self) -> None:
        """Wait until the trackers have what was logged so far."""
        for listener in self._listeners.copy().values():
            listener.drain()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        for listener in self._listeners.values():
            listener.close()


class Curve:
    """The points of one name, thinned so that the whole run fits."""

    __slots__ = ("added", "last", "points", "stride")

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.stride, self.added = 1, 0
        self.last = (-1, 0.0)

    def add(self, step: int, value: float) -> None:
        """Add a point; of a long curve, only some are kept."""
        self.last = step, value
        if self.added % self.stride == 0:
            self.points.append(self.last)
            if len(self.points) > POINTS:
                self.points, self.stride = self.points[::2], self.stride * 2
        self.added += 1


class Curves:
    """The numbers of one pool, by name and place; any thread may add to them and read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._curves: dict[tuple[str, Place], Curve] = {}
        self._steps: dict[tuple[str, Place], int] = {}
        """The last step of each curve that is not kept, because there are too many."""

    @property
    def left_out(self) -> int:
        """How many curves are not kept."""
        return len(self._steps)

    def add(self, place: Place, values: Mapping[str, float], step: int | None) -> int:
        """Add values of a place; returns their step, which is counted if there is none."""
        with self._lock:
            if step is None:
                step = 1 + max(self._last_step(name, place) for name in values)
            for name, value in values.items():
                key = name, place
                curve = self._curves.get(key)
                if curve is None and len(self._curves) < CURVES:
                    curve = self._curves[key] = Curve()
                if curve is not None:
                    curve.add(step, value)
                elif key in self._steps or len(self._steps) < STEPS:
                    self._steps[key] = step
        return step

    def _last_step(self, name: str, place: Place) -> int:
        curve = self._curves.get((name, place))
        return self._steps.get((name, place), -1) if curve is None else curve.last[0]

    def news(self, told: Told) -> list[News]:
        """What has come since `told`, which is brought up to date, of each curve with news."""
        rows: list[News] = []
        with self._lock:
            for (name, place), curve in self._curves.items():
                stride, count, added = told.get((name, place), (0, 0, 0))
                if added == curve.added:
                    continue
                start = count if stride == curve.stride else 0
                told[name, place] = curve.stride, len(curve.points), curve.added
                rows.append((name, place, start, curve.points[start:], curve.last))
        return rows


_RUNS: dict[str, Callable[[], _Tracker]] = {"wandb": _WandB, "mlflow": _MLflow}
_outside: dict[str, _Tracker] = {}
_curves_outside = Curves()
"""What is logged outside of a pool: only its steps are of use."""
_failed: set[str] = set()
"""The trackers whose failure was reported."""


def track_outside(values: dict[str, float], step: int | None) -> None:
    """Pass on what is logged outside of a pool, at once; a tracker that fails is reported once."""
    step = _curves_outside.add(None, values, step)
    event = NumbersLogged(time.time(), "", step, values, None, None, 0, "", None)
    for module, kind in _RUNS.items():
        if module not in sys.modules:
            continue
        tracker = _outside.get(module) or _outside.setdefault(module, kind())
        try:
            run = tracker.run()
            if run is not None:
                tracker.write(event, run)
                tracker.flush()
        except Exception as problem:
            _report(tracker, problem, lambda text: print(f"skyward: {text}", file=sys.stderr))


def _report(tracker: _Tracker, problem: Exception, note: Callable[[str], None]) -> None:
    if tracker.called not in _failed:
        _failed.add(tracker.called)
        note(
            f"{tracker.called} failed at sky.log: {problem!r}; it gets the next numbers, and "
            "further failures are not reported"
        )
