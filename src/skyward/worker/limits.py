"""Limits that the system sets to a worker's process, raised where that is allowed."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptors() -> None:
    """Allow as many open files as the system permits: each shared memory segment is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
