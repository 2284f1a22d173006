"""Waiting, for functions that tests run on workers."""

from __future__ import annotations

import os
import time


def wait_for(path: str | os.PathLike[str], seconds: float = 100.0) -> None:
    """On a worker: until a file is there."""
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.002)
