"""Interrupts: how a cancelled task is stopped inside the user's code, and only there."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import ssl
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import TypeVar

from skyward.wire.line import LineRequest, arrive, wait_readable
from skyward.worker.failures import OURS
from skyward.worker.places import ReadyTask

AGAIN_SECONDS = 0.005
"""How long an interrupt waits before its next attempt, if it found our own code or an import."""

# Not imported here: most executors never need it.
_FUTURES = os.path.join(os.path.dirname(threading.__file__), "concurrent", "futures", "_base.py")
_BETWEEN = {ssl.__file__, socket.__file__, threading.__file__, _FUTURES}
"""Modules that our code and user code wait in; the callers' frames show which of the two it is."""


T = TypeVar("T")


def await_other(wait: Callable[..., T], timeout: float | None) -> T:
    """Wait for a task that the user's code has started, with a function that waits."""
    return wait(timeout=timeout)


_WAITS = {
    LineRequest.wait.__code__,
    arrive.__code__,
    wait_readable.__code__,
    await_other.__code__,
}
"""Functions of ours that wait for the user, and can be interrupted as the user's code can."""


class Interrupted(KeyboardInterrupt):
    """Raised inside a task that the client cancelled."""


class Interrupts:
    """Raises `Interrupted` in the function of a task."""

    def __init__(self, *, threads: bool) -> None:
        """`threads` says whether tasks run on threads; otherwise they run on the main thread."""
        self._threads = threads
        self._main = threading.main_thread().ident or 0
        self._meant: ReadyTask | None = None
        self._meant_as: type[KeyboardInterrupt] = Interrupted
        self.calling: dict[int, ReadyTask] = {}
        """For each thread, the task whose function is being called there."""

    def raise_in(self, task: ReadyTask, kind: type[KeyboardInterrupt] = Interrupted) -> None:
        """Interrupt the function of a task that runs: cancelled, or with a plain Ctrl-C.

        Between the functions of two tasks nothing is raised: who runs them looks at `cancelled`.
        """
        if self.calling.get(task.thread) is not task:
            return
        if self._threads or task.thread != self._main:
            if _in_an_import(sys._current_frames().get(task.thread)):
                self._raise_later(task, kind)
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(task.thread), ctypes.py_object(kind)
            )
        else:
            # A signal also ends a blocking system call.
            self._meant, self._meant_as = task, kind
            signal.pthread_kill(self._main, signal.SIGINT)

    def on_signal(self, _: int, frame: types.FrameType | None) -> None:
        """Handle SIGINT: raise in the cancelled task, and only while it is in the user's code."""
        task, self._meant = self._meant, None
        kind, self._meant_as = self._meant_as, Interrupted
        if task is None or task is not self.calling.get(self._main):
            return
        if _in_our_code(frame) or _in_an_import(frame):
            # A half-sent frame, memory that is not given back, or a module that stays half
            # imported would harm later tasks.
            self._raise_later(task, kind)
            return
        if kind is Interrupted:
            self.calling.pop(self._main, None)
        raise kind

    def _raise_later(self, task: ReadyTask, kind: type[KeyboardInterrupt]) -> None:
        retry = threading.Timer(AGAIN_SECONDS, self.raise_in, (task, kind))
        retry.daemon = True
        retry.start()


def _in_an_import(frame: types.FrameType | None) -> bool:
    """Whether a module is being imported; one that ends half-way leaves its submodules behind."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _in_our_code(frame: types.FrameType | None) -> bool:
    """Whether our code is sending, printing or giving memory back in this frame."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None or frame.f_code in _WAITS:
        return False
    file = frame.f_code.co_filename
    # Finalizers, which `weakref` calls, give memory back.
    return file.startswith(OURS) or file == weakref.__file__
