"""The scheduler: which task goes to which executor.

The scheduler is a plain data structure. The time per task does not depend on the number of nodes.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

FAST_SECONDS = 0.001
"""Tasks shorter than this are sent ahead, so that the worker never waits for the next one."""
AHEAD_MAX = 64
AHEAD_SECONDS = 0.004


class Work(Protocol):
    """The properties of a task that the scheduler needs."""

    id: int
    on: int | None
    """The node that the task must run on."""
    worker: tuple[int, int] | None
    """The (node, worker) that the task must run on."""
    pinned: Load[Any] | None
    """The executor process that the task must run in, and no other."""
    waiting: bool
    """Whether the task is queued; False after it was dropped from the queue."""
    order: int
    """The task's number in the queue; the scheduler sets it."""
    depth: int
    """How many tasks have started one another to start this one, and may wait for it."""
    apart: str
    """The object with a place of its own that the task belongs to; empty if there is none."""


W = TypeVar("W", bound=Work)


@dataclass(slots=True, eq=False)
class Load(Generic[W]):
    """What the scheduler knows of one executor process: its tasks, and how many it may have."""

    node: int
    worker: int
    slot: int
    """The executor's number among the processes of its worker."""
    capacity: int = 1
    """How many tasks the executor runs at once, including those that wait for other tasks."""
    tasks: dict[int, W] = field(default_factory=dict)
    """The executor's tasks in the order of sending.

    The first ones have started: as many as `capacity` says, with those of objects that have places
    of their own, which never wait for the others.
    """
    window: int = 0
    """How many tasks the executor may have, including tasks sent ahead; first its capacity."""
    open: bool = True
    """Whether the executor is given new tasks."""
    paused: bool = False
    """Whether the executor gets no new tasks only because it is out of reach."""
    nested_only: bool = False
    """Whether the executor, which is not open, takes nested tasks while a task of it waits."""
    listed: bool = False
    """Whether the scheduler lists the executor among those with a free slot."""
    lent_listed: bool = False
    """Whether it lists the executor among those with a free slot for nested tasks alone."""
    average: float = 1.0
    """How many seconds the executor's recent tasks ran on average."""
    last_result: float = 0.0
    """When the executor's last task ended."""
    recalling: bool = False
    """Whether the executor was asked to give tasks back, and has not answered yet."""
    slots: int = 0
    """How many tasks the executor runs at once that do not wait; first its capacity."""
    common: int = 0
    """How many tasks the executor runs at once before it only takes nested ones.

    If any task could have any place that is given up, all waiting tasks would begin as soon as
    each of them waits for another for a moment.
    """
    crowded: bool = False
    """Whether a task has gone on whose place another one has got, which may not have begun."""
    waiting: set[int] = field(default_factory=set)
    """The tasks that wait for others, and have given their places up."""
    apart: set[int] = field(default_factory=set)
    """The tasks of objects that have places of their own."""

    def __post_init__(self) -> None:
        self.window = self.window or self.capacity
        self.slots = self.slots or self.capacity
        self.common = self.capacity

    def note(self, ran: float) -> None:
        """Set how many tasks may be sent ahead, from the seconds that a task ran."""
        self.average = ran if ran > 10 * FAST_SECONDS else 0.7 * self.average + 0.3 * ran
        if self.average > FAST_SECONDS or self.capacity != self.slots:
            self.window = self.capacity
        else:
            ahead = int(AHEAD_SECONDS / max(self.average, 1e-5))
            self.window = self.capacity + min(AHEAD_MAX, ahead)

    def stop_sending_ahead(self) -> None:
        """Send no tasks ahead until short ones have run again."""
        self.average, self.window = 1.0, self.capacity

    def lend(self, task_id: int) -> None:
        """Note that a task waits for others: its place is free."""
        self.waiting.add(task_id)
        self.crowded = False
        self._set_capacity(self.capacity)
        self.stop_sending_ahead()

    def begin_apart(self, task_id: int) -> None:
        """Note that a task takes none of the slots."""
        self.apart.add(task_id)
        self._set_capacity(self.capacity + 1)

    def take_back(self, task_id: int) -> None:
        """Note that a task goes on; the one that has its place stays, until one of them ends."""
        self.waiting.discard(task_id)
        self._set_capacity(min(self.capacity, len(self.tasks)))
        self.crowded = self.capacity > self.slots + len(self.apart) + len(self.waiting)

    def end(self, task_id: int) -> W | None:
        """Remove a task of an executor that has lent places, or objects with their own."""
        had_place = any(task.id == task_id for task in self.started())
        self.waiting.discard(task_id)
        self.apart.discard(task_id)
        self._set_capacity(self.capacity - had_place)
        return self.tasks.pop(task_id, None)

    def _set_capacity(self, least: int) -> None:
        own = self.slots + len(self.apart)
        self.capacity = self.window = max(least, own + len(self.waiting))
        self.common = own + min(self.slots, len(self.waiting))

    @property
    def takes_nested(self) -> bool:
        """Whether the executor is given tasks that other tasks have started."""
        return self.open or (self.nested_only and bool(self.waiting) and not self.paused)

    @property
    def where(self) -> str:
        """The executor's node and worker, in words."""
        return f"node {self.node}" + (f" worker {self.worker}" if self.worker else "")

    @property
    def idle_slots(self) -> int:
        """Slots without a task."""
        return max(0, self.capacity - len(self.tasks))

    @property
    def overfull(self) -> bool:
        """Whether tasks that were sent ahead wait for those that run."""
        return len(self.tasks) > self.capacity

    def started(self) -> list[W]:
        """Tasks that may have begun to run."""
        if not self.apart:
            return list(itertools.islice(self.tasks.values(), self.capacity))
        unstarted = {task.id for task in self.unstarted()}
        return [task for task in self.tasks.values() if task.id not in unstarted]

    def unstarted(self) -> list[W]:
        """Tasks that were sent ahead and wait behind others."""
        tasks = (task for task in self.tasks.values() if task.id not in self.apart)
        return list(itertools.islice(tasks, self.capacity - len(self.apart), None))


