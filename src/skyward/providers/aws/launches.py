"""Launches: the instances of a pool, bought together, from the first offer that can be had."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyward.errors import (
    ConfigurationError,
    SkywardError,
    UnavailableError,
    UnreachableError,
)
from skyward.market import Offer, money
from skyward.providers import Order, Request
from skyward.providers.aws import failures, images, network, tags
from skyward.providers.aws.catalogue import Catalogue
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.instances import TOGETHER_SECONDS, Instances
from skyward.providers.aws.keys import Keys, make_keys
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.reservations import Reservation, reserved
from skyward.providers.aws.user_data import user_data

STRATEGIES = ("cluster", "spread", "partition")
USUAL_DISK_GB = 50
GPU_DISK_GB = 120
"""The drivers and tools of the usual AMI alone take 60 GB."""
_UNKNOWN = frozenset({"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"})
"""Errors that leave open whether AWS did what was asked."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked of AWS, besides machines."""

    subnet: str | None
    ami: str | None
    key: str | None
    reservation: str | None
    placement_group: str | None
    efa: bool | None
    public_ip: bool | None
    access: str
    instance_type: str | None
    architecture: str | None
    instance_profile: str | None
    admit: Sequence[str]


@dataclass(frozen=True, slots=True)
class Bought:
    """An instance, with what is needed to log in."""

    id: str
    offer: Offer
    keys: Keys


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all instances of a pool share."""

    subnets: tuple[Subnet, ...]
    keys: Keys
    key_pair: str
    group: str
    placement_group: str | None


class Launches:
    """Buys the instances of one pool, on one event loop."""

    def __init__(self, instances: Instances, settings: Settings) -> None:
        self._instances, self._settings = instances, settings
        self._account = instances.account
        self._catalogue = Catalogue(instances.account)
        self._orders: list[tuple[Order, asyncio.Future[Bought]]] = []
        self._work: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._shared: _Shared | None = None
        self._images: dict[tuple[str, bool], MachineImage] = {}
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
            shared = self._shared = self._shared or self._make_shared(orders[0], offers)
        for order in orders:
            order.tell("asking AWS for the machine")
        done: dict[int, Bought] = {}
        reasons: list[str] = []
        exhausted: set[str] = set()
        # First all in one place: nodes that are far apart are slow together.
        for least in (len(orders), 1) if len(orders) > 1 else (1,):
            for offer, subnet in self._places(offers, shared):
                quota, code = failures.quota_of(
                    offer.instance_type, spot=offer.allocation == "spot"
                )
                if code in exhausted:
                    continue
                left = [order for order in orders if order.node not in done]
                if not left:
                    return done, None
                try:
                    made = self._buy(left, min(least, len(left)), offer, subnet, shared)
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
        key = ami, True
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
        key = offer.architecture, offer.accelerator is not None
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
        return found

    def _reserved(self) -> Reservation | None:
        named = self._settings.reservation
        return reserved(self._account, named) if named else None

    def _make_shared(self, order: Order, offers: Sequence[Offer]) -> _Shared:
        """Make what the instances share; every piece has a name and tags that lead back to it."""
        account, settings = self._account, self._settings
        name = tags.resource_name(order.pool)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            # What is refused is refused before anything is made.
            imaging = threads.submit(self._image, offers[0])
            subnets = network.subnets(account, settings.subnet, settings.public_ip)
            networks = (
                network.client_networks(account, subnets[0], settings.admit)
                if settings.access == "ssh"
                else []
            )
            imaging.result()
            keys = make_keys(order.pool, settings.key)
            importing = threads.submit(self._import_key, order, name, keys)
            grouping = threads.submit(self._make_placement_group, order, name)
            group = network.make_security_group(
                account, order, subnets[0].vpc, networks, efa=self._wants_efa(order.request)
            )
            importing.result()
            placement_group = grouping.result()
        return _Shared(subnets, keys, name, group, placement_group)

    def _import_key(self, order: Order, name: str, keys: Keys) -> None:
        try:
            self._account.call(
                "ec2",
                "import_key_pair",
                KeyName=name,
                PublicKeyMaterial=keys.public().encode("ascii"),
                TagSpecifications=[tags.specification("key-pair", order)],
            )
        except RequestError as problem:
            if problem.code != "InvalidKeyPair.Duplicate":
                raise

    def _make_placement_group(self, order: Order, name: str) -> str | None:
        asked = self._settings.placement_group
        if asked not in STRATEGIES:
            return asked
        try:
            self._account.call(
                "ec2",
                "create_placement_group",
                GroupName=name,
                Strategy=asked,
                TagSpecifications=[tags.specification("placement-group", order)],
            )
        except RequestError as problem:
            if problem.code != "InvalidPlacementGroup.Duplicate":
                raise
        return name

    def _places(self, offers: Sequence[Offer], shared: _Shared) -> Iterator[tuple[Offer, Subnet]]:
        """Every offer in every zone that has it, in the order in which they are tried."""
        near_first = sorted(shared.subnets, key=lambda subnet: subnet.zone != self._zone)
        for offer in offers:
            zones = [offer.zone] if offer.zone else self._catalogue.zones_of(offer.instance_type)
            yield from ((offer, subnet) for subnet in near_first if subnet.zone in zones)

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

    def _buy(
        self, orders: Sequence[Order], least: int, offer: Offer, subnet: Subnet, shared: _Shared
    ) -> dict[int, Bought]:
        image = self._image(offer)
        first = orders[0]
        arguments = self._arguments(first.request, offer, subnet, shared, image)
        nodes = " ".join(str(order.node) for order in orders)
        named = {tags.NODES: nodes, tags.USER: image.user}
        kinds = ["instance", "volume", "network-interface"]
        if offer.allocation == "spot":
            kinds.append("spot-instances-request")
        answer = self._run_instances(
            MinCount=least,
            MaxCount=len(orders),
            TagSpecifications=[tags.specification(kind, first, **named) for kind in kinds],
            **arguments,
        )
        made = sorted(answer["Instances"], key=lambda each: int(each.get("AmiLaunchIndex", 0)))
        offer = replace(offer, zone=subnet.zone)
        return {
            order.node: Bought(str(each["InstanceId"]), offer, shared.keys)
            for order, each in zip(orders, made, strict=False)
        }

    def _run_instances(self, **arguments: Any) -> Any:
        """Launch instances; asks again if the answer is lost, since there may be instances.

        With the same token, AWS launches no more than once.
        """
        arguments["ClientToken"] = uuid.uuid4().hex
        pauses = iter((1.0, 3.0))
        while True:
            try:
                # For want of capacity AWS answers as if it had failed, and again and again.
                return self._account.call("ec2", "run_instances", attempts=1, **arguments)
            except (UnreachableError, RequestError) as problem:
                lost = not isinstance(problem, RequestError) or problem.code in _UNKNOWN
                pause = next(pauses, None)
                if not lost or pause is None:
                    raise
            time.sleep(pause)

    def _arguments(
        self, request: Request, offer: Offer, subnet: Subnet, shared: _Shared, image: MachineImage
    ) -> dict[str, Any]:
        usual = USUAL_DISK_GB if offer.accelerator is None else GPU_DISK_GB
        disk = max(int(request.disk_gb or usual), image.disk_gb)
        arguments: dict[str, Any] = {
            "ImageId": image.id,
            "InstanceType": offer.instance_type,
            "KeyName": shared.key_pair,
            "UserData": user_data(shared.keys.host_key, idle=request.idle_timeout, ttl=request.ttl),
            # So that an instance that shuts itself down is gone, with its volume.
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "BlockDeviceMappings": [
                {
                    "DeviceName": image.root_device,
                    "Ebs": {
                        "VolumeSize": disk,
                        "VolumeType": "gp3",
                        "Encrypted": True,
                        "DeleteOnTermination": True,
                    },
                }
            ],
            "NetworkInterfaces": self._interfaces(request, offer, subnet, shared),
        }
        if self._settings.instance_profile:
            arguments["IamInstanceProfile"] = {"Name": self._settings.instance_profile}
        if shared.placement_group:
            arguments["Placement"] = {"GroupName": shared.placement_group}
        if offer.allocation == "spot":
            spot: dict[str, Any] = {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
            }
            if request.max_hourly_cost is not None:
                spot["MaxPrice"] = f"{request.max_hourly_cost:g}"
            arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        if self._reservation is not None:
            arguments |= self._reservation.arguments()
        return arguments

    def _interfaces(
        self, request: Request, offer: Offer, subnet: Subnet, shared: _Shared
    ) -> list[dict[str, Any]]:
        plain = {"SubnetId": subnet.id, "Groups": [shared.group], "DeleteOnTermination": True}
        first: dict[str, Any] = {**plain, "DeviceIndex": 0}
        cards = 1
        if self._wants_efa(request):
            kind = self._catalogue.type(offer.instance_type)
            if kind.efa_interfaces:
                first["InterfaceType"] = "efa"
                # An instance with several interfaces gets no public address.
                cards = 1 if subnet.public else min(kind.efa_interfaces, kind.network_cards)
            elif self._settings.efa:
                raise ConfigurationError(
                    f"AWS(efa=True): {kind.name} has no Elastic Fabric Adapter; ask for a machine "
                    "that has one, such as accelerator=sky.accelerators.H100(8), or leave efa out"
                )
        if cards == 1:
            first["AssociatePublicIpAddress"] = subnet.public
        return [first] + [
            {**plain, "DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa"}
            for card in range(1, cards)
        ]

    def _wants_efa(self, request: Request) -> bool:
        """Whether to use EFA: as the user says, or for several nodes with our own AMI's driver."""
        if self._settings.efa is not None:
            return self._settings.efa
        several = request.most_nodes > 1 and request.accelerator is not None
        return several and self._settings.ami is None

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
