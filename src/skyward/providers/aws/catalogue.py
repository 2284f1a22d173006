"""The catalogue of EC2: the types that a region sells, where, and what they cost."""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from skyward.errors import ConfigurationError, UnavailableError, UnreachableError
from skyward.market import Offer, money
from skyward.providers import Request
from skyward.providers.aws import choice, prices, remembered
from skyward.providers.aws.instance_types import InstanceType, read_type
from skyward.providers.aws.remembered import Remembered, SpotPrices

if TYPE_CHECKING:
    from skyward.providers.aws.account import Account

_HOUR = 3600.0
TYPES_SECONDS = 7 * 24 * _HOUR
ON_DEMAND_SECONDS = 24 * _HOUR
SPOT_SECONDS, FRESH_SPOT_SECONDS = _HOUR, 600.0
"""How old a spot price may be in a listing, and before a purchase."""
REFUSED_SECONDS = _HOUR
"""After how long to ask again for prices that AWS did not tell."""

_log = logging.getLogger("skyward")


class Catalogue:
    """What EC2 sells in a region; any thread may ask.

    Answers of AWS are kept in a file below the user's cache directory, or `SKYWARD_CACHE`.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._path = remembered.place(account)
        self._lock = threading.Lock()
        self._known: Remembered | None = None

    def offers(
        self,
        request: Request,
        *,
        architecture: str | None = None,
        instance_type: str | None = None,
        fresh: bool = False,
    ) -> list[Offer]:
        """What fulfils a request, cheapest first: spot instances zone by zone, others in any zone.

        With `fresh`, spot prices are those of the last minutes. Raises `UnavailableError` if there
        is a limit to the price, and AWS does not say what anything costs.
        """
        found, _ = self._chosen(request, architecture, instance_type)
        offers = self._priced(request, found, architecture, fresh)
        limit = request.max_hourly_cost
        if limit is None:
            return offers
        if not _any_price(offers):
            # The user may have got the permission meanwhile.
            self._forget_refusals()
            offers = self._priced(request, found, architecture, fresh)
        if offers and not _any_price(offers):
            raise UnavailableError(
                f"AWS does not say what {offers[0].instance_type} costs, so max_hourly_cost="
                f"{money(limit)} cannot be kept: allow pricing:GetProducts and "
                "ec2:DescribeSpotPriceHistory, as docs/aws.md says, or leave max_hourly_cost out"
            )
        return [
            each for each in offers if each.hourly_cost is not None and each.hourly_cost <= limit
        ]

    def why_none(
        self,
        request: Request,
        *,
        architecture: str | None = None,
        instance_type: str | None = None,
    ) -> str:
        """Why nothing fulfils a request, in a sentence."""
        found, why = self._chosen(request, architecture, instance_type)
        if why:
            return why
        offers = self._priced(request, found, architecture, False)
        if not offers:
            return f"no zone of {self._account.region} sells {found[0].name} as a spot instance now"
        cheapest = min(offers, key=_rank)
        if cheapest.hourly_cost is None or request.max_hourly_cost is None:
            return f"EC2 sells {cheapest.instance_type}, but says no price for it"
        how = " as a spot instance" if cheapest.allocation == "spot" else ""
        return (
            f"the cheapest is {cheapest.instance_type}{how} at {money(cheapest.hourly_cost)} an "
            f"hour, above max_hourly_cost={money(request.max_hourly_cost)}"
        )

    def type(self, name: str) -> InstanceType:
        """What EC2 says about a type; raises `ConfigurationError` if it sells none of that name."""
        types = self._catalogue().types
        for kind in types:
            if kind.name == name:
                return kind
        names = [kind.name for kind in types]
        close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
        hint = f"; there is {', '.join(close)}" if close else ""
        raise ConfigurationError(
            f"AWS(instance_type={name!r}): EC2 sells no such type in {self._account.region}{hint}"
        )

    def zones_of(self, name: str) -> tuple[str, ...]:
        """The zones of the region that have a type."""
        return tuple(self._catalogue().zones.get(name, ()))

    def _chosen(
        self,
        request: Request,
        architecture: str | None,
        instance_type: str | None,
    ) -> tuple[list[InstanceType], str]:
        known = self._catalogue()
        requirements = choice.requirements(
            request,
            self._account.region,
            architecture=architecture,
            named=instance_type is not None,
        )
        types = known.types if instance_type is None else [self.type(instance_type)]
        return choice.suitable(types, requirements)

    def _priced(
        self,
        request: Request,
        kinds: Sequence[InstanceType],
        architecture: str | None,
        fresh: bool,
    ) -> list[Offer]:
        known = self._catalogue()
        offers: list[Offer] = []
        if request.allocation != "on-demand":
            sold = [kind for kind in kinds if "spot" in kind.usages]
            costs = self._spot([kind.name for kind in sold], fresh)
            for kind in sold:
                unknown = dict.fromkeys(known.zones.get(kind.name, ()))
                there: dict[str, float | None] = {
                    **(unknown if costs is None else costs[kind.name])
                }
                offers += [
                    self._offer(kind, architecture, "spot", zone, cost)
                    for zone, cost in there.items()
                ]
            offers.sort(key=_rank)
        if request.allocation != "spot":
            offers += sorted(
                (
                    self._offer(
                        kind, architecture, "on-demand", None, known.on_demand.get(kind.name)
                    )
                    for kind in kinds
                ),
                key=_rank,
            )
        return offers

    def _offer(
        self,
        kind: InstanceType,
        architecture: str | None,
        allocation: Literal["on-demand", "spot"],
        zone: str | None,
        cost: float | None,
    ) -> Offer:
        usual = "x86_64" if "x86_64" in kind.architectures else kind.architectures[0]
        return Offer(
            provider="aws",
            region=self._account.region,
            zone=zone,
            instance_type=kind.name,
            accelerator=kind.accelerator,
            vcpus=kind.vcpus,
            memory_gb=kind.memory_gb,
            architecture=architecture or usual,
            allocation=allocation,
            hourly_cost=cost,
        )

    # What AWS says.

    def _catalogue(self) -> Remembered:
        """Types, zones and on-demand prices, as old as they may be."""
        with self._lock:
            if self._known is None:
                self._known = remembered.read(self._path)
            known, now = self._known, time.time()
            told = ON_DEMAND_SECONDS if known.on_demand else REFUSED_SECONDS
            due: list[Callable[[], None]] = []
            if not 0 <= now - known.types_at < TYPES_SECONDS:
                due.append(self._fetch_types)
            if not 0 <= now - known.zones_at < TYPES_SECONDS:
                due.append(self._fetch_zones)
            if not 0 <= now - known.on_demand_at < told:
                due.append(self._fetch_on_demand)
            if due:
                with ThreadPoolExecutor(len(due), "aws-catalogue") as threads:
                    for done in [threads.submit(fetch) for fetch in due]:
                        done.result()
                remembered.write(self._path, known)
            return known

    def _forget_refusals(self) -> None:
        with self._lock:
            if self._known is not None:
                self._known.spot_refused_at = 0.0
                if not self._known.on_demand:
                    self._known.on_demand_at = 0.0

    def _fetch_types(self) -> None:
        assert self._known is not None
        listed = self._account.pages("ec2", "describe_instance_types", "InstanceTypes")
        self._known.types = sorted((read_type(each) for each in listed), key=lambda k: k.name)
        self._known.types_at = time.time()

    def _fetch_zones(self) -> None:
        assert self._known is not None
        listed = self._account.pages(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
        )
        found: dict[str, list[str]] = {}
        for each in listed:
            # Local and wavelength zones have longer names, and networks of their own.
            if len(each["Location"]) == len(self._account.region) + 1:
                found.setdefault(each["InstanceType"], []).append(each["Location"])
        self._known.zones = {name: sorted(zones) for name, zones in sorted(found.items())}
        self._known.zones_at = time.time()

    def _fetch_on_demand(self) -> None:
        assert self._known is not None
        try:
            self._known.on_demand = prices.on_demand(self._account)
        except (UnavailableError, UnreachableError) as problem:
            self._known.on_demand = {}
            _log.warning(
                "prices of AWS are unknown, so its machines are chosen by size: %s", problem
            )
        self._known.on_demand_at = time.time()

    def _spot(self, names: Sequence[str], fresh: bool) -> dict[str, dict[str, float]] | None:
        """Spot prices by type and zone; None if AWS does not say them."""
        known = self._catalogue()
        age = FRESH_SPOT_SECONDS if fresh else SPOT_SECONDS
        with self._lock:
            now = time.time()
            if 0 <= now - known.spot_refused_at < REFUSED_SECONDS:
                return None
            due = [
                name
                for name in names
                if name not in known.spot or not 0 <= now - known.spot[name].at < age
            ]
            if due:
                try:
                    found = prices.spot(self._account, due)
                except (UnavailableError, UnreachableError) as problem:
                    known.spot_refused_at = now
                    remembered.write(self._path, known)
                    _log.warning("spot prices of AWS are unknown: %s", problem)
                    return None
                known.spot |= {name: SpotPrices(now, found.get(name, {})) for name in due}
                remembered.write(self._path, known)
            return {name: known.spot[name].zones for name in names}


def _any_price(offers: Sequence[Offer]) -> bool:
    return any(offer.hourly_cost is not None for offer in offers)


def _rank(offer: Offer) -> tuple[bool, float, float, str, str]:
    cost = offer.hourly_cost
    name = offer.instance_type
    return cost is None, cost or 0.0, offer.vcpus, name, offer.zone or ""
