"""The instances of a pool: bought together, from the first offer that can be had, and booted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyward.errors import PoolStartError, SkywardError, UnavailableError
from skyward.providers import Offer, Order, Request, money
from skyward.providers.allocation import SharedAllocation, WantedMachine
from skyward.providers.aws import site, tags
from skyward.providers.aws.account import CAPACITY, PRICE, QUOTA, Account, RequestError
from skyward.providers.aws.catalogue import DEARER, STRATEGIES, Catalogue, is_block
from skyward.providers.aws.instances import (
    ENDED,
    STOPPED,
    Instance,
    Instances,
    is_spot,
    node_of,
    state_of,
)
from skyward.providers.aws.machine import ANSWER_SECONDS, BOOT_SECONDS, AWSMachine, user_data
from skyward.providers.aws.settings import Settings
from skyward.providers.aws.site import Site, Subnet

STARTS = 3
"""How many offers to try whose instances end before they run."""
USUAL_DISK_GB = 50
GPU_DISK_GB = 120
"""The drivers and tools of the usual AMI alone take 60 GB."""
_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_QUOTAS = (
    (re.compile(r"p[5-9]"), "P", "L-417A185B", "P5", "L-C4BD4855"),
    (re.compile(r"p\d"), "P", "L-417A185B", "P4, P3 and P2", "L-7212CCBC"),
    (re.compile(r"(?:gr?|vt)\d"), "G and VT", "L-DB2E81BA", "G and VT", "L-3819A6DF"),
    (re.compile(r"trn\d"), "Trn", "L-2C3B7624", "Trn", "L-6B0D517C"),
    (re.compile(r"inf\d"), "Inf", "L-1945791B", "Inf", "L-B5D1601B"),
    (re.compile(r"dl\d"), "DL", "L-6E869C2A", "DL", "L-85EED4F7"),
    (re.compile(r"hpc\d"), "HPC", "L-F7808C92", "HPC", "L-F7808C92"),
    (re.compile(r"x\d"), "X", "L-7295265B", "X", "L-E3A00192"),
    (re.compile(r"f\d"), "F", "L-74FC7D96", "F", "L-88CF9481"),
    (re.compile(r"u\d?-"), "High Memory", "L-43DA4232", "High Memory", "L-43DA4232"),
    (re.compile(""), _STANDARD, "L-1216C47A", _STANDARD, "L-34B43A08"),
)
"""Which types share a quota: its name and code on demand, and for spot."""


@dataclass(eq=False)
class Bought:
    """An instance that was bought for a node, and boots."""

    id: str
    offer: Offer
    machine: AWSMachine | None = None
    """What the node gets when it has booted; None as long as the instance does not run."""
    boot: asyncio.Task[None] | None = None


class AWSAllocation(SharedAllocation[AWSMachine]):
    """Buys the instances of one pool, and hands them out when they have booted."""

    def __init__(self, pool: str, settings: Settings) -> None:
        super().__init__(pool)
        self._settings = settings
        self._was_asked = False
        """Whether anything was ordered here."""
        self._booting: dict[int, Bought] = {}
        """What was bought for nodes that have not got it yet."""
        self._site: Site | None = None
        self._failed: set[tuple[str, str, str]] = set()
        """The offers whose instances did not start: type, zone and allocation."""
        self._zone = ""
        """The zone of the last instances; nodes that are near each other talk faster."""

    @functools.cached_property
    def _account(self) -> Account:
        """The account; the first time, AWS may be asked whose it is."""
        return self._settings.own_account()

    @functools.cached_property
    def _catalogue(self) -> Catalogue:
        return Catalogue(self._account, self._settings)

    @functools.cached_property
    def _instances(self) -> Instances:
        return Instances(self._account, self.pool)

    async def _opened(self) -> Instances:
        await asyncio.to_thread(lambda: self._account)
        # Here, on the event loop: two threads might make two of each.
        _ = self._catalogue
        return self._instances

    async def get(self, order: Order) -> AWSMachine:
        """An instance that has booted; those that are ordered together are one purchase."""
        self._was_asked = True
        await self._opened()
        # Of an earlier order, whose end nobody has waited for.
        await self.release(order.node)
        if order.request.keep and (former := await self._former(order)) is not None:
            return former
        for start in range(1, STARTS + 1):
            try:
                machine = await super().get(order)
                del self._booting[order.node]
                return machine
            except RequestError as problem:
                if start == STARTS or not was_sold_out(problem) or problem.leaves_machine:
                    raise
        raise AssertionError

    async def _former(self, order: Order) -> AWSMachine | None:
        """The machine that a node of a kept pool has, if it can be used again.

        One that is stopped is started; one that runs and does not answer is ended.
        """
        instance = await self._instances.former(order.node)
        if instance is None:
            return None
        self.expect_no_more(order.node)
        is_stopped = state_of(instance) in STOPPED
        if is_stopped:
            order.tell("starting the machine again")
            instance = await self._instances.start(instance)
        offer = await asyncio.to_thread(self._offer_of, instance, order.request)
        machine = AWSMachine(self._instances, self._settings, instance, order.node, offer)
        machine.is_former = True
        order.bought(machine.id, offer)
        try:
            await machine.make(order, BOOT_SECONDS if is_stopped else ANSWER_SECONDS)
        except PoolStartError:
            if is_stopped:
                raise
            await asyncio.shield(machine.destroy())
            return None
        return machine

    def _offer_of(self, instance: Instance, request: Request) -> Offer | None:
        """The offer by which an instance of the pool would be bought now; None if there is none."""
        allocation = "spot" if is_spot(instance) else "on-demand"
        bought = instance["InstanceType"], allocation
        with contextlib.suppress(SkywardError):
            for offer in self._catalogue.offers(request):
                if (offer.instance_type, offer.allocation) == bought:
                    return replace(offer, zone=instance["Placement"]["AvailabilityZone"])
        return None

    async def find(self) -> list[AWSMachine]:
        """The instances with the pool's tag that have not ended."""
        instances = await self._opened()
        return [
            AWSMachine(instances, self._settings, each, node_of(each) or 0)
            for each in (await instances.all()).values()
            if state_of(each) not in ENDED
        ]

    async def ask(self, nodes: Sequence[int]) -> None:
        """Buy instances, and have each handed out when it has booted."""
        asked = [self.wanted[node] for node in nodes]
        made: dict[int, Bought] = {}
        buying = asyncio.ensure_future(asyncio.to_thread(self._launch, asked, made))
        try:
            await asyncio.shield(buying)
        except asyncio.CancelledError:
            # The pool is closed. The thread ends after the request that it is making.
            for wanted in asked:
                wanted.is_given_up = True
            await asyncio.wait({buying})
            await asyncio.gather(*(self._instances.terminate(each.id) for each in made.values()))
            raise
        except Exception as problem:
            # What was bought before is not lost.
            self.refuse(set(nodes) - made.keys(), problem)
        for wanted in asked:
            node = wanted.order.node
            if node in made and self.wanted.get(node) is wanted:
                bought = self._booting[node] = made.pop(node)
                bought.boot = self._begin(self._boot(wanted.order, bought))
        # These nodes were ordered again meanwhile.
        await asyncio.gather(*(self._instances.terminate(each.id) for each in made.values()))

    async def _boot(self, order: Order, bought: Bought) -> None:
        try:
            order.bought(bought.id, bought.offer)
            order.tell("waiting for the machine to start")
            instance = await self._instances.running(bought.id)
            machine = bought.machine = AWSMachine(
                *(self._instances, self._settings, instance, order.node, bought.offer), is_new=True
            )
            await machine.make(order)
        except Exception as problem:
            if was_sold_out(problem):
                offer = bought.offer
                self._failed.add((offer.instance_type, offer.zone or "", offer.allocation))
            self.refuse([order.node], problem)
        else:
            self.give(order.node, machine)

    async def cancelled(self, node: int) -> None:
        """End the instance that the node was to get."""
        await self.release(node)

    async def release(self, node: int, *, lost: bool = False) -> None:
        """End the instance that a node was to get; one that it has got ends as a machine."""
        wanted = self.wanted.pop(node, None)
        if wanted is not None and wanted.waits:
            wanted.machine.cancel()
        if (bought := self._booting.pop(node, None)) is not None:
            await asyncio.shield(self._end(bought))

    async def _end(self, bought: Bought) -> None:
        if bought.boot is not None:
            bought.boot.cancel()
            await asyncio.wait({bought.boot})
        if bought.machine is not None:
            await bought.machine.destroy()
        else:
            await self._instances.terminate(bought.id)

    async def sweep(self) -> None:
        """Remove the pool's security group, key pair, placement group and keys."""
        # The keys are made first. Without credentials, nobody could ask AWS what there is.
        if self._was_asked and not site.Keys(self.pool).folder.exists():
            return
        grouped = self._settings.placement_group in STRATEGIES
        await asyncio.to_thread(lambda: site.sweep(self._account, self.pool, grouped=grouped))
        self._site = None

    # On another thread, one launch after the other.

    def _launch(self, asked: Sequence[WantedMachine[AWSMachine]], made: dict[int, Bought]) -> None:
        """Buy an instance for each node that is waited for; raises if some have none.

        What is bought is in `made` whatever happens.
        """
        orders = [each.order for each in asked]
        request = orders[0].request
        for order in orders:
            order.tell("choosing a machine")
        offers = self._catalogue.offers(request, fresh=request.allocation != "on-demand")
        if not offers:
            raise UnavailableError(f"AWS: {self._catalogue.why_none(request)}")
        here = self._site
        if here is None:
            here = self._site = site.make_site(
                self._account,
                self._settings,
                orders[0],
                lambda: self._catalogue.image(offers[0]),
            )
        elif self._settings.access == "ssh":
            # The client may be in another network by now.
            site.admit(self._account, here.subnets[0], here.group, self._settings.admit)
        for order in orders:
            order.tell("asking AWS for the machine")
        reasons: list[str] = []
        refused: dict[str, float] = {}
        # First all in one place: nodes that are far apart are slow together.
        for least in (len(orders), 1) if len(orders) > 1 else (1,):
            for offer, subnet in self._places(offers, here):
                left = [
                    each.order
                    for each in asked
                    if each.order.node not in made and not each.is_given_up
                ]
                if not left:
                    return
                spot = offer.allocation == "spot"
                quota, code = quota_of(offer.instance_type, spot=spot)
                need = offer.vcpus * min(least, len(left))
                if need >= refused.get(code, need + 1):
                    continue
                try:
                    bought = self._buy(offer, subnet, here, left, least)
                except RequestError as problem:
                    where = f"{offer.instance_type} in {subnet.zone}"
                    if problem.code in QUOTA:
                        refused[code] = need
                        reasons.append(f"{where}: {self._over_quota(quota, code)}")
                    elif problem.code in CAPACITY | PRICE:
                        reasons.append(_passed_over(problem, where))
                    else:
                        raise
                    orders[0].tell(f"passed over {reasons[-1]}")
                    continue
                self._zone = subnet.zone
                made |= bought
                for each in bought.values():
                    self._instances.expect(each.id)
                self._tell(orders, offer, subnet, offers, reasons)
            if all(order.node in made for order in orders):
                return
        raise self._none_left(request, reasons)

    def _places(self, offers: Sequence[Offer], here: Site) -> Iterator[tuple[Offer, Subnet]]:
        """Every offer in every zone that has it, in the order in which they are tried."""
        near_first = sorted(here.subnets, key=lambda subnet: subnet.zone != self._zone)
        for offer in offers:
            zones = self._catalogue.zones_of(offer)
            for subnet in near_first:
                what = offer.instance_type, subnet.zone, offer.allocation
                if subnet.zone in zones and what not in self._failed:
                    yield offer, subnet

    def _buy(
        self, offer: Offer, subnet: Subnet, here: Site, orders: Sequence[Order], least: int
    ) -> dict[int, Bought]:
        """Buy instances for the orders; for fewer of them if a quota does not allow for all."""
        count = len(orders)
        while True:
            try:
                return self._purchase(offer, subnet, here, orders[:count], min(least, count))
            except RequestError as problem:
                if problem.code not in QUOTA or count <= least:
                    raise
            count //= 2

    def _purchase(
        self, offer: Offer, subnet: Subnet, here: Site, orders: Sequence[Order], least: int
    ) -> dict[int, Bought]:
        """Buy instances for as many of the orders as there are, but no fewer than `least`."""
        first, image = orders[0], self._catalogue.image(offer)
        request = first.request
        named = {
            tags.NODES: tags.listed([order.node for order in orders]),
            tags.USER: self._settings.user or image.user,
        }
        kinds = ["instance", "volume", "network-interface"]
        usual_gb = USUAL_DISK_GB if offer.accelerator is None else GPU_DISK_GB
        ebs = {"Encrypted": True, "DeleteOnTermination": True}
        root = {"VolumeSize": max(int(request.disk_gb or usual_gb), image.disk_gb)}
        arguments: dict[str, Any] = {
            "ImageId": image.id,
            "InstanceType": offer.instance_type,
            "KeyName": tags.resource_name(first.pool),
            "UserData": user_data(*here.keys.host_key, idle=request.idle_timeout, ttl=request.ttl),
            # So that an instance that shuts itself down is gone, with its volume.
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "BlockDeviceMappings": [
                *({"DeviceName": device, "Ebs": ebs} for device in image.more_devices),
                {"DeviceName": image.root_device, "Ebs": {**root, "VolumeType": "gp3", **ebs}},
            ],
            "NetworkInterfaces": self._interfaces(offer, subnet, here, request),
        }
        if self._settings.instance_profile:
            arguments["IamInstanceProfile"] = {"Name": self._settings.instance_profile}
        if here.placement_group:
            arguments["Placement"] = {"GroupName": here.placement_group}
        if offer.allocation == "spot":
            kinds.append("spot-instances-request")
            spot: dict[str, Any] = {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
            }
            if request.max_hourly_cost is not None:
                spot["MaxPrice"] = f"{request.max_hourly_cost:g}"
            arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        if (held := self._catalogue.reservation) is not None:
            target = {"CapacityReservationId": held["CapacityReservationId"]}
            arguments["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
            if is_block(held):
                arguments["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
        answer = self._account.call(
            "ec2",
            "run_instances",
            # Once: for want of capacity AWS answers as if it had failed, again and again.
            attempts=1,
            MinCount=least,
            MaxCount=len(orders),
            ClientToken=uuid.uuid4().hex,
            TagSpecifications=[tags.specification(kind, first, **named) for kind in kinds],
            **arguments,
        )
        made = sorted(answer["Instances"], key=lambda each: int(each.get("AmiLaunchIndex", 0)))
        bought = replace(offer, zone=subnet.zone)
        return {
            order.node: Bought(str(each["InstanceId"]), bought)
            for order, each in zip(orders, made, strict=False)
        }

    def _interfaces(
        self, offer: Offer, subnet: Subnet, here: Site, request: Request
    ) -> list[dict[str, Any]]:
        kind = self._catalogue.type(offer.instance_type)
        plain = {"SubnetId": subnet.id, "Groups": [here.group], "DeleteOnTermination": True}
        first: dict[str, Any] = {**plain, "DeviceIndex": 0}
        cards = 1
        if kind.efa_interfaces and self._settings.wants_efa(request):
            first["InterfaceType"] = "efa"
            # An instance with several interfaces gets no public address.
            cards = 1 if subnet.public else min(kind.efa_interfaces, kind.network_cards)
        if cards == 1:
            first["AssociatePublicIpAddress"] = subnet.public
        return [first] + [
            {**plain, "DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa"}
            for card in range(1, cards)
        ]

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
        cards = self._catalogue.type(bought.instance_type).efa_interfaces
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


def was_sold_out(problem: Exception) -> bool:
    """Whether an instance ended because there was no room for it, although it was sold."""
    return isinstance(problem, RequestError) and problem.code.partition(".")[2] in CAPACITY


def quota_of(instance_type: str, *, spot: bool) -> tuple[str, str]:
    """The name and the code of the quota that limits a type."""
    words, code, spot_words, spot_code = next(
        quota for types, *quota in _QUOTAS if types.match(instance_type)
    )
    if spot:
        return f"All {spot_words} Spot Instance Requests", spot_code
    return f"Running On-Demand {words} instances", code


def _passed_over(problem: RequestError, where: str) -> str:
    """Why an offer was passed over, in a few words."""
    if problem.code in PRICE:
        return f"{where}: its spot price is above max_hourly_cost"
    if problem.code in ("Unsupported", "UnsupportedOperation"):
        return f"{where}: not sold there"
    if problem.code == "InsufficientFreeAddressesInSubnet":
        return f"{where}: its subnet has too few free addresses"
    return f"{where}: no capacity"
