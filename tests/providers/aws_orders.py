"""Orders for machines on AWS, and what came of them."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward.accelerators import Accelerator
from skyward.providers import Allocation, Offer, Order, Request
from skyward.providers.aws import AWS
from skyward.providers.aws.machine import AWSMachine
from skyward.spec import Image

from .aws_gateway import Gateway
from .aws_messages import Call

Then = Callable[["Outcome"], Awaitable[None]]
MAKING = ("Create", "Import", "Authorize", "Run")
"""How the names of operations begin that make something."""


def a_request(accelerator: Accelerator | None = None, **changed: Any) -> Request:
    """A request for a machine."""
    given: dict[str, Any] = {"vcpus": None, "memory_gb": None, "image": Image(), "volumes": ()}
    return Request(accelerator, **{**given, **changed})


@dataclass
class Outcome:
    """The machines that were made for a pool, and why others were not."""

    pool: str
    machines: list[AWSMachine] = field(default_factory=list)
    problems: list[BaseException] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """What all those said that failed."""
        (message,) = {f"{type(each).__name__}: {each}" for each in self.problems}
        assert not self.machines
        return message

    @property
    def offer(self) -> Offer:
        """What all machines were bought by."""
        assert not self.problems, self.problems
        (offer,) = {machine.offer for machine in self.machines}
        assert offer is not None
        return offer


def attempt(
    provider: AWS, request: Request | None = None, *, nodes: int = 1, then: Then | None = None
) -> Outcome:
    """Order the machines of a pool, and remove them after they were used."""
    return asyncio.run(_attempt(provider, request or a_request(), nodes, then))


async def _attempt(provider: AWS, request: Request, nodes: int, then: Then | None) -> Outcome:
    outcome = Outcome(f"t-{uuid.uuid4().hex[:8]}")
    allocation = provider.allocate(outcome.pool)
    allocation.expect(range(nodes))
    orders = [
        Order(outcome.pool, node, request, note=outcome.notes.append, name="mine")
        for node in range(nodes)
    ]
    made = await asyncio.gather(*map(allocation.get, orders), return_exceptions=True)
    outcome.machines = [each for each in made if isinstance(each, AWSMachine)]
    outcome.problems = [each for each in made if isinstance(each, BaseException)]
    try:
        if then is not None:
            assert not outcome.problems, outcome.problems
            await then(outcome)
    finally:
        await remove(allocation)
    return outcome


async def remove(allocation: Allocation[AWSMachine]) -> None:
    """Remove everything of a pool."""
    await asyncio.gather(*(machine.destroy() for machine in await allocation.find()))
    await allocation.sweep()
    await allocation.close()


def making(aws: Gateway) -> list[Call]:
    """The calls that would have made something."""
    return [call for call in list(aws.calls) if call.action.startswith(MAKING)]


def left(aws: Gateway) -> list[str]:
    """What there is in the account, and the files of keys on this machine."""
    keys = Path(os.environ["SKYWARD_STATE"], "aws")
    return aws.leftovers() + [str(each) for each in keys.rglob("*") if each.is_file()]
