"""Purchases: the one request that buys instances of one offer in one subnet."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyward.errors import UnreachableError
from skyward.market import Offer
from skyward.providers import Order, Request
from skyward.providers.aws import failures, tags
from skyward.providers.aws.account import Account
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.images import MachineImage
from skyward.providers.aws.instance_types import InstanceType
from skyward.providers.aws.keys import Keys
from skyward.providers.aws.network import Subnet
from skyward.providers.aws.reservations import Reservation
from skyward.providers.aws.site import Settings, Site
from skyward.providers.aws.user_data import user_data

RETRY_PAUSES = (1.0, 2.0, 4.0)
USUAL_DISK_GB = 50
GPU_DISK_GB = 120
"""The drivers and tools of the usual AMI alone take 60 GB."""


@dataclass(frozen=True, slots=True)
class Bought:
    """An instance, with what is needed to log in."""

    id: str
    offer: Offer
    keys: Keys


@dataclass(frozen=True, slots=True)
class Purchase:
    """An offer, and everything else that a launch has to say."""

    settings: Settings
    site: Site
    offer: Offer
    kind: InstanceType
    subnet: Subnet
    image: MachineImage
    reservation: Reservation | None

    def make(self, account: Account, orders: Sequence[Order], least: int) -> dict[int, Bought]:
        """Buy instances for as many of the orders as there are, but no fewer than `least`."""
        first = orders[0]
        named = {
            tags.NODES: tags.listed([order.node for order in orders]),
            tags.USER: self.settings.user or self.image.user,
        }
        kinds = ["instance", "volume", "network-interface"]
        if self.offer.allocation == "spot":
            kinds.append("spot-instances-request")
        answer = _run_instances(
            account,
            MinCount=least,
            MaxCount=len(orders),
            ClientToken=uuid.uuid4().hex,
            TagSpecifications=[tags.specification(kind, first, **named) for kind in kinds],
            **self._arguments(first.request),
        )
        made = sorted(answer["Instances"], key=lambda each: int(each.get("AmiLaunchIndex", 0)))
        offer = replace(self.offer, zone=self.subnet.zone)
        return {
            order.node: Bought(str(each["InstanceId"]), offer, self.site.keys)
            for order, each in zip(orders, made, strict=False)
        }

    def _arguments(self, request: Request) -> dict[str, Any]:
        usual = USUAL_DISK_GB if self.offer.accelerator is None else GPU_DISK_GB
        disk = max(int(request.disk_gb or usual), self.image.disk_gb)
        arguments: dict[str, Any] = {
            "ImageId": self.image.id,
            "InstanceType": self.offer.instance_type,
            "KeyName": self.site.key_pair,
            "UserData": user_data(
                *self.site.keys.host_key, idle=request.idle_timeout, ttl=request.ttl
            ),
            # So that an instance that shuts itself down is gone, with its volume.
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},
            "BlockDeviceMappings": [
                {"DeviceName": device, "Ebs": {"Encrypted": True, "DeleteOnTermination": True}}
                for device in self.image.more_devices
            ]
            + [
                {
                    "DeviceName": self.image.root_device,
                    "Ebs": {
                        "VolumeSize": disk,
                        "VolumeType": "gp3",
                        "Encrypted": True,
                        "DeleteOnTermination": True,
                    },
                }
            ],
            "NetworkInterfaces": self._interfaces(request),
        }
        if self.settings.instance_profile:
            arguments["IamInstanceProfile"] = {"Name": self.settings.instance_profile}
        if self.site.placement_group:
            arguments["Placement"] = {"GroupName": self.site.placement_group}
        if self.offer.allocation == "spot":
            spot: dict[str, Any] = {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
            }
            if request.max_hourly_cost is not None:
                spot["MaxPrice"] = f"{request.max_hourly_cost:g}"
            arguments["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": spot}
        if self.reservation is not None:
            arguments |= self.reservation.arguments()
        return arguments

    def _interfaces(self, request: Request) -> list[dict[str, Any]]:
        plain = {
            "SubnetId": self.subnet.id,
            "Groups": [self.site.group],
            "DeleteOnTermination": True,
        }
        first: dict[str, Any] = {**plain, "DeviceIndex": 0}
        cards = 1
        if self.kind.efa_interfaces and self.settings.wants_efa(request):
            first["InterfaceType"] = "efa"
            # An instance with several interfaces gets no public address.
            most = min(self.kind.efa_interfaces, self.kind.network_cards)
            cards = 1 if self.subnet.public else most
        if cards == 1:
            first["AssociatePublicIpAddress"] = self.subnet.public
        return [first] + [
            {**plain, "DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa"}
            for card in range(1, cards)
        ]


def _run_instances(account: Account, **arguments: Any) -> Any:
    """Launch; repeats a request that may have arrived, which its token makes harmless."""
    pauses = iter(RETRY_PAUSES)
    while True:
        try:
            # Once: for want of capacity AWS answers as if it had failed, again and again.
            return account.call("ec2", "run_instances", attempts=1, **arguments)
        except (RequestError, UnreachableError) as problem:
            pause = next(pauses, None)
            again = failures.UNCERTAIN | failures.NOT_YET
            refused = isinstance(problem, RequestError) and problem.code not in again
            if pause is None or refused:
                raise
        time.sleep(pause)
