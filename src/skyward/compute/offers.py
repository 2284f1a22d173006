"""Offers: the machines that providers sell, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from skyward import accelerators, checks
from skyward.accelerators import Accelerator
from skyward.console.plain import Quiet
from skyward.errors import ConfigurationError, SkywardError, UnavailableError
from skyward.providers import (
    AllocationKind,
    Offer,
    Provider,
    Request,
    Seller,
    check_allocation,
    check_provider,
    check_region,
    providers_with,
    sells,
)
from skyward.spec import Image

_BOTH: tuple[AllocationKind, ...] = ("on-demand", "spot")


@dataclass(frozen=True, slots=True)
class Search:
    """What was found, or why nothing was."""

    offers: list[Offer]
    why_none: str = ""
    """The reason of the provider, if only one was asked and it has one to give."""


def offers(
    accelerator: Accelerator | str | None = None,
    *,
    vcpus: float | None = None,
    memory_gb: float | None = None,
    region: str | None = None,
    allocation: AllocationKind | None = None,
    max_hourly_cost: float | None = None,
    providers: Iterable[Provider] | None = None,
) -> list[Offer]:
    """The machines that one can buy now, the cheapest first; those of unknown price come last.

    Without `providers`, every provider that sells machines is asked. A provider that does not
    answer is passed over, and a line on stderr says so; if it is the only one, its error is raised.
    `allocation=None` means both on-demand and spot machines.

    >>> for offer in sky.offers("L4", max_hourly_cost=2): print(offer)
    """
    return search(
        accelerator,
        vcpus=vcpus,
        memory_gb=memory_gb,
        region=region,
        allocation=allocation,
        max_hourly_cost=max_hourly_cost,
        providers=providers,
    ).offers


def search(
    accelerator: Accelerator | str | None = None,
    *,
    vcpus: float | None = None,
    memory_gb: float | None = None,
    region: str | None = None,
    allocation: AllocationKind | None = None,
    max_hourly_cost: float | None = None,
    providers: Iterable[Provider] | None = None,
) -> Search:
    """As `offers`, and with the reason if there is none."""
    if isinstance(accelerator, str):
        accelerator = accelerators.parse(accelerator)
    accelerators.check("offers", accelerator)
    numbers = {"vcpus": vcpus, "memory_gb": memory_gb, "max_hourly_cost": max_hourly_cost}
    for what, number in numbers.items():
        checks.above_zero("offers", what, number)
    check_region("offers", region)
    if allocation is not None:
        check_allocation("offers", allocation)
    requests = [
        Request(
            accelerator,
            vcpus,
            memory_gb,
            Image(),
            (),
            allocation=kind,
            max_hourly_cost=max_hourly_cost,
        )
        for kind in (_BOTH if allocation is None else (allocation,))
    ]
    found: list[Offer] = []
    failures: dict[str, SkywardError] = {}
    sellers, unmade = _sellers(providers)
    failures |= unmade
    with ThreadPoolExecutor(max_workers=8) as threads:
        asked = [(each.name, threads.submit(_asked, each, region, requests)) for each in sellers]
        for name, answer in asked:
            try:
                found += answer.result()
            except (UnavailableError, ConfigurationError) as problem:
                failures[name] = problem
    if failures and len(failures) == len(sellers) + len(unmade) == 1:
        raise next(iter(failures.values()))
    for name, failure in failures.items():
        Quiet().note(f"{name} is passed over: {failure}")
    if not found and not failures and len(sellers) == 1:
        return Search([], _why_none(_in_region(sellers[0], region), requests))
    unique = dict.fromkeys(found)
    return Search(sorted(unique, key=lambda offer: _cost(offer.hourly_cost)))


def _asked(provider: Seller, region: str | None, requests: Iterable[Request]) -> list[Offer]:
    there = _in_region(provider, region)
    return [offer for request in requests for offer in there.offers(request)]


def _in_region(provider: Seller, region: str | None) -> Seller:
    return provider if region is None else provider.in_region(region)


def _why_none(provider: Seller, requests: Iterable[Request]) -> str:
    reasons = filter(None, (provider.why_none(request) for request in requests))
    told = "; ".join(dict.fromkeys(reasons))
    return told and f"{provider.name}: {told}"


def _cost(cost: float | None) -> float:
    return math.inf if cost is None else cost


def _sellers(
    providers: Iterable[Provider] | None,
) -> tuple[list[Seller], dict[str, SkywardError]]:
    """The providers to ask, and why others cannot be made."""
    if providers is not None:
        if isinstance(providers, str | type | Provider) or not isinstance(providers, Iterable):
            raise ConfigurationError(
                f"offers(providers={providers!r}): give a list of providers, such as [sky.AWS()]"
            )
        given = list(providers)
        for each in given:
            check_provider("offers", each)
            if not sells(each):
                raise ConfigurationError(
                    f"offers(providers=[{each!r}]): it sells no machines; give instances of "
                    f"{_named(providers_with(sells))}"
                )
        return [each for each in given if sells(each)], {}
    made: list[Seller] = []
    unmade: dict[str, SkywardError] = {}
    for name, kind in providers_with(sells).items():
        try:
            made.append(kind())
        except TypeError:
            unmade[name] = ConfigurationError(
                f"it needs arguments; make one, and give it: offers(providers=[{kind.__name__}"
                "(...)])"
            )
        except SkywardError as problem:
            unmade[name] = problem
    if not made and not unmade:
        raise ConfigurationError("offers(): no provider that sells machines is installed")
    return made, unmade


def _named(kinds: dict[str, type[Any]]) -> str:
    return ", ".join(kind.__name__ for kind in kinds.values()) or "a provider that does"
