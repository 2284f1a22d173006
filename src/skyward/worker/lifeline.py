"""The lifeline: a pipe from the agent, at whose end a child process ends itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

LEAVE = signal.SIGUSR2
"""Asks an executor to leave its hooks and end; SIGTERM is left to the user's code."""


def hold(descriptor: int) -> None:
    """End this process and its group when the agent closes the pipe, or dies."""
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
    """Kill a child process, which leads a process group, and everything in that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
