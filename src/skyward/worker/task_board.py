"""The task board: memory in which a child shows its agent the tasks that it runs and has run.

The agent reads it without the child's help, since the child may not be able to give any. A task
costs the child two short writes; nothing is sent. Nobody is woken, unless the agent asks for that:
then the child tells of the next change, once.
"""

from __future__ import annotations

import mmap
import os
import struct
from bisect import bisect_left
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic

from skyward import kernel
from skyward.wire.messages import End, Failure, Message, Missing, Result
from skyward.worker.changes import tell

BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)
"""The bounds, in seconds, between which tasks are counted by how long they ran."""
OUTCOMES = ("running", "ok", "failed", "cancelled", "lost")
RUNNING, OK, FAILED, CANCELLED, LOST = range(len(OUTCOMES))

_RECORDS = 256
"""How many tasks a child's board keeps; with many slots, each slot has fewer."""
_RECORDS_LEAST = 16
SPARE = 8
"""Slots for tasks that run in the places of others, which wait."""
_RECORD = struct.Struct("<QqQddHHH210s")
_ENDED = struct.Struct("<dH")
_ENDED_AT = 32
_ERROR = struct.Struct("<H")
_ERROR_AT = 44
_TEXT_AT = 46
_TEXT = 210
_NAME = 120
"""How many bytes of a name are kept; the rest is for the error of a task that fails."""
_BEGUN, _FIRST_BUCKET = 0, len(OUTCOMES)
_SECONDS = _FIRST_BUCKET + len(BUCKETS) + 1
_RESENT = _SECONDS + 1
_AWAITED, _WRITTEN = _RESENT + 1, _RESENT + 2
_HEADER = 256
_RETURNS = (Result, End)
_READS = 100
"""How often a record that changes while it is read is read again."""


@dataclass(frozen=True, slots=True)
class BoardTask:
    """A task on a board; times are those of `time.monotonic`, and `ended` is 0 while it runs."""

    number: int
    """Counts the tasks of the slot, from 1."""
    slot: int
    task: int
    name: str
    thread: int
    began: float
    ended: float
    outcome: int
    error: str


@dataclass(slots=True)
class TaskTotals:
    """How many tasks there were, how they ended, and how long those ran that were not cancelled."""

    begun: int = 0
    running: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0
    seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))

    def add(self, other: TaskTotals) -> None:
        """Add the numbers of other tasks."""
        self.begun += other.begun
        self.running += other.running
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.lost += other.lost
        self.seconds += other.seconds
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]

    @property
    def succeeded(self) -> int:
        """How many tasks returned."""
        return self.begun - self.running - self.failed - self.cancelled - self.lost


