"""Which task goes where: a pure structure, constant time per task whatever the number of nodes."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

FAST_SECONDS = 0.001
"""Tasks shorter than this are sent ahead, so that the worker never waits for the next one."""
AHEAD_MAX = 64
AHEAD_SECONDS = 0.004


class Work(Protocol):
    """What the scheduler knows of a task."""

    id: int
    on: int | None
    """The node it must run on."""
    worker: tuple[int, int] | None
    """The (node, worker) it must run on."""
    waiting: bool
    """False once it was cancelled while queued."""
    order: int
    """Its place in the queue, given by the scheduler."""


W = TypeVar("W", bound=Work)


@dataclass(slots=True, eq=False)
class Place(Generic[W]):
    """Something that runs tasks: one executor process with its slots."""

    node: int
    worker: int
    slot: int
    capacity: int = 1
    tasks: dict[int, W] = field(default_factory=dict)
    """In flight, in the order they were sent; the first `capacity` have started."""
    window: int = 1
    open: bool = True
    listed: bool = False
    average: float = 1.0

    def note(self, ran: float) -> None:
        """Learn from how long a task ran how many may be sent ahead."""
        self.average = ran if ran > 10 * FAST_SECONDS else 0.7 * self.average + 0.3 * ran
        if self.average > FAST_SECONDS:
            self.window = self.capacity
        else:
            ahead = int(AHEAD_SECONDS / max(self.average, 1e-5))
            self.window = self.capacity + min(AHEAD_MAX, ahead)

    @property
    def idle_slots(self) -> int:
        """Slots without a task."""
        return max(0, self.capacity - len(self.tasks))

    def started(self) -> list[W]:
        """Tasks that may have begun to run."""
        return list(itertools.islice(self.tasks.values(), self.capacity))

    def unstarted(self) -> list[W]:
        """Tasks that were sent ahead and wait behind others."""
        return list(itertools.islice(self.tasks.values(), self.capacity, None))


class Scheduler(Generic[W]):
    """Round-robin over places with a free slot; else a queue, also per node and per worker."""

    def __init__(self) -> None:
        self._ready: deque[Place[W]] = deque()
        self._places: dict[tuple[int, int], list[Place[W]]] = {}
        self._at_node: dict[int, list[Place[W]]] = {}
        self._queue: deque[W] = deque()
        self._aimed: dict[object, deque[W]] = {}
        self._order = itertools.count()
        self._first = itertools.count(-1, -1)

    def add(self, place: Place[W]) -> None:
        """A place is there to be used."""
        self._places.setdefault((place.node, place.worker), []).append(place)
        self._at_node.setdefault(place.node, []).append(place)
        self._list(place)

    def remove(self, place: Place[W]) -> None:
        """A place is gone; what was on it is the caller's to deal with."""
        place.open = False
        self._places[place.node, place.worker].remove(place)
        self._at_node[place.node].remove(place)

    def places(self) -> Iterator[Place[W]]:
        """All places."""
        for places in self._places.values():
            yield from places

    def pick(self, task: W) -> Place[W] | None:
        """A place with a free slot for this task, now."""
        # Never past one that waits for the same place: broadcasts must keep one order everywhere.
        if task.worker is not None:
            if self._awaited(task.worker):
                return None
            return self._most_idle(self._places.get(task.worker, ()))
        if task.on is not None:
            if self._awaited(task.on):
                return None
            return self._most_idle(self._at_node.get(task.on, ()))
        while self._ready:
            place = self._ready.popleft()
            place.listed = False
            if place.open and len(place.tasks) < place.capacity:
                return place
        return None

    def _awaited(self, aim: object) -> bool:
        queue = self._aimed.get(aim)
        while queue and not queue[0].waiting:
            queue.popleft()
        return bool(queue)

    @staticmethod
    def _most_idle(places: list[Place[W]] | tuple[()]) -> Place[W] | None:
        best = max(places, key=lambda place: place.idle_slots, default=None)
        return best if best is not None and best.open and best.idle_slots else None

    def begin(self, place: Place[W], task: W) -> None:
        """The task is about to be sent there."""
        place.tasks[task.id] = task
        self._list(place)

    def queue(self, task: W, *, first: bool = False) -> None:
        """Keep a task until a place asks for it; `first` puts it before all others."""
        task.order = next(self._first) if first else next(self._order)
        aim: object = task.worker if task.worker is not None else task.on
        queue = self._queue if aim is None else self._aimed.setdefault(aim, deque())
        if first:
            queue.appendleft(task)
        else:
            queue.append(task)

    def end(self, place: Place[W], task_id: int) -> W | None:
        """The task has left that place."""
        task = place.tasks.pop(task_id, None)
        self._list(place)
        return task

    def next_for(self, place: Place[W]) -> W | None:
        """The longest waiting task that this place may take, if it has room."""
        if not place.open or len(place.tasks) >= place.window:
            return None
        # Aimed tasks are not sent ahead: a broadcast must run everywhere at once.
        queues = [self._queue]
        if len(place.tasks) < place.capacity and self._aimed:
            queues += [
                queue
                for aim in ((place.node, place.worker), place.node)
                if (queue := self._aimed.get(aim)) is not None
            ]
        best: deque[W] | None = None
        for queue in queues:
            while queue and not queue[0].waiting:
                queue.popleft()
            if queue and (best is None or queue[0].order < best[0].order):
                best = queue
        return best.popleft() if best else None

    def queued(self) -> list[W]:
        """Every waiting task."""
        everything = [*self._queue, *(t for queue in self._aimed.values() for t in queue)]
        return [task for task in everything if task.waiting]

    @property
    def backlog(self) -> int:
        """How many tasks wait, those cancelled meanwhile included."""
        return len(self._queue) + sum(map(len, self._aimed.values()))

    def forget_queue(self) -> list[W]:
        """Take every waiting task out."""
        tasks = self.queued()
        self._queue.clear()
        self._aimed.clear()
        return tasks

    def relist(self, place: Place[W]) -> None:
        """Make sure that a place which has room is found."""
        place.listed = place in self._ready
        self._list(place)

    def _list(self, place: Place[W]) -> None:
        if place.open and not place.listed and len(place.tasks) < place.capacity:
            place.listed = True
            self._ready.append(place)
