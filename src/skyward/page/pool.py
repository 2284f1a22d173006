"""A pool as the page shows it: one model for the pools of every process and for kept ones.

Whoever knows something of a pool adds it here, and the hub asks for what is new. A pool may make a
hundred thousand calls a second, and a page shows a few hundred: what comes in one moment is
counted, and only a part of it is told call by call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

CALLS_KEPT = 1000
LINES_KEPT = 500
NOTES_KEPT = 100
SAMPLES_KEPT = 300
ROWS_KEPT = 3000
"""How many rows of nodes all kept samples have together."""
CALLS_A_TIME = 300
"""How many calls that ended are told one by one at a time; the others are only counted."""
LINES_A_TIME = 200
LINE_MOST = 2000
"""How many characters of a line of output are told."""

Message = dict[str, Any]
"""What a page is told, and what processes tell each other: see "type"."""
Row = list[Any]
"""A call: key, name, node, worker, start, end, how it ended, client.
A line: time, node, worker, stream, text, function, client, job.
A node: number, state, address, accelerator, how many of it, phase.
A curve: name, node, worker, first point that is new, points, last point, and the process whose it
is in a kept pool; the client's own numbers have no node and no worker.
The load of a node: number, processors, memory, memory there is, bytes a second in and out, GPUs,
bytes in and out."""
Pair = tuple[int, int]

_STATES = ("workers", "clients", "jobs")
"""What is told as it is now, also if there are none any more."""


class ShownPool:
    """What a page knows of one pool; the lock of the hub that shows it guards it."""

    def __init__(self, key: str, name: str, provider: str) -> None:
        """`key` names the pool on a page: several processes may be clients of one pool."""
        self.key, self.name, self.provider = key, name, provider
        self.nodes: dict[int, Row] = {}
        self.workers: list[Row] = []
        self.clients: dict[str, dict[str, Any]] = {}
        self.jobs: list[dict[str, Any]] = []
        self.running: dict[Any, Row] = {}
        self._told: set[Any] = set()
        """The running calls that have been told."""
        self._ended: deque[Row] = deque(maxlen=CALLS_KEPT)
        self._lines: deque[Row] = deque(maxlen=LINES_KEPT)
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES_KEPT)
        self._numbers: dict[tuple[Any, ...], Row] = {}
        self._news = _nothing()
        self._load: dict[int, Row] = {}
        self._measured: set[int] = set()
        """The nodes that were measured since the last sample."""
        self._traffic: dict[int, tuple[float, int, int]] = {}
        """When each node was measured last, and how many bytes it had received and sent."""
        self.keep_samples(deque())
        self._new_samples: list[Message] = []
        self.sample_due = 0.0
        """When the hub wants the next sample, by `time.monotonic`."""

    # What those do who know how the pool is.

    def gather(self) -> None:
        """Add what has come since the last time, where nobody adds it at once."""

    def sample(self) -> None:
        """Add a sample, at once or soon; a pool whose samples come by themselves does nothing."""

    # What is added.

    def add_nodes(self, rows: Iterable[Row]) -> None:
        """Nodes as they are now; one that has "stopped" is told once."""
        for row in rows:
            self._news["nodes"].append(row)
            self.nodes[row[0]] = row
            if row[1] == "stopped":
                self.forget_node(row[0])

    def forget_node(self, node: int) -> None:
        """Know nothing more of a node."""
        for known in (self.nodes, self._load, self._traffic):
            known.pop(node, None)

    def add_call(self, call: Row) -> None:
        """A call that runs, or one that has ended."""
        if call[5] is None:
            self.running[call[0]] = call
        else:
            self.running.pop(call[0], None)
            self._news["ended"].append(call)

    def add_lines(self, lines: Iterable[Row]) -> None:
        """Lines of output."""
        self._news["lines"] += lines

    def add_notes(self, notes: Iterable[dict[str, Any]]) -> None:
        """Events that people want to know of."""
        self._news["notes"] += notes

    def add_numbers(self, rows: Iterable[Row]) -> None:
        """What has come of curves."""
        for row in rows:
            name, node, worker, start, points, last, *process = row
            curve = (name, node, worker, *process)
            before = self._numbers.get(curve)
            kept = [*before[4][:start], *points] if before is not None and start else points
            self._numbers[curve] = [name, node, worker, 0, kept, last, *process]
            self._news["numbers"].append(row)

    def set_now(self, **states: Any) -> None:
        """The workers, the clients or the jobs as they are now."""
        for what, value in states.items():
            setattr(self, what, value)
        self._news |= states

    def add_load(self, node: int, cpu: float, memory: Pair, gpus: list[Any], network: Pair) -> None:
        """A measurement: the memory used and there, the bytes received and sent so far."""
        now, (received, sent) = time.monotonic(), network
        then, received_then, sent_then = self._traffic.get(node, (now, received, sent))
        self._traffic[node] = (now, received, sent)
        seconds = max(now - then, 1e-3)
        rates = max(0, received - received_then) / seconds, max(0, sent - sent_then) / seconds
        self._load[node] = [node, cpu, *memory, *rates, gpus, received, sent]
        self._measured.add(node)

    @property
    def is_measured(self) -> bool:
        """Whether the load of every node that is ready is known."""
        return all(row[0] in self._load for row in self.nodes.values() if row[1] == "ready")

    def add_sample(self, numbers: Message) -> None:
        """The pool's numbers now; with them goes the load of the nodes measured since the last."""
        measured, self._measured = self._measured & self._load.keys(), set()
        load = [self._load[node] for node in sorted(measured)]
        head = {"type": "sample", "pool": self.key, "time": time.time(), "usage": load}
        self._keep_sample(head | numbers)

    def keep_samples(self, samples: deque[Message]) -> None:
        """Go on with these samples: the last ones, for the curves of a page that is opened."""
        self.samples = samples
        self._rows = sum(len(sample["usage"]) for sample in samples)

    def _keep_sample(self, sample: Message) -> None:
        self._new_samples.append(sample)
        self.samples.append(sample)
        self._rows += len(sample["usage"])
        while len(self.samples) > 1 and (
            len(self.samples) > SAMPLES_KEPT or self._rows > ROWS_KEPT
        ):
            self._rows -= len(self.samples.popleft()["usage"])

    def absorb(self, message: Message) -> None:
        """Take what another process tells of the pool."""
        if message["type"] == "sample":
            self._load |= {row[0]: row for row in message["usage"]}
            self._keep_sample(message)
            return
        for call in (*message.get("running", ()), *message.get("started", ()), *message["ended"]):
            self.add_call(call)
        self._news["skipped"] += message.get("skipped", 0)
        self.add_nodes(message["nodes"])
        self.add_lines(message["lines"])
        self.add_notes(message["notes"])
        self.add_numbers(message["numbers"])
        self.set_now(**{what: message[what] for what in _STATES if what in message})

    # What is told.

    def news(self) -> list[Message]:
        """What was added since this was last asked."""
        self.gather()
        news, self._news = self._news, _nothing()
        samples, self._new_samples = self._new_samples, []
        news["started"] = [each for key, each in self.running.items() if key not in self._told]
        if not any(value or what in _STATES for what, value in news.items()):
            return samples
        ended = news["ended"]
        self._ended.extend(ended)
        self._lines.extend(news["lines"])
        self._notes.extend(news["notes"])
        # A call that was told as running must be told as ended.
        known = [call for call in ended if call[0] in self._told]
        others = [call for call in ended if call[0] not in self._told]
        self._told = set(self.running)
        news["skipped"] += max(0, len(others) - CALLS_A_TIME)
        news["ended"] = known + others[-CALLS_A_TIME:]
        news["lines"] = news["lines"][-LINES_A_TIME:]
        news["notes"] = news["notes"][-NOTES_KEPT:]
        return [{"type": "changes", "pool": self.key} | news, *samples]

    def snapshot(self) -> Message:
        """All that is known, for a page that has just been opened; after `news`."""
        return {
            "type": "pool",
            "pool": self.key,
            "name": self.name,
            "provider": self.provider,
            "workers": self.workers,
            "nodes": list(self.nodes.values()),
            "running": list(self.running.values())[-CALLS_KEPT:],
            # Nodes may tell at different times.
            "ended": sorted(self._ended, key=lambda call: float(call[5])),
            "lines": sorted(self._lines, key=lambda line: float(line[0])),
            "notes": sorted(self._notes, key=lambda note: float(note["time"])),
            "numbers": list(self._numbers.values()),
            "clients": self.clients,
            "jobs": self.jobs,
        }

    def latest(self) -> Message | None:
        """The last sample, with the load of every node; None if there is none."""
        if not self.samples:
            return None
        load = [row for _, row in sorted(self._load.items())]
        return self.samples[-1] | ({"usage": load} if load else {})


def _nothing() -> dict[str, Any]:
    return {"ended": [], "skipped": 0, "lines": [], "notes": [], "nodes": [], "numbers": []}
