"""Launches: the instances of a pool, bought together, from the first offer that can be had."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyward.errors import SkywardError, UnavailableError
from skyward.market import Offer, money
from skyward.providers import Order, Request
from skyward.providers.aws import failures, network
from skyward.providers.aws.assortment import DEARER, Assortment
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.instances import Instance, Instances
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.purchases import Bought, Purchase
from skyward.providers.aws.site import Settings, Site, make_site
from skyward.providers.together import GATHER_SECONDS, gather


class Launches:
    """Buys the instances of one pool, on one event loop."""

    def __init__(self, instances: Instances, settings: Settings) -> None:
        self._instances, self._settings = instances, settings
        self._account = instances.account
        self._assortment = Assortment(instances.account, settings)
        self._orders: list[tuple[Order, asyncio.Future[Bought]]] = []
        self._work: asyncio.Task[None] | None = None
        self._site: Site | None = None
        self._nodes: set[int] = set()
        """The nodes for which a launch has been tried."""
        self.asked = False
        """Whether anything was ordered, in this process."""
        self._given_up: set[int] = set()
        """The nodes whose orders were cancelled while they were being fulfilled."""
        self._failed: set[tuple[str, str, str]] = set()
        """The offers whose instances did not start: type, zone and allocation."""
        self._zone = ""
        """The zone of the last instances; nodes that are near each other talk faster."""

    async def get(self, order: Order) -> Bought:
        """Buy an instance; orders that come together are one request.

        If cancelled, ends the instance that may have been bought already.
        """
        bought: asyncio.Future[Bought] = asyncio.get_running_loop().create_future()
        self.asked = True
        self._given_up.discard(order.node)
        self._orders.append((order, bought))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._launch_soon())
        try:
            return await asyncio.shield(bought)
        except asyncio.CancelledError:
            waiting = [each for each in self._orders if each[1] is not bought]
            if len(waiting) < len(self._orders):
                self._orders = waiting
                raise
            self._given_up.add(order.node)
            await asyncio.wait({bought})
            if bought.exception() is None:
                await self._instances.terminate(bought.result().id)
            raise

    def exclude(self, bought: Bought) -> None:
        """Do not buy an offer again whose instance did not start."""
        offer = bought.offer
        self._failed.add((offer.instance_type, offer.zone or "", offer.allocation))

    def offer_of(self, instance: Instance, request: Request) -> Offer | None:
        """The offer by which an instance of the pool would be bought now; None if there is none."""
        allocation = "spot" if instance.get("InstanceLifecycle") == "spot" else "on-demand"
        bought = instance["InstanceType"], allocation
        with contextlib.suppress(SkywardError):
            for offer in self._assortment.offers(request):
                if (offer.instance_type, offer.allocation) == bought:
                    return replace(offer, zone=instance["Placement"]["AvailabilityZone"])
        return None

    def _is_complete(self) -> bool:
        """Whether all nodes have been ordered that are to come together: one zone has them all."""
        ordered = self._nodes | {order.node for order, _ in self._orders}
        return all(order.together <= ordered for order, _ in self._orders)

    async def _launch_soon(self) -> None:
        while self._orders:
            await gather(self._is_complete)
            count = 0
            while count < len(self._orders):
                count = len(self._orders)
                await asyncio.sleep(GATHER_SECONDS)
            taken, self._orders = self._orders, []
            if not taken:
                return
            orders = [order for order, _ in taken]
            self._nodes.update(order.node for order in orders)
            bought: dict[int, Bought] = {}
            problem: BaseException | None = None
            try:
                problem = await asyncio.to_thread(self._launch, orders, bought)
            except BaseException as failure:
                problem = failure
            for order, waiting in taken:
                if order.node in bought:
                    waiting.set_result(bought[order.node])
                else:
                    waiting.set_exception(problem or UnavailableError("AWS: no instance"))
                    waiting.exception()

    # On another thread, one launch after the other.

    def _launch(self, orders: Sequence[Order], bought: dict[int, Bought]) -> Exception | None:
        """Buy an instance for each order; returns why some have none.

        What is bought is in `bought` whatever happens.
        """
        request = orders[0].request
        for order in orders:
            order.tell("choosing a machine")
        offers = self._assortment.offers(request, fresh=request.allocation != "on-demand")
        if not offers:
            raise UnavailableError(f"AWS: {self._assortment.why_none(request)}")
        site = self._site
        if site is None:
            site = self._site = make_site(
                self._account,
                self._settings,
                orders[0],
                lambda: self._assortment.image(offers[0]),
            )
        elif self._settings.access == "ssh":
            # The client may be in another network by now.
            network.admit(self._account, site.subnets[0], site.group, self._settings.admit)
        for order in orders:
            order.tell("asking AWS for the machine")
        reasons: list[str] = []
        refused: dict[str, float] = {}
        # First all in one place: nodes that are far apart are slow together.
        for least in (len(orders), 1) if len(orders) > 1 else (1,):
            for offer, subnet in self._places(offers, site):
                left = [each for each in orders if each.node not in bought.keys() | self._given_up]
                if not left:
                    return None
                spot = offer.allocation == "spot"
                quota, code = failures.quota_of(offer.instance_type, spot=spot)
                need = offer.vcpus * min(least, len(left))
                if need >= refused.get(code, need + 1):
                    continue
                try:
                    made = self._buy(self._purchase(offer, subnet, site), left, least)
                except RequestError as problem:
                    where = f"{offer.instance_type} in {subnet.zone}"
                    if problem.code in failures.QUOTA:
                        refused[code] = need
                        reasons.append(f"{where}: {self._over_quota(quota, code)}")
                    elif problem.code in failures.CAPACITY | failures.PRICE:
                        reasons.append(failures.passed_over(problem, where))
                    else:
                        return problem
                    orders[0].tell(f"passed over {reasons[-1]}")
                    continue
                self._zone = subnet.zone
                bought |= made
                for each in made.values():
                    self._instances.expect(each.id)
                self._tell(orders, offer, subnet, offers, reasons)
            if all(order.node in bought for order in orders):
                return None
        return self._none_left(request, reasons)

    def _places(self, offers: Sequence[Offer], site: Site) -> Iterator[tuple[Offer, Subnet]]:
        """Every offer in every zone that has it, in the order in which they are tried."""
        near_first = sorted(site.subnets, key=lambda subnet: subnet.zone != self._zone)
        for offer in offers:
            zones = self._assortment.zones_of(offer)
            for subnet in near_first:
                what = offer.instance_type, subnet.zone, offer.allocation
                if subnet.zone in zones and what not in self._failed:
                    yield offer, subnet

    def _buy(self, purchase: Purchase, orders: Sequence[Order], least: int) -> dict[int, Bought]:
        """Buy instances for the orders; for fewer of them if a quota does not allow for all."""
        count = len(orders)
        while True:
            try:
                return purchase.make(self._account, orders[:count], min(least, count))
            except RequestError as problem:
                if problem.code not in failures.QUOTA or count <= least:
                    raise
            count //= 2

    def _purchase(self, offer: Offer, subnet: Subnet, site: Site) -> Purchase:
        kind, image = self._assortment.kind(offer.instance_type), self._assortment.image(offer)
        reservation = self._assortment.reservation
        return Purchase(self._settings, site, offer, kind, subnet, image, reservation)

    def _over_quota(self, quota: str, code: str) -> str:
        """Which quota is used up, and how to ask for more."""
        has = ""
        with contextlib.suppress(SkywardError, KeyError):
            value = self._account.call(
                "service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code
            )["Quota"]["Value"]
            has = f", which is {value:g} vCPUs"
        return (
            f"above the quota {quota!r} ({code}){has}: ask for more with `aws service-quotas "
            f"request-service-quota-increase --service-code ec2 --quota-code {code} "
            f"--desired-value N --region {self._account.region}`"
        )

    def _tell(
        self,
        orders: Sequence[Order],
        bought: Offer,
        subnet: Subnet,
        offers: Sequence[Offer],
        reasons: list[str],
    ) -> None:
        """Tell the user if another offer was bought than the first, or one that is used in part."""
        first = offers[0]
        if (bought.instance_type, bought.allocation) != (first.instance_type, first.allocation):
            why = "; ".join(dict.fromkeys(reasons))
            price = "" if bought.hourly_cost is None else f", {money(bought.hourly_cost)} an hour"
            how = "spot" if bought.allocation == "spot" else "on demand"
            orders[0].note(f"bought {bought.instance_type} {how}{price} instead: {why}")
        cards = self._assortment.kind(bought.instance_type).efa_interfaces
        if cards > 1 and subnet.public and self._settings.wants_efa(orders[0].request):
            orders[0].note(
                f"{bought.instance_type} has {cards} EFA interfaces, and one is used: AWS gives an "
                "instance with several no public address; name a subnet with a NAT gateway with "
                "subnet= to use them all"
            )

    def _none_left(self, request: Request, reasons: Sequence[str]) -> UnavailableError:
        why = "; ".join(dict.fromkeys(reasons)) or (
            "none of the subnets is in a zone that has the machines; name one with subnet="
        )
        advice = "try again later, in another region, or give sky.Compute.any more to choose from"
        if request.allocation == "spot":
            advice = f"allocation='spot-if-available' also buys on demand; or {advice}"
        if request.max_hourly_cost is None:
            advice += (
                f"; machines of more than {DEARER:g} times the price are bought with "
                "max_hourly_cost only"
            )
        return UnavailableError(f"AWS has no such machine now: {why}; {advice}")
