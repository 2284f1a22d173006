"""Pending tasks: the executor has received them, and they wait in order for what they name.

That is buffers, and objects that the client has sent under a key: functions, and data from `put`.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from skyward.errors import SerializationError
from skyward.objects import encoding
from skyward.objects.payloads import Pieces, nowhere, unpack
from skyward.wire.channel import Channel
from skyward.wire.messages import Define, Missing, Run
from skyward.worker.inbox import Inbox


@dataclass(slots=True)
class PendingTask:
    """A task that has arrived; buffers and definitions that it names may be missing."""

    run: Run
    body: bytearray
    reported: bool = False
    """Whether the client was told what is missing, and will send the task again."""


@dataclass(slots=True)
class KeptObject:
    """An object defined under a key; decoded when first used."""

    pieces: Pieces | None
    """None after `value` has been decoded."""
    frozen: bool
    value: Any = None
    again: Callable[[], Pieces] | None = None
    """Finds the pieces once more, for a task that gets an object of its own."""


class PendingTasks:
    """Admits tasks once everything they name is here, in the order in which they arrived.

    The order matters: tasks of two broadcasts that wait for each other would wait for ever if some
    workers began with the first broadcast and others with the second.
    """

    def __init__(self, inbox: Inbox, admit: Callable[[Run, Pieces], None]) -> None:
        self._inbox, self._admit = inbox, admit
        self._tasks: deque[PendingTask] = deque()
        self._known: dict[bytes, KeptObject] = {}
        self._coming: dict[bytes, tuple[Define, bytearray]] = {}
        """The objects whose buffers are still on their way from a peer."""
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
            self._keep(channel, define, body)
            self._admit_complete()

    def _keep(self, channel: Channel, define: Define, body: bytearray) -> None:
        """Keep an object; if its buffers are missing, the task that names it reports the key."""
        if self._inbox.awaits(define.payload):
            self._coming[define.key] = define, body
            return
        pieces, _ = self._inbox.find(channel, define.payload, body)
        if pieces is not None:
            again = None
            if define.fresh:
                again = functools.partial(self._found_again, channel, define, bytes(body))
            # With `fresh`, the pieces stay, so that the cache keeps the buffers.
            self._known[define.key] = KeptObject(pieces, define.frozen, again=again)

    def _found_again(self, channel: Channel, define: Define, body: bytes) -> Pieces:
        pieces, _ = self._inbox.find(channel, define.payload, bytearray(body))
        assert pieces is not None
        return pieces

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the objects under these keys: no task will name them again."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
                self._coming.pop(key, None)

    def resolve(self, key: bytes) -> Any:
        """The object under a key."""
        definition = self._known.get(key)
        if definition is None:
            raise SerializationError(
                "a handle from sky.put that this worker was not given; pass the handle as an "
                "argument, on the pool that `sky.put` was called on"
            )
        if definition.again is not None:
            return encoding.decode(*definition.again())
        pieces = definition.pieces
        if pieces is not None:
            data, buffers, storages = pieces
            if definition.frozen:
                # All tasks of this process share the object, so its numpy arrays become read-only.
                plain = len(buffers) - len(storages)
                buffers = [b.toreadonly() for b in buffers[:plain]] + buffers[plain:]
            definition.value = encoding.decode(data, buffers, storages)
            definition.pieces = None
        return definition.value

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
            keys = self._lacking(_keys(run))
            if pieces is None or keys:
                task.reported = True
                self._channel.send(Missing(run.task, missing, keys, False))
                return
            self._tasks.popleft()
            self._admit(run, pieces)

    def _is_complete(self, run: Run) -> bool:
        """Whether the task, as usual, names nothing but its code, and the code is here."""
        here = run.code in self._known and run.code not in self._coming
        return here and not (run.payload.buffers or run.handles)

    def _awaits(self, run: Run) -> bool:
        """Whether a buffer of the task, or of an object that it names, is on its way."""
        coming = [self._coming[key][0].payload for key in _keys(run) if key in self._coming]
        return any(map(self._inbox.awaits, (run.payload, *coming)))

    def _lacking(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys without an object, after all buffers have arrived or will not arrive."""
        lacking = []
        for key in keys:
            if key in self._coming:
                self._keep(self._channel, *self._coming.pop(key))
            if key not in self._known:
                lacking.append(key)
        return lacking


def _keys(run: Run) -> tuple[bytes, ...]:
    return run.code, *run.handles
