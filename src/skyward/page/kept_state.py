"""The state of a kept pool as the page shows it, from what its agents tell.

Who is a client of the pool on this machine adds what only clients know: calls that wait, torch
devices, bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from skyward.nodes.keeping import KeptPool
from skyward.page.sampling import rates
from skyward.page.state import CALLS_A_TIME, CALLS_KEPT, LINES_A_TIME, LINES_KEPT, NOTES_KEPT
from skyward.worker.task_board import BUCKETS

_OF_AGENTS = ("begun", "succeeded", "failed", "cancelled", "call_seconds")
_OF_CLIENTS = ("retried", "nodes_lost", "sent", "received", "curves_left_out")
SAME_SECONDS = 2.0
"""A task is the one that was told if it has the same name and began within so many seconds."""
NOTES_OF_CLIENTS = frozenset(
    {"call_retried", "device_opened", "device_closed", "node_lost", "node_failed", "node_stopped"}
)
"""The events of a client that the page shows of a kept pool; the agents tell of the others."""

_STATES = ("workers", "clients", "jobs")
"""What is told as it is now, also if there are none any more."""

_NOTHING_NEW: dict[str, Any] = {
    "type": "changes",
    "started": [],
    "ended": [],
    "skipped": 0,
    "lines": [],
    "notes": [],
    "nodes": [],
    "numbers": [],
}


def changes_of_client(
    key: str, notes: list[dict[str, Any]], numbers: list[list[Any]]
) -> dict[str, Any] | None:
    """What to tell of the events and the numbers of a client of the kept pool with that key."""
    found = [note for note in notes if note.get("event") in NOTES_OF_CLIENTS]
    if not found and not numbers:
        return None
    return _NOTHING_NEW | {"pool": key, "notes": found, "numbers": numbers}


class KeptState:
    """What the page knows of one kept pool; one thread uses it."""

    def __init__(self, record: KeptPool, key: str) -> None:
        self.key = key
        self.record = record
        self._nodes = {node.index: self._row(node.index, "connecting") for node in record.nodes}
        self._workers: dict[int, int] = {}
        self._running: dict[str, list[Any]] = {}
        self._totals: dict[int, dict[str, Any]] = {}
        self._usage: dict[int, list[Any]] = {}
        self._measured: set[int] = set()
        """The nodes that were measured since the last sample."""
        self._before: dict[int, tuple[float, int, int]] = {}
        self._clients: dict[int, dict[str, dict[str, Any]]] = {}
        self._jobs: dict[int, list[dict[str, Any]]] = {}
        self._counted: dict[str, dict[str, Any]] = {}
        """The last sample of every client: what those who are gone have moved stays counted."""
        self._ended: deque[list[Any]] = deque(maxlen=CALLS_KEPT)
        self._lines: deque[list[Any]] = deque(maxlen=LINES_KEPT)
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES_KEPT)

    def renew(self, record: KeptPool) -> dict[str, Any]:
        """Take over the nodes of a record that has changed; returns what to tell of it."""
        before, self.record = self.record, record
        news: dict[str, Any] = {"ended": []}
        there = {node.index: node for node in record.nodes}
        others = [index for index in self._nodes if before.node(index) != there.get(index)]
        for index in others:
            for known in (self._nodes, self._workers, self._usage, self._clients, self._jobs):
                known.pop(index, None)
            self._before.pop(index, None)
            self._forget_calls(index, {}, news)
        rows = [[each, "stopped", "", None, 0, ""] for each in others if each not in there]
        for index in there:
            if index not in self._nodes:
                self._nodes[index] = self._row(index, "connecting")
                rows.append(self._nodes[index])
        ended = [call[:8] for call in news["ended"]]
        self._ended.extend(ended)
        people = {"workers": self.workers(), "clients": self.clients(), "jobs": self.jobs()}
        return self._changes(nodes=rows, ended=ended, **people)

    def _row(self, index: int, state: str) -> list[Any]:
        node = self.record.node(index)
        if node is None:
            return [index, state, "", None, 0, ""]
        return [index, state, node.address, node.accelerator, node.accelerators, ""]

    @property
    def all_answered(self) -> bool:
        """Whether every node has told something, or cannot be reached."""
        return not any(row[1] == "connecting" for row in self._nodes.values())

    @property
    def is_measured(self) -> bool:
        """Whether the load of every node that can be reached is known."""
        return all(row[0] in self._usage for row in self._nodes.values() if row[1] == "ready")

    def take(self, reports: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any] | None:
        """Take what agents have told; returns what to tell of it, None if nothing has changed."""
        news: dict[str, Any] = {"started": [], "ended": [], "lines": [], "notes": [], "nodes": []}
        for node, told in reports:
            if node in self._nodes:
                self._take_one(node, told, news)
        if not any(value or what in _STATES for what, value in news.items()):
            return None
        ended = news["ended"]
        known = [call for call in ended if call[8]]
        others = [call for call in ended if not call[8]]
        news["skipped"] = max(0, len(others) - CALLS_A_TIME)
        news["ended"] = [call[:8] for call in known + others[-CALLS_A_TIME:]]
        news["lines"] = news["lines"][-LINES_A_TIME:]
        news["notes"] = news["notes"][-NOTES_KEPT:]
        self._ended.extend(news["ended"])
        self._lines.extend(news["lines"])
        self._notes.extend(news["notes"])
        return self._changes(**news)

    def _take_one(self, node: int, told: dict[str, Any], news: dict[str, Any]) -> None:
        if "state" in told:
            self._nodes[node] = self._row(node, told["state"])
            news["nodes"].append(self._nodes[node])
        if told.get("fresh"):
            # The agent begins again with all that it knows.
            self._pass_over_told(node, told)
            self._forget_calls(node, told, news)
        for task in told.get("tasks", ()):
            self._take_task(node, task, news)
        news["lines"] += [_line_row(node, line) for line in told.get("lines", ())]
        if "usage" in told:
            self._usage[node] = self._usage_row(node, told["usage"])
            self._measured.add(node)
        if "totals" in told:
            self._totals[node] = told["totals"]
        if "workers" in told:
            self._workers[node] = told["workers"]
            news["workers"] = self.workers()
        if "clients" in told:
            self._clients[node] = told["clients"]
            news["clients"] = self.clients()
        if "jobs" in told:
            self._jobs[node] = told["jobs"]
            news["jobs"] = self.jobs()

    def _pass_over_told(self, node: int, told: dict[str, Any]) -> None:
        """Take out of a report what the agent had told before its connection was lost."""
        known = {call[0]: call[4] for call in self._ended if call[2] == node}
        # A node that was started again counts its tasks anew.
        told["tasks"] = [
            task
            for task in told.get("tasks", ())
            if abs(known.get(f"{node}:{task[0]}", 0.0) - task[3]) > SAME_SECONDS
        ]
        last = max((line[0] for line in self._lines if line[1] == node), default=0.0)
        told["lines"] = [line for line in told.get("lines", ()) if line[0] > last]

    def _forget_calls(self, node: int, told: dict[str, Any], news: dict[str, Any]) -> None:
        there = {f"{node}:{task[0]}" for task in told.get("tasks", ())}
        for number, call in list(self._running.items()):
            if call[2] == node and number not in there:
                del self._running[number]
                news["ended"].append([*call[:5], time.time(), "lost", call[7], True])

    def _take_task(self, node: int, task: list[Any], news: dict[str, Any]) -> None:
        number, name, worker, began, ended, how, client, error = task
        key = f"{node}:{number}"
        call = [key, name, node, worker, began, ended, None if ended is None else how, client]
        if ended is None:
            self._running[key] = call
            news["started"].append(call)
            return
        known = self._running.pop(key, None) is not None
        # One that was told a moment ago, in the same batch, is told as ended alone.
        news["started"] = [each for each in news["started"] if each[0] != key]
        news["ended"].append([*call, known])
        if how in ("failed", "lost"):
            why = error or "its process has ended"
            about = {"event": "call_failed", "time": ended, "name": name, "node": node}
            news["notes"].append(about | {"error": why, "client": client})

    def _usage_row(self, node: int, told: dict[str, Any]) -> list[Any]:
        received, sent = told["network_received"], told["network_sent"]
        return [
            node,
            told["cpu_percent"],
            told["memory_used"],
            told["memory_total"],
            *rates(self._before, node, received, sent),
            told["gpus"],
            received,
            sent,
        ]

    def workers(self) -> list[list[int]]:
        """The workers: node and number."""
        return [
            [node, each] for node, count in sorted(self._workers.items()) for each in range(count)
        ]

    def clients(self) -> dict[str, dict[str, Any]]:
        """The clients by their names: who they are, and since when those that are attached are."""
        found: dict[str, dict[str, Any]] = {}
        for told in self._clients.values():
            for name, who in told.items():
                before = found.get(name, {})
                found[name] = {**before, **who}
                if "since" in before and "since" in who:
                    # A node that came later knows a later one.
                    found[name]["since"] = min(before["since"], who["since"])
        return found

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs, in the order of their start."""
        found = [job for told in self._jobs.values() for job in told]
        return sorted(found, key=lambda job: float(job["began"]))

    def snapshot(self) -> dict[str, Any]:
        """All that is known, for a page that has just been opened."""
        return {
            "type": "pool",
            "pool": self.key,
            "name": self.record.name,
            "provider": self.record.provider,
            "workers": self.workers(),
            "nodes": list(self._nodes.values()),
            "running": list(self._running.values())[-CALLS_KEPT:],
            "ended": sorted(self._ended, key=lambda call: float(call[5])),
            "lines": sorted(self._lines, key=lambda line: float(line[0])),
            "notes": sorted(self._notes, key=lambda note: float(note["time"])),
            "clients": self.clients(),
            "jobs": self.jobs(),
            "numbers": [],
        }

    def _changes(self, **news: Any) -> dict[str, Any]:
        return _NOTHING_NEW | {"pool": self.key} | news

    def sample(self, clients: Iterable[dict[str, Any]], *, every: bool = False) -> dict[str, Any]:
        """The pool's numbers now, with the samples of its clients on this machine.

        It has the load of the nodes that were measured since the last one, or of every node.
        """
        measured = self._usage.keys() if every else self._measured & self._usage.keys()
        if not every:
            self._measured = set()
        totals: dict[str, Any] = dict.fromkeys(_OF_AGENTS, 0)
        buckets = [0] * (len(BUCKETS) + 1)
        for told in self._totals.values():
            for name in _OF_AGENTS:
                totals[name] += told[name]
            buckets = [a + b for a, b in zip(buckets, told["buckets"], strict=True)]
        hourly = self.record.hourly_cost
        cost = None if hourly is None else hourly * (time.time() - self.record.created) / 3600
        sample = {
            "type": "sample",
            "pool": self.key,
            "time": time.time(),
            "usage": [self._usage[node] for node in sorted(measured)],
            "devices": [],
            "submitted": totals.pop("begun"),
            "buckets": buckets,
            "cost": cost,
            "hourly_cost": hourly,
            "waiting": 0,
            **totals,
        }
        for each in clients:
            process = each["pool"].rpartition("-")[2]
            self._counted[each["pool"]] = {name: each.get(name, 0) for name in _OF_CLIENTS}
            sample["waiting"] += each["waiting"]
            sample["submitted"] += each["waiting"]
            sample["devices"] += [{**row, "process": process} for row in each["devices"]]
        for name in _OF_CLIENTS:
            sample[name] = sum(counted[name] for counted in self._counted.values())
        return sample


def _line_row(node: int, line: list[Any]) -> list[Any]:
    """A line as the page has it: one of a call by name is the call's, as one of a job is the job's.

    Workers know such a call by its function and its name: "train (run-7)".
    """
    when, worker, stream, text, function, client, job = line
    called, separator, named = function.rpartition(" (")
    if not job and separator and named.endswith(")"):
        return [when, node, worker, stream, text, called, client, named[:-1]]
    return [when, node, worker, stream, text, function, client, job]
