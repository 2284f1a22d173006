"""Launches: the instances of a pool, bought together, from the first offer that can be had."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyward.errors import ConfigurationError, SkywardError, UnavailableError
from skyward.market import Offer, money
from skyward.providers import Order, Request
from skyward.providers.aws import failures, images
from skyward.providers.aws.catalogue import Catalogue
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.instances import TOGETHER_SECONDS, Instances
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.purchases import Bought, Purchase
from skyward.providers.aws.reservations import Reservation, reserved
from skyward.providers.aws.site import Settings, Site, make_site


class Launches:
    """Buys the instances of one pool, on one event loop."""

    def __init__(self, instances: Instances, settings: Settings) -> None:
        self._instances, self._settings = instances, settings
        self._account = instances.account
        self._catalogue = Catalogue(instances.account)
        self._orders: list[tuple[Order, asyncio.Future[Bought]]] = []
        self._work: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._site: Site | None = None
        self._images: dict[tuple[str, str], MachineImage] = {}
        self._reservation: Reservation | None = None
        self._zone = ""
        """The zone of the last instances; nodes that are near each other talk faster."""

    async def get(self, order: Order) -> Bought:
        """Buy an instance; orders that come together are one request.

        If cancelled, waits until it is known whether there is an instance.
        """
        bought: asyncio.Future[Bought] = asyncio.get_running_loop().create_future()
        self._orders.append((order, bought))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._launch_soon())
        try:
            return await asyncio.shield(bought)
        except asyncio.CancelledError:
            waiting = [each for each in self._orders if each[1] is not bought]
            if len(waiting) < len(self._orders):
                self._orders = waiting
            else:
                await asyncio.wait({bought})
                bought.cancelled() or bought.exception()
            raise

    async def _launch_soon(self) -> None:
        while self._orders:
            count = 0
            while count < len(self._orders):
                count = len(self._orders)
                await asyncio.sleep(TOGETHER_SECONDS)
            taken, self._orders = self._orders, []
            if not taken:
                return
            orders = [order for order, _ in taken]
            bought: dict[int, Bought] = {}
            problem: BaseException | None = None
            try:
                bought, problem = await asyncio.to_thread(self._launch, orders)
            except BaseException as failure:
                problem = failure
            for each in bought.values():
                self._instances.expect(each.id)
            for order, waiting in taken:
                if order.node in bought:
                    waiting.set_result(bought[order.node])
                else:
                    waiting.set_exception(problem or UnavailableError("AWS: no instance"))
                    waiting.exception()

    # On another thread.

    def _launch(self, orders: list[Order]) -> tuple[dict[int, Bought], Exception | None]:
        """Buy an instance for each order; those without one have the exception in common."""
        request = orders[0].request
        for order in orders:
            order.tell("choosing a machine")
        image = self._given_image()
        offers = self._offers(request, image)
        with self._lock:
            site = self._site = self._site or make_site(
                self._account, self._settings, orders[0], lambda: self._image(offers[0])
            )
        for order in orders:
            order.tell("asking AWS for the machine")
        done: dict[int, Bought] = {}
        reasons: list[str] = []
        exhausted: set[str] = set()
        # First all in one place: nodes that are far apart are slow together.
        for least in (len(orders), 1) if len(orders) > 1 else (1,):
            for offer, subnet in self._places(offers, site):
                quota, code = failures.quota_of(
                    offer.instance_type, spot=offer.allocation == "spot"
                )
                if code in exhausted:
                    continue
                left = [order for order in orders if order.node not in done]
                if not left:
                    return done, None
                try:
                    made = self._purchase(offer, subnet, site).make(
                        self._account, left, min(least, len(left))
                    )
                except RequestError as problem:
                    where = f"{offer.instance_type} in {subnet.zone}"
                    if problem.code in failures.QUOTA:
                        exhausted.add(code)
                        reasons.append(f"{where}: {self._over_quota(quota, code)}")
                    elif problem.code in failures.CAPACITY | failures.PRICE:
                        spot = offer.allocation == "spot"
                        reasons.append(failures.passed_over(problem, where, spot=spot))
                    else:
                        return done, problem
                    orders[0].tell(f"passed over {reasons[-1]}")
                else:
                    done |= made
                    self._zone = subnet.zone
                    self._tell(orders, offer, offers, reasons)
            if all(order.node in done for order in orders):
                return done, None
        return done, self._none_left(request, reasons)

    def _given_image(self) -> MachineImage | None:
        ami = self._settings.ami
        if ami is None:
            return None
        key = ami, ""
        if key not in self._images:
            self._images[key] = images.given_image(self._account, ami)
        return self._images[key]

    def _image(self, offer: Offer) -> MachineImage:
        given = self._given_image()
        if given is not None:
            if given.architecture != offer.architecture:
                raise ConfigurationError(
                    f"AWS(ami={given.id!r}): that AMI is for {given.architecture}, and "
                    f"{offer.instance_type} is {offer.architecture}; name an AMI for it, or leave "
                    "ami out"
                )
            return given
        key = offer.architecture, offer.accelerator.name if offer.accelerator else ""
        if key not in self._images:
            self._images[key] = images.usual_image(self._account, key[0], offer.accelerator)
        return self._images[key]

    def _offers(self, request: Request, image: MachineImage | None) -> list[Offer]:
        settings = self._settings
        architecture = settings.architecture or (image.architecture if image else None)
        held = self._reservation = self._reserved()
        if held is not None:
            held.check(request)
            found = self._catalogue.offers(
                replace(request, allocation="on-demand", max_hourly_cost=None),
                instance_type=held.instance_type,
            )
            if not found:
                raise ConfigurationError(
                    f"AWS(reservation={held.id!r}): it is for {held.instance_type}, which is not "
                    "what this pool asks for; leave accelerator, vcpus and memory_gb out, or name "
                    "another reservation"
                )
            return [replace(found[0], zone=held.zone)]
        found = self._catalogue.offers(
            request,
            architecture=architecture,
            instance_type=settings.instance_type,
            fresh=request.allocation != "on-demand",
        )
        if not found and image is not None and settings.instance_type is not None:
            kind = self._catalogue.type(settings.instance_type)
            if image.architecture not in kind.architectures:
                raise ConfigurationError(
                    f"AWS(ami={image.id!r}): that AMI is for {image.architecture}, and "
                    f"{kind.name} is {' or '.join(kind.architectures)}; name an AMI for it, or "
                    "leave ami out"
                )
        if not found:
            raise UnavailableError(
                "AWS: "
                + self._catalogue.why_none(
                    request, architecture=architecture, instance_type=settings.instance_type
                )
            )
        return self._with_efa(found) if settings.efa else found

    def _with_efa(self, offers: list[Offer]) -> list[Offer]:
        found = [each for each in offers if self._catalogue.type(each.instance_type).efa_interfaces]
        if not found:
            raise ConfigurationError(
                f"AWS(efa=True): {offers[0].instance_type} has no Elastic Fabric Adapter; ask for "
                "a machine that has one, such as accelerator=sky.accelerators.H100(8), or leave "
                "efa out"
            )
        return found

    def _reserved(self) -> Reservation | None:
        named = self._settings.reservation
        return reserved(self._account, named) if named else None

    def _places(self, offers: Sequence[Offer], site: Site) -> Iterator[tuple[Offer, Subnet]]:
        """Every offer in every zone that has it, in the order in which they are tried."""
        near_first = sorted(site.subnets, key=lambda subnet: subnet.zone != self._zone)
        for offer in offers:
            zones = [offer.zone] if offer.zone else self._catalogue.zones_of(offer.instance_type)
            yield from ((offer, subnet) for subnet in near_first if subnet.zone in zones)

    def _purchase(self, offer: Offer, subnet: Subnet, site: Site) -> Purchase:
        kind = self._catalogue.type(offer.instance_type)
        image = self._image(offer)
        return Purchase(self._settings, site, offer, kind, subnet, image, self._reservation)

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
        self, orders: Sequence[Order], bought: Offer, offers: Sequence[Offer], reasons: list[str]
    ) -> None:
        """Tell the user if another offer was bought than the first, and why."""
        first = offers[0]
        if (bought.instance_type, bought.allocation) != (first.instance_type, first.allocation):
            why = "; ".join(dict.fromkeys(reasons))
            price = "" if bought.hourly_cost is None else f", {money(bought.hourly_cost)} an hour"
            how = "spot" if bought.allocation == "spot" else "on demand"
            orders[0].note(f"bought {bought.instance_type} {how}{price} instead: {why}")

    def _none_left(self, request: Request, reasons: Sequence[str]) -> UnavailableError:
        why = "; ".join(dict.fromkeys(reasons)) or (
            "none of the subnets is in a zone that has the machines; name one with subnet="
        )
        advice = "try again later, in another region, or give sky.Compute.any more to choose from"
        if request.allocation == "spot":
            advice = f"allocation='spot-if-available' also buys on demand; or {advice}"
        return UnavailableError(f"AWS has no such machine now: {why}; {advice}")
