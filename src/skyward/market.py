"""The market: machines that providers sell, and their prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError

AllocationKind = Literal["on-demand", "spot", "spot-if-available"]
"""How a machine is bought: at a fixed price, or cheaper and until the provider takes it back."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine that a provider sells.

    >>> str(Offer("aws", "us-east-1", None, "g6.xlarge", L4(), 4, 16, "x86_64", "spot", 0.33))
    'g6.xlarge (L4-24GB, 4 vCPUs, 16 GB) in us-east-1, spot, $0.33 an hour'
    """

    provider: str
    region: str
    zone: str | None
    """The part of the region; None for any."""
    instance_type: str
    accelerator: Accelerator | None
    """The accelerators of the machine, which may be more than were asked for."""
    vcpus: float
    memory_gb: float
    architecture: str
    allocation: Literal["on-demand", "spot"]
    hourly_cost: float | None
    """The price in US dollars; None if it is unknown."""

    def __str__(self) -> str:
        return self.of(1)

    def of(self, count: int) -> str:
        """The offer and its price, for so many machines.

        >>> Offer("aws", "us-east-1", None, "t3.nano", None, 2, 0.5, "x86_64", "spot", 2).of(3)
        '3 x t3.nano (2 vCPUs, 0.5 GB) in us-east-1, spot, $2.00 an hour each, $6.00 an hour in all'
        """
        parts = f"{self.vcpus:g} vCPUs, {self.memory_gb:g} GB"
        if self.accelerator is not None:
            parts = f"{self.accelerator}, {parts}"
        price, cost = "price unknown", self.hourly_cost
        if cost is not None:
            price = f"{money(cost)} an hour"
            if count > 1:
                price = f"{price} each, {money(cost * count)} an hour in all"
        how = "spot" if self.allocation == "spot" else "on demand"
        what = f"{count} x {self.instance_type}" if count > 1 else self.instance_type
        return f"{what} ({parts}) in {self.zone or self.region}, {how}, {price}"


def money(dollars: float) -> str:
    """An amount in US dollars, with as many decimals as make a difference.

    >>> money(0.0116), money(40.9)
    ('$0.0116', '$40.90')
    """
    if 0 < dollars < 0.00005:
        return "less than $0.0001"
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"


def check_allocation(call: str, allocation: object) -> None:
    """Refuse what is no `AllocationKind`, in the call of a function."""
    if allocation not in get_args(AllocationKind):
        raise ConfigurationError(
            f"{call}(allocation={allocation!r}): choose 'on-demand', 'spot', or "
            "'spot-if-available', which takes an on-demand machine where there is no spot machine"
        )


def check_region(call: str, region: object) -> None:
    """Refuse what cannot be a region's name, in the call of a function."""
    if region is not None and (not isinstance(region, str) or not region.strip()):
        raise ConfigurationError(
            f"{call}(region={region!r}): give the provider's name of a region, such as 'us-east-1'"
        )
