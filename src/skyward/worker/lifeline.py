"""The lifeline: a process that must not outlive its agent holds on to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

LEAVE = signal.SIGUSR2
"""Asks an executor to end in good order; SIGTERM stays what it is to the code that runs there."""


def hold(descriptor: int) -> None:
    """End this process and its children when the pipe's other end, or the parent, is gone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    threading.Thread(
        target=_watch, args=(descriptor,), name="skyward-lifeline", daemon=True
    ).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def cut(pid: int) -> None:
    """End a child process and everything it started; it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
