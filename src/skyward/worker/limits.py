"""Limits the system sets to a worker's process, and how it moves them."""

from __future__ import annotations

import contextlib
import resource


def raise_descriptors() -> None:
    """Open as many files as the system allows: shared memory takes one each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
