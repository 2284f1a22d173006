"""The site of a pool on AWS: the network, the keys and the groups that its instances share."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ipaddress
import logging
import os
import shutil
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward.errors import ConfigurationError, PoolError, PoolStartError, SkywardError
from skyward.providers import Order, Remains, gathered, state_folder
from skyward.providers.aws import tags
from skyward.providers.aws.account import END_PAUSE_SECONDS, Account, RequestError
from skyward.providers.aws.catalogue import STRATEGIES
from skyward.providers.aws.instances import ENDED, described, state_of
from skyward.providers.aws.settings import Settings

_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Site:
    """What all instances of a pool share."""

    subnets: tuple[Subnet, ...]
    keys: Keys
    group: str
    placement_group: str | None


def make_site(
    account: Account, settings: Settings, order: Order, check: Callable[[], object]
) -> Site:
    """Make what the instances share; every piece has a name and tags that lead back to it.

    `check` runs beside the first requests. If it fails, nothing is made.
    """
    name = tags.resource_name(order.pool)
    strategy = settings.placement_group if settings.placement_group in STRATEGIES else None
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        checking = threads.submit(check)
        usable = subnets(account, settings.subnet, settings.public_ip)
        networks = (
            client_networks(account, usable[0], settings.admit) if settings.access == "ssh" else []
        )
        checking.result()
        keys = Keys(order.pool, settings.key)
        keys.make()
        importing = threads.submit(
            account.call,
            *("ec2", "import_key_pair"),
            fine={"InvalidKeyPair.Duplicate"},
            KeyName=name,
            PublicKeyMaterial=keys.public().encode("ascii"),
            TagSpecifications=[tags.specification("key-pair", order)],
        )
        if strategy is not None:
            grouping = threads.submit(
                account.call,
                *("ec2", "create_placement_group"),
                fine={"InvalidPlacementGroup.Duplicate"},
                GroupName=name,
                Strategy=strategy,
                TagSpecifications=[tags.specification("placement-group", order)],
            )
        group = _make_security_group(
            account, order, usable[0].vpc, networks, efa=settings.wants_efa(order.request)
        )
        importing.result()
        if strategy is not None:
            grouping.result()
    return Site(usable, keys, group, name if strategy else settings.placement_group)


# The network.

WHO_AM_I = "https://checkip.amazonaws.com"
"""Tells from which address requests of this machine come to AWS."""


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


def _make_security_group(
    account: Account, order: Order, vpc: str, networks: Sequence[str], *, efa: bool
) -> str:
    """A security group that admits the client's networks and the pool's own instances."""
    made = account.call(
        "ec2",
        "create_security_group",
        fine={"InvalidGroup.Duplicate"},
        GroupName=tags.resource_name(order.pool),
        Description=f"The nodes of the Skyward pool {order.pool}",
        VpcId=vpc,
        TagSpecifications=[tags.specification("security-group", order)],
    )
    # One that is there was made by an attempt that was cut short.
    group = str(made["GroupId"] if made else security_groups(account, order.pool)[0])
    everything = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    rules = [everything, *_client_rules(networks)]
    _authorize(account, "authorize_security_group_ingress", group, rules)
    if efa:
        # Traffic of EFA is not IP: the usual rule, which lets everything out, is not for it.
        _authorize(account, "authorize_security_group_egress", group, [everything])
    return group


def admit(account: Account, subnet: Subnet, group: str, chosen: Sequence[str]) -> None:
    """Let the client's networks of now in, if they are others than when the group was made."""
    rules = _client_rules(client_networks(account, subnet, chosen))
    if rules:
        _authorize(account, "authorize_security_group_ingress", group, rules)


def admit_again(account: Account, pool: str, subnet: str, chosen: Sequence[str]) -> None:
    """Let the client's networks of now in to a kept pool."""
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
    known = {"InvalidPermission.Duplicate"}
    account.call("ec2", operation, fine=known, GroupId=group, IpPermissions=rules)


