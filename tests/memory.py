"""How much memory a process has allocated, whatever the kernel has done with the pages."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

SHARED = re.compile(r"^(\w+)-(\w+) .w.s .* /(?:memfd:|dev/shm/)", flags=re.MULTILINE)


def in_use(process: psutil.Process) -> int:
    """Bytes of address space that a process has for data.

    The resident set is no measure of it: a kernel that reclaims idle pages makes the resident set
    shrink while nothing is freed, and grow again while nothing is allocated. On Linux this counts
    private memory that can be written to, and shared memory that is mapped.
    """
    folder = Path(f"/proc/{process.pid}")
    try:
        status, maps = (folder / "status").read_text(), (folder / "maps").read_text()
    except OSError:
        return int(process.memory_info().vms)
    (private,) = re.findall(r"^VmData:\s+(\d+) kB$", status, flags=re.MULTILINE)
    shared = [int(end, 16) - int(start, 16) for start, end in SHARED.findall(maps)]
    return 1024 * int(private) + sum(shared)
