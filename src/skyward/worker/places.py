"""Places: which tasks of an executor run, which wait for a place, and which have given theirs up.

A task that waits for tasks that it has started gives its place up. Then a helper, a thread besides
those that run tasks, runs another one. When the first goes on, both run until one of them ends.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyward import instances
from skyward.errors import PoolError
from skyward.objects import encoding, payloads
from skyward.objects.encoding import Encoded
from skyward.objects.payloads import Pieces
from skyward.staff import Staff
from skyward.wire.channel import Channel
from skyward.wire.messages import End, Failure, Message, Places, Result, Run, Waits
from skyward.worker.outbox import Sendable
from skyward.worker.streams import InputStream, OutputStream

if TYPE_CHECKING:
    import torch

WAITING_MAX = 1000
"""How many tasks of an executor may wait for others at a time; each has a thread."""


class ObjectCaller:
    """The connection of a process whose tasks call objects of this one."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.calls: set[int] = set()
        """The calls that have not ended, as far as the caller has been told."""

    def send(self, message: Message, sendable: Sendable | None = None) -> None:
        """Send a message, with a packed value if it has one."""
        if isinstance(message, Failure | End) or (
            isinstance(message, Result) and message.payload is not None
        ):
            self.calls.discard(message.task)
        try:
            self.channel.send(message, sendable[1] if sendable is not None else ())
        except OSError:
            # The caller is gone: whoever reads ends its calls.
            return

    def pack(self, value: Any, what: str = "the value") -> Sendable:
        """A value, laid out for sending; `what` names it in errors."""
        return self.lay_out(encoding.encode(value, own_modules=True, what=what))

    def lay_out(self, encoded: Encoded) -> Sendable:
        """An encoded value, laid out for sending."""
        packed = payloads.pack(encoded, None)
        return packed.payload, packed.body, []


@dataclass(slots=True)
class ReadyTask:
    """A task whose arguments are complete: it waits for its turn, then runs."""

    run: Run
    pieces: Pieces
    inputs: list[InputStream]
    output: OutputStream | None = None
    """None until the function has returned a generator."""
    cancelled: bool = False
    thread: int = 0
    """The thread that runs the task."""
    waits: int = 0
    """How often the task, on all its threads, waits now for tasks that it has started."""
    wake: Callable[[], object] | None = None
    """Ends the wait of the thread that runs the task, if that waits for tasks."""
    woken: bool = False
    """Whether that wait must end with an interrupt."""
    opened: list[tuple[torch.UntypedStorage, bytes]] = field(default_factory=list)
    """The device's storages among the arguments, if the result is kept: it may have them, too."""
    places: queue.SimpleQueue[Places | None] | None = None
    """If the result is kept: the client's answer to `Room`, or None if the task was cancelled."""
    caller: ObjectCaller | None = None
    """The process that has called an object, and gets the answer; None if that is the client."""


