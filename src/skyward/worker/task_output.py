"""Task output: the last lines that executors of a kept pool have written, kept on the node.

Each executor has a log of its own, whose lines are JSON: when, worker, stream, text, function and
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from pathlib import Path

import msgspec

from skyward.worker import output_log
from skyward.worker.output_log import OutputLog

KEPT = 1 << 20
"""How many bytes are kept of what one executor writes."""
FOLDER = "output"
_LOCK = "lock"
_PIECE = 256 << 10
_NAME = 200
_SETTLED = 1_000_000_000
_ENTRY = 32 << 10
"""How many characters an entry has at most: in JSON, each may take six bytes."""


class TaskLine(msgspec.Struct, array_like=True):
    """What a task has written at once: one line or several."""

    when: float
    worker: int
    stream: str
    text: str
    name: str = ""
    """The function that has written it."""
    executor: int = 0
    """The number of the process."""


class TaskOutput:
    """The writing end, in an executor."""

    def __init__(self, folder: str, worker: int, slot: int) -> None:
        """Take the first log of this worker and slot that no other executor writes."""
        self._worker = worker
        for number in itertools.count():
            place = Path(folder, f"{worker}.{slot}.{number}")
            place.mkdir(parents=True, exist_ok=True)
            # Held until the process ends: the pool's next client may have executors of its own.
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._log = OutputLog(place, KEPT)
            return

    def write(self, stream: str, text: str, name: str) -> None:
        """Keep what a task of that name has written; on a full disk it is lost."""
        now, pid = time.time(), os.getpid()
        with contextlib.suppress(OSError):
            for at in range(0, len(text), _ENTRY):
                part = text[at : at + _ENTRY]
                entry = TaskLine(now, self._worker, stream, part, name[:_NAME], pid)
                self._log.write(msgspec.json.encode(entry) + b"\n")


class TaskOutputReader:
    """The reading end: the lines of all executors of a node, in the order of time."""

    def __init__(self, folder: Path, tail: int | None) -> None:
        """With `tail`, begin with the last so many lines."""
        self._folder, self._tail = folder, tail
        self._positions: dict[Path, int] = {}
        self._known: list[Path] = []
        self._mark: int | None = None
        self._marks: dict[Path, tuple[int, Path, int]] = {}
        """When each log got its last file, that file, and its length at the last look."""

    def next_lines(self) -> list[TaskLine]:
        """What was written since the last call."""
        found: list[TaskLine] = []
        for place in self._places():
            if place not in self._positions:
                tail = self._tail
                at = 0 if tail is None else output_log.position_of_last(place, tail)
                self._positions[place] = at
            found += self._new_lines(place)
        found.sort(key=lambda line: line.when)
        if self._tail is not None:
            found = _last(found, self._tail)
            self._tail = None
        return found

    def _places(self) -> list[Path]:
        """The logs that may have something new."""
        try:
            mark = self._folder.stat().st_mtime_ns
            if mark != self._mark:
                self._known = sorted(each for each in self._folder.iterdir() if each.is_dir())
                self._mark = mark
        except FileNotFoundError:
            return []
        return [place for place in self._known if self._has_grown(place)]

    def _has_grown(self, place: Path) -> bool:
        """Whether a log has another file or a longer one: two questions instead of a reading."""
        before = self._marks.get(place)
        try:
            changed = os.stat(place).st_mtime_ns
            if before is not None and before[0] == changed:
                length = os.stat(before[1]).st_size
                self._marks[place] = changed, before[1], length
                return length != before[2]
        except FileNotFoundError:
            pass
        else:
            # One that was made just now may get a file within the same tick of the clock.
            if time.time_ns() - changed > _SETTLED:
                last = output_log.last_file(place)
                if last is not None:
                    self._marks[place] = changed, last, -1
        return True

    def _new_lines(self, place: Path) -> list[TaskLine]:
        lines: list[TaskLine] = []
        while True:
            start, data = output_log.read(place, self._positions[place], _PIECE)
            whole, newline, _ = data.rpartition(b"\n")
            if not newline:
                if len(data) >= _PIECE:
                    # Too long for a line: passed over.
                    self._positions[place] = start + len(data)
                    continue
                return lines
            self._positions[place] = start + len(whole) + 1
            for line in whole.split(b"\n"):
                # The first one may be the rest of a line whose beginning is gone.
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    lines.append(msgspec.json.decode(line, type=TaskLine))


def _last(lines: list[TaskLine], count: int) -> list[TaskLine]:
    """The last so many lines of text."""
    kept: list[TaskLine] = []
    for each in reversed(lines):
        parts = each.text.splitlines(keepends=True)[-count:] if count > 0 else []
        if not parts:
            break
        kept.append(msgspec.structs.replace(each, text="".join(parts)))
        count -= len(parts)
    return kept[::-1]
