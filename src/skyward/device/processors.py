"""Processors of this host that PyTorch's threads here leave to a worker on the same host.

After a parallel operation on the CPU, PyTorch's threads spin for milliseconds in wait of the next.
If there are as many as processors, they and the worker's thread, which feeds the GPU, stand in
each other's way for whole time slices. On 16 processors, a training step fed by a DataLoader took
3.7 ms with 16 threads and 2.3 ms with 14.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from skyward import kernel

_lock = threading.Lock()
_workers = 0
_before = 0
"""How many threads PyTorch had before the first worker; 0 if that was left as it is."""
_thread = 0
"""The thread that lowered the number: it has one of its own, and only it can raise it again."""


def threads_beside_a_worker(processors: int) -> int:
    """How many threads use what a worker leaves of so many processors."""
    return processors if processors <= 2 else processors - max(1, processors // 8)


@contextmanager
def spared(processors: int | None = None) -> Iterator[None]:
    """PyTorch has fewer threads here than processors; it gets them back after the last worker.

    A number that the user has chosen, with OMP_NUM_THREADS or a smaller one with
    `torch.set_num_threads`, stays.
    """
    global _workers, _before, _thread
    import torch

    fewer = threads_beside_a_worker(processors or kernel.processors())
    with _lock:
        _workers += 1
        if not _before and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > fewer:
            _before, _thread = torch.get_num_threads(), threading.get_ident()
            torch.set_num_threads(fewer)
    try:
        yield
    finally:
        with _lock:
            _workers -= 1
        give_back(processors)


def give_back(processors: int | None = None) -> None:
    """PyTorch gets its threads back if no worker is left, and if this thread can do that.

    A device that is lost is closed on another thread; the end of its pool asks once more.
    """
    global _before
    with _lock:
        if not _before or _workers or threading.get_ident() != _thread:
            return
        import torch

        if torch.get_num_threads() == threads_beside_a_worker(processors or kernel.processors()):
            torch.set_num_threads(_before)
        _before = 0
