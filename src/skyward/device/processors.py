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
from typing import NamedTuple

from skyward import kernel

_lock = threading.Lock()
_workers = 0
_lowered: _Lowered | None = None


class _Lowered(NamedTuple):
    """A number of threads that was lowered; each thread has one of its own."""

    thread: int
    before: int
    after: int


def threads_beside_a_worker(processors: int) -> int:
    """How many threads use what a worker leaves of so many processors."""
    return processors if processors <= 2 else processors - max(1, processors // 8)


@contextmanager
def spared(processors: int | None = None) -> Iterator[None]:
    """PyTorch has fewer threads here than processors; it gets them back after the last worker.

    A number that the user has chosen, with OMP_NUM_THREADS or a smaller one with
    `torch.set_num_threads`, stays.
    """
    global _workers, _lowered
    import torch

    before = torch.get_num_threads()
    after = threads_beside_a_worker(processors or kernel.processors())
    with _lock:
        _workers += 1
        if _lowered is None and "OMP_NUM_THREADS" not in os.environ and before > after:
            _lowered = _Lowered(threading.get_ident(), before, after)
            torch.set_num_threads(after)
    try:
        yield
    finally:
        with _lock:
            _workers -= 1
        give_back()


def give_back() -> None:
    """PyTorch gets its threads back if no worker is left, and if this thread can do that.

    A device that is lost is closed on another thread; the end of its pool asks once more.
    """
    global _lowered
    with _lock:
        if _lowered is None or _workers or _lowered.thread != threading.get_ident():
            return
        import torch

        if torch.get_num_threads() == _lowered.after:
            torch.set_num_threads(_lowered.before)
        _lowered = None
