"""Sweeping: removes what a pool has on AWS besides its instances, found by its tags."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from skyward.errors import PoolStartError, SkywardError
from skyward.providers import Remains
from skyward.providers.aws import tags
from skyward.providers.aws.account import Account
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.instances import ENDED, state_of
from skyward.providers.aws.keys import forget_keys

_log = logging.getLogger("skyward")
END_SECONDS = 150.0
"""How long the instances of a pool may take to end; until then, their security group stays."""
_GONE = frozenset(
    {
        *("InvalidGroup.NotFound", "InvalidGroupId.NotFound", "InvalidSecurityGroupID.NotFound"),
        *("InvalidKeyPair.NotFound", "InvalidPlacementGroup.Unknown"),
    }
)
_IN_USE = frozenset({"DependencyViolation", "InvalidGroup.InUse", "InvalidPlacementGroup.InUse"})


def sweep(
    account: Account,
    pool: str,
    *,
    grouped: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Remove a pool's security group and key pair, its placement group, and its keys here.

    Waits for the end of its instances, which use them. `grouped` says whether there may be a
    placement group of the pool's own, which must not stay.
    """
    deadline = clock() + END_SECONDS
    mine = [tags.of_pool(pool)]
    # First what needs no wait: the instances may take long to end.
    for each in account.call("ec2", "describe_key_pairs", Filters=mine)["KeyPairs"]:
        _removed(account, deadline, clock, "delete_key_pair", KeyName=each["KeyName"])
    forget_keys(pool)
    pause = 0.5
    while left := _instances(account, pool):
        lost = [each["InstanceId"] for each in left if state_of(each) not in ENDED]
        if lost:
            # Their launch was cut short: nobody else knows of them.
            account.call("ec2", "terminate_instances", InstanceIds=lost)
        if clock() > deadline:
            raise PoolStartError(
                f"AWS: instances of the pool {pool} have not ended after {END_SECONDS:.0f} s, and "
                "their security group stays until they have; it costs nothing"
            )
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
    groups = account.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=mine)
    for each in groups:
        _removed(account, deadline, clock, "delete_security_group", GroupId=each["GroupId"])
    try:
        groups = _placement_groups(account, tags.of_pool(pool))
    except SkywardError:
        # Most pools have none, and most users need not be allowed to list them.
        if grouped:
            raise
        groups = []
    for each in groups:
        _removed(account, deadline, clock, "delete_placement_group", GroupName=each["GroupName"])


def _instances(account: Account, pool: str) -> list[dict[str, Any]]:
    """The instances of a pool that have not ended."""
    found = account.pages("ec2", "describe_instances", "Reservations", Filters=[tags.of_pool(pool)])
    return [
        each for group in found for each in group["Instances"] if state_of(each) != "terminated"
    ]


def _removed(
    account: Account, deadline: float, clock: Callable[[], float], operation: str, **what: Any
) -> None:
    """Remove something that may be in use for a moment longer, or gone."""
    while True:
        try:
            account.call("ec2", operation, **what)
            return
        except RequestError as problem:
            if problem.code in _GONE:
                return
            if problem.code not in _IN_USE or clock() > deadline:
                raise
        time.sleep(2)


def remains(account: Account) -> list[Remains]:
    """What there is in a region of any pool."""
    marked = [tags.of_any_pool()]
    found: dict[str, list[str]] = defaultdict(list)
    told: dict[str, dict[str, str]] = defaultdict(dict)

    def note(resource: dict[str, object], what: str) -> None:
        each = tags.tags_of(resource)
        if tags.is_pool(pool := each.get(tags.POOL, "")):
            found[pool].append(what)
            told[pool] |= each

    for group in account.pages("ec2", "describe_instances", "Reservations", Filters=marked):
        for each in group["Instances"]:
            if state_of(each) not in ENDED:
                note(each, f"instance {each['InstanceId']}")
    for each in account.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=marked):
        note(each, f"security group {each['GroupId']}")
    for each in account.call("ec2", "describe_key_pairs", Filters=marked)["KeyPairs"]:
        note(each, f"key pair {each['KeyName']}")
    try:
        for each in _placement_groups(account, tags.of_any_pool()):
            note(each, f"placement group {each['GroupName']}")
    except SkywardError as problem:
        _log.warning("placement groups are left out: %s", problem)
    return [
        Remains(
            pool=pool,
            name=told[pool].get(tags.NAME, ""),
            owner=told[pool].get(tags.OWNER, ""),
            pid=_number(told[pool].get(tags.PID, "")),
            resources=tuple(sorted(resources)),
        )
        for pool, resources in found.items()
    ]


def _placement_groups(account: Account, which: dict[str, Any]) -> list[dict[str, Any]]:
    found = account.call("ec2", "describe_placement_groups", attempts=2, Filters=[which])
    return [each for each in found["PlacementGroups"] if each.get("State") == "available"]


def _number(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    return 0
