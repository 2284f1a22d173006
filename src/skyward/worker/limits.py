"""Limits of the system for a worker's process; they are raised where the system allows it."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptors() -> None:
    """Allow as many open files as the system permits: each shared memory segment is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
