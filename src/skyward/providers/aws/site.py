"""The site of a pool on AWS: the network, the keys and the groups that its instances share."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.providers import Order, Request
from skyward.providers.aws import network, tags
from skyward.providers.aws.account import Account
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.keys import Keys, make_keys
from skyward.providers.aws.network import Subnet

STRATEGIES = ("cluster", "spread", "partition")


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
    user: str | None

    def wants_efa(self, request: Request) -> bool:
        """Whether to use EFA: as the user says, or for several nodes with our own AMI's driver."""
        if self.efa is not None:
            return self.efa
        several = request.most_nodes > 1 and request.accelerator is not None
        return several and self.ami is None


@dataclass(frozen=True, slots=True)
class Site:
    """What all instances of a pool share."""

    subnets: tuple[Subnet, ...]
    keys: Keys
    key_pair: str
    group: str
    placement_group: str | None


def make_site(
    account: Account, settings: Settings, order: Order, check: Callable[[], object]
) -> Site:
    """Make what the instances share; every piece has a name and tags that lead back to it.

    `check` runs beside the first requests. If it fails, nothing is made.
    """
    name = tags.resource_name(order.pool)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        checking = threads.submit(check)
        subnets = network.subnets(account, settings.subnet, settings.public_ip)
        networks = (
            network.client_networks(account, subnets[0], settings.admit)
            if settings.access == "ssh"
            else []
        )
        checking.result()
        keys = make_keys(order.pool, settings.key)
        importing = threads.submit(_import_key, account, order, name, keys)
        grouping = threads.submit(
            _make_placement_group, account, order, name, settings.placement_group
        )
        group = network.make_security_group(
            account, order, subnets[0].vpc, networks, efa=settings.wants_efa(order.request)
        )
        importing.result()
        placement_group = grouping.result()
    return Site(subnets, keys, name, group, placement_group)


def _import_key(account: Account, order: Order, name: str, keys: Keys) -> None:
    try:
        account.call(
            "ec2",
            "import_key_pair",
            KeyName=name,
            PublicKeyMaterial=keys.public().encode("ascii"),
            TagSpecifications=[tags.specification("key-pair", order)],
        )
    except RequestError as problem:
        if problem.code != "InvalidKeyPair.Duplicate":
            raise


def _make_placement_group(
    account: Account, order: Order, name: str, asked: str | None
) -> str | None:
    if asked not in STRATEGIES:
        return asked
    try:
        account.call(
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
