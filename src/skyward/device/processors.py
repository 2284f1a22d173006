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


def threads_beside_a_worker(processors: int) -> int:
    """How many threads use what a worker leaves of so many processors."""
    return processors if processors <= 2 else processors - max(1, processors // 8)


@contextmanager
def spared(processors: int = 0) -> Iterator[None]:
    """PyTorch has fewer threads here than processors; it gets them back after the last worker.

    A number that the user has chosen, with OMP_NUM_THREADS or a smaller one with
    `torch.set_num_threads`, stays.
    """
    global _workers, _before
    import torch

    fewer = threads_beside_a_worker(processors or kernel.processors())
    with _lock:
        _workers += 1
        if _workers == 1:
            is_chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() <= fewer
            _before = 0 if is_chosen else torch.get_num_threads()
            if _before:
                torch.set_num_threads(fewer)
    try:
        yield
    finally:
        with _lock:
            _workers -= 1
            if not _workers and _before and torch.get_num_threads() == fewer:
                torch.set_num_threads(_before)
