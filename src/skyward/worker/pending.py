"""Pending tasks: the executor has received them, and they wait in order for what they name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skyward.objects.payloads import Pieces, nowhere, unpack
from skyward.wire.channel import Channel
from skyward.wire.messages import Define, Missing, Run
from skyward.worker.definitions import Definitions
from skyward.worker.inbox import Inbox


@dataclass(slots=True)
class PendingTask:
    """A task that has arrived; buffers and definitions that it names may be missing."""

    run: Run
    body: bytearray
    reported: bool = False
    """Whether the client was told what is missing, and will send the task again."""


class PendingTasks:
    """Admits tasks once everything they name is here, in the order in which they arrived.

    The order matters: tasks of two broadcasts that wait for each other would wait for ever if some
    workers began with the first broadcast and others with the second.
    """

    def __init__(
        self, inbox: Inbox, definitions: Definitions, admit: Callable[[Run, Pieces], None]
    ) -> None:
        self._inbox, self._definitions = inbox, definitions
        self._admit = admit
        self._tasks: deque[PendingTask] = deque()
        self._channel: Channel
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether a task is pending; another thread may admit it at any time."""
        return bool(self._tasks)

    def add(self, channel: Channel, run: Run, body: bytearray) -> None:
        """Take a task that has arrived, for the first time or again."""
        with self._lock:
            self._channel = channel
            if not self._tasks and not run.pending and self._is_complete(run):
                self._admit(run, unpack(run.payload, body, nowhere))
                return
            for task in self._tasks:
                if task.run.task == run.task:
                    task.run, task.body, task.reported = run, body, False
                    break
            else:
                if run.pending:
                    # The client recalled it after it had begun to send it again.
                    return
                self._tasks.append(PendingTask(run, body))
            self._admit_complete()

    def define(self, channel: Channel, define: Define, body: bytearray) -> None:
        """Take an object that has arrived; tasks name it by its key."""
        with self._lock:
            self._channel = channel
            self._definitions.add(channel, define, body)
            self._admit_complete()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the objects under these keys: no task will name them again."""
        with self._lock:
            self._definitions.forget(keys)

    def settle(self) -> None:
        """Admit the tasks that waited for buffers which have arrived or will not arrive."""
        with self._lock:
            self._admit_complete()

    def cancel(self, task_id: int) -> None:
        """Remove a task that the client has cancelled."""
        with self._lock:
            self._tasks = deque(task for task in self._tasks if task.run.task != task_id)
            self._admit_complete()

    def clear(self) -> list[int]:
        """Remove all tasks, because the client takes them back; returns their numbers."""
        with self._lock:
            runs = [task.run for task in self._tasks]
            self._tasks.clear()
            if runs:
                # Nobody will report what they lack, and peers would wait for it.
                self._inbox.report_lost(self._channel, [run.payload for run in runs])
        return [run.task for run in runs]

    def _admit_complete(self) -> None:
        while self._tasks:
            task = self._tasks[0]
            run = task.run
            if task.reported or self._awaits(run):
                return
            pieces, missing = self._inbox.find(self._channel, run.payload, task.body)
            keys = self._definitions.lacking(self._channel, _keys(run))
            if pieces is None or keys:
                task.reported = True
                self._channel.send(Missing(run.task, missing, keys, False))
                return
            self._tasks.popleft()
            self._admit(run, pieces)

    def _is_complete(self, run: Run) -> bool:
        """Whether the task, as usual, names nothing but its code, and the code is here."""
        return not (run.payload.buffers or run.handles) and self._definitions.has(run.code)

    def _awaits(self, run: Run) -> bool:
        return self._inbox.awaits(run.payload) or self._definitions.awaits(_keys(run))


def _keys(run: Run) -> tuple[bytes, ...]:
    return run.code, *run.handles