def security_groups(account: Account, pool: str) -> list[str]:
    """The security groups of a pool."""
    return [each["GroupId"] for each in _security_groups(account, tags.of_pool(pool))]


def _security_groups(account: Account, which: dict[str, Any]) -> list[dict[str, Any]]:
    return account.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=[which])


# The keys: one to log in with, and one that the instances prove themselves with. They lie in the
# user's state folder until the pool is removed, so that `sky down` can log in after the client was
# killed.

_FILES = ("key", "host_key", "known_hosts")
"""The files of a pool's keys. The last is written last: with it, the others are complete."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The files of a pool's keys, which need not exist.

    Raises `ValueError` for what is no pool: the name may come from a tag that others have written.
    """

    pool: str
    own: str | None = None
    """A private key of the user's, which is used instead of a new one."""
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        if not tags.is_pool(self.pool):
            raise ValueError(f"no pool can be called {self.pool!r}")
        object.__setattr__(self, "folder", state_folder() / "aws" / self.pool)

    @property
    def private(self) -> str:
        """The path of the private key to log in with."""
        return self.own or str(self.folder / "key")

    @property
    def known_hosts(self) -> Path:
        """The file with the keys that the instances may have."""
        return self.folder / "known_hosts"

    @property
    def host_key(self) -> tuple[str, str]:
        """The key of the instances: its private half, and its public half."""
        public = self.known_hosts.read_text("ascii").splitlines()[0].partition(" ")[2]
        return (self.folder / "host_key").read_text("ascii"), public

    def public(self) -> str:
        """The public half of the key to log in with, in OpenSSH's form."""
        from cryptography.hazmat.primitives import serialization

        try:
            data = Path(self.private).expanduser().read_bytes()
            key = serialization.load_ssh_private_key(data, None)
        except OSError as problem:
            raise ConfigurationError(
                f"AWS(key={self.own!r}): {problem.strerror}; name a private key's file, or leave "
                "key out: then each pool has its own"
            ) from problem
        except (ValueError, TypeError) as problem:
            beside = Path(f"{self.private}.pub").expanduser()
            if beside.exists():
                # One with a passphrase, which the ssh agent has.
                return " ".join(beside.read_text("ascii").split()[:2])
            raise ConfigurationError(
                f"AWS(key={self.own!r}): not a private key that can be read: {problem}; put its "
                "public half beside it, or leave key out: then each pool has its own"
            ) from problem
        return (
            key.public_key()
            .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            .decode("ascii")
        )

    def trust(self, addresses: Sequence[str], keys: Sequence[str]) -> None:
        """Let the addresses of an instance have other keys, which the API has told."""
        with self.known_hosts.open("a", encoding="ascii") as file:
            file.writelines(f"{','.join(addresses)} {key}\n" for key in keys)

    def make(self) -> None:
        """Make the keys, if they do not exist."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self.known_hosts.exists():
                if self.own is None:
                    _write(self.folder / "key", _new_key()[0])
                private, public = _new_key()
                _write(self.folder / "host_key", private)
                # Last: with it, the others are complete.
                _write(self.known_hosts, f"* {public}\n")
        except OSError as problem:
            raise PoolStartError(
                f"the pool's keys cannot be kept in {self.folder}: {problem.strerror}; make that "
                "folder writable, or set SKYWARD_STATE to another"
            ) from problem

    def read(self) -> dict[str, str]:
        """The texts of the keys, by the names of their files; raises `PoolError` without them.

        A key of the user's own is not among them.
        """
        names = _FILES if self.own is None else _FILES[1:]
        try:
            return {name: (self.folder / name).read_text("ascii") for name in names}
        except OSError as problem:
            raise PoolError(
                f"the keys of this pool are not in {self.folder}: {problem.strerror}; export its "
                "record on the machine that made it"
            ) from problem

    def write(self, texts: Mapping[str, str]) -> None:
        """Write down keys that another machine has made."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in _FILES:
            if name in texts:
                _write(self.folder / name, texts[name])

    def forget(self) -> None:
        """Remove the keys."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)


def _new_key() -> tuple[str, str]:
    """A private key and its public half, both in OpenSSH's form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private.decode("ascii"), public.decode("ascii")


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)