class Scheduler(Generic[W]):
    """Picks executors with a free slot in turn; queues tasks, for all, by node or by worker."""

    def __init__(self) -> None:
        self._ready: deque[Load[W]] = deque()
        self._lent: deque[Load[W]] = deque()
        """Executors with room for nested tasks alone."""
        self._nested: list[tuple[int, int, W]] = []
        """A heap: the deepest tasks first, so that few tasks wait, and of those the oldest."""
        self._loads: dict[tuple[int, int], list[Load[W]]] = {}
        self._at_node: dict[int, list[Load[W]]] = {}
        self._queue: deque[W] = deque()
        self._aimed: dict[object, deque[W]] = {}
        self._backlog = 0
        self._dropped = 0
        """How many tasks in the queues wait no more, at most: they are removed together."""
        self._order = itertools.count()
        self._first = itertools.count(-1, -1)
        self._turn = itertools.count()

    def add(self, load: Load[W]) -> None:
        """Use an executor from now on."""
        self._loads.setdefault((load.node, load.worker), []).append(load)
        self._at_node.setdefault(load.node, []).append(load)
        self._list(load)

    def remove(self, load: Load[W]) -> None:
        """Give an executor no new tasks; the caller deals with the tasks that it has."""
        load.open = False
        self._loads[load.node, load.worker].remove(load)
        self._at_node[load.node].remove(load)

    def pick(self, task: W) -> Load[W] | None:
        """An executor that has a free slot for this task; None if there is none."""
        if task.apart:
            return self._pick_apart(task)
        # No task overtakes one that waits for the same worker or node: broadcasts must keep one
        # order everywhere.
        if task.pinned is not None:
            load = task.pinned
            return None if self._awaited(load) or not load.open or not load.idle_slots else load
        if task.worker is not None:
            if self._awaited(task.worker):
                return None
            return self._most_idle(self._loads.get(task.worker, ()))
        if task.on is not None:
            if self._awaited(task.on):
                return None
            return self._most_idle(self._at_node.get(task.on, ()))
        while self._ready:
            load = self._ready.popleft()
            load.listed = False
            if load.open and len(load.tasks) < load.common:
                return load
        while self._lent and task.depth:
            load = self._lent.popleft()
            load.lent_listed = False
            if load.takes_nested and len(load.tasks) < load.capacity:
                return load
        return None

    def _pick_apart(self, task: W) -> Load[W] | None:
        """An executor for a task that needs none of its slots: the one with the fewest tasks.

        Of several, each in its turn.
        """
        if task.pinned is not None:
            loads = [task.pinned]
        elif task.worker is not None:
            loads = self._loads.get(task.worker, [])
        elif task.on is not None:
            loads = self._at_node.get(task.on, [])
        else:
            loads = [load for each in self._loads.values() for load in each]
        # An object that is still there answers, also if its executor will be replaced.
        stays = task.pinned is not None and task.pinned.nested_only and not task.pinned.paused
        there = deque(load for load in loads if load.open or stays)
        there.rotate(-next(self._turn))
        return min(there, key=lambda load: len(load.tasks), default=None)

    def _awaited(self, aim: object) -> bool:
        queue = self._aimed.get(aim)
        while queue and not queue[0].waiting:
            queue.popleft()
        return bool(queue)

    @staticmethod
    def _most_idle(loads: list[Load[W]] | tuple[()]) -> Load[W] | None:
        best = max(loads, key=lambda load: load.idle_slots, default=None)
        return best if best is not None and best.open and best.idle_slots else None

    def begin(self, load: Load[W], task: W) -> None:
        """Note that the task is about to be sent to that executor."""
        load.tasks[task.id] = task
        if task.apart:
            load.begin_apart(task.id)
        if len(load.tasks) < load.capacity:
            self._list(load)

    def queue(self, task: W, *, first: bool = False) -> None:
        """Keep a task until an executor has room; `first` puts it before all others."""
        task.order = next(self._first) if first else next(self._order)
        self._backlog += 1
        aim: object = task.pinned or (task.worker if task.worker is not None else task.on)
        if aim is None and task.depth:
            heapq.heappush(self._nested, (-task.depth, task.order, task))
            return
        queue = self._queue if aim is None else self._aimed.setdefault(aim, deque())
        if first:
            queue.appendleft(task)
        else:
            queue.append(task)

    def end(self, load: Load[W], task_id: int) -> W | None:
        """Note that the task has left that executor."""
        plain = load.capacity == load.slots
        task = load.tasks.pop(task_id, None) if plain else load.end(task_id)
        if not (load.listed and load.open):
            self._list(load)
        return task

    def lend(self, load: Load[W], task_id: int) -> None:
        """Note that a task waits for others, and that its place is free."""
        load.lend(task_id)
        self._list(load)

    def room_for(self, task: W) -> Load[W] | None:
        """An executor that has room for a task that is queued; None if none has."""
        load = self.pick(task)
        if load is not None:
            self._list(load)
        return load

    def next_for(self, load: Load[W]) -> W | None:
        """The longest waiting task that this executor may take, if it has room."""
        if len(load.tasks) >= load.window or not (load.open or load.takes_nested):
            return None
        while self._nested:
            task = heapq.heappop(self._nested)[2]
            if task.waiting:
                self._backlog -= 1
                return task
        # Tasks for one worker or node are not sent ahead: a broadcast must run everywhere at once.
        queues = []
        if load.open:
            if len(load.tasks) < load.common + load.window - load.capacity:
                queues.append(self._queue)
            if self._aimed and (pinned := self._aimed.get(load)) is not None:
                queues.append(pinned)
            if len(load.tasks) < load.capacity and self._aimed:
                queues += [
                    queue
                    for aim in ((load.node, load.worker), load.node)
                    if (queue := self._aimed.get(aim)) is not None
                ]
        best: deque[W] | None = None
        for queue in queues:
            while queue and not queue[0].waiting:
                queue.popleft()
            if queue and (best is None or queue[0].order < best[0].order):
                best = queue
        if best is None:
            return None
        self._backlog -= 1
        return best.popleft()

    def queued(self) -> list[W]:
        """Every waiting task."""
        everything = [
            *(task for _, _, task in sorted(self._nested)),
            *self._queue,
            *(t for queue in self._aimed.values() for t in queue),
        ]
        return [task for task in everything if task.waiting]

    def take_pinned(self, load: Load[W]) -> list[W]:
        """Remove the waiting tasks that only this executor can run, and return them."""
        tasks = [task for task in self._aimed.pop(load, ()) if task.waiting]
        self._backlog -= len(tasks)
        for task in tasks:
            task.waiting = False
        return tasks

    def drop(self, tasks: Iterable[W]) -> None:
        """Let tasks that wait do so no more.

        They are removed when they are more than those that wait: one by one, each would take as
        long as the queue is.
        """
        for task in tasks:
            if task.waiting:
                task.waiting = False
                self._backlog -= 1
                self._dropped += 1
        if self._dropped > self._backlog:
            self.tidy()

    def tidy(self) -> None:
        """Remove the tasks that wait no more, and count the others anew."""
        self._queue = deque(task for task in self._queue if task.waiting)
        self._nested = [each for each in self._nested if each[2].waiting]
        heapq.heapify(self._nested)
        left = {aim: [t for t in queue if t.waiting] for aim, queue in self._aimed.items()}
        self._aimed = {aim: deque(tasks) for aim, tasks in left.items() if tasks}
        self._dropped = 0
        self._backlog = len(self._queue) + len(self._nested) + sum(map(len, left.values()))

    @property
    def may_have_queued(self) -> bool:
        """False if no task waits."""
        return bool(self._queue or self._aimed or self._nested)

    @property
    def backlog(self) -> int:
        """How many tasks wait."""
        return self._backlog

    def forget_queue(self) -> list[W]:
        """Remove every waiting task from the queue, and return them."""
        tasks = self.queued()
        self.drop(tasks)
        return tasks

    def relist(self, load: Load[W]) -> None:
        """List an executor that has room, so that `pick` finds it."""
        load.listed = load in self._ready
        load.lent_listed = load in self._lent
        self._list(load)

    def _list(self, load: Load[W]) -> None:
        if load.open and len(load.tasks) < load.common:
            if not load.listed:
                load.listed = True
                self._ready.append(load)
        elif not load.open and not load.nested_only:
            return
        elif len(load.tasks) < load.capacity and not load.lent_listed:
            load.lent_listed = True
            self._lent.append(load)


