"""A shop: a provider that sells machines, which are processes of this machine.

Its prices, failures and notices are what a test says. Besides its machines, a pool in a shop has a
file below `root`, which must be swept up.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import skyward as sky
from skyward import providers
from skyward.market import Offer
from skyward.providers import Allocation, Capabilities, Order, Remains, Request


def an_offer(
    name: str = "m1.small",
    cost: float | None = 0.5,
    allocation: Literal["on-demand", "spot"] = "on-demand",
    region: str = "here-1",
) -> Offer:
    """A machine of two vCPUs."""
    return Offer("shop", region, None, name, None, 2, 4, "x86_64", allocation, cost)


@dataclass
class Stock:
    """What a shop has, and what became of it."""

    offers: list[Offer] = field(default_factory=lambda: [an_offer()])
    failures: list[Exception] = field(default_factory=list)
    """What the next calls of `create` raise."""
    unpaid: list[Exception] = field(default_factory=list)
    """What the next calls of `offers` raise."""
    unswept: list[Exception] = field(default_factory=list)
    """What the next calls of `sweep` raise."""
    notice: str = ""
    """The module that the next machines name."""
    orders: list[Order] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    watch: Callable[[], object] = lambda: None
    """Called when a machine is asked for."""
    boot: Callable[[], Awaitable[None]] | None = None
    """What a machine that was bought does before it is there; None if a shop does not say so."""
    swept: list[str] = field(default_factory=list)


STOCKS: dict[str, Stock] = {}


@dataclass(frozen=True)
class Shop(sky.Local):
    """Machines with a price."""

    root: str = ""
    region: str = "here-1"
    owner: str = "me@here"

    name = "shop"
    instance_type = None
    capabilities = Capabilities(sells=True, collects=True, encrypted=False, mounts_folders=False)

    @property
    def stock(self) -> Stock:
        """What this shop has."""
        return STOCKS.setdefault(self.root, Stock())

    def describe(self) -> dict[str, Any]:
        """The arguments."""
        return {"root": self.root, "region": self.region}

    def price(self, request: Request) -> float | None:
        """The price of the first offer."""
        return next((each.hourly_cost for each in self.stock.offers), None)

    def in_region(self, region: str) -> Shop:
        """The same shop elsewhere."""
        return replace(self, region=region)

    def offers(self, request: Request) -> list[Offer]:
        """What is in stock."""
        self.stock.requests.append(request)
        if self.stock.unpaid:
            raise self.stock.unpaid.pop(0)
        kinds = {
            "on-demand": ("on-demand",),
            "spot": ("spot",),
            "spot-if-available": ("spot", "on-demand"),
        }[request.allocation]
        most = request.max_hourly_cost
        return [
            replace(each, region=self.region)
            for kind in kinds
            for each in self.stock.offers
            if each.allocation == kind and (most is None or (each.hourly_cost or most + 1) <= most)
        ]

    def why_none(self, request: Request) -> str:
        """Nothing: a shop does not say why."""
        return ""

    def allocate(self, pool: str) -> Allocation[Any]:
        """The machines of a pool, and its file."""
        return Shelf(self, pool)

    async def create(self, order: Order) -> Any:
        """Sell a machine."""
        self.stock.orders.append(order)
        self.stock.watch()
        folder = Path(self.root, "rules")
        folder.mkdir(exist_ok=True)
        (folder / order.pool).write_text(
            json.dumps({"owner": self.owner, "pid": os.getpid(), "name": order.name})
        )
        if self.stock.failures:
            raise self.stock.failures.pop(0)
        offer = next(iter(self.offers(order.request)), None)
        machine: Any = await super().create(order)
        machine.offer = offer
        if self.stock.boot is not None:
            await asyncio.to_thread(order.bought, machine.id, offer)
            try:
                await self.stock.boot()
            except Exception:
                await machine.destroy()
                raise
        machine.notice = self.stock.notice
        return machine

    @property
    def where(self) -> str:
        """Where `remains` looks."""
        return self.name

    async def remains(self) -> list[Remains]:
        """The pools that have a file."""
        found = []
        for rule in sorted(Path(self.root, "rules").glob("*")):
            about = json.loads(rule.read_text())
            machines = [f"machine {each.id}" for each in await self.find(rule.name)]
            resources = (*machines, f"rule {rule.name}")
            found.append(Remains(rule.name, about["name"], about["owner"], about["pid"], resources))
        return found


class Shelf(Allocation[Any]):
    """What a pool has in a shop."""

    def __init__(self, shop: Shop, pool: str) -> None:
        super().__init__(shop, pool)
        self._shop = shop

    async def sweep(self) -> None:
        """Remove the file of the pool."""
        if self._shop.stock.unswept:
            raise self._shop.stock.unswept.pop(0)
        self._shop.stock.swept.append(self.pool)
        Path(self._shop.root, "rules", self.pool).unlink(missing_ok=True)


@contextmanager
def opened(root: Path) -> Iterator[Shop]:
    """A shop that the command line finds by its name."""
    sys.modules["shop_of_tests"] = sys.modules[__name__]
    providers.BUILT_IN["shop"] = "shop_of_tests:Shop"
    try:
        yield Shop(root=str(root))
    finally:
        del providers.BUILT_IN["shop"], sys.modules["shop_of_tests"]
        STOCKS.pop(str(root), None)
