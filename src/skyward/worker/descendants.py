"""Descendants: the processes below this one, found and ended whatever sessions they have.

On Linux this process adopts orphans, so that a daemon stays its descendant. On other systems, a
daemon with a session of its own survives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING

from skyward import kernel

if TYPE_CHECKING:
    import psutil

TERMINATE_SECONDS = 1.0
"""How long processes have to end on SIGTERM before they are killed."""


def adopt_orphans() -> None:
    """Be the parent of descendants whose own parent has ended, where the kernel can do that."""
    if kernel.IS_LINUX:
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_all(seconds: float = TERMINATE_SECONDS) -> None:
    """Terminate, then kill, every descendant of this process."""
    if _reap():
        return
    # Imported here: it takes 20 ms, and most programs leave nothing behind.
    import psutil

    deadline = time.monotonic() + seconds
    for child in _descendants():
        with contextlib.suppress(psutil.Error):
            child.terminate()
    while _descendants() and time.monotonic() < deadline:
        time.sleep(0.01)
    # In a loop: a process that forks meanwhile leaves a child, which this process adopts.
    while left := _descendants():
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)


def _reap() -> bool:
    """Take note of children that have ended; whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _descendants() -> list[psutil.Process]:
    import psutil

    _reap()
    return list(psutil.Process().children(recursive=True))
