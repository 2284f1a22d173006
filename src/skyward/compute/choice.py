"""The choice between pools of which one is enough: in the user's order, or the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from skyward import accelerators, checks
from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError, UnavailableError
from skyward.former import explained
from skyward.nodes.spec import PoolSpec
from skyward.providers import (
    AllocationKind,
    Provider,
    check_allocation,
    check_provider,
    check_region,
    sells,
)

Choose = Literal["cheapest", "first"]


@explained
@dataclass(frozen=True, slots=True)
class Spec:
    """Machines that a pool may have: one of several, for `Compute.any`.

    `max_hourly_cost` is the most that one machine may cost in an hour, in US dollars.

    >>> sky.Spec(sky.AWS(), accelerator=sky.accelerators.L4(), allocation="spot")
    """

    provider: Provider
    accelerator: Accelerator | None = None
    vcpus: float | None = None
    memory_gb: float | None = None
    region: str | None = None
    allocation: AllocationKind = "on-demand"
    max_hourly_cost: float | None = None
    disk_gb: float | None = None

    def __post_init__(self) -> None:
        check_provider("Spec", self.provider)
        accelerators.check("Spec", self.accelerator)
        for what in ("vcpus", "memory_gb", "max_hourly_cost", "disk_gb"):
            checks.above_zero("Spec", what, getattr(self, what))
        check_region("Spec", self.region)
        check_allocation("Spec", self.allocation)

    def __str__(self) -> str:
        """What tells this spec from others, such as "aws g6.xlarge, 8 vCPUs, spot in us-east-1"."""
        name, region = self.provider.name, self.region
        parts = [str(self.accelerator)] if self.accelerator is not None else []
        if self.vcpus is not None:
            parts.append(f"{self.vcpus:g} vCPUs")
        if self.memory_gb is not None:
            parts.append(f"{self.memory_gb:g} GB")
        if sells(self.provider):
            name += f" {self.provider.instance_type}" if self.provider.instance_type else ""
            region = region or self.provider.region
            parts.append("on demand" if self.allocation == "on-demand" else self.allocation)
        told = f"{name} {', '.join(parts)}".rstrip()
        return f"{told} in {region}" if region else told


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pool that could be started."""

    label: str
    pool: PoolSpec


class Failures:
    """Why candidates were passed over."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines: list[str] = []

    def add(self, candidate: Candidate, problem: Exception) -> str:
        """Note that a candidate is passed over; returns the line that tells the user."""
        self._lines.append(f"{candidate.label}: {problem}")
        return f"{self._name}: {candidate.label} is passed over: {problem}"

    def error(self) -> UnavailableError:
        """The error if all candidates were passed over."""
        reasons = "".join(f"\n- {line}" for line in self._lines)
        count = len(self._lines)
        which = "its only spec is not" if count == 1 else f"none of its {count} specs is"
        return UnavailableError(
            f"{self._name} did not start: {which} available; add another spec, or try again later:"
            f"{reasons}"
        )


def check_choice(specs: object, choose: object) -> None:
    """Refuse what `Compute.any` cannot choose from."""
    if choose not in ("cheapest", "first"):
        raise ConfigurationError(
            f"Compute.any(choose={choose!r}): choose 'cheapest', or 'first' for your own order"
        )
    if not isinstance(specs, Sequence) or isinstance(specs, str) or not specs:
        raise ConfigurationError(f"Compute.any({specs!r}): give a list of at least one sky.Spec")
    for spec in specs:
        if not isinstance(spec, Spec):
            raise ConfigurationError(f"Compute.any([{spec!r}]): expected sky.Spec(provider, ...)")


def ordered(
    candidates: Sequence[Candidate], choose: Choose
) -> Iterator[tuple[Candidate, UnavailableError | None]]:
    """The candidates in the order in which to try them, or why one is not to be tried."""
    if choose == "first":
        yield from ((candidate, None) for candidate in candidates)
        return
    prices: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        try:
            prices.append((_price(candidate.pool), candidate))
        except UnavailableError as problem:
            yield candidate, problem
    for _, candidate in sorted(prices, key=lambda priced: priced[0]):
        yield candidate, None


def _price(pool: PoolSpec) -> float:
    provider, price = pool.provider, None
    if sells(provider):
        first = next(iter(provider.offers(pool.request)), None)
        price = None if first is None else first.hourly_cost
    else:
        price = provider.price(pool.request)
    return math.inf if price is None else price
