"""Inspection: a child process shows its agent where its threads are."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import types

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