class TaskPlaces:
    """The tasks of one executor."""

    def __init__(
        self, slots: int, tell: Callable[[Message], None], run: Callable[[ReadyTask], None]
    ) -> None:
        """`slots` is how many tasks have places. `tell` sends the client a message.

        `run` runs a task on a helper.
        """
        self.lock = threading.Lock()
        """For all attributes; the changes of a task that belong together are made under it."""
        self.waiting: OrderedDict[int, ReadyTask] = OrderedDict()
        """The tasks that have not begun, in the order in which they came."""
        self.waiting_apart: dict[int, ReadyTask] = {}
        """The tasks of objects with places of their own that have not begun."""
        self.running: dict[int, ReadyTask] = {}
        self.awaited = 0
        """How many threads wait until a task ends, or gives its place up."""
        self._slots, self._tell, self._run = slots, tell, run
        self._given_up: set[int] = set()
        """The running tasks that have no place, because they wait for others."""
        self._running_apart = 0
        """How many tasks of objects with places of their own run."""
        self._freed = threading.Condition(self.lock)
        self._telling = threading.Lock()
        """So that the client hears of waits in their order."""
        self._helpers = Staff("skyward-task", 2 * WAITING_MAX)
        self._apart: dict[str, queue.SimpleQueue[ReadyTask | None]] = {}
        """For each object with a place of its own, the tasks of its thread."""

    def find(self, number: int) -> ReadyTask | None:
        """A task that waits or runs."""
        with self.lock:
            waiting = self.waiting.get(number) or self.waiting_apart.get(number)
            return waiting or self.running.get(number)

    def take_waiting(self, number: int) -> ReadyTask | None:
        """Remove a task that has not begun; the caller holds the lock."""
        return self.waiting.pop(number, None) or self.waiting_apart.pop(number, None)

    def add(self, task: ReadyTask) -> bool:
        """Take a task; returns whether a helper should run it, since the other threads may wait."""
        with self.lock:
            self.waiting[task.run.task] = task
            threads = len(self.running) - self._running_apart
            return self._slots <= threads < self._slots + len(self._given_up)

    def add_apart(self, task: ReadyTask) -> None:
        """Take a task of an object that has a place of its own, on the object's thread."""
        key = task.run.apart
        with self.lock:
            begins = key not in self._apart
            if begins:
                self._apart[key] = queue.SimpleQueue()
            self._apart[key].put(task)
            self.waiting_apart[task.run.task] = task
        if begins:
            threading.Thread(
                target=self._serve_apart, args=(key,), name="skyward-object", daemon=True
            ).start()

    def _serve_apart(self, key: str) -> None:
        """Run the tasks of one object, until there is none and the object is gone."""
        tasks = self._apart[key]
        while True:
            task = tasks.get()
            with self.lock:
                wanted = None if task is None else self.waiting_apart.pop(task.run.task, None)
                if wanted is not None:
                    wanted.thread = threading.get_ident()
                    self.running[wanted.run.task] = wanted
                    self._running_apart += 1
            if wanted is not None:
                self._run(wanted)
            del task, wanted
            with self.lock:
                if tasks.empty() and not instances.has(key):
                    del self._apart[key]
                    return

    def objects_freed(self) -> None:
        """End the threads of objects that are gone."""
        with self.lock:
            for tasks in self._apart.values():
                tasks.put(None)

    def begin_next(self, *, waits: bool = True) -> ReadyTask | None:
        """The task that has waited longest; None if others began all tasks.

        Waits until it has a place, or gives None if it has none.
        """
        with self.lock:
            if self.waiting and not self._has_room():
                if not waits:
                    return None
                # A helper runs a task in the place of one that goes on, or has ended. The count
                # comes first: who ends a task looks at it, without the lock.
                self.awaited += 1
                while self.waiting and not self._has_room():
                    self._freed.wait()
                self.awaited -= 1
            if not self.waiting:
                return None
            number, task = self.waiting.popitem(last=False)
            task.thread = threading.get_ident()
            self.running[number] = task
            return task

    def _has_room(self) -> bool:
        return len(self.running) - self._running_apart - len(self._given_up) < self._slots

    def free(self, task: ReadyTask) -> None:
        """Let another task have the place of one that has ended.

        Most tasks need only be removed from `running`: they had a place that no thread waits for.
        """
        with self.lock:
            ended = self.running.pop(task.run.task, None)
            if ended is not None and task.run.apart:
                self._running_apart -= 1
            self._given_up.discard(task.run.task)
            self._freed.notify_all()

    def help(self) -> None:
        """Have a helper run tasks in the places of those that wait."""
        self._helpers.run(self._help)

    def _help(self) -> None:
        while (task := self.begin_next(waits=False)) is not None:
            self._run(task)

    def begin_wait(
        self, task: ReadyTask | None, wake: Callable[[], object] | None
    ) -> ReadyTask | None:
        """Give the place of a task up: it waits for tasks that it has started.

        Without a task, some task whose own thread does not wait, if there is one: the caller is a
        thread of one of them. Returns the task, for `end_wait`. `wake` ends the wait.
        """
        with self._telling:
            with self.lock:
                if task is None:
                    own = (each for each in self.running.values() if not each.run.apart)
                    task = next((each for each in own if not each.waits), None)
                if task is None:
                    return None
                if not task.run.apart and not task.waits and len(self._given_up) >= WAITING_MAX:
                    raise PoolError(
                        f"{task.run.name} cannot wait for another task: {WAITING_MAX} tasks of "
                        "this worker wait for others already; start fewer tasks that wait, or let "
                        "a task return before the next one starts"
                    )
                task.waits += 1
                if wake is not None and task.thread == threading.get_ident():
                    task.wake = wake
                if task.run.apart or task.waits > 1 or task.run.task not in self.running:
                    return task
                self._given_up.add(task.run.task)
                self._freed.notify_all()
                helps = bool(self.waiting)
            if task.caller is None:
                self._tell(Waits(task.run.task, True))
        if helps:
            self.help()
        return task

    def end_wait(self, task: ReadyTask) -> bool:
        """Have a task go on, also if another one runs in its place; returns whether it must end."""
        with self._telling:
            with self.lock:
                task.waits -= 1
                woken = False
                if task.thread == threading.get_ident():
                    woken, task.wake, task.woken = task.woken, None, False
                if task.waits or task.run.task not in self._given_up:
                    return woken
                self._given_up.discard(task.run.task)
            if task.caller is None:
                self._tell(Waits(task.run.task, False))
        return woken
