"""Counts: what a pool has done so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Numbers since the pool was made."""

    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    workers_died: int = 0
    nodes_lost: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    started: float = field(default_factory=time.monotonic)
