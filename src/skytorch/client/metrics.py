"""How a compute is doing, told to its `on_metrics` every second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skytorch.client.event import logger
from skyward.nodes.fleet import GpuUsage, NodeUsage

INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a reading."""

    name: str
    value: float
    unit: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading: how busy the compute is, in a pod its container, and what it has done so far."""

    compute: str
    time: float
    cpu_percent: float
    """Of all processors that the compute may use, since the reading before."""
    memory_used: int
    memory_total: int
    gpus: tuple[GpuUsage, ...]
    """Each has `name`, `percent` (None if unknown), `memory_used` and `memory_total`."""
    calls: int
    """Functions executed, also those that failed."""
    operations: int
    """Torch operations on the compute's devices."""
    bytes_sent: int
    bytes_received: int

    @property
    def metrics(self) -> list[Metric]:
        """How busy the compute is, as a list of named numbers: SkyTorch's own form.

        >>> for metric in reading.metrics:
        ...     print(f"{metric.name}: {metric.value} {metric.unit}")
        """
        found = [
            Metric("cpu.utilization", self.cpu_percent, "percent"),
            Metric("memory.used", self.memory_used, "bytes"),
            Metric("memory.total", self.memory_total, "bytes"),
        ]
        for number, gpu in enumerate(self.gpus):
            labels = {"device": str(number), "gpu": gpu.name}
            if gpu.percent is not None:
                found.append(Metric("gpu.utilization.compute", gpu.percent, "percent", labels))
            found.append(Metric("gpu.memory.used", gpu.memory_used, "bytes", labels))
            found.append(Metric("gpu.memory.total", gpu.memory_total, "bytes", labels))
        return found


OnMetrics = Callable[[Metrics], object]


class Meter:
    """Takes a reading every second, on a thread of its own: a training loop may hold the event
    loop for minutes."""

    def __init__(self, read: Callable[[], Metrics | None], tell: OnMetrics) -> None:
        """`read` returns None while the compute does not answer."""
        self._read, self._tell = read, tell
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skytorch-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            try:
                reading = self._read()
                if reading is not None:
                    self._tell(reading)
            except Exception:
                logger.exception("on_metrics failed and is not called again")
                return

    def stop(self) -> None:
        """No more readings; the one under way is finished."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def reading(
    compute: str, usage: NodeUsage, calls: int, operations: int, sent: int, received: int
) -> Metrics:
    """A reading: how busy the compute is, and what it has done."""
    return Metrics(
        compute,
        time.time(),
        usage.cpu_percent,
        usage.memory_used,
        usage.memory_total,
        usage.gpus,
        calls,
        operations,
        sent,
        received,
    )
