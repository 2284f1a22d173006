"""How much memory a process has in use, whatever the kernel has done with the pages."""

from __future__ import annotations

import re
from pathlib import Path

import psutil


def in_use(process: psutil.Process) -> int:
    """Bytes that a process has allocated and written to.

    The resident set is no measure of it: a kernel that reclaims idle pages makes the resident set
    shrink while nothing is freed, and grow again while nothing is allocated. On Linux this counts
    anonymous and shared memory, in memory or swapped out; files that are mapped do not count.
    """
    folder = Path(f"/proc/{process.pid}")
    try:
        text = (folder / "smaps_rollup").read_text() + (folder / "status").read_text()
    except OSError:
        return int(process.memory_info().rss)
    found = re.findall(r"^(?:Anonymous|Swap|RssShmem):\s+(\d+) kB$", text, flags=re.MULTILINE)
    return 1024 * sum(map(int, found))
