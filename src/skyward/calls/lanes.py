"""Lanes: the executors of a pool and the tasks that wait for them, under one lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from skyward.calls.lane import Lane
from skyward.calls.scheduler import Load, Scheduler
from skyward.calls.task import Task

RECALL_SECONDS = 0.05
"""After so long without a result, the client calls tasks back that were sent ahead."""


class Lanes:
    """Gives tasks to lanes with a free slot, and keeps the others until one is free."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Callers hold this around `assign` and `queue`, and around steps that belong together."""
        self._scheduler: Scheduler[Task] = Scheduler()
        self._by_load: dict[Load[Task], Lane] = {}
        self._refillable: dict[Lane, None] = {}
        """Lanes that may have room for waiting tasks; the first is filled first."""

    def __iter__(self) -> Iterator[Lane]:
        """The lanes of this moment."""
        return iter(list(self._by_load.values()))

    # Lanes.

    def add(self, lane: Lane, *, usable: bool) -> None:
        """Add a lane; unless it is `usable`, it gets no tasks yet."""
        with self.lock:
            self._by_load[lane.load] = lane
            lane.load.open = usable
            if usable:
                self._scheduler.add(lane.load)
            self._refillable[lane] = None

    def drain(self, lane: Lane, *, nested: bool = False) -> None:
        """Give a lane no new tasks; with `nested`, only those that a task which waits may need."""
        load = lane.load
        with self.lock:
            nested = nested and load in self._by_load
            load.paused, load.nested_only = load.paused and nested, nested
            if load.open:
                self._scheduler.remove(load)
            if nested:
                self._scheduler.relist(load)
                self._refillable[lane] = None

    def pause(self, lane: Lane) -> None:
        """Give a lane that is out of reach no new tasks for now; it keeps the tasks it has."""
        with self.lock:
            lane.disconnected()
            if lane.load.open:
                self._scheduler.remove(lane.load)
                lane.load.paused = True
            elif lane.load.nested_only:
                lane.load.paused = True

    def resume(self, lane: Lane) -> None:
        """Use a lane again that is back within reach."""
        with self.lock:
            lane.reconnected()
            if lane.load.paused and not lane.lost:
                lane.load.paused = False
                if not lane.load.nested_only:
                    lane.load.open = True
                    self._scheduler.add(lane.load)
                self._refillable[lane] = None

    def remove(self, lane: Lane) -> tuple[list[Task], list[Task]]:
        """Remove a lane; returns its tasks that may have started, and its other tasks.

        The tasks that only this executor can run count as started.
        """
        with self.lock:
            self.drain(lane)
            self._by_load.pop(lane.load, None)
            started, unstarted = lane.load.started(), lane.load.unstarted()
            started += [task for task in unstarted if task.pinned is not None]
            unstarted = [task for task in unstarted if task.pinned is None]
            lane.tasks.clear()
            return started + self._scheduler.take_pinned(lane.load), unstarted

    def with_task(self, task: Task) -> Lane | None:
        """The lane that has a task, if one does."""
        with self.lock:
            load = task.load if task.on_executor else None
            return self._by_load.get(load) if load is not None else None

    def has(self, load: Load[Task]) -> bool:
        """Whether an executor is there; one that is lost never comes back."""
        return load in self._by_load

    def relist(self) -> None:
        """Find every free slot again: a Ctrl-C may have interrupted the assigning of a task."""
        with self.lock:
            for load in self._by_load:
                self._scheduler.relist(load)
        self.refill_all()

    def refill_all(self) -> None:
        """Have every lane asked whether it has room."""
        with self.lock:
            self._refillable.update(dict.fromkeys(self._by_load.values()))

    @property
    def refillable(self) -> bool:
        """Whether a lane may have room for waiting tasks."""
        return bool(self._refillable)

    def take_refillable(self) -> Iterable[Lane]:
        """Lanes that may have room for waiting tasks, since this was last asked."""
        if not self._refillable:
            return ()
        with self.lock:
            refillable, self._refillable = self._refillable, {}
        return refillable

    def take_stuck(self) -> list[Lane]:
        """Lanes with tasks that were sent ahead and wait behind a slow one; each is named once."""
        now = time.monotonic()
        stuck = []
        for load, lane in list(self._by_load.items()):
            behind = (load.overfull or load.crowded) and not load.recalling
            if behind and now - load.last_result > RECALL_SECONDS:
                load.recalling, load.crowded = True, False
                stuck.append(lane)
        return stuck

    def held(self) -> tuple[list[Task], list[Task], bool]:
        """Waiting tasks whose workers are all held by streams that are not read, and the streams.

        The flag says whether no other task is on any worker.
        """
        if not self._scheduler.may_have_queued:
            return [], [], False
        with self.lock:
            loads = list(self._by_load)
            full = [load for load in loads if _held_up(load)]
            full.sort(key=lambda load: (load.node, load.worker, load.slot))
            queued = self._scheduler.queued() if full else []
            if not queued:
                return [], [], False
            free = [load for load in loads if load not in full]
            nodes = {load.node for load in free}
            workers = {(load.node, load.worker) for load in free}

            def waits(task: Task) -> bool:
                if task.pinned is not None:
                    return task.pinned in full
                if task.worker is not None:
                    return task.worker not in workers
                return task.on not in nodes if task.on is not None else not free

            waiting = [task for task in queued if waits(task)]
            streams = [task for load in full for task in load.started() if task.stream is not None]
            return waiting, streams, not any(load.tasks for load in free)

    # Tasks.

    def assign(self, task: Task) -> Lane | None:
        """Give a task to a lane with a free slot, if there is one."""
        load = self._scheduler.pick(task)
        if load is None:
            return None
        # In this order, so that a task on a lane knows its lane even after a Ctrl-C.
        task.load = load
        self._scheduler.begin(load, task)
        return self._by_load[load]

    def assign_next(self, lane: Lane) -> Task | None:
        """Give a lane the waiting task it may take next, if it has room."""
        with self.lock:
            task = self._scheduler.next_for(lane.load)
            if task is not None:
                task.waiting = False
                task.load = lane.load
                self._scheduler.begin(lane.load, task)
            return task

    def queue(self, task: Task) -> None:
        """Keep a task until a lane has room for it."""
        task.waiting = True
        self._scheduler.queue(task)

    def queue_nested(self, task: Task) -> None:
        """Queue a task that another one has started: before all others, unless it is aimed.

        So the tasks that wait for others are as few as the tasks are deep. Aimed tasks keep their
        order: those of two broadcasts must come in the same order everywhere.
        """
        task.waiting = True
        load = self._scheduler.room_for(task)
        self._scheduler.queue(task)
        if load is not None:
            self._refillable[self._by_load[load]] = None

    def lend(self, lane: Lane, task_id: int) -> None:
        """Use the place of a task that waits for others."""
        with self.lock:
            if task_id in lane.tasks:
                self._scheduler.lend(lane.load, task_id)
                self._refillable[lane] = None

    def go_on(self, lane: Lane, task_id: int) -> None:
        """Note that a task that waited for others goes on."""
        with self.lock:
            lane.load.take_back(task_id)

    def requeue(self, tasks: Iterable[Task]) -> None:
        """Queue tasks that lost their lane, before all others; the first given comes last."""
        with self.lock:
            for task in tasks:
                if not task.done:
                    task.load = None
                    task.waiting = True
                    self._scheduler.queue(task, first=True)

    def take_back(self, lane: Lane, task: Task) -> None:
        """Free the slot of a task that its executor does not run."""
        with self.lock:
            self._scheduler.end(lane.load, task.id)
            self._refillable[lane] = None

    def leave(self, lane: Lane, task_id: int, ran: float) -> Task | None:
        """Free the slot of a task that has run for so many seconds."""
        with self.lock:
            task = self._scheduler.end(lane.load, task_id)
            lane.load.note(ran)
            lane.load.last_result = time.monotonic()
            # Else a task that comes later finds the free slot by itself.
            if self._scheduler.may_have_queued:
                self._refillable[lane] = None
        return task

    def recalled(self, lane: Lane, task_ids: list[int]) -> None:
        """Requeue tasks that an executor has given back."""
        with self.lock:
            lane.load.recalling = False
            lane.load.stop_sending_ahead()
            ended = [self._scheduler.end(lane.load, task_id) for task_id in reversed(task_ids)]
            self.requeue(task for task in ended if task is not None)
            self.refill_all()

    def take_unrunnable(self, can_run: Callable[[Task], bool]) -> list[Task]:
        """Remove the waiting tasks that cannot run any more, and return them."""
        with self.lock:
            unrunnable = [task for task in self._scheduler.queued() if not can_run(task)]
            for task in unrunnable:
                task.waiting = False
        return unrunnable

    def take_all(self) -> list[Task]:
        """Empty the queue, and return every task, also those on lanes."""
        with self.lock:
            waiting = self._scheduler.forget_queue()
            return waiting + [task for load in self._by_load for task in load.tasks.values()]

    @property
    def backlog(self) -> int:
        """How many tasks wait for a free slot."""
        with self.lock:
            return self._scheduler.backlog


def _held_up(load: Load[Task]) -> bool:
    """Whether streams that are not read have every slot of an executor."""
    slotless = load.waiting | load.apart
    tasks = [task for task in load.tasks.values() if task.id not in slotless]
    return len(load.tasks) >= load.capacity and all(
        task.stream is not None and task.stream.held_up for task in tasks
    )
