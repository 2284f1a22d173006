"""Watches: each hears what there is to know of a pool, and tells it to those who show the pool.

The agents of the nodes tell what has happened there, from their logs: tasks, load, and the output
of kept pools. The record of a kept pool tells which nodes there are; a client tells what only it
knows. Each message has its "type", and the id of its "pool":

- pool: its name, its provider and whether it is kept; the first of all
- node: a report of the agent of a "node"
- client: rows of nodes that have changed, lines, notes, numbers, and a sample of the client's own
- gone: nothing more comes
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from skyward.errors import DeviceError, SkywardError
from skyward.events import (
    CallFailed,
    CallRetried,
    DeviceClosed,
    DeviceOpened,
    Event,
    News,
    NodeChanged,
    NodeEvent,
    NodeFailed,
    NodeLost,
    NodeReady,
    NodeStarting,
    NodeStopped,
    OutputWritten,
    Told,
    as_dict,
    in_json,
)
from skyward.nodes import records
from skyward.nodes.fleet import Fleet
from skyward.nodes.kept import ReachedPool
from skyward.nodes.records import KeptNode, KeptPool
from skyward.page.pool import LINES_A_TIME, Message, Row
from skyward.wire.channel import ServiceConnection

SAMPLE_SECONDS = 2.0
"""How often a client tells its numbers, and a page those of a pool."""
NODES_AT_EASE = 128
"""Of a pool with more nodes, each is measured less often: of a thousand, every 16 s."""
NODE_AGAIN_SECONDS = 2.0
"""How long to wait before an agent that could not be reached is asked again."""
SKEW_SECONDS = 0.5
"""A node's clock that differs by more than this from what was thought is measured again."""
END_SECONDS = 1.0
"""How long the end of a watch waits for its threads: one may wait for a provider for a minute."""
NOTES_WAITING = 1000
LINE_MOST = 2000
"""How many characters of a line of output are told."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, msgspec.MsgspecError)
"""What reading an agent or a process may raise, which may have another version of Skyward."""
UNREACHED = (SkywardError, EOFError, *UNREADABLE)

UNHURRIED = frozenset({"type", "pool", "node", "time", "usage"})
"""A report of a node that has nothing else wakes nobody."""
_SERVING = ("ready", "reconnecting", "reclaimed", "draining")
_NOTED = (CallRetried, DeviceOpened, DeviceClosed, NodeLost, NodeFailed, NodeStopped)
"""The events that a page shows, and no agent knows."""
_NOTED_OF_OWN = (*_NOTED, CallFailed, NodeReady, NodeChanged)
"""The same of a pool that is not kept: its client knows them better than the agents."""


class NodeWatch:
    """Hears the agent of one node on a thread of its own."""

    def __init__(
        self,
        service: Callable[[], ServiceConnection],
        tell: Callable[[Message], None],
        **asked: Any,
    ) -> None:
        """`service` connects to the agent, who gets the question with what is `asked`."""
        self._service, self._tell, self._asked = service, tell, asked
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._connection: ServiceConnection | None = None
        self._skew: float | None = None
        self.thread = threading.Thread(target=self._run, name="skyward-node-watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._hear()
            except UNREACHED:
                if not self._ended.is_set():
                    self._tell({"state": "unreachable"})
            self._ended.wait(NODE_AGAIN_SECONDS)

    def _hear(self) -> None:
        connection = self._service()
        with contextlib.closing(connection):
            with self._lock:
                self._connection = connection
                if self._ended.is_set():
                    return
            connection.channel.on_change(self._changed)
            connection.send("watch", **self._asked)
            state: Message = {"state": "ready", "fresh": True}
            while True:
                told = connection.next_reply().value
                self._tell(self._in_our_time(told) | state)
                state = {}

    def _changed(self, connected: bool) -> None:
        self._tell({"state": "ready" if connected else "reconnecting"})

    def _in_our_time(self, told: Message) -> Message:
        """The report with the times of this machine's clock: clocks of machines differ."""
        skew = time.time() - float(told["time"])
        if self._skew is None or abs(skew - self._skew) > SKEW_SECONDS:
            self._skew = skew
        if abs(self._skew) < SKEW_SECONDS:
            return told
        for task in told.get("tasks", ()):
            task[3] += self._skew
            task[4] = task[4] and task[4] + self._skew
        for line in told.get("lines", ()):
            line[0] += self._skew
        return told

    def end(self) -> None:
        """Have the thread end."""
        self._ended.set()
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.channel.abort()


