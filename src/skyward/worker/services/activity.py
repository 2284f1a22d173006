"""Activity: what a node does, for those who look at a pool: tasks, output, jobs and clients.

The first question is "watch". The first reply has what is known, and each further one what is new;
whoever does not ask costs the node nothing.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from skyward.wire.asking import next_part
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker import output_log
from skyward.worker.kept_jobs import JobView
from skyward.worker.services import ServedNode
from skyward.worker.services.jobs import wait_or_leave
from skyward.worker.services.usage import measured
from skyward.worker.task_history import HistoricTask, TaskWatch
from skyward.worker.task_output import FOLDER, TaskLine, TaskOutputReader
from skyward.worker.usage import Gauge

LOOK_SECONDS = 0.2
IDLE_LOOK_SECONDS = 0.4
"""How long until the next look if there was nothing new: waking up is most of what a look costs."""
USAGE_SECONDS = 2.0
JOBS_SECONDS = 1.0
TASKS_A_TIME = 60
"""How many tasks of a slot are told at a time; the others are only counted."""
TASKS_FIRST = 300
"""How many tasks are told in the first reply."""
LINES_A_TIME = 200
LINE_MOST = 2000
"""How many characters of a line are told."""
_PIECE = 64 << 10


def serve(node: ServedNode, channel: Channel) -> None:
    """Tell what is new until the other end leaves."""
    question, _ = next_part(channel)
    if question.what != "watch":
        channel.send(Reply(problem=f"this service does not answer {question.what!r}; ask 'watch'"))
        return
    look = _Look(node)
    usage = _Usage()
    try:
        while True:
            news = look.news()
            told = news | usage.news()
            if told:
                channel.send(Reply({"time": time.time()} | told, more=True))
            wait_or_leave(channel, LOOK_SECONDS if news else IDLE_LOOK_SECONDS)
    finally:
        usage.close()


class _Look:
    """What one who looks has been told of the node."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node
        self._tasks = TaskWatch(node.tenants.past, TASKS_A_TIME)
        self._lines = TaskOutputReader(Path(node.config.folder, FOLDER), LINES_A_TIME)
        self._job_lines = JobLines()
        self._jobs: list[JobView] = []
        self._jobs_at = 0.0
        self._before: dict[str, Any] = {}

    def news(self) -> dict[str, Any]:
        """What is new since the last look."""
        told: dict[str, Any] = {}
        executors = self._node.tenants.executors
        first = not self._before
        tasks = self._tasks.news(executors)
        if first:
            # Of each kind the latest ones: those that run are among them.
            tasks = sorted(tasks, key=lambda task: (task.ended is None, task.began))[-TASKS_FIRST:]
        if tasks:
            told["tasks"] = [_task_row(each) for each in tasks]
        lines = [*self._task_lines(), *self._lines_of_jobs(told)]
        if lines:
            told["lines"] = lines[-LINES_A_TIME:]
        if tasks or first:
            self._tell(told, "totals", self._totals(executors))
        self._tell(told, "clients", self._clients())
        self._tell(told, "workers", self._node.config.workers)
        return told

    def _tell(self, told: dict[str, Any], what: str, value: object) -> None:
        """Tell a value if it has changed."""
        if self._before.get(what) != value:
            told[what] = self._before[what] = value

    def _totals(self, executors: list[tuple[Any, Any]]) -> dict[str, Any]:
        totals = self._node.tenants.past.totals([each for each, _ in executors])
        return {
            "begun": totals.begun,
            "succeeded": totals.succeeded,
            "failed": totals.failed,
            "cancelled": totals.cancelled,
            "call_seconds": totals.seconds,
            "buckets": totals.buckets,
        }

    def _clients(self) -> dict[str, dict[str, Any]]:
        """Who has used the node; those that are attached have `since`."""
        tenants = self._node.tenants
        found: dict[str, dict[str, Any]] = {
            name: dict(who) for name, who in tenants.identities().items()
        }
        for tenant in tenants.clients:
            found.setdefault(tenant.name, {})["since"] = tenant.since
        return found

    def _task_lines(self) -> list[list[Any]]:
        lines = self._lines.next_lines()
        if not lines:
            return []
        whose = {each.process.pid: visits for each, visits in self._node.tenants.executors}
        shift = time.monotonic() - time.time()
        rows = []
        for line in lines:
            visits = whose.get(line.executor)
            client = visits.at(line.when + shift) if visits is not None else ""
            rows += [_line_row(line, text, client) for text in line.text.splitlines()]
        return rows

    def _lines_of_jobs(self, told: dict[str, Any]) -> list[list[Any]]:
        now = time.monotonic()
        if now - self._jobs_at >= JOBS_SECONDS:
            self._jobs, self._jobs_at = self._node.jobs.all(), now
            # How long one has run changes all the time, and is known to who knows when it began.
            states = [(each.id, each.state) for each in self._jobs]
            if self._before.get("jobs") != states:
                self._before["jobs"] = states
                told["jobs"] = [msgspec.to_builtins(each) for each in self._jobs]
        return self._job_lines.next_lines(self._jobs)


