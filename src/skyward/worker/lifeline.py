"""The lifeline: a pipe from the agent; when it closes, the child process ends itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading

from skyward import kernel

LEAVE = signal.SIGUSR2
"""The signal by which an executor leaves its hooks and ends; user code may use SIGTERM."""


def hold(descriptor: int) -> None:
    """End this process and its group when the agent closes the pipe, or dies."""
    if kernel.IS_LINUX:
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
    """Kill a child process, which leads a process group, and everything in that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
