"""The specification of a pool, which `Compute` makes from its arguments."""

from __future__ import annotations

from dataclasses import dataclass

from skyward.accelerators import Accelerator
from skyward.nodes.preparations import Preparations
from skyward.providers import Provider, Request
from skyward.spec import Nodes, Options, Worker


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Everything that decides how a pool starts and runs."""

    provider: Provider
    nodes: Nodes
    accelerator: Accelerator | None
    worker: Worker
    options: Options
    request: Request
    name: str
    preparations: Preparations
