"""Activity: the node's log, read for those who look at a pool, with its jobs and its clients.

The first reply has what is known, and each further one what is new; whoever does not ask costs the
node nothing. While nothing happens, the node is only measured.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from skyward.worker import output_log
from skyward.worker.jobs import LIVE, OWN, Job
from skyward.worker.node_log import HistoricTask, LogReader, NodeLog, Visits
from skyward.worker.services import Caller, Parts, ServedNode, answers
from skyward.worker.supervision import ExecutorProcess
from skyward.worker.task_output import FOLDER, TaskLine, TaskOutputReader

LOOK_SECONDS = 0.25
"""How long from one look to the next, at least."""
SETTLE_SECONDS = 0.05
"""How long from a change to the look at it, at least: a short call is told once."""
UNTOLD_LOOK_SECONDS = 0.4
"""How long if there was nothing new, where nobody is woken by changes."""
USAGE_SECONDS = 2.0
TOTALS_SECONDS = 1.0
JOBS_SECONDS = 0.4
"""How long until jobs are read again: there may be thousands of calls by name."""
JOBS_MOST = 100
"""How many jobs are told: the latest, and those that have not ended."""
TASKS_A_TIME = 60
"""How many tasks of a slot are told at a time; the others are only counted."""
TASKS_FIRST = 300
"""How many tasks are told in the first reply."""
LINES_A_TIME = 200
LINE_MOST = 2000
"""How many characters of a line are told."""
_PIECE = 64 << 10


@answers("activity")
def watch(caller: Caller, seconds: float = USAGE_SECONDS) -> Parts:
    """Tell what is new until the other end leaves, and how busy the node is every few seconds."""
    log = caller.node.tenants.log
    look, usage = _Look(caller.node), _Usage(log, seconds)
    with contextlib.ExitStack() as held:
        listener = log.changes.listen()
        if listener is not None:
            held.enter_context(listener)
        changed = True
        while True:
            if listener is not None:
                listener.clear()
            began = time.monotonic()
            news = look.news() if changed or look.is_due else {}
            told = news | usage.news()
            if told:
                yield {"time": time.time()} | told, ()
            if listener is None:
                caller.wait(LOOK_SECONDS if news else UNTOLD_LOOK_SECONDS)
                continue
            left = min(usage.due, look.due) - time.monotonic()
            changed = caller.wait(max(0.0, left), listener)
            if changed:
                caller.wait(max(SETTLE_SECONDS, began + LOOK_SECONDS - time.monotonic()))


class _Look:
    """What one who looks has been told of the node."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node
        self._tasks = LogReader(node.tenants.log, TASKS_A_TIME)
        self._lines = TaskOutputReader(Path(node.config.folder, FOLDER), LINES_A_TIME)
        self._looked = 0.0
        self._executors: list[ExecutorProcess] = []
        """Those that tell of changes: they were asked to at the last look."""
        self._written: list[tuple[int, int]] | None = None
        """How often each executor had written at the last look."""
        self._job_lines = JobLines()
        self._jobs: list[Job] = []
        self._jobs_at = 0.0
        self._jobs_version = -1
        self._totals_at, self._totals_due = 0.0, 0.0
        self._before: dict[str, Any] = {}

    @property
    def due(self) -> float:
        """When to look again though nobody tells of a change.

        Jobs tell nobody what they write; and not everything is read at every change.
        """
        if self._node.jobs.scripts:
            return self._looked + LOOK_SECONDS
        jobs = self._jobs_at + JOBS_SECONDS if self._jobs_changed else float("inf")
        return min(jobs, self._totals_due)

    @property
    def is_due(self) -> bool:
        """Whether to look though nobody has told of a change."""
        there = [each for each, _ in self._node.tenants.executors]
        return time.monotonic() >= self.due or there != self._executors

    @property
    def _jobs_changed(self) -> bool:
        return self._node.jobs.version != self._jobs_version

    def news(self) -> dict[str, Any]:
        """What is new since the last look."""
        told: dict[str, Any] = {}
        executors = self._node.tenants.executors
        self._looked, self._executors = time.monotonic(), [each for each, _ in executors]
        for executor, _ in executors:
            # Before the look, so that nothing is missed after it.
            _await_change(executor)
        tasks = self._tasks.news(executors)
        if not self._before:
            # Of each kind the latest ones: those that run are among them.
            tasks = sorted(tasks, key=lambda task: (task.ended is None, task.began))[-TASKS_FIRST:]
        if tasks:
            told["tasks"] = [_task_row(each) for each in tasks]
        self._tell_jobs(told)
        lines = [*self._task_lines(executors), *self._job_lines.next_lines(self._jobs)]
        if lines:
            told["lines"] = lines[-LINES_A_TIME:]
        if tasks:
            self._totals_due = min(self._totals_due, self._totals_at + TOTALS_SECONDS)
        now = time.monotonic()
        if now >= self._totals_due:
            self._totals_at, self._totals_due = now, float("inf")
            self._tell(told, "totals", self._totals(executors))
        self._tell(told, "clients", self._clients())
        self._tell(told, "workers", self._node.config.workers)
        if members := self._node.tenants.members:
            self._tell(told, "members", members)
        return told

    def _tell(self, told: dict[str, Any], what: str, value: object) -> None:
        """Tell a value if it has changed."""
        if self._before.get(what) != value:
            told[what] = self._before[what] = value

    def _totals(self, executors: list[tuple[Any, Any]]) -> dict[str, Any]:
        totals = self._node.tenants.log.totals([each for each, _ in executors])
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

    def _task_lines(self, executors: list[tuple[ExecutorProcess, Visits]]) -> list[list[Any]]:
        # The memory of the executors tells what the files would, and costs no system calls.
        written = [(each.number, _written(each)) for each, _ in executors]
        if written == self._written:
            return []
        lines, self._written = self._lines.next_lines(), written
        if not lines:
            return []
        whose = {each.process.pid: visits for each, visits in executors}
        shift = time.monotonic() - time.time()
        rows = []
        for line in lines:
            visits = whose.get(line.executor)
            client = visits.at(line.when + shift) if visits is not None else ""
            rows += [_line_row(line, text, client) for text in line.text.splitlines()]
        return rows

    def _tell_jobs(self, told: dict[str, Any]) -> None:
        """Tell the jobs and the calls by name, if one is new or another's state is."""
        now = time.monotonic()
        if not self._jobs_changed or now - self._jobs_at < JOBS_SECONDS:
            return
        node = self._node
        self._jobs_version, self._jobs_at = node.jobs.version, now
        found = sorted(node.jobs.all(OWN), key=lambda job: (job.state in LIVE, job.began))
        # The lines of calls are told as those of tasks.
        self._jobs = [job for job in found if job.kind == "script"]
        # How long one has run changes all the time, and is known to who knows when it began.
        told_of = [(job.id, job.state, job.began) for job in found[-JOBS_MOST:]]
        if self._before.get("jobs") != told_of:
            self._before["jobs"] = told_of
            told["jobs"] = [msgspec.to_builtins(job) for job in found[-JOBS_MOST:]]


