"""Limits of the system for a worker's process; they are raised where the system allows it."""

from __future__ import annotations

import contextlib
import math
import resource


def raise_descriptors(count: float = math.inf) -> float:
    """Allow so many open files if the system permits it, and return how many are allowed now.

    Each shared memory segment is an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed, most = (math.inf if each == resource.RLIM_INFINITY else each for each in (soft, hard))
    wanted = min(count, most)
    if wanted <= allowed:
        return allowed
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if wanted == most else int(wanted), hard))
        return wanted
    return allowed
