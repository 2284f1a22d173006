"""What a pool is to be, as `Compute` was asked for it."""

from __future__ import annotations

from dataclasses import dataclass

from skyward.accelerators import Accelerator
from skyward.pool.preparing import Preparations
from skyward.providers import Hosting, Provider, Wish
from skyward.spec import Nodes, Options, Worker


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """All that decides how a pool comes up and runs."""

    provider: Provider | Hosting
    nodes: Nodes
    accelerator: Accelerator | None
    worker: Worker
    options: Options
    wish: Wish
    name: str
    preparations: Preparations
