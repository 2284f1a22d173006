"""The hub: gives every viewer of some pools a snapshot of each, and then what changes.

While nobody is there, a hub has no thread, the pools make no events, and no node is measured.
"""

from __future__ import annotations

import bisect
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

import msgspec

from skyward.errors import DeviceError
from skyward.events import (
    CallCancelled,
    CallFailed,
    CallFinished,
    CallRetried,
    CallStarted,
    DeviceClosed,
    DeviceOpened,
    Event,
    NodeChanged,
    NodeFailed,
    NodeLost,
    NodeReady,
    NodeStarting,
    NodeStopped,
    OutputWritten,
    as_dict,
    in_json,
)
from skyward.listeners import News, Told
from skyward.nodes.fleet import Fleet
from skyward.page.pool import LINE_MOST, Message, Row, ShownPool
from skyward.staff import Staff
from skyward.worker.task_board import BUCKETS

TICK_SECONDS = 0.1
"""What comes within so many seconds is told together."""
SETTLE_SECONDS = 0.03
"""What comes after a pause waits so long for more: nodes often tell of the same call."""
SAMPLE_SECONDS = 2.0
IDLE_SAMPLE_SECONDS = 10.0
"""How often pools are measured for a page that nobody looks at, but that is served."""
IDLE_SECONDS = 2.0
"""How often events are taken for such a page."""
BATCHES_WAITING = 100
"""So many batches may wait for a viewer, which is 10 s; one that is slower is dropped."""
EVENTS_WAITING = 50_000
NODES_A_TIME = 128
"""How many nodes are asked at a time: a thousand nodes are asked in turn, each every 16 s."""
ANSWER_SECONDS = 0.8
"""How long a sample waits for nodes; one that is slower is asked again in its turn."""