class JobLines:
    """What jobs write, from the first look at each on."""

    def __init__(self) -> None:
        self._since = time.time()
        self._positions: dict[str, int] = {}
        self._over: set[str] = set()
        """The jobs that have ended, and whose output has been told."""

    def next_lines(self, jobs: list[Job]) -> list[list[Any]]:
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

    def _new(self, job: Job) -> list[list[Any]]:
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
    """How busy the node is, every few seconds, in turn with the looks.

    A GPU's driver may take seconds to wake up: then, a thread measures. So it does the first time.
    """

    def __init__(self, log: NodeLog, seconds: float) -> None:
        self._log, self._seconds = log, seconds
        self._latest: dict[str, object] = {}
        self._measuring: threading.Thread | None = None
        self.due = 0.0
        """When the next measurement begins."""

    def _measure(self) -> None:
        self._latest = msgspec.structs.asdict(self._log.usage())

    def _measure_and_tell(self) -> None:
        self._measure()
        self._log.changes.tell()

    def news(self) -> dict[str, Any]:
        """A measurement that has not been told, if there is one."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + self._seconds
            if self._log.gauge.has_gpus is False:
                self._measure()
            elif self._measuring is None or not self._measuring.is_alive():
                self._measuring = threading.Thread(
                    target=self._measure_and_tell, name="skyward-usage", daemon=True
                )
                self._measuring.start()
        latest, self._latest = self._latest, {}
        return {"usage": latest} if latest else {}


def _await_change(executor: ExecutorProcess) -> None:
    """Have an executor tell of the next change."""
    if (board := executor.stacks.tasks) is not None:
        # One that is closed changes no more.
        with contextlib.suppress(ValueError):
            board.await_change()


def _written(executor: ExecutorProcess) -> int:
    board = executor.stacks.tasks
    try:
        return -1 if board is None else board.rings[0].written
    except ValueError:
        # Its board is closed: all that it wrote is in its log.
        return -1


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