class JobLines:
    """What jobs write, from the first look at each on."""

    def __init__(self) -> None:
        self._since = time.time()
        self._positions: dict[str, int] = {}
        self._over: set[str] = set()
        """The jobs that have ended, and whose output has been told."""

    def next_lines(self, jobs: list[JobView]) -> list[list[Any]]:
        """The lines since the last look: time, no worker, stream, text, no function, who, job."""
        rows: list[list[Any]] = []
        self._over &= {job.id for job in jobs}
        for job in jobs:
            if job.id in self._over:
                continue
            lines = self._new(job)
            rows += lines
            if not lines and job.state != "running":
                self._over.add(job.id)
                self._positions.pop(job.id, None)
        return rows

    def _new(self, job: JobView) -> list[list[Any]]:
        folder = Path(job.folder, "output")
        at = self._positions.get(job.id)
        if at is None and job.state != "running" and job.began < self._since:
            # It had ended before somebody looked: nobody knows when it wrote which line.
            return []
        if at is None or output_log.bounds(folder)[1] - at > _PIECE:
            at = output_log.position_of_last(folder, LINES_A_TIME)
        start, data = output_log.read(folder, at, _PIECE)
        whole, _, rest = data.rpartition(b"\n")
        if job.state != "running" or len(rest) >= _PIECE // 2:
            whole, rest = data, b""
        self._positions[job.id] = start + len(data) - len(rest)
        now = time.time()
        return [
            [now, None, "stdout", line.decode(errors="replace")[:LINE_MOST], "", job.by, job.id]
            for line in whole.splitlines()
        ]


class _Usage:
    """How busy the node is, measured on a thread: a GPU's driver may take seconds to wake up."""

    def __init__(self) -> None:
        self._latest: dict[str, object] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._measure, name="skyward-usage", daemon=True).start()

    def _measure(self) -> None:
        gauge = Gauge()
        while True:
            self._latest = measured(gauge)
            if self._ended.wait(USAGE_SECONDS):
                return

    def news(self) -> dict[str, Any]:
        """A measurement that has not been told, if there is one."""
        latest, self._latest = self._latest, {}
        return {"usage": latest} if latest else {}

    def close(self) -> None:
        """End the thread, once it has measured."""
        self._ended.set()


def _task_row(task: HistoricTask) -> list[Any]:
    return [
        task.id,
        task.name,
        task.worker,
        task.began,
        task.ended,
        task.outcome,
        task.client,
        task.error,
    ]


def _line_row(line: TaskLine, text: str, client: str) -> list[Any]:
    return [line.when, line.worker, line.stream, text[:LINE_MOST], line.name, client, ""]
