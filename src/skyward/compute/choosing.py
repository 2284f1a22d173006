"""Choosing: pools of which one is enough, tried in the user's order or the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from skyward import accelerators, checks
from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError, UnavailableError
from skyward.market import Allocation, check_allocation, check_region
from skyward.nodes.spec import PoolSpec
from skyward.providers import Provider, check_provider, sells

Choose = Literal["cheapest", "first"]


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
    allocation: Allocation = "on-demand"
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
        parts: list[object] = [self.provider.name]
        if self.accelerator is not None:
            parts.append(self.accelerator)
        if sells(self.provider):
            parts.append("on demand" if self.allocation == "on-demand" else self.allocation)
        if self.region is not None:
            parts.append(f"in {self.region}")
        return " ".join(map(str, parts))


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
        return UnavailableError(
            f"{self._name} did not start: none of its {len(self._lines)} specs is available; add "
            f"another spec, or try again later:{reasons}"
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
