"""How busy a node is: its processors, its memory, its NVIDIA GPUs, its network.

In a container, that is the container's share, as its cgroup counts it, and not the whole machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyward.wire.messages import Usage

CGROUPS = Path("/sys/fs/cgroup")
_NVML = "libnvidia-ml.so.1"


class Gauge:
    """Measures the node; the load of the processors is since the measurement before."""

    def __init__(self, cgroups: Path = CGROUPS, nvml: str = _NVML) -> None:
        self._cgroups, self._nvml = cgroups, nvml
        self._gpus: _Gpus | None = None
        self._lock = threading.Lock()
        self._before = self._busy_seconds(), time.monotonic()

    def read(self, number: int) -> Usage:
        """A measurement, as the answer to a client's question."""
        with self._lock:
            # The driver may take seconds to wake up: not before a client asks.
            self._gpus = self._gpus or _Gpus(self._nvml)
            memory = _memory(self._cgroups)
            return Usage(number, self._load(), *memory, self._gpus.read(), *_network())

    def _load(self) -> float:
        busy, now = self._busy_seconds(), time.monotonic()
        (busy_before, then), self._before = self._before, (busy, now)
        share = (busy - busy_before) / max(now - then, 1e-3) / _processors(self._cgroups)
        return round(min(max(100.0 * share, 0.0), 100.0), 1)

    def _busy_seconds(self) -> float:
        counted = _numbers(self._cgroups / "cpu.stat").get("usage_usec")
        if counted is not None and _is_contained(self._cgroups):
            return counted / 1e6
        nanoseconds = _number(self._cgroups / "cpuacct" / "cpuacct.usage")
        if nanoseconds is not None:
            return nanoseconds / 1e9
        import psutil

        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def _is_contained(cgroups: Path) -> bool:
    """Whether the folder is a container's own; only that of the whole machine lacks the file."""
    return (cgroups / "memory.current").exists()


def _processors(cgroups: Path) -> float:
    """How many processors may be used."""
    there = float(os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroups / "cpu.max").read_text().split()
        return min(there, float(quota) / float(period)) if quota != "max" else there
    quota_us = _number(cgroups / "cpu" / "cpu.cfs_quota_us")
    period_us = _number(cgroups / "cpu" / "cpu.cfs_period_us")
    if quota_us and period_us and quota_us > 0:
        return min(there, quota_us / period_us)
    return there


def _memory(cgroups: Path) -> tuple[int, int]:
    """Bytes used, without what the kernel would drop from its cache, and bytes there are."""
    import psutil

    machine = psutil.virtual_memory()
    if _is_contained(cgroups):
        folder, used, limit, cache = cgroups, "memory.current", "memory.max", "inactive_file"
    else:
        folder, used, limit = cgroups / "memory", "memory.usage_in_bytes", "memory.limit_in_bytes"
        cache = "total_inactive_file"
    bytes_used = _number(folder / used)
    # In version 1 of cgroups, only the folder of the whole machine has the agent's file.
    if bytes_used is None or (folder / "release_agent").exists():
        return int(machine.total - machine.available), int(machine.total)
    dropped = _numbers(folder / "memory.stat").get(cache, 0)
    there = min(_number(folder / limit) or machine.total, machine.total)
    return max(bytes_used - dropped, 0), int(there)


def _network() -> tuple[int, int]:
    """Bytes received and sent by all interfaces but those for the machine itself."""
    import psutil

    counted = psutil.net_io_counters(pernic=True).items()
    real = [each for name, each in counted if not re.fullmatch(r"lo\d*", name)]
    return sum(each.bytes_recv for each in real), sum(each.bytes_sent for each in real)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numbers(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}
    except (OSError, ValueError):
        return {}


class _Load(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Gpus:
    """The NVIDIA GPUs of the node, asked through the driver's own library, if it is there."""

    def __init__(self, library: str) -> None:
        self._library: Any = None
        with contextlib.suppress(OSError):
            loaded = ctypes.CDLL(library)
            if loaded.nvmlInit_v2() == 0:
                self._library = loaded

    def read(self) -> list[tuple[str, float | None, int, int]]:
        """The name, the load in percent if it is known, and memory used and there, of each."""
        if self._library is None:
            return []
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = (self._of(index) for index in range(count.value))
        return [each for each in found if each is not None]

    def _of(self, index: int) -> tuple[str, float | None, int, int] | None:
        library, handle = self._library, ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            return None
        name, load, memory = ctypes.create_string_buffer(96), _Load(), _Memory()
        known = _asked(library.nvmlDeviceGetUtilizationRates, handle, load)
        if not _asked(library.nvmlDeviceGetMemoryInfo, handle, memory):
            return None
        library.nvmlDeviceGetName(handle, name, 96)
        # A part of a GPU (MIG) has memory of its own, but no load.
        percent = float(load.gpu) if known else None
        return name.value.decode(errors="replace"), percent, memory.used, memory.total


def _asked(question: Callable[..., int], handle: Any, answer: ctypes.Structure) -> bool:
    return question(handle, ctypes.byref(answer)) == 0
