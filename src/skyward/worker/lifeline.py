"""The lifeline: a pipe from the agent; when it closes, the child process ends itself.

A byte on it is the number of a question: where are you?
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from skyward import kernel

LEAVE = signal.SIGUSR2
"""The signal by which an executor leaves its hooks and ends; user code may use SIGTERM."""


def hold(descriptor: int, asked: Callable[[int], None]) -> None:
    """End this process and its group when the agent closes the pipe, or dies.

    `asked` is called with the number of every question that the agent asks.
    """
    if kernel.IS_LINUX:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    threading.Thread(
        target=_watch, args=(descriptor, asked), name="skyward-lifeline", daemon=True
    ).start()


def _watch(descriptor: int, asked: Callable[[int], None]) -> None:
    # First the answer to a question that nobody asked: it tells the agent which thread this is.
    number = b"\0"
    while number:
        try:
            asked(number[0])
        except Exception:
            # The process must still end with its agent, which notices that no answer comes.
            traceback.print_exc(file=sys.__stderr__)
        number = os.read(descriptor, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def cut(pid: int) -> None:
    """Kill a child process, which leads a process group, and everything in that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