# A name may be a kind of str, which is no plain one.
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Viewer:
    """One who looks: a queue of batches, each a line of JSON; None ends it."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.dropped = False
        """Whether the viewer was too slow, or the hub has ended."""

    def put(self, batch: str | None) -> bool:
        """Give the viewer a batch; False if too many wait already."""
        if batch is not None and self._batches.qsize() >= BATCHES_WAITING:
            self.dropped, batch = True, None
        self._batches.put(batch)
        return batch is not None

    def next(self, seconds: float) -> str | None:
        """Wait for the next batch; "" after so many seconds without one, None at the end."""
        if self.dropped:
            return None
        try:
            return self._batches.get(timeout=seconds)
        except queue.Empty:
            return ""


class Hub:
    """Some pools, and those who look at them; any thread may call the methods."""

    pid = 0
    """The process whose pools they are, if they are of one."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.RLock()
        """Guards the pools."""
        self.pools: dict[str, ShownPool] = {}
        """The pools that are shown, by their keys."""
        self.looked_at = False
        self._viewers: list[Viewer] = []
        self._held = 0
        self._turns = threading.Lock()
        """Held while the hub begins or ends."""
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()

    # Those who look.

    def join(self) -> Viewer:
        """A new viewer, whose first batch has everything that is known; `leave` ends it."""
        viewer = Viewer()
        with self._turns:
            self._begin()
            with self.lock:
                self._tell_news()
                self._viewers.append(viewer)
                self.looked_at = True
                every: list[Message] = [{"type": "hello", "time": time.time(), "pid": self.pid}]
                for pool in self.pools.values():
                    every += _all_of(pool)
                    pool.sample_due = 0.0
                viewer.put(_encode(every).decode())
        self.wake()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Give a viewer nothing more; after the last one, the hub ends its thread."""
        with self._turns:
            with self.lock:
                self._viewers = [each for each in self._viewers if each is not viewer]
                self.looked_at = bool(self._viewers)
            viewer.put(None)
            self._end_if_alone()

    def hold(self) -> None:
        """Remember what happens for viewers that come later, until `release`."""
        with self._turns:
            self._held += 1
            self._begin()

    def release(self) -> None:
        """End one `hold`."""
        with self._turns:
            self._held -= 1
            self._end_if_alone()

    def _begin(self) -> None:
        with self.lock:
            if self._thread is None:
                self._woken.clear()
                self._thread = threading.Thread(target=self._run, name="skyward-page", daemon=True)
                self.begin()
                self._thread.start()

    def _end_if_alone(self) -> None:
        if self._thread is not None and not (self._viewers or self._held):
            with self.lock:
                self._thread = None
            self.wake()
            self.end()
            with self.lock:
                self.pools.clear()

    def begin(self) -> None:
        """Begin to look at pools: somebody has come. The lock is held."""

    def end(self) -> None:
        """Look at no pool any more; waits for the threads that do."""

    # The pools.

    def show(self, pool: ShownPool) -> None:
        """Show a pool from now on."""
        with self.lock:
            pool.news()
            self.pools[pool.key] = pool
            self._tell(_all_of(pool))
        self.wake()

    def hide(self, pool: ShownPool, how: str = "gone") -> None:
        """Show a pool no longer: it is "gone", or "replaced" by another. Its news is told first."""
        with self.lock:
            if self.pools.pop(pool.key, None) is not None:
                end = {"type": how, "pool": pool.key, "time": time.time()}
                self._tell([*pool.news(), end])

    def wake(self) -> None:
        """Have the news told soon."""
        if not self._woken.is_set():
            self._woken.set()

    def measure(self) -> list[tuple[Message, Message]]:
        """The snapshot and a sample of every pool that has one, for metrics."""
        with self.lock:
            self._tell_news()
            found = [(pool.snapshot(), pool.latest()) for pool in self.pools.values()]
        return [(snapshot, sample) for snapshot, sample in found if sample is not None]

    # The thread.

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            began = time.monotonic()
            with self.lock:
                if self._thread is not me:
                    return
                pause = SAMPLE_SECONDS if self.looked_at else IDLE_SAMPLE_SECONDS
                for pool in self.pools.values():
                    if began >= pool.sample_due:
                        pool.sample_due = began + pause
                        pool.sample()
                self._tell_news()
                due = min((pool.sample_due for pool in self.pools.values()), default=began + pause)
            left = due - time.monotonic()
            if self._woken.wait(max(0.0, left if self.looked_at else min(left, IDLE_SECONDS))):
                self._woken.clear()
                time.sleep(max(SETTLE_SECONDS, began + TICK_SECONDS - time.monotonic()))

    def _tell_news(self) -> None:
        self._tell([message for pool in self.pools.values() for message in pool.news()])

    def _tell(self, messages: list[Message]) -> None:
        if messages and self._viewers:
            batch = _encode(messages).decode()
            # Whoever has a viewer that is dropped has it leave.
            self._viewers = [viewer for viewer in self._viewers if viewer.put(batch)]


def _all_of(pool: ShownPool) -> list[Message]:
    latest = pool.latest()
    return [pool.snapshot(), *list(pool.samples)[:-1], *([] if latest is None else [latest])]


class OwnPools(Hub):
    """The pools of this process."""

    def _reset(self) -> None:
        super()._reset()
        self._fleets: list[Fleet] = []
        self._samples: dict[str, deque[Message]] = {}
        """The last samples of each pool: a page that is opened again has its curves again."""
        self.pid = os.getpid()
        self.staff = Staff("skyward-page", most=8)

    @property
    def fleets(self) -> list[Fleet]:
        """The open pools of this process."""
        with self.lock:
            return list(self._fleets)

    def add(self, fleet: Fleet) -> None:
        """Show a pool from now on."""
        with self.lock:
            self._fleets.append(fleet)
            if self._thread is not None:
                self.show(self._own(fleet))

    def remove(self, fleet: Fleet) -> None:
        """Show a pool no longer: it is closed."""
        with self.lock:
            if fleet in self._fleets:
                self._fleets.remove(fleet)
            self._samples.pop(fleet.id, None)
            pool = self.pools.get(key_of(fleet))
            if isinstance(pool, OwnPool):
                pool.end()
                self.hide(pool)

    def _own(self, fleet: Fleet) -> OwnPool:
        pool = OwnPool(fleet, self)
        pool.keep_samples(self._samples.setdefault(fleet.id, pool.samples))
        pool.begin()
        return pool

    def begin(self) -> None:
        self.pools |= {pool.key: pool for pool in map(self._own, self._fleets)}

    def end(self) -> None:
        with self.lock:
            for pool in self.pools.values():
                if isinstance(pool, OwnPool):
                    pool.end()

    def measure(self) -> list[tuple[Message, Message]]:
        """The same, measured for this answer."""
        with self.lock:
            own = [pool for pool in self.pools.values() if isinstance(pool, OwnPool)]
        for pool in own:
            pool.measure(every_node=True)
        return super().measure()


class OwnPool(ShownPool):
    """A pool of this process, by its events."""

    def __init__(self, fleet: Fleet, hub: Hub) -> None:
        super().__init__(key_of(fleet), fleet.spec.name, fleet.spec.provider.name)
        self.fleet, self._hub = fleet, hub
        self._events: deque[Event] = deque(maxlen=EVENTS_WAITING)
        self._dropped = False
        """Whether events were lost, because nobody asked in time."""
        self._phases: dict[int, str] = {}
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._numbers_told: Told = {}
        self._measuring = threading.Lock()
        self._next = 0

    def begin(self) -> None:
        """Begin with the calls that run already; when they started is not known."""
        self.fleet.events.add(self.take)
        now = time.time()
        for call in self.fleet.dispatcher.running():
            self.add_call([*call, now, None, None, ""])

    def end(self) -> None:
        """Take no more events."""
        self.fleet.events.remove(self.take)

    def take(self, event: Event) -> None:
        """Take an event, on the thread that made it."""
        events = self._events
        if len(events) >= EVENTS_WAITING:
            self._dropped = True
        events.append(event)
        if self._hub.looked_at or len(events) >= EVENTS_WAITING // 2:
            self._hub.wake()

    def gather(self) -> None:
        numbers = self.fleet.dispatcher.teller.curves.news(self._numbers_told)
        self.add_numbers(map(number_row, numbers))
        dropped, self._dropped = self._dropped, False
        # Asked before the events that are left: among them is the end of a call that ends from now.
        there = {call[0]: call for call in self.fleet.dispatcher.running()} if dropped else {}
        over = [call for call in self.running if call not in there] if dropped else []
        nodes: set[int] = set()
        ended: set[int] = set()
        while self._events:
            match event := self._events.popleft():
                case CallStarted():
                    about = [event.call, event.name, event.node, event.worker, event.time]
                    self.add_call([*about, None, None, ""])
                case CallFinished() | CallFailed() | CallCancelled():
                    ended.add(event.call)
                    self._end_call(event)
                    if isinstance(event, CallFailed):
                        self.add_notes([as_dict(event)])
                case OutputWritten():
                    place = [event.time, event.node, event.worker, event.stream]
                    self.add_lines([[*place, event.text[:LINE_MOST], event.name, "", ""]])
                case NodeStarting():
                    self._phases[event.node] = event.phase
                    nodes.add(event.node)
                case NodeReady() | NodeLost() | NodeFailed() | NodeStopped() | NodeChanged():
                    self._phases.pop(event.node, None)
                    nodes.add(event.node)
                    self.add_notes([as_dict(event)])
                case CallRetried():
                    call = self.running.get(event.call)
                    if call is not None:
                        self.add_call([*call[:5], event.time, "lost", ""])
                    self.add_notes([as_dict(event)])
                case DeviceOpened() | DeviceClosed():
                    self.add_notes([as_dict(event)])
                case _:
                    pass
        if nodes:
            self.add_nodes(self._rows_of(nodes))
        now = time.time()
        for number in over:
            if (known := self.running.get(number)) is not None:
                self.add_call([*known[:5], now, "ok", ""])
        for number in there.keys() - self.running.keys() - ended:
            self.add_call([*there[number], now, None, None, ""])

    def _end_call(self, event: CallFinished | CallFailed | CallCancelled) -> None:
        known = self.running.pop(event.call, None)
        if event.node is None or event.worker is None:
            return  # no worker had it
        how = {CallFinished: "ok", CallFailed: "failed"}.get(type(event), "cancelled")
        seconds = 0.0 if isinstance(event, CallCancelled) else event.seconds
        if how != "cancelled":
            self._buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds
        # A call that was sent ahead of its turn has run for less time than its worker had it.
        began = event.time - seconds if seconds or known is None else known[4]
        about = [event.call, event.name, event.node, event.worker, began]
        self.add_call([*about, event.time, how, ""])

    def _rows_of(self, wanted: set[int] | None) -> list[Row]:
        return [
            [
                view.node,
                view.state,
                view.address,
                view.accelerator,
                view.accelerators,
                self._phases.get(view.node, "") if view.state == "starting" else "",
            ]
            for view in self.fleet.views()
            if wanted is None or view.node in wanted
        ]

    def snapshot(self) -> Message:
        self.nodes = {row[0]: row for row in self._rows_of(None)}
        self.workers = [list(each) for each in sorted(self.fleet.workers())]
        return super().snapshot()

    # Its numbers.

    def sample(self) -> None:
        assert isinstance(self._hub, OwnPools)
        self._hub.staff.submit(self._sample)

    def _sample(self) -> None:
        # One that takes long stands for those that were due meanwhile.
        if not self._measuring.locked():
            try:
                self.measure()
            except Exception as problem:
                if not self.fleet.closed:
                    # A defect of ours: the page goes on without this sample.
                    traceback.print_exception(problem, file=sys.stderr)
            self._hub.wake()

    def measure(self, *, every_node: bool = False) -> None:
        """Add a sample; of a large pool, with the nodes whose turn it is."""
        fleet, calls = self.fleet, self.fleet.dispatcher
        with self._measuring:
            nodes = [node.index for node in fleet.nodes if node.serves]
            usages = fleet.usages(nodes if every_node else self._turn(nodes), ANSWER_SECONDS)
        sent, received = calls.traffic()
        counts, ledger = calls.counts, fleet.ledger
        devices = device_rows(fleet)
        with self._hub.lock:
            for node, usage in usages.items():
                gpus = [
                    [gpu.name, gpu.percent, gpu.memory_used, gpu.memory_total] for gpu in usage.gpus
                ]
                memory = usage.memory_used, usage.memory_total
                network = usage.network_received, usage.network_sent
                self.add_load(node, usage.cpu_percent, memory, gpus, network)
            self.gather()
            self.add_sample(
                {
                    "devices": devices,
                    "submitted": counts.submitted,
                    "succeeded": counts.succeeded,
                    "failed": counts.failed,
                    "cancelled": counts.cancelled,
                    "retried": counts.retried,
                    "nodes_lost": counts.nodes_lost,
                    "waiting": calls.backlog,
                    "sent": sent,
                    "received": received,
                    "curves_left_out": calls.teller.curves.left_out,
                    "cost": ledger.cost,
                    "hourly_cost": ledger.hourly_cost,
                    "buckets": list(self._buckets),
                    "call_seconds": self._seconds,
                }
            )

    def _turn(self, nodes: list[int]) -> list[int]:
        """The nodes that are measured this time."""
        if len(nodes) <= NODES_A_TIME:
            return nodes
        first = self._next % len(nodes)
        self._next = first + NODES_A_TIME
        return (nodes + nodes)[first : first + NODES_A_TIME]


def key_of(fleet: Fleet) -> str:
    """What names a pool of this process on a page."""
    return f"{fleet.id}-{os.getpid()}"


def number_row(news: News) -> Row:
    """What has come of a curve, for JSON."""
    name, place, start, points, last = news
    rows = [[step, in_json(value)] for step, value in (*points, last)]
    return [name, *(place or (None, None)), start, rows[:-1], rows[-1]]


def device_rows(fleet: Fleet) -> list[dict[str, Any]]:
    """The numbers of a pool's open torch devices so far."""
    opened = fleet.devices.all_open()
    if not opened:
        return []
    # Imported here: it imports torch, which a process with an open device has done already.
    from skyward.device.core import core

    rows = []
    for node, index, kind in opened:
        try:
            stats = core().stats(index)
        except DeviceError:
            # It was closed a moment ago.
            continue
        rows.append(
            {
                "device": index,
                "node": node,
                "kind": kind,
                "operations": stats.operations,
                "waits": stats.waits,
                "cache_hits": stats.cache_hits,
                "sent": stats.bytes_sent + stats.bytes_uploaded,
                "fetched": stats.bytes_fetched,
            }
        )
    return rows


hub = OwnPools()
"""The hub of this process."""

os.register_at_fork(after_in_child=hub._reset)
