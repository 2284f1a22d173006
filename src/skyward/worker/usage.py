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

from skyward import kernel
from skyward.wire.messages import Usage

_NVML = "libnvidia-ml.so.1"
_LOOPBACK = re.compile(r"lo\d*")


class Gauge:
    """Measures the node; the load of the processors is since the measurement before."""

    def __init__(self, cgroups: Path = Path(kernel.CGROUPS), nvml: str = _NVML) -> None:
        self._cgroup, self._nvml = _Cgroup(str(cgroups)), nvml
        self._gpus: _Gpus | None = None
        self._lock = threading.Lock()
        self._before = self._cgroup.busy_seconds(), time.monotonic()

    @property
    def has_gpus(self) -> bool | None:
        """Whether there are GPUs; None if nobody has measured yet."""
        return None if self._gpus is None else self._gpus.found

    def read(self, number: int) -> Usage:
        """A measurement, as the answer to a client's question."""
        with self._lock:
            # The driver may take seconds to wake up: not before a client asks.
            self._gpus = self._gpus or _Gpus(self._nvml)
            memory = self._cgroup.memory()
            return Usage(number, self._load(), *memory, self._gpus.read(), *_network())

    def _load(self) -> float:
        busy, now = self._cgroup.busy_seconds(), time.monotonic()
        (busy_before, then), self._before = self._before, (busy, now)
        share = (busy - busy_before) / max(now - then, 1e-3) / self._cgroup.processors()
        return round(min(max(100.0 * share, 0.0), 100.0), 1)


def memory_there() -> int:
    """The bytes of memory that this machine has, or the container that this process is in."""
    return _Cgroup(kernel.CGROUPS).memory()[1]


class _Cgroup:
    """What the kernel counts for this container, or for the machine.

    Which files there are is found once: to look for those that are missing takes longer than to
    read the others.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        # Of version 2; only the folder of the whole machine lacks the file.
        contained = os.path.exists(f"{folder}/memory.current")
        self._cpu_stat = _found(f"{folder}/cpu.stat") if contained else ""
        self._memory, self._of_memory = folder, ("memory.current", "memory.max", "inactive_file")
        # Of version 1.
        self._cpu_usage = _found(f"{folder}/cpuacct/cpuacct.usage")
        if not contained:
            self._memory = f"{folder}/memory"
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
            self._of_memory = names
            # Only the folder of the whole machine has the agent's file.
            if os.path.exists(f"{self._memory}/release_agent"):
                self._memory = ""

    def busy_seconds(self) -> float:
        """How long processors were busy."""
        counted = _number_in(self._cpu_stat, "usage_usec") if self._cpu_stat else None
        if counted is not None:
            return counted / 1e6
        nanoseconds = _number(self._cpu_usage) if self._cpu_usage else None
        if nanoseconds is not None:
            return nanoseconds / 1e9
        import psutil

        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))

    def processors(self) -> float:
        """How many processors may be used."""
        return min(float(os.cpu_count() or 1), kernel.processor_share(self._folder))

    def memory(self) -> tuple[int, int]:
        """Bytes used, without what the kernel would drop from its cache, and bytes there are."""
        import psutil

        machine = psutil.virtual_memory()
        used, limit, cache = self._of_memory
        bytes_used = _number(f"{self._memory}/{used}") if self._memory else None
        if bytes_used is None:
            return int(machine.total - machine.available), int(machine.total)
        dropped = _number_in(f"{self._memory}/memory.stat", cache) or 0
        there = min(_number(f"{self._memory}/{limit}") or machine.total, machine.total)
        return max(bytes_used - dropped, 0), int(there)


def _network() -> tuple[int, int]:
    """Bytes received and sent by all interfaces but those for the machine itself."""
    if kernel.IS_LINUX:
        return _network_of_linux(_text("/proc/self/net/dev") or "")
    import psutil

    counted = psutil.net_io_counters(pernic=True).items()
    real = [each for name, each in counted if not _LOOPBACK.fullmatch(name)]
    return sum(each.bytes_recv for each in real), sum(each.bytes_sent for each in real)


def _network_of_linux(table: str) -> tuple[int, int]:
    """The same from the kernel's table; psutil takes four times as long, for more numbers."""
    received = sent = 0
    for line in table.splitlines()[2:]:
        name, _, numbers = line.rpartition(":")
        if not _LOOPBACK.fullmatch(name.strip()):
            counts = numbers.split(None, 9)
            received, sent = received + int(counts[0]), sent + int(counts[8])
    return received, sent


def _text(file: str) -> str | None:
    """What is in a small file; None if it is not there. `read_text` takes three times as long."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)) as opened:
        try:
            return opened.read().decode()
        except (OSError, UnicodeDecodeError):
            return None


def _number(file: str) -> int | None:
    try:
        return int(_text(file) or "")
    except ValueError:
        return None


def _number_in(file: str, name: str) -> int | None:
    """The number after a name that begins a line."""
    _, found, after = f"\n{_text(file) or ''}".partition(f"\n{name} ")
    try:
        return int(after.partition("\n")[0]) if found else None
    except ValueError:
        return None


def _found(file: str) -> str:
    return file if os.path.exists(file) else ""


class _Load(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Gpus:
    """The NVIDIA GPUs of the node, asked through the driver's own library, if it is there."""

    def __init__(self, library: str) -> None:
        self._library: Any = None
        self.found = False
        """Whether the driver's library is there."""
        with contextlib.suppress(OSError):
            loaded = ctypes.CDLL(library)
            if loaded.nvmlInit_v2() == 0:
                self._library = loaded
                self.found = True

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
