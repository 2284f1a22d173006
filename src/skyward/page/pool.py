"""A pool as the page shows it: one model for the pools of every process and for kept ones.

The agents of its nodes tell what has happened there, from their logs; its clients tell what only
they know. The hub asks for what is new. A pool may make a hundred thousand calls a second, and a
page shows a few hundred: what comes in one moment is counted, and only a part of it is told call by
call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from skyward.worker.task_board import BUCKETS

CALLS_KEPT = 1000
LINES_KEPT = 500
NOTES_KEPT = 100
SAMPLES_KEPT = 300
ROWS_KEPT = 3000
"""How many rows of nodes all kept samples have together."""
CALLS_A_TIME = 300
"""How many calls that ended are told one by one at a time; the others are only counted."""
LINES_A_TIME = 200
SAME_SECONDS = 2.0
"""A task is the one that was told if it has the same name and began within so many seconds."""
KEPT = "kept"
"""The source that tells what the record of a kept pool says, and its agents; others are clients."""

Message = dict[str, Any]
"""What a page is told, and what it is made of: see "type"."""
Row = list[Any]
"""A call: key, name, node, worker, start, end, how it ended, client.
A line: time, node, worker, stream, text, function, client, job.
A node: number, state, address, accelerator, how many of it, phase.
A curve: name, node, worker, first point that is new, points, last point, and the process whose it
is in a kept pool; the client's own numbers have no node and no worker.
The load of a node: number, processors, memory, memory there is, bytes a second in and out, GPUs,
bytes in and out."""

_STATES = ("workers", "clients", "jobs")
"""What is told as it is now, also if there are none any more."""
_OF_NODES = ("begun", "succeeded", "failed", "cancelled", "call_seconds")
_OF_CLIENTS = ("retried", "nodes_lost", "sent", "received", "curves_left_out")
_AWAY = ("starting", "lost", "failed")
"""A node in such a state has no tasks."""


class ShownPool:
    """What a page knows of one pool; the lock of the hub that shows it guards it."""

    def __init__(self, key: str, name: str, provider: str, *, kept: bool = False) -> None:
        """`key` is the pool's id."""
        self.key, self.name, self.provider, self._kept = key, name, provider, kept
        self.sources: list[str] = []
        """Who tells of the pool: its clients' processes, and before them the record."""
        self.shown = False
        """Whether pages have been told of the pool."""
        self.show_by = 0.0
        """When the hub shows the pool though not all of its nodes have answered."""
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
        self._of_nodes: dict[int, dict[str, Any]] = {}
        """What each agent has told last of workers, clients, jobs and totals."""
        self._past = _no_totals()
        """The totals of agents that are gone."""
        self._of_clients: dict[str, Message] = {}
        """The last numbers of every client that is there."""
        self._counted: dict[str, Message] = {}
        """The same of all clients: what those who are gone have moved stays counted."""
        self._price: tuple[float | None, float] | None = None
        """What a kept pool costs in an hour, and since when."""
        self._load: dict[int, Row] = {}
        self._measured: set[int] = set()
        """The nodes that were measured since the last sample."""
        self._traffic: dict[int, tuple[float, int, int]] = {}
        """When each node was measured last, and how many bytes it had received and sent."""
        self.samples: deque[Message] = deque()
        """The last ones, for the curves of a page that is opened."""
        self._rows = 0
        """How many rows of nodes they have."""
        self._new_samples: list[Message] = []
        self.sample_due = 0.0
        """When the hub wants the next sample, by `time.monotonic`."""

    # What is heard.

    def join(self, source: str) -> None:
        """Have a source tell of the pool: the process of a client, or `KEPT`."""
        if source in self.sources:
            return
        if source == KEPT:
            self.sources.insert(0, source)
            # From now on, the nodes are those of the record.
            self._news["nodes"] += [[node, "stopped", "", None, 0, ""] for node in self.nodes]
            self.nodes.clear()
        else:
            self.sources.append(source)

    def leave(self, source: str) -> None:
        """Hear a source no more."""
        self.sources.remove(source)
        self._of_clients.pop(source, None)

    def take(self, source: str, message: Message) -> None:
        """Take what a source tells; what the nodes are and do, of the first source alone."""
        leads = source == self.sources[0]
        if message["type"] == "node":
            if leads:
                self._take_report(message["node"], message)
            return
        if leads:
            self._add_nodes(message.get("nodes", ()))
        self._news["lines"] += message.get("lines", ())
        self._news["notes"] += message.get("notes", ())
        process = [source] if self._kept else []
        self._add_numbers([*row, *process] for row in message.get("numbers", ()))
        if "price" in message:
            self._price = tuple(message["price"])
        if "sample" in message:
            self._of_clients[source] = sample = message["sample"]
            self._counted[source] = {name: sample.get(name, 0) for name in _OF_CLIENTS}

    def _add_nodes(self, rows: Iterable[Row]) -> None:
        """Nodes as they are now; one that has "stopped" is told once."""
        for row in rows:
            self._news["nodes"].append(row)
            self.nodes[row[0]] = row
            if row[1] == "stopped" or row[1] in _AWAY:
                self._forget(row[0])
            if row[1] == "stopped":
                del self.nodes[row[0]]

    def _forget(self, node: int) -> None:
        """Know nothing more of a node's agent: if it comes again, it is another one."""
        self._lose_calls(node, set())
        if (known := self._of_nodes.pop(node, None)) is not None:
            self._past = _sum(self._past, known.get("totals"))
            self._set_states()
        for of_nodes in (self._load, self._traffic):
            of_nodes.pop(node, None)

    def _take_report(self, node: int, told: Message) -> None:
        """Take a report of a node's agent."""
        if node not in self.nodes or self.nodes[node][1] in _AWAY:
            return
        tasks, lines = told.get("tasks", ()), told.get("lines", ())
        if told.get("fresh"):
            # The agent begins again with all that it knows.
            tasks, lines = self._untold(node, tasks, lines)
            self._lose_calls(node, {f"{node}:{task[0]}" for task in tasks})
        for task in tasks:
            self._take_task(node, task)
        self._news["lines"] += [_line_row(node, line) for line in lines]
        if "usage" in told:
            self._take_usage(node, told["usage"])
        known = self._of_nodes.setdefault(node, {})
        before, now = known.get("totals"), told.get("totals")
        if before is not None and now is not None and now["begun"] < before["begun"]:
            self._past = _sum(self._past, before)
        states = {key: told[key] for key in (*_STATES, "totals") if key in told}
        known |= states
        if states.keys() - {"totals"}:
            self._set_states()

    def _untold(
        self, node: int, tasks: Iterable[Row], lines: Iterable[Row]
    ) -> tuple[list[Row], list[Row]]:
        """What the agent had not told before its connection was lost."""
        over = (*self._ended, *self._news["ended"])
        known = {call[0]: call[4] for call in over if call[2] == node}
        heard = (*self._lines, *self._news["lines"])
        last = max((line[0] for line in heard if line[1] == node), default=0.0)
        # A node that was started again counts its tasks anew.
        return (
            [
                task
                for task in tasks
                if abs(known.get(f"{node}:{task[0]}", 0.0) - task[3]) > SAME_SECONDS
            ],
            [line for line in lines if line[0] > last],
        )

    def _lose_calls(self, node: int, but: set[str]) -> None:
        for key, call in list(self.running.items()):
            if call[2] == node and key not in but:
                self._add_call([*call[:5], time.time(), "lost", call[7]])

    def _take_task(self, node: int, task: Row) -> None:
        number, name, worker, began, ended, how, client, error = task
        about = [f"{node}:{number}", name, node, worker, began, ended]
        self._add_call([*about, None if ended is None else how, client])
        # The only client of a pool that is not kept tells it in more words.
        if self._kept and ended is not None and how in ("failed", "lost"):
            why = error or "its process has ended"
            event = {"event": "call_failed", "time": ended, "name": name, "node": node}
            self._news["notes"].append(event | {"error": why, "client": client})

    def _add_call(self, call: Row) -> None:
        """A call that runs, or one that has ended."""
        if call[5] is None:
            self.running[call[0]] = call
        else:
            self.running.pop(call[0], None)
            self._news["ended"].append(call)

    def _take_usage(self, node: int, usage: Message) -> None:
        """A measurement: among others, the bytes received and sent so far."""
        now, received, sent = time.monotonic(), usage["network_received"], usage["network_sent"]
        then, received_then, sent_then = self._traffic.get(node, (now, received, sent))
        self._traffic[node] = (now, received, sent)
        seconds = max(now - then, 1e-3)
        rates = max(0, received - received_then) / seconds, max(0, sent - sent_then) / seconds
        memory = usage["memory_used"], usage["memory_total"]
        row = [node, usage["cpu_percent"], *memory, *rates, usage["gpus"], received, sent]
        self._load[node] = row
        self._measured.add(node)

    def _add_numbers(self, rows: Iterable[Row]) -> None:
        """What has come of curves."""
        for row in rows:
            name, node, worker, start, points, last, *process = row
            curve = (name, node, worker, *process)
            before = self._numbers.get(curve)
            kept = [*before[4][:start], *points] if before is not None and start else points
            self._numbers[curve] = [name, node, worker, 0, kept, last, *process]
            self._news["numbers"].append(row)

    def _set_states(self) -> None:
        """The workers, the clients and the jobs as they are now."""
        told = sorted(self._of_nodes.items())
        workers = [[node, each] for node, known in told for each in range(known.get("workers", 0))]
        jobs = [job for _, known in told for job in known.get("jobs", ())]
        clients: dict[str, dict[str, Any]] = {}
        for _, known in told:
            for name, who in known.get("clients", {}).items():
                if not name:
                    continue  # the only client of a pool that is not kept
                before = clients.get(name, {})
                clients[name] = {**before, **who}
                if "since" in before and "since" in who:
                    # A node that came later knows a later one.
                    clients[name]["since"] = min(before["since"], who["since"])
        jobs.sort(key=lambda job: float(job["began"]))
        self.workers, self.clients, self.jobs = workers, clients, jobs
        self._news |= {"workers": workers, "clients": clients, "jobs": jobs}

    # Samples: the pool's numbers at some moment.

    @property
    def all_answered(self) -> bool:
        """Whether every node has told something, or cannot be reached."""
        known = self._of_nodes
        return bool(self.nodes or self._price) and not any(
            row[1] == "connecting" or (row[1] == "ready" and row[0] not in known)
            for row in self.nodes.values()
        )

    @property
    def is_measured(self) -> bool:
        """Whether the load of every node that is ready is known."""
        return all(row[0] in self._load for row in self.nodes.values() if row[1] == "ready")

    def sample(self) -> None:
        """Add a sample; with it goes the load of the nodes that were measured since the last."""
        measured, self._measured = self._measured & self._load.keys(), set()
        load = [self._load[node] for node in sorted(measured)]
        head = {"type": "sample", "pool": self.key, "time": time.time(), "usage": load}
        self._new_samples.append(head | self._now())
        self.keep_samples(self._new_samples[-1:])

    def keep_samples(self, samples: Iterable[Message]) -> None:
        """Keep samples, within bounds, for a page that is opened."""
        for sample in samples:
            self.samples.append(sample)
            self._rows += len(sample["usage"])
        while len(self.samples) > 1 and (
            len(self.samples) > SAMPLES_KEPT or self._rows > ROWS_KEPT
        ):
            self._rows -= len(self.samples.popleft()["usage"])

    def _now(self) -> Message:
        totals = self._past
        for known in self._of_nodes.values():
            totals = _sum(totals, known.get("totals"))
        numbers = totals | {"cost": None, "hourly_cost": None, "devices": [], "waiting": 0}
        for source, each in self._of_clients.items():
            whose = {"process": source} if self._kept else {}
            numbers["waiting"] += each["waiting"]
            numbers["devices"] += [{**row, **whose} for row in each["devices"]]
        for name in _OF_CLIENTS:
            numbers[name] = sum(counted[name] for counted in self._counted.values())
        numbers["submitted"] = numbers.pop("begun") + numbers["waiting"]
        for each in self._of_clients.values():
            # A client knows what its pool costs, and all calls of a pool that it has alone.
            numbers |= each["own"]
        if self._price is not None:
            hourly, since = self._price
            cost = None if hourly is None else hourly * (time.time() - since) / 3600
            numbers |= {"cost": cost, "hourly_cost": hourly}
        return numbers

    # What is told.

    def news(self) -> list[Message]:
        """What has come since this was last asked."""
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
        news["skipped"] = max(0, len(others) - CALLS_A_TIME)
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

    def everything(self) -> list[Message]:
        """The snapshot and the samples, the last one with the load of every node."""
        latest = self.latest()
        return [self.snapshot(), *list(self.samples)[:-1], *([] if latest is None else [latest])]


def _nothing() -> dict[str, Any]:
    return {"ended": [], "skipped": 0, "lines": [], "notes": [], "nodes": [], "numbers": []}


def _no_totals() -> Message:
    return {**dict.fromkeys(_OF_NODES, 0), "buckets": [0] * (len(BUCKETS) + 1)}


def _sum(totals: Message, more: Message | None) -> Message:
    if more is None:
        return totals
    buckets = [a + b for a, b in zip(totals["buckets"], more["buckets"], strict=True)]
    return {**{name: totals[name] + more[name] for name in _OF_NODES}, "buckets": buckets}


def _line_row(node: int, line: Row) -> Row:
    """A line as the page has it: one of a call by name is the call's, as one of a job is the job's.

    Workers know such a call by its function and its name: "train (run-7)".
    """
    when, worker, stream, text, function, client, job = line
    called, separator, named = function.rpartition(" (")
    if not job and separator and named.endswith(")"):
        return [when, node, worker, stream, text, called, client, named[:-1]]
    return [when, node, worker, stream, text, function, client, job]
