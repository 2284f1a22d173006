"""How a compute is doing, told to its `on_metrics` every second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from skytorch.client.event import logger

INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading: the machine's load, and what the compute has done so far."""

    compute: str
    time: float
    cpu_percent: float
    """Of all cores of the machine, since the reading before."""
    memory_used: int
    memory_total: int
    calls: int
    """Functions executed, also those that failed."""
    operations: int
    """Torch operations on the compute's devices."""
    bytes_sent: int
    bytes_received: int


OnMetrics = Callable[[Metrics], object]


class Meter:
    """Takes a reading every second, on a thread of its own: a training loop may hold the event
    loop for minutes."""

    def __init__(self, read: Callable[[], Metrics], tell: OnMetrics) -> None:
        self._read, self._tell = read, tell
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skytorch-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            try:
                self._tell(self._read())
            except Exception:
                logger.exception("on_metrics failed and is not called again")
                return

    def stop(self) -> None:
        """No more readings; the one under way is finished."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def read(compute: str, calls: int, operations: int, sent: int, received: int) -> Metrics:
    """A reading of this machine, with what the compute has done."""
    import psutil

    memory = psutil.virtual_memory()
    return Metrics(
        compute,
        time.time(),
        psutil.cpu_percent(),
        memory.total - memory.available,
        memory.total,
        calls,
        operations,
        sent,
        received,
    )
