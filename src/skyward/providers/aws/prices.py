"""Prices of instances: what AWS says they cost, on demand and as spot instances."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyward.providers.aws.account import Account

_MOST_NAMED = 100
"""How many types a request may name."""
_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}


def on_demand(account: Account) -> dict[str, float]:
    """The price of an hour in US dollars, by type."""
    filters = {**_FILTERS, "regionCode": account.region}
    # The price list of all regions is served in few of them.
    home = "cn-northwest-1" if account.region.startswith("cn-") else "us-east-1"
    listed = account.pages(
        "pricing",
        "get_products",
        "PriceList",
        region=home,
        # Machines can be bought without it: a service that fails must not keep the user waiting.
        attempts=2,
        ServiceCode="AmazonEC2",
        Filters=[
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in filters.items()
        ],
    )
    found: dict[str, float] = {}
    for entry in listed:
        # A price that is written in a way of its own is unknown, and no reason to sell nothing.
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):
            product = json.loads(entry)
            name = product["product"]["attributes"]["instanceType"]
            found |= {str(name): price for price in _hourly(product)}
    return found


def _hourly(product: Any) -> Iterator[float]:
    for term in product["terms"]["OnDemand"].values():
        for rate in term["priceDimensions"].values():
            dollars = float(rate["pricePerUnit"].get("USD", 0))
            # Capacity that is paid for by a reservation is listed with a price of nothing.
            if rate["unit"] == "Hrs" and dollars > 0:
                yield dollars


def spot(account: Account, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """What an hour costs now in US dollars, by type and zone; not for types that no zone sells."""
    named: dict[str, Any] = {"InstanceTypes": list(names)} if len(names) <= _MOST_NAMED else {}
    listed = account.pages(
        "ec2",
        "describe_spot_price_history",
        "SpotPriceHistory",
        StartTime=datetime.now(UTC),
        ProductDescriptions=["Linux/UNIX"],
        **named,
    )
    latest: dict[tuple[str, str], tuple[Any, float]] = {}
    for entry in listed:
        key = entry["InstanceType"], entry["AvailabilityZone"]
        said = entry["Timestamp"], float(entry["SpotPrice"])
        latest[key] = max(latest.get(key, said), said)
    found: dict[str, dict[str, float]] = {}
    for (name, zone), (_, price) in latest.items():
        found.setdefault(name, {})[zone] = price
    return found
