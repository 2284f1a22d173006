"""Timeouts: a task that runs too long is looked at, so that its error says where, and cancelled."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from skyward.calls.lane import Lane, Lanes
from skyward.calls.loop import Loop
from skyward.calls.task import Task
from skyward.errors import TaskError, TaskTimeoutError
from skyward.staff import Staff

LOOK_SECONDS = 10.0
"""How long a timeout may be late, because agents are asked where the tasks are; on a machine that
is not too busy to answer, it is some milliseconds."""
TOGETHER_SECONDS = 0.5
"""Tasks of one broadcast that are due within this time are cancelled together, after the look: one
that is cancelled makes the others fail in the collective that they wait in."""
AGAIN_SECONDS = 0.1
"""How often a timeout is looked at that is due while a debugger holds the time."""
LOOKS_AT_ONCE = 64

E = TypeVar("E", bound=TaskError)


@dataclass(slots=True)
class TimeoutGroup:
    """Tasks that are looked at together, and how many looks have not ended."""

    tasks: Sequence[Task]
    due: list[Task]
    left: int


class Timeouts:
    """Cancels the tasks of a pool whose time is over."""

    def __init__(
        self, loop: Loop, lanes: Lanes, cancel: Callable[[Task, BaseException], None]
    ) -> None:
        self._loop, self._lanes, self._cancel = loop, lanes, cancel
        self._staff = Staff("skyward-looks", LOOKS_AT_ONCE)
        self._lock = threading.Lock()
        self._looking: dict[int, TimeoutGroup] = {}
        """The looks that have not ended, by the number of the first task."""
        self._holds = 0
        self._held = 0.0
        """For how long the time has been held so far."""
        self._held_since = 0.0

    def start(self, task: Task) -> None:
        """Let a task's time run, if it has a timeout; a second call changes nothing."""
        if task.timeout is not None and task.timer is None and not task.done:
            task.due = self.now() + task.timeout
            task.timer = self._loop.later(task.timeout, functools.partial(self._strike, task))

    def hold(self) -> None:
        """Let no task's time run for now: somebody is in a debugger."""
        with self._lock:
            if not self._holds:
                self._held_since = time.monotonic()
            self._holds += 1

    def release(self) -> None:
        """Let the time run again, once for every `hold`."""
        with self._lock:
            self._holds -= 1
            if not self._holds:
                self._held += time.monotonic() - self._held_since

    def now(self) -> float:
        """The time without the times in which it was held."""
        with self._lock:
            now = self._held_since if self._holds else time.monotonic()
            return now - self._held

    def _strike(self, task: Task) -> None:
        """Have a task looked at and cancelled; on the loop's thread, which must not wait."""
        if not _unfinished(task):
            return
        left = task.due - self.now()
        if self._holds or left > AGAIN_SECONDS:
            again = functools.partial(self._strike, task)
            task.timer = self._loop.later(max(left, AGAIN_SECONDS), again)
            return
        task.overdue = True
        tasks = task.together or [task]
        key = tasks[0].id
        places = [(each, self._reachable(each)) for each in tasks]
        asked = [(each, lane) for each, lane in places if lane is not None]
        with self._lock:
            group = self._looking.get(key)
            if group is not None:
                group.due.append(task)
                return
            self._looking[key] = TimeoutGroup(tasks, [task], len(asked))
        if not asked:
            self._end(key)
        for each, lane in asked:
            self._staff.run(functools.partial(self._look, key, each, lane))
        self._loop.later(LOOK_SECONDS, functools.partial(self._end, key))

    def look_at(self, tasks: Sequence[Task], seconds: float) -> None:
        """Note where tasks are, each in its `standing`; waits so many seconds for their agents."""
        places = [(task, self._reachable(task)) for task in tasks]
        looks = [
            self._staff.submit(self._note_standing, task, lane)
            for task, lane in places
            if lane is not None
        ]
        concurrent.futures.wait(looks, seconds)

    def _note_standing(self, task: Task, lane: Lane) -> None:
        task.standing = lane.look(task)

    def _reachable(self, task: Task) -> Lane | None:
        lane = self._lanes.with_task(task) if _unfinished(task) else None
        return lane if lane is not None and lane.channel.connected else None

    def _look(self, key: int, task: Task, lane: Lane) -> None:
        try:
            self._note_standing(task, lane)
        finally:
            with self._lock:
                group = self._looking.get(key)
                last = False
                if group is not None:
                    group.left -= 1
                    last = not group.left
            if last:
                self._end(key)

    def _end(self, key: int) -> None:
        """Cancel what is due, after the look or without waiting for it any longer."""
        with self._lock:
            group = self._looking.pop(key, None)
        if group is None:
            return
        soon = self.now() + TOGETHER_SECONDS
        for task in group.tasks:
            due = task in group.due or (task.timer is not None and task.due < soon)
            if due and _unfinished(task):
                self._cancel(task, timeout_error(task))


def timeout_error(task: Task) -> TaskTimeoutError:
    """The error of a task whose time is over; it says where the task was, if that is known."""
    where = f" on {task.load.where}" if task.load is not None else ""
    text = f"{task.name} ran longer than its timeout of {task.timeout:g} s{where}; "
    return standing_at(task, TaskTimeoutError, f"{text}the remote work was cancelled")


def standing_at(task: Task, kind: type[E], text: str) -> E:
    """An error of that kind, which says where the task was, if that is known."""
    standing = task.standing
    if standing is None:
        return kind(text)
    error = kind(f"{text}; {standing.text}")
    error.place, error.collective = standing.place, standing.collective
    return error


def _unfinished(task: Task) -> bool:
    """Whether the task has no answer yet, or is a stream that has not ended."""
    return not task.done or (task.stream is not None and task.on_executor)