# What is left of a pool.

END_SECONDS = 150.0
"""How long the instances of a pool may take to end; until then, their security group stays."""
_GONE = frozenset(
    {
        *("InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidSecurityGroupID.NotFound"),
        *("InvalidKeyPair.NotFound", "InvalidPlacementGroup.Unknown"),
    }
)


def sweep(account: Account, pool: str, *, grouped: bool = False) -> None:
    """Remove a pool's security group and key pair, its placement group, and its keys here.

    Waits for the end of its instances, which use them. `grouped` says whether there may be a
    placement group of the pool's own, which must not stay.
    """
    mine = tags.of_pool(pool)
    # First what needs no wait: the instances may take long to end.
    for pair in _key_pairs(account, mine):
        account.call("ec2", "delete_key_pair", fine=_GONE, KeyName=pair["KeyName"])
    Keys(pool).forget()
    deadline = time.monotonic() + END_SECONDS
    while left := [each for each in described(account, mine) if state_of(each) != "terminated"]:
        lost = [each["InstanceId"] for each in left if state_of(each) not in ENDED]
        if lost:
            # Their launch was cut short: nobody else knows of them.
            account.call("ec2", "terminate_instances", InstanceIds=lost)
        if time.monotonic() > deadline:
            raise PoolStartError(
                f"AWS: instances of the pool {pool} have not ended after {END_SECONDS:.0f} s, and "
                "their security group stays until they have; it costs nothing"
            )
        try:
            seconds = max(END_PAUSE_SECONDS, deadline - time.monotonic())
            account.wait_for_end([each["InstanceId"] for each in left], seconds)
        except RequestError:
            # One that AWS still calls pending, or has forgotten, ends the wait: then look again.
            time.sleep(END_PAUSE_SECONDS)
    for group in security_groups(account, pool):
        account.call("ec2", "delete_security_group", fine=_GONE, GroupId=group)
    try:
        groups = _placement_groups(account, mine)
    except SkywardError:
        # Most pools have none, and most users need not be allowed to list them.
        if grouped:
            raise
        return
    for each in groups:
        account.call("ec2", "delete_placement_group", fine=_GONE, GroupName=each["GroupName"])


def remains(account: Account) -> list[Remains]:
    """What there is in a region of any pool."""
    marked = tags.of_any_pool()
    found: list[Remains] = []

    def note(resource: Mapping[str, Any], what: str) -> None:
        each = tags.tags_of(resource)
        if tags.is_pool(each.get(tags.POOL, "")):
            found.append(Remains.labelled(each, tags.PREFIX, what))

    for each in described(account, marked):
        if state_of(each) not in ENDED:
            note(each, f"instance {each['InstanceId']}")
    for each in _security_groups(account, marked):
        note(each, f"security group {each['GroupId']}")
    for each in _key_pairs(account, marked):
        note(each, f"key pair {each['KeyName']}")
    try:
        for each in _placement_groups(account, marked):
            note(each, f"placement group {each['GroupName']}")
    except SkywardError as problem:
        _log.warning("placement groups are left out: %s", problem)
    return gathered(sorted(found, key=lambda each: each.resources))


def _key_pairs(account: Account, which: dict[str, Any]) -> list[dict[str, Any]]:
    found = account.call("ec2", "describe_key_pairs", Filters=[which])
    return found["KeyPairs"]  # type: ignore[no-any-return]


def _placement_groups(account: Account, which: dict[str, Any]) -> list[dict[str, Any]]:
    found = account.call("ec2", "describe_placement_groups", attempts=2, Filters=[which])
    return [each for each in found["PlacementGroups"] if each.get("State") == "available"]
