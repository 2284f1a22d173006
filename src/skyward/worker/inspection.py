"""Inspection: a child process shows its agent where its threads are, and which tasks they run."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
import types
from dataclasses import dataclass

import msgspec

from skyward import kernel

DUMP: int = signal.SIGRTMAX - 7 if kernel.IS_LINUX else getattr(signal, "SIGINFO", 29)
"""The signal on which a child writes its stacks even while C code holds the interpreter.

No library that we know uses it; SIGUSR1 and SIGUSR2 belong to schedulers and to `LEAVE`.
"""
DEPTH = 200
"""How many frames of a thread are told, from the innermost outwards."""
WRITE_SECONDS = 2.0
"""How long a child waits for an agent that does not read its answer."""

_RECORD = struct.Struct("<qdQH200s")
_TASK = struct.Struct("<q")
"""The first part of a record, which is 0 if no task runs."""


class ChildThread(msgspec.Struct, array_like=True):
    """One thread of a child: its frames, innermost first, are (file, line, function)."""

    ident: int
    name: str
    frames: list[tuple[str, int, str]]


class ChildStacks(msgspec.Struct):
    """A child's answer to the question of that number."""

    number: int
    teller: int
    """The number that the kernel has for the thread that answers."""
    threads: list[ChildThread]


@dataclass(frozen=True, slots=True)
class BoardEntry:
    """A task that runs: its number and name, the thread that runs it, and for how many seconds."""

    task: int
    name: str
    thread: int
    seconds: float


class TaskBoard:
    """Memory that a child shares with its agent: the task of each of its slots.

    The agent reads it without the child's help, since the child may not be able to give any.
    """

    def __init__(self, descriptor: int, slots: int) -> None:
        self._slots = slots
        self._memory = mmap.mmap(descriptor, slots * _RECORD.size)

    def begin(self, slot: int, task: int, name: str) -> None:
        """Note that this thread runs a task from now on."""
        text = name.encode(errors="replace")[:200]
        record = (task, time.monotonic(), threading.get_ident(), len(text), text)
        _RECORD.pack_into(self._memory, slot * _RECORD.size, *record)

    def end(self, slot: int) -> None:
        """Note that the slot's task is over."""
        _TASK.pack_into(self._memory, slot * _RECORD.size, 0)

    def read(self) -> list[BoardEntry]:
        """The tasks that run now."""
        found = []
        for slot in range(self._slots):
            # Twice, until both are the same: the child may be writing.
            record, again = self._record(slot), self._record(slot)
            while record != again:
                record, again = again, self._record(slot)
            task, since, thread, length, text = record
            if task:
                name = text[:length].decode(errors="replace")
                found.append(BoardEntry(task, name, thread, time.monotonic() - since))
        return found

    def _record(self, slot: int) -> tuple[int, float, int, int, bytes]:
        task, since, thread, length, text = _RECORD.unpack_from(self._memory, slot * _RECORD.size)
        return task, since, thread, length, text

    def close(self) -> None:
        """Give the memory back."""
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
    os.ftruncate(descriptor, slots * _RECORD.size)
    return descriptor


class Inspection:
    """The child's end: answers its agent's questions, in Python or from the signal's handler."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is the pipe to the agent."""
        self._pipe = descriptor
        os.set_inheritable(descriptor, False)
        # A signal handler must never wait for the agent.
        os.set_blocking(descriptor, False)
        faulthandler.register(DUMP, file=descriptor, all_threads=True, chain=False)

    def answer(self, number: int) -> None:
        """Tell the agent where every thread but this one is."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads = []
        for ident, top in sys._current_frames().items():
            if ident == threading.get_ident():
                continue
            frames: list[tuple[str, int, str]] = []
            frame: types.FrameType | None = top
            while frame is not None and len(frames) < DEPTH:
                code = frame.f_code
                frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
                frame = frame.f_back
            threads.append(ChildThread(ident, names.get(ident, ""), frames))
        answer = ChildStacks(number, threading.get_native_id(), threads)
        self._write(msgspec.json.encode(answer) + b"\n")

    def _write(self, data: bytes) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        room = select.poll()
        room.register(self._pipe, select.POLLOUT)
        while data and room.poll(max(0.0, deadline - time.monotonic()) * 1000):
            with contextlib.suppress(BlockingIOError):
                try:
                    data = data[os.write(self._pipe, data) :]
                except BrokenPipeError:
                    return
