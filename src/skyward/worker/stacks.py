"""Stacks: how an agent learns where the threads of a child process are, whatever the child does."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import re
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from skyward import kernel
from skyward.worker.inspection import DUMP, ChildStacks, ChildThread
from skyward.worker.process import ChildProcess
from skyward.worker.task_board import BoardTask, TaskBoard, board_file

PATIENCE = 1.0
"""How long a child has to answer in Python; then the agent sends the signal."""
DUMP_SECONDS = 4.0
"""How long a child has to answer the signal."""
PAUSE_SECONDS = 0.1
"""After so long without another byte, a dump is over: nothing else marks its end."""

# Made now: msgspec ends the process if two threads are the first to read a struct that has others.
_stacks = msgspec.json.Decoder(ChildStacks)
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_THREAD = re.compile(rb"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(rb'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True, slots=True)
class Sighting:
    """Where a child process is."""

    threads: list[ChildThread] = field(default_factory=list)
    tasks: list[BoardTask] = field(default_factory=list)
    answered: bool = True
    """Whether the child answered in Python: it does not while C code holds the interpreter."""
    problem: str = ""
    """Why there are no threads; empty if there are."""


_ENDED = Sighting(problem="the process has ended")


class StackSource:
    """The agent's end of the inspection of one child process."""

    def __init__(self, slots: int = 0) -> None:
        """`slots` is how many tasks the child runs at once; 0 if it runs none."""
        self._pipe, self.pipe = os.pipe()
        self.board = board_file(slots) if slots else -1
        """Descriptors for the child, which inherits them: its pipe, and its board."""
        self.tasks = TaskBoard(self.board, slots) if slots else None
        """What the child shows of its tasks; closed with this."""
        self._lock = threading.Lock()
        self._number = 0
        self._teller = 0
        """The thread of the child that answers; 0 if the child has not told."""
        self._names: dict[int, str] = {}
        self._is_silent = False
        """Whether the child has not answered since `ask`."""
        self._open = True

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that the child inherits."""
        return (self.pipe,) if self.tasks is None else (self.pipe, self.board)

    def handed_over(self) -> None:
        """Close the child's ends: the child has them, or did not start."""
        for descriptor in self.inherited:
            os.close(descriptor)

    def close(self) -> None:
        """Close the agent's ends; the child has ended."""
        with self._lock:
            self._open = False
            os.close(self._pipe)
            if self.tasks is not None:
                self.tasks.close()

    def look(self, child: ChildProcess) -> Sighting:
        """Where the child is now; takes five seconds if the child does not answer at all."""
        with self._lock:
            if not self._open:
                return _ENDED
            tasks = self.tasks.running() if self.tasks is not None else []
            if not self._asks(child):
                return _ENDED
            threads = self._answer()
            if threads is not None:
                self._names = {thread.ident: thread.name for thread in threads}
                return Sighting(threads, tasks)
            if child.ended:
                return _ENDED
            if not _catches(child.pid):
                problem = f"it does not answer, and user code has taken the signal {int(DUMP)}"
                return Sighting([], tasks, False, problem)
            _signal(child, self._teller)
            threads = self._dump()
            problem = "" if threads else "it does not answer: stopped, or without a processor"
            return Sighting(threads, tasks, False, problem)

    def ask(self, child: ChildProcess) -> None:
        """Ask whether the child can answer in Python, and wait for nothing: see `is_silent`."""
        with self._at_once() as may:
            if may and self._asks(child):
                self._is_silent = True

    @property
    def is_silent(self) -> bool:
        """Whether the child has not answered what `ask` has asked."""
        with self._at_once() as may:
            if may:
                self._note_answers()
            return self._is_silent

    @contextlib.contextmanager
    def _at_once(self) -> Iterator[bool]:
        """Whether the pipe can be used now: it is open, and nobody waits for an answer."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield self._open
        finally:
            self._lock.release()

    def _asks(self, child: ChildProcess) -> bool:
        # What the child said when it started, or answered too late last time.
        self._note_answers()
        self._number = self._number % 255 + 1
        return child.ask(self._number)

    def _note_answers(self) -> None:
        for answer in _answers(self._read(0.0)):
            self._teller, self._is_silent = answer.teller, False

    def _answer(self) -> list[ChildThread] | None:
        deadline = time.monotonic() + PATIENCE
        told = b""
        while (left := deadline - time.monotonic()) > 0:
            data = self._read(left)
            if not data:
                break
            told += data
            if not told.endswith(b"\n"):
                continue
            for answer in _answers(told):
                self._teller, self._is_silent = answer.teller, False
                if answer.number == self._number:
                    return answer.threads
        return None

    def _dump(self) -> list[ChildThread]:
        told = self._read(DUMP_SECONDS)
        while data := self._read(PAUSE_SECONDS):
            told += data
        threads: list[ChildThread] = []
        for line in told.splitlines():
            if found := _THREAD.match(line):
                ident = int(found[1], 16)
                threads.append(ChildThread(ident, self._names.get(ident, ""), []))
            elif (found := _FRAME.match(line)) and threads:
                number = int(found[2]) if found[2].isdigit() else 0
                frame = (found[1].decode(errors="replace"), number, found[3].decode())
                threads[-1].frames.append(frame)
        return threads

    def _read(self, seconds: float) -> bytes:
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        told = b""
        while waiting.poll(seconds * 1000):
            data = os.read(self._pipe, 1 << 16)
            told += data
            if not data or seconds:
                break
        return told


def described(sighting: Sighting) -> dict[str, object]:
    """A sighting for the client, with the source lines that this node has."""
    return {
        "answered": sighting.answered,
        "problem": sighting.problem,
        "tasks": [
            (each.task, each.name, each.thread, time.monotonic() - each.began)
            for each in sighting.tasks
        ],
        "threads": [
            (each.ident, each.name, [_described_frame(*frame) for frame in each.frames])
            for each in sighting.threads
        ],
    }


def _described_frame(file: str, line: int, function: str) -> tuple[str, int, str, str, bool]:
    linecache.checkcache(file)
    source = linecache.getline(file, line).strip()
    return file, line, function, source, file.startswith(_OURS)


def _answers(told: bytes) -> Iterator[ChildStacks]:
    for line in told.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield _stacks.decode(line)


def _signal(child: ChildProcess, thread: int) -> None:
    """Have a child write its stacks; by a thread of ours, if possible.

    On the thread that runs a task, the signal's handler would end a system call of C code early.
    """
    libc = ctypes.CDLL(None)
    if thread and hasattr(libc, "tgkill"):
        libc.tgkill(child.pid, thread, DUMP)
    else:
        child.signal(DUMP)


def _catches(pid: int) -> bool:
    """Whether the process handles the signal; one without a handler would end it."""
    if not kernel.IS_LINUX:
        return True
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (DUMP - 1) & 1)
    return False