class TaskRing:
    """The tasks of one slot: a header of counts, and a ring of the last records."""

    __slots__ = (
        "_at",
        "_begun",
        "_changes",
        "_counts",
        "_first",
        "_length",
        "_memory",
        "_name",
        "_seconds",
        "_since",
        "_slot",
        "_text",
    )

    def __init__(self, memory: mmap.mmap, slot: int, length: int, changes: int) -> None:
        self._memory, self._slot, self._length, self._changes = memory, slot, length, changes
        header = slot * (_HEADER + length * _RECORD.size)
        self._first = header + _HEADER
        view = memoryview(memory)[header : header + _HEADER]
        self._counts, self._seconds = view.cast("Q"), view.cast("d")
        view.release()
        self._begun, self._at, self._since = 0, self._first, 0.0
        self._name, self._text = "", b""

    # The child's end.

    def begin(self, task: int, name: str) -> None:
        """Note that this thread runs a task from now on."""
        if name != self._name:
            self._name, self._text = name, name.encode(errors="replace")[:_NAME]
        self._begun = number = self._begun + 1
        self._at = at = self._first + number % self._length * 256
        self._since = now = monotonic()
        text = self._text
        _RECORD.pack_into(
            self._memory, at, number, task, get_ident(), now, 0.0, RUNNING, len(text), 0, text
        )
        self._counts[_BEGUN] = number
        if self._counts[_AWAITED]:
            self._tell_change()

    def end(self, answer: Message | None) -> None:
        """Note that the task is over, and how: by its answer, or without one."""
        now = monotonic()
        outcome = OK if type(answer) in _RETURNS else self._failed(answer)
        _ENDED.pack_into(self._memory, self._at + _ENDED_AT, now, outcome)
        if outcome <= FAILED:
            took = now - self._since
            self._counts[_FIRST_BUCKET + bisect_left(BUCKETS, took)] += 1
            self._seconds[_SECONDS] += took
        if self._counts[_AWAITED]:
            self._tell_change()

    def wrote(self) -> None:
        """Note that a task has written something, which the node keeps."""
        self._counts[_WRITTEN] += 1
        if self._counts[_AWAITED]:
            self._tell_change()

    def _tell_change(self) -> None:
        self._counts[_AWAITED] = 0
        tell(self._changes)

    def _failed(self, answer: Message | None) -> int:
        outcome = LOST
        if isinstance(answer, Missing):
            # It has not run: the client sends it again, and that time counts.
            self._note_error("its tensors could not be opened; the client sends it again")
            self._counts[_RESENT] += 1
            return CANCELLED
        if isinstance(answer, Failure):
            outcome = CANCELLED if answer.cancelled else FAILED
            self._note_error(f"{answer.type_name}: {answer.text}".removeprefix(": "))
        self._counts[outcome] += 1
        return outcome

    def _note_error(self, said: str) -> None:
        error = said.encode(errors="replace")[: _TEXT - len(self._text)]
        start = self._at + _TEXT_AT + len(self._text)
        self._memory[start : start + len(error)] = error
        _ERROR.pack_into(self._memory, self._at + _ERROR_AT, len(error))

    # The agent's end.

    def await_change(self) -> None:
        """Have the child tell of the next change."""
        self._counts[_AWAITED] = 1

    @property
    def written(self) -> int:
        """How often tasks have written something."""
        return self._counts[_WRITTEN]

    @property
    def begun(self) -> int:
        """How many tasks have begun: the number of the last one."""
        return self._counts[_BEGUN]

    @property
    def oldest(self) -> int:
        """The number of the oldest task that is kept."""
        return max(1, self.begun - self._length + 1)

    def read(self, number: int) -> BoardTask | None:
        """The task of that number; None if it is not kept."""
        at = self._first + number % self._length * 256
        # Twice, until both are the same: the child may be writing.
        record, again = self._record(at), self._record(at)
        for _ in range(_READS):
            if record == again:
                break
            record, again = again, self._record(at)
        found, task, thread, began, ended, outcome, length, error, text = record
        if found != number or record != again:
            return None
        name = text[:length].decode(errors="replace")
        why = text[length : length + error].decode(errors="replace")
        return BoardTask(
            number, self._slot, task, name, thread, began, ended, min(outcome, LOST), why
        )

    def _record(self, at: int) -> tuple[int, int, int, float, float, int, int, int, bytes]:
        number, task, thread, began, *rest = _RECORD.unpack_from(self._memory, at)
        ended, outcome, length, error, text = rest
        return number, task, thread, began, ended, outcome, length, error, text

    def totals(self) -> TaskTotals:
        """The numbers of all tasks of the slot."""
        begun = self.begun
        last = self.read(begun) if begun else None
        counts = self._counts
        return TaskTotals(
            begun - counts[_RESENT],
            int(last is not None and last.outcome == RUNNING),
            counts[FAILED],
            counts[CANCELLED],
            counts[LOST],
            self._seconds[_SECONDS],
            list(counts[_FIRST_BUCKET:_SECONDS]),
        )

    def close(self) -> None:
        """Let go of the memory."""
        self._counts.release()
        self._seconds.release()


class TaskBoard:
    """The tasks of all slots of a child, in memory that the child shares with its agent."""

    def __init__(self, descriptor: int, slots: int, changes: int = -1) -> None:
        """`changes` is the descriptor on which the child tells of changes."""
        length = _length(slots)
        self._memory = mmap.mmap(descriptor, _size(slots))
        every = range(slots + SPARE)
        self.rings = [TaskRing(self._memory, slot, length, changes) for slot in every]
        """One for each slot."""

    def running(self) -> list[BoardTask]:
        """The tasks that run now."""
        last = [ring.read(ring.begun) for ring in self.rings if ring.begun]
        return [task for task in last if task is not None and task.outcome == RUNNING]

    def kept(self) -> list[BoardTask]:
        """All tasks that are kept."""
        found = [
            ring.read(number)
            for ring in self.rings
            for number in range(ring.oldest, ring.begun + 1)
        ]
        return [task for task in found if task is not None]

    def await_change(self) -> None:
        """Have the child tell of the next change."""
        for each in self.rings:
            each.await_change()

    def totals(self) -> TaskTotals:
        """The numbers of all tasks."""
        total = TaskTotals()
        for ring in self.rings:
            total.add(ring.totals())
        return total

    def close(self) -> None:
        """Give the memory back; who reads the board then gets a `ValueError`."""
        for ring in self.rings:
            ring.close()
        self._memory.close()


def board_file(slots: int) -> int:
    """A descriptor of memory for a board; the caller closes it."""
    if kernel.IS_LINUX:
        descriptor = os.memfd_create("skyward-board")
    else:
        # Imported here: an executor on Linux never needs it, and it imports much.
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _size(slots))
    return descriptor


def _length(slots: int) -> int:
    return max(_RECORDS_LEAST, _RECORDS // slots)


def _size(slots: int) -> int:
    return (slots + SPARE) * (_HEADER + _length(slots) * _RECORD.size)