def end_all(watches: dict[int, NodeWatch]) -> None:
    """End watches; one whose thread waits for a node that does not answer ends by itself."""
    deadline = time.monotonic() + END_SECONDS
    for watch in watches.values():
        watch.end()
    for watch in watches.values():
        watch.thread.join(max(0.0, deadline - time.monotonic()))


class FleetWatch:
    """Watches a pool of this process: what its client knows, and its agents."""

    def __init__(self, fleet: Fleet, wake: Callable[[], None], *, alone: bool) -> None:
        """`wake` is called if there is news; `alone` says that nobody watches the pool's record."""
        self.fleet, self._wake, self._alone = fleet, wake, alone
        self._kept = fleet.spec.keep is not None
        self._noted = _NOTED if self._kept else _NOTED_OF_OWN
        self._lines: deque[Row] = deque(maxlen=LINES_A_TIME)
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES_WAITING)
        self._changed: deque[int] = deque()
        """The nodes whose rows are to be told."""
        self._phases: dict[int, str] = {}
        self._numbers_told: Told = {}
        self._sample_due = 0.0
        self._nodes: dict[int, NodeWatch] = {}
        self._reports: deque[Message] = deque()
        self._begun = False
        fleet.events.add(self._take)
        self._changed.extend(view.node for view in fleet.views())

    def _take(self, event: Event) -> None:
        """Take an event, on the thread that made it."""
        if isinstance(event, OutputWritten):
            if self._kept:
                return  # the nodes tell it
            place = [event.time, event.node, event.worker, event.stream]
            self._lines.append([*place, event.text[:LINE_MOST], event.name, "", ""])
        elif isinstance(event, NodeStarting):
            self._phases[event.node] = event.phase
            self._changed.append(event.node)
        elif isinstance(event, self._noted):
            if isinstance(event, NodeEvent):
                self._changed.append(event.node)
            self._notes.append(as_dict(event))
        elif isinstance(event, NodeEvent):
            self._changed.append(event.node)
        else:
            return
        self._wake()

    def _report(self, node: int, told: Message) -> None:
        told.pop("state", None)  # the client knows it
        if told:
            report = {"type": "node", "pool": self.fleet.id, "node": node} | told
            self._reports.append(report)
            if report.keys() - UNHURRIED:
                self._wake()

    def news(self) -> list[Message]:
        """What has come since this was last asked."""
        head = {"type": "client", "pool": self.fleet.id}
        told: Message = {}
        is_due = time.monotonic() >= self._sample_due
        if changed := set(_drained(self._changed)):
            told["nodes"] = self._rows_of(changed)
        if lines := _drained(self._lines):
            told["lines"] = lines
        if notes := _drained(self._notes):
            told["notes"] = notes
        curves = self.fleet.dispatcher.teller.curves
        if numbers := [_number_row(each) for each in curves.news(self._numbers_told)]:
            told["numbers"] = numbers
        if is_due:
            self._sample_due = time.monotonic() + SAMPLE_SECONDS
            told["sample"] = self._sample()
        # After the rows of nodes, without which nobody takes their reports.
        messages: list[Message] = [head | told] if told else []
        messages += _drained(self._reports)
        if (changed or is_due) and not self.fleet.closed:
            self._watch_nodes()
        if not self._begun:
            self._begun = True
            spec = self.fleet.spec
            about = {"name": spec.name, "provider": spec.provider.name, "kept": self._kept}
            messages.insert(0, {"type": "pool", "pool": self.fleet.id} | about)
        return messages

    def _rows_of(self, wanted: set[int]) -> list[Row]:
        rows = {node: [node, "stopped", "", None, 0, ""] for node in wanted}
        for view in self.fleet.views():
            if view.node in rows:
                phase = self._phases.get(view.node, "") if view.state == "starting" else ""
                kind = view.accelerator, view.accelerators
                rows[view.node] = [view.node, view.state, view.address, *kind, phase]
        return list(rows.values())

    def _watch_nodes(self) -> None:
        """Have a watch for each node that has tasks, unless others watch them by the record."""
        fleet = self.fleet
        there = {view.node for view in fleet.views() if view.state in _SERVING}
        if self._kept and not self._alone and records.find(fleet.id) is not None:
            there = set()
        end_all({node: self._nodes.pop(node) for node in self._nodes.keys() - there})
        pace = {"seconds": SAMPLE_SECONDS * max(1.0, len(there) / NODES_AT_EASE)}
        for node in sorted(there - self._nodes.keys()):
            service = partial(fleet.service, node, "activity")
            self._nodes[node] = NodeWatch(service, partial(self._report, node), **pace)

    def _sample(self) -> Message:
        """What the client counts; as its own, what is true of the whole pool."""
        fleet, calls = self.fleet, self.fleet.dispatcher
        sent, received = calls.traffic()
        counts, ledger = calls.counts, fleet.ledger
        own: Message = {"cost": ledger.cost, "hourly_cost": ledger.hourly_cost}
        if not self._kept:
            own["submitted"] = counts.submitted
            own |= {"succeeded": counts.succeeded, "failed": counts.failed}
            own["cancelled"] = counts.cancelled
        return {
            "own": own,
            "devices": device_rows(fleet),
            "retried": counts.retried,
            "nodes_lost": counts.nodes_lost,
            "waiting": calls.backlog,
            "sent": sent,
            "received": received,
            "curves_left_out": calls.teller.curves.left_out,
        }

    def close(self) -> None:
        """Hear nothing more."""
        self.fleet.events.remove(self._take)
        end_all(self._nodes)
        self._nodes = {}