# Prospects.


class Aimed(Protocol):
    """What says where a task may run."""

    @property
    def on(self) -> int | None:
        """The node it must run on."""

    @property
    def worker(self) -> tuple[int, int] | None:
        """The (node, worker) it must run on."""


class Prospects:
    """The nodes of a pool that run tasks, or will once they are up.

    The fleet says what becomes of its nodes; the dispatcher asks whether a task can still run.
    """

    def __init__(self, *, grouped: bool) -> None:
        """`grouped`: the workers are one group, which needs as many nodes as `need` says."""
        self._grouped = grouped
        self._needed = 1
        self._ceiling = 0
        self._expected: set[int] = set()
        self._failures: dict[int, BaseException] = {}
        self._alike: set[int] = set()
        """The failed nodes whose failure every other node would have as well."""
        self._lock = threading.Lock()

    def need(self, count: int) -> None:
        """Say without how many nodes a group is of no use."""
        with self._lock:
            self._needed = count

    def grow_up_to(self, count: int) -> None:
        """Say how many nodes a pool without nodes may have when tasks wait; 0 if it has some."""
        with self._lock:
            self._ceiling = count

    def expect(self, node: int) -> None:
        """A node has been added to the pool."""
        with self._lock:
            self._expected.add(node)
            self._forget(node)

    def fail(self, node: int, failure: BaseException, *, alike: bool = False) -> None:
        """A node has failed for good; one that has left the pool is nobody's concern.

        `alike` says that another node would fail as well, so that the pool need not grow.
        """
        with self._lock:
            if node in self._expected:
                self._expected.discard(node)
                self._failures[node] = failure
                if alike:
                    self._alike.add(node)

    def leave(self, node: int) -> None:
        """A node takes no more tasks, because the pool shrinks."""
        with self._lock:
            self._expected.discard(node)
            self._forget(node)

    def _forget(self, node: int) -> None:
        self._failures.pop(node, None)
        self._alike.discard(node)

    def can_run(self, task: Aimed) -> bool:
        """Whether some node runs tasks like this one, or will."""
        with self._lock:
            if self._grouped and self._failures and len(self._expected) < self._needed:
                return False
            wanted = task.worker[0] if task.worker is not None else task.on
            # A pool without nodes starts with node 0 when a task waits.
            grows = not self._expected and len(self._failures) < self._ceiling and not self._alike
            if wanted is None:
                return grows or bool(self._expected)
            return wanted in self._expected or (grows and wanted == 0 and not self._failures)

    def why_not(self) -> str:
        """Why nodes failed, in words; empty if none did."""
        with self._lock:
            reasons = [str(self._failures[node]) for node in sorted(self._failures)]
        if not self._grouped:
            return "; ".join(reasons)
        return f"its workers are a group, and {reasons[0]}" if reasons else ""
