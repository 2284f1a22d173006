"""The network of a pool on AWS: its subnets, the way out of them, and its security group."""

from __future__ import annotations

import ipaddress
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.errors import ConfigurationError
from skyward.providers import Order
from skyward.providers.aws import failures, tags
from skyward.providers.aws.account import Account
from skyward.providers.aws.failures import RequestError

WHO_AM_I = "https://checkip.amazonaws.com"
"""Tells from which address requests of this machine come to AWS."""
AGAIN_PAUSES = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Subnet:
    """A subnet in which instances have a way out."""

    id: str
    zone: str
    vpc: str
    cidr: str
    public: bool
    """Whether instances get a public address, without which there would be no way out."""


def subnets(account: Account, subnet: str | None, public_ip: bool | None) -> tuple[Subnet, ...]:
    """The subnets that a pool may use; raises if instances would have no way out of any."""
    asked: dict[str, Any] = (
        {"SubnetIds": [subnet]}
        if subnet
        else {"Filters": [{"Name": "default-for-az", "Values": ["true"]}]}
    )
    found = account.pages("ec2", "describe_subnets", "Subnets", **asked)
    if not found:
        raise ConfigurationError(
            f"AWS: {account.region} has no default subnets; name one with subnet=, or make them "
            "with `aws ec2 create-default-vpc`"
        )
    vpc = found[0]["VpcId"]
    tables = account.pages(
        "ec2",
        "describe_route_tables",
        "RouteTables",
        Filters=[{"Name": "vpc-id", "Values": [vpc]}],
    )
    usable: list[Subnet] = []
    refused: dict[str, list[str]] = {}
    for each in found:
        public, problem = False, "no IPv4 addresses"
        if each.get("CidrBlock"):
            public, problem = _way_out(each["SubnetId"], tables, public_ip)
        if problem:
            refused.setdefault(problem, []).append(each["SubnetId"])
        else:
            usable.append(
                Subnet(each["SubnetId"], each["AvailabilityZone"], vpc, each["CidrBlock"], public)
            )
    if not usable:
        raise ConfigurationError(
            f"AWS: {_told(refused)}; name another subnet with subnet=: nodes install packages, "
            "and so need a way out"
        )
    return tuple(usable)


def _way_out(
    subnet: str, tables: Sequence[Mapping[str, Any]], public_ip: bool | None
) -> tuple[bool, str]:
    """Whether instances of a subnet need a public address, and why there is no way out."""
    own = [
        table
        for table in tables
        if any(each.get("SubnetId") == subnet for each in table.get("Associations", ()))
    ]
    main = [
        table for table in tables if any(each.get("Main") for each in table.get("Associations", ()))
    ]
    for table in (own or main)[:1]:
        for route in table.get("Routes", ()):
            if (
                route.get("DestinationCidrBlock") != "0.0.0.0/0"
                or route.get("State") == "blackhole"
            ):
                continue
            if not str(route.get("GatewayId", "")).startswith("igw-"):
                if public_ip:
                    return False, (
                        "a route out through a NAT, behind which a public address would not be "
                        "reachable: leave public_ip out"
                    )
                return False, ""
            if public_ip is False:
                return False, (
                    "a route out through an internet gateway only, which takes a public address: "
                    "leave public_ip out, or use a subnet with a NAT gateway"
                )
            return True, ""
    return False, "no route out (no 0.0.0.0/0 in the route table)"


def _told(refused: Mapping[str, Sequence[str]]) -> str:
    """Which subnets cannot be used, and why."""
    return "; ".join(
        f"{', '.join(ids)} {'has' if len(ids) == 1 else 'have'} {problem}"
        for problem, ids in refused.items()
    )


def client_networks(account: Account, subnet: Subnet, admit: Sequence[str]) -> list[str]:
    """The networks that may connect to the instances: the user's choice, or this machine alone."""
    if admit:
        return list(admit)
    found: list[str | None] = []
    inside = _source_address(str(ipaddress.ip_network(subnet.cidr)[1]))
    if inside is not None and ipaddress.ip_address(inside).is_private:
        found.append(inside)
    if subnet.public and not account.endpoint:
        found.append(_public_address())
    elif account.endpoint:
        found.append(_source_address(urllib.parse.urlsplit(account.endpoint).hostname or ""))
    return [f"{each}/32" for each in dict.fromkeys(found) if each]


def _source_address(target: str) -> str | None:
    """The address of this machine from which packets to a target are sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _public_address() -> str:
    try:
        with urllib.request.urlopen(WHO_AM_I, timeout=10) as answer:
            return str(ipaddress.IPv4Address(answer.read(100).decode("ascii").strip()))
    except (OSError, ValueError) as problem:
        raise ConfigurationError(
            f"AWS: {WHO_AM_I} does not say from which address this machine comes to AWS "
            f"({problem}); name the networks that may connect: AWS(admit=['203.0.113.0/24'])"
        ) from problem


def make_security_group(
    account: Account, order: Order, vpc: str, networks: Sequence[str], *, efa: bool
) -> str:
    """A security group that admits the client's networks and the pool's own instances."""
    name = tags.resource_name(order.pool)
    try:
        group = account.call(
            "ec2",
            "create_security_group",
            GroupName=name,
            Description=f"The nodes of the Skyward pool {order.pool}",
            VpcId=vpc,
            TagSpecifications=[tags.specification("security-group", order)],
        )["GroupId"]
    except RequestError as problem:
        if problem.code != "InvalidGroup.Duplicate":
            raise
        # Made by an attempt that was cut short.
        group = security_groups(account, order.pool)[0]
    everything = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    rules = [everything, *_client_rules(networks)]
    _authorize(account, "authorize_security_group_ingress", group, rules)
    if efa:
        # Traffic of EFA is not IP: the usual rule, which lets everything out, is not for it.
        _authorize(account, "authorize_security_group_egress", group, [everything])
    return str(group)


def admit(account: Account, subnet: Subnet, group: str, chosen: Sequence[str]) -> None:
    """Let the client's networks of now in, if they are others than when the group was made."""
    rules = _client_rules(client_networks(account, subnet, chosen))
    if rules:
        _authorize(account, "authorize_security_group_ingress", group, rules)


def admit_again(account: Account, pool: str, subnet: str, chosen: Sequence[str]) -> None:
    """Let the client's networks of now in to a pool that stays."""
    for group in security_groups(account, pool):
        admit(account, subnets(account, subnet, None)[0], group, chosen)


def _client_rules(networks: Sequence[str]) -> list[dict[str, Any]]:
    ranges = [{"CidrIp": each, "Description": "the client"} for each in networks]
    return [
        {"IpProtocol": "tcp", "FromPort": first, "ToPort": last, "IpRanges": ranges}
        for first, last in ((22, 22), (1024, 65535))
        if ranges
    ]


def _authorize(
    account: Account, operation: str, group: str, rules: Sequence[Mapping[str, Any]]
) -> None:
    pauses = iter(AGAIN_PAUSES)
    while True:
        try:
            account.call("ec2", operation, GroupId=group, IpPermissions=rules)
            return
        except RequestError as problem:
            if problem.code == "InvalidPermission.Duplicate":
                return
            pause = next(pauses, None) if problem.code in failures.NOT_YET else None
            if pause is None:
                raise
        time.sleep(pause)


def security_groups(account: Account, pool: str) -> list[str]:
    """The security groups of a pool."""
    found = account.pages(
        "ec2", "describe_security_groups", "SecurityGroups", Filters=[tags.of_pool(pool)]
    )
    return [each["GroupId"] for each in found]