def _drained(waiting: deque[Any]) -> list[Any]:
    """What waits now; other threads may add more meanwhile."""
    return [waiting.popleft() for _ in range(len(waiting))]


def _number_row(news: News) -> Row:
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


class KeptWatch:
    """Watches a kept pool by its record, until it is ended or the pool is.

    Its thread reaches nodes, which may take long, and waits while none comes.
    """

    def __init__(self, name: str, tell: Callable[[Message], None]) -> None:
        """`tell` takes the messages, on the threads that hear them."""
        self.name, self._tell = name, tell
        self.began = time.monotonic()
        self._woken = threading.Event()
        """Set if there is something to do: nodes have changed, or the end."""
        self._known = KnownNodes()
        self._lock = threading.Lock()
        self._ended = False
        self._mark: tuple[int, int] | None = None
        self._record: KeptPool | None = None
        """The record, with the nodes that there are now."""
        self._nodes: dict[int, NodeWatch] = {}
        self._reached: list[ReachedPool] = []
        """What the watches of nodes go through."""
        self._thread = threading.Thread(target=self._run, name="skyward-kept", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the pool is still watched."""
        return self._thread.is_alive()

    def look_at_record(self) -> None:
        """Have the record read again if its file is another one."""
        if self._mark is not None and self._found_mark() != self._mark:
            self._woken.set()

    def _found_mark(self) -> tuple[int, int]:
        try:
            found = records.path_of(self.name).stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def end(self) -> None:
        """Have the connections and the threads end."""
        self._ended = True
        self._woken.set()

    def join(self, seconds: float) -> None:
        """Wait so long for the end; a thread that waits for a provider ends by itself."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            record = self._read()
            if record.stopped:
                return
            self._begin(record)
            while not self._ended:
                if self._found_mark() != self._mark:
                    written = self._read()
                    if written.id != record.id or written.stopped:
                        return
                    record = written
                with self._lock:
                    nodes = self._known.nodes
                self._renew(msgspec.structs.replace(record, nodes=nodes))
                self._woken.wait()
                self._woken.clear()
        except UNREACHED:
            pass  # it is gone, or out of reach; who looks for kept pools tries again
        finally:
            if self._record is not None:
                self._tell({"type": "gone", "pool": self._record.id})
            end_all(self._nodes)
            for reached in self._reached:
                reached.close()

    def _read(self) -> KeptPool:
        self._mark = self._found_mark()
        record = records.read(self.name)
        with self._lock:
            self._known.write(record.nodes)
        return record

    def _say(self, kind: str, **told: Any) -> None:
        if self._record is not None and not self._ended:
            self._tell({"type": kind, "pool": self._record.id} | told)

    def _begin(self, record: KeptPool) -> None:
        """Show the pool once its machines are found."""
        reached = self._reach(record)
        if self._ended:
            return
        self._record = record
        self._say("pool", name=record.name, provider=record.provider, kept=True)
        price = [record.hourly_cost, record.created]
        self._say("client", price=price)
        self._watch(reached, [node.index for node in record.nodes])

    def _renew(self, record: KeptPool) -> None:
        """Watch the nodes that there are now, and no others."""
        before = self._record
        assert before is not None
        if record.nodes == before.nodes:
            return
        there = {node.index: node for node in record.nodes}
        others = [node.index for node in before.nodes if node != there.get(node.index)]
        end_all({index: self._nodes.pop(index) for index in others if index in self._nodes})
        known = {node.index for node in before.nodes} - set(others)
        new = sorted(there.keys() - known)
        reached = self._reach(record) if new else None
        self._record = record
        self._say("client", nodes=[[index, "stopped", "", None, 0, ""] for index in others])
        if reached is not None:
            self._watch(reached, new)

    def _reach(self, record: KeptPool) -> ReachedPool:
        reached = ReachedPool(record)
        self._reached.append(reached)
        return reached

    def _watch(self, reached: ReachedPool, nodes: list[int]) -> None:
        found = set(reached.nodes)
        states = {index: "connecting" if index in found else "unreachable" for index in nodes}
        self._say("client", nodes=[self._row(*each) for each in states.items()])
        for index in found.intersection(nodes):
            service = partial(reached.service, index, "activity")
            self._nodes[index] = NodeWatch(service, partial(self._report, index))

    def _row(self, index: int, state: str) -> Row:
        node = None if self._record is None else self._record.node(index)
        if node is None:
            return [index, state, "", None, 0, ""]
        return [index, state, node.address, node.accelerator, node.accelerators, ""]

    def _report(self, node: int, told: Message) -> None:
        """Take what the agent of a node tells, on the thread that hears it."""
        assert self._record is not None
        # Only the head is told of all changes.
        if node == self._record.head and "members" in told:
            members = dict[int, KeptNode | None]
            with self._lock:
                self._known.tell(msgspec.convert(told["members"], members, strict=False))
            self._woken.set()
        told.pop("members", None)
        if (state := told.pop("state", None)) is not None:
            self._say("client", nodes=[self._row(node, state)])
        if told:
            self._say("node", node=node, **told)


class KnownNodes:
    """The nodes of a pool, by its record and by what its head was told; what came last counts."""

    def __init__(self) -> None:
        self._written: dict[int, KeptNode] = {}
        self._told: dict[int, KeptNode | None] = {}
        self._outdated: dict[int, KeptNode | None] = {}
        """What the head was told, and says still, of nodes of which the record has news."""

    def write(self, nodes: list[KeptNode]) -> None:
        """Take the nodes of the record, which was read."""
        now = {node.index: node for node in nodes}
        for index, node in self._told.items():
            if now.get(index) != self._written.get(index):
                self._outdated[index] = node
        self._written = now

    def tell(self, members: dict[int, KeptNode | None]) -> None:
        """Take all that the head was told of nodes that came, and of those that left, as None."""
        self._told = members
        old = self._outdated.items()
        self._outdated = {i: node for i, node in old if i in members and members[i] == node}

    @property
    def nodes(self) -> list[KeptNode]:
        """The nodes that there are, in the order of their numbers."""
        newer = {i: node for i, node in self._told.items() if i not in self._outdated}
        found = self._written | newer
        return [node for _, node in sorted(found.items()) if node is not None]
