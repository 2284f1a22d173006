"""A node's log: what has happened on it, whichever client has made the calls; its agent keeps it.

It is written where things happen, and has a bound everywhere: the boards of the executors have the
last tasks, files the last lines of output, and the log itself has the tasks of executors that have
ended, how many there were in all, who the clients were, and how busy the node is. Whoever reads it
remembers how far; nobody writes anything for readers, and who does not read costs nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import msgspec

from skyward.wire.messages import Usage
from skyward.worker.changes import Changes
from skyward.worker.supervision import ExecutorProcess
from skyward.worker.task_board import LOST, OK, OUTCOMES, RUNNING, BoardTask, TaskBoard, TaskTotals
from skyward.worker.usage import Gauge

PAST_KEPT = 500
"""How many tasks of executors that have ended are kept."""
VISITS_KEPT = 32
"""How many clients of one set of executors are remembered."""
USAGE_SECONDS = 0.5
"""One who asks so soon after another gets the same measurement: the load needs a while."""
SEEN_MOST = 1000
"""Of how many executors a watch remembers what it has told, at least."""


@dataclass(frozen=True, slots=True)
class HistoricTask:
    """A task of this node; times are seconds since 1970, `ended` is None while it runs."""

    executor: int
    """The process that ran it."""
    slot: int
    number: int
    """Counts the tasks of that slot of the process."""
    name: str
    worker: int
    began: float
    ended: float | None
    outcome: str
    client: str
    error: str

    @property
    def id(self) -> str:
        """A name that no other task of this node has."""
        return f"{self.executor}.{self.slot}.{self.number}"


class Visits:
    """Which clients have used one set of executors, and since when."""

    def __init__(self) -> None:
        self._visits: deque[tuple[float, str, dict[str, str]]] = deque(maxlen=VISITS_KEPT)

    def begin(self, client: str, identity: dict[str, str]) -> None:
        """Note that a client begins to use the executors; `identity` says who it is, if known."""
        if self._visits and self._visits[-1][1] == client:
            since, _, known = self._visits.pop()
            self._visits.append((since, client, identity or known))
        else:
            self._visits.append((time.monotonic(), client, identity))

    def at(self, when: float) -> str:
        """Whose a task is that began at a time of `time.monotonic`."""
        visits = list(self._visits)
        before = [client for since, client, _ in visits if since <= when]
        return before[-1] if before else visits[0][1] if visits else ""

    def identities(self) -> dict[str, dict[str, str]]:
        """Who the clients are, as far as this node was told."""
        return {client: identity for _, client, identity in list(self._visits) if identity}


class NodeLog:
    """What the agent keeps of its node; any thread may use it."""

    def __init__(self) -> None:
        self.changes = Changes()
        """Wakes those who read the log."""
        self.gauge = Gauge()
        self._usage = Usage(0, 0.0, 0, 0, [])
        self._measured = 0.0
        self._measuring = threading.Lock()
        self._lock = threading.Lock()
        self._tasks: deque[HistoricTask] = deque(maxlen=PAST_KEPT)
        self._added = 0
        self._totals = TaskTotals()
        self._identities: dict[str, dict[str, str]] = {}

    def add(self, executor: ExecutorProcess, visits: Visits) -> None:
        """Keep what an executor that has ended had on its board; the board is still open."""
        try:
            if (board := executor.stacks.tasks) is not None:
                self._add(executor, board, visits)
        finally:
            self.changes.tell()

    def _add(self, executor: ExecutorProcess, board: TaskBoard, visits: Visits) -> None:
        now = time.monotonic()
        tasks = [historic(executor, each, visits, ended=now) for each in board.kept()]
        totals = board.totals()
        totals.lost += totals.running
        totals.running = 0
        with self._lock:
            executor.is_past = True
            self._tasks.extend(tasks)
            self._added += len(tasks)
            self._totals.add(totals)
            for client, identity in visits.identities().items():
                self._identities.pop(client, None)
                self._identities[client] = identity
            while len(self._identities) > VISITS_KEPT:
                del self._identities[next(iter(self._identities))]

    def usage(self, number: int = 0) -> Usage:
        """How busy the node is now, as the answer to a question of that number.

        The driver of a GPU may take seconds to wake up.
        """
        with self._measuring:
            now = time.monotonic()
            if not self._measured or now - self._measured >= USAGE_SECONDS:
                self._usage, self._measured = self.gauge.read(0), now
            return msgspec.structs.replace(self._usage, number=number)

    def since(self, count: int) -> tuple[int, list[HistoricTask]]:
        """How many tasks have been added, and those after the first `count` that are kept."""
        with self._lock:
            new = min(self._added - count, len(self._tasks))
            return self._added, list(self._tasks)[len(self._tasks) - new :]

    def totals(self, living: list[ExecutorProcess]) -> TaskTotals:
        """The numbers of all tasks: of executors that have ended, and of these."""
        total = TaskTotals()
        with self._lock:
            total.add(self._totals)
            for executor in living:
                if not executor.is_past and executor.stacks.tasks is not None:
                    total.add(executor.stacks.tasks.totals())
        return total

    def identities(self) -> dict[str, dict[str, str]]:
        """Who the clients of executors that have ended are."""
        with self._lock:
            return dict(self._identities)

    def close(self) -> None:
        """Wake nobody any more."""
        self.changes.close()


def historic(
    executor: ExecutorProcess, task: BoardTask, visits: Visits, *, ended: float | None = None
) -> HistoricTask:
    """A task of a board, with its client; one that runs has ended at `ended`, if that is given."""
    shift = time.time() - time.monotonic()
    outcome, until = task.outcome, task.ended
    if outcome == RUNNING and ended is not None:
        outcome, until = LOST, ended
    return HistoricTask(
        executor.number,
        task.slot,
        task.number,
        task.name,
        executor.worker,
        task.began + shift,
        None if outcome == RUNNING else until + shift,
        OUTCOMES[outcome],
        visits.at(task.began),
        task.error,
    )


class LogReader:
    """How far one who reads the log has read of tasks, and what is new."""

    def __init__(self, log: NodeLog, most: int) -> None:
        """At most so many tasks of a slot are told at a time."""
        self._log, self._most = log, most
        self._past_count = 0
        self._seen: dict[tuple[int, int], int] = {}
        """The number of the last task of each slot that was told or passed over."""
        self._running: dict[tuple[int, int], HistoricTask] = {}
        """The task of each slot that was told as running."""

    def news(self, executors: list[tuple[ExecutorProcess, Visits]]) -> list[HistoricTask]:
        """The tasks that have begun or ended since the last look, as they are now."""
        found: list[HistoricTask] = []
        for executor, visits in executors:
            # One whose board is closed is among the past ones.
            with contextlib.suppress(ValueError):
                found += self._new_of_board(executor, visits)
        self._past_count, past = self._log.since(self._past_count)
        found += [task for task in past if self._is_new(task)]
        for task in found:
            self._note(task)
        living = {executor.number for executor, _ in executors}
        vanished = [each for slot, each in self._running.items() if slot[0] not in living]
        for task in vanished:
            found.append(replace(task, ended=time.time(), outcome=OUTCOMES[LOST]))
            self._note(found[-1])
        if len(self._seen) > SEEN_MOST:
            self._seen = {slot: each for slot, each in self._seen.items() if slot[0] in living}
        return found

    def _new_of_board(self, executor: ExecutorProcess, visits: Visits) -> list[HistoricTask]:
        board = executor.stacks.tasks
        found: list[HistoricTask] = []
        for number, ring in enumerate(board.rings if board is not None else ()):
            slot = (executor.number, number)
            last, told = ring.begun, self._running.get(slot)
            if told is not None and told.number < last:
                ended = ring.read(told.number)
                # So many tasks have run since then that this one is not kept.
                gone = replace(told, ended=time.time(), outcome=OUTCOMES[OK])
                found.append(historic(executor, ended, visits) if ended is not None else gone)
            seen = self._seen.get(slot, 0)
            first = max(seen + 1, last - self._most + 1, ring.oldest)
            first = last if last == seen and told is not None else first
            tasks = [ring.read(each) for each in range(first, last + 1)]
            found += [historic(executor, each, visits) for each in tasks if each is not None]
        return [task for task in found if self._is_new(task)]

    def _is_new(self, task: HistoricTask) -> bool:
        slot = (task.executor, task.slot)
        told = self._running.get(slot)
        ends = told is not None and told.number == task.number and task.ended is not None
        return ends or task.number > self._seen.get(slot, 0)

    def _note(self, task: HistoricTask) -> None:
        slot = (task.executor, task.slot)
        told = self._running.get(slot)
        self._seen[slot] = max(self._seen.get(slot, 0), task.number)
        if task.ended is None:
            self._running[slot] = task
        elif told is not None and told.number == task.number:
            del self._running[slot]
