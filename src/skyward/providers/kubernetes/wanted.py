"""A node of a pool that is to have a pod, and what the client knows of its pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from skyward.providers.kubernetes.access import Object


@dataclass(eq=False)
class Wanted:
    """A node that is to have a pod."""

    tell: Callable[[str], None]
    running: asyncio.Future[Object] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    together: frozenset[int] = frozenset()
    """The nodes that are ordered at the same time, this one among them."""
    serves: bool = False
    """Whether the pod has an agent, and the pool's record says so."""
    pod: str = ""
    reason: str = ""
    """Why there is no running pod yet."""
    refusal: str = ""
    """What the registry said when the image was pulled."""
    has_failed: bool = False
    """Whether it is being told why its pod has failed."""

    @property
    def has_run(self) -> bool:
        done = self.running.done() and not self.running.cancelled()
        return done and self.running.exception() is None

    def fail(self, problem: BaseException) -> None:
        if not self.running.done():
            self.running.set_exception(problem)
            self.running.exception()  # Nobody may be waiting for it any more.
