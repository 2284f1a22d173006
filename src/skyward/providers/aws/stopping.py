"""Stopping: the instances of a pool that stays are stopped with their disks, and started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Literal

from skyward.errors import PoolError, UnavailableError
from skyward.providers.aws import failures, tags
from skyward.providers.aws.account import Account
from skyward.providers.aws.failures import RequestError
from skyward.providers.aws.instances import ENDED, PAUSES, Instance, Instances, node_of, state_of

STOP_SECONDS = 600.0
"""How long instances may take to stop; large ones take minutes."""
START_SECONDS = 120.0
"""How long AWS may call an instance stopped after it was asked to start it."""
STOPPED = frozenset({"stopping", "stopped"})
GB_MONTH = 0.08
"""What a gigabyte of a disk costs in a month, in US dollars, in most regions."""
MONTH_HOURS = 730


def check(instances: Iterable[Instance]) -> None:
    """Refuse instances that cannot be stopped."""
    spot = [each["InstanceId"] for each in _there(instances) if _is_spot(each)]
    if spot:
        raise PoolError(
            f"AWS does not stop spot instances of this kind ({', '.join(sorted(spot))})"
        )


async def spare(instances: Instances, spared: bool) -> None:
    """Have the instances of a pool keep their disks if they shut themselves down, or lose them."""
    behaviour: Literal["stop", "terminate"] = "stop" if spared else "terminate"
    running = _there((await instances.all()).values())
    changes = (on_shutdown(instances, str(each["InstanceId"]), behaviour) for each in running)
    await asyncio.gather(*changes)


async def on_shutdown(
    instances: Instances, instance: str, behaviour: Literal["stop", "terminate"]
) -> None:
    """Say what becomes of an instance that shuts itself down; terminated, it loses its disk."""
    await asyncio.to_thread(
        instances.account.call,
        "ec2",
        "modify_instance_attribute",
        InstanceId=instance,
        Attribute="instanceInitiatedShutdownBehavior",
        Value=behaviour,
    )


async def stop(instances: Instances) -> None:
    """Stop all instances of a pool, and wait until they have stopped."""
    account = instances.account
    running = [each["InstanceId"] for each in _there((await instances.all()).values())]
    if running:
        await asyncio.to_thread(account.call, "ec2", "stop_instances", InstanceIds=running)
    deadline = time.monotonic() + STOP_SECONDS
    pause, longest = PAUSES
    while True:
        found = (await instances.look(fresh=True)).values()
        late = [each["InstanceId"] for each in found if state_of(each) not in ENDED | {"stopped"}]
        if not late:
            return
        if time.monotonic() > deadline:
            raise PoolError(
                f"AWS: the instances {', '.join(late)} have not stopped after {STOP_SECONDS:.0f} s"
            )
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, longest)


async def former(instances: Instances, node: int) -> Instance | None:
    """The instance that a node has, running or not; None if it has none."""
    found = await instances.all()
    return next(
        (each for each in found.values() if node_of(each) == node and state_of(each) not in ENDED),
        None,
    )


async def start(instances: Instances, instance: Instance) -> Instance:
    """Start an instance that is stopped, or about to be, and wait until it runs."""
    id = str(instance["InstanceId"])
    deadline = time.monotonic() + STOP_SECONDS
    while state_of(instance) == "stopping" and time.monotonic() < deadline:
        await asyncio.sleep(PAUSES[0])
        instance = (await instances.look(fresh=True)).get(id, instance)
    # First: without a client, the instance shuts itself down.
    await on_shutdown(instances, id, "stop")
    try:
        await asyncio.to_thread(instances.account.call, "ec2", "start_instances", InstanceIds=[id])
    except RequestError as problem:
        if problem.code not in failures.CAPACITY:
            raise
        raise UnavailableError(
            f"AWS has no room now to start the instance {id} again, and it stays stopped: "
            f"{problem}; try later"
        ) from problem
    deadline = time.monotonic() + START_SECONDS
    while True:
        found = (await instances.look(fresh=True)).get(id)
        if found is None or state_of(found) != "stopped":
            return await instances.running(id)
        if time.monotonic() > deadline:
            raise _did_not_start(found)
        await asyncio.sleep(PAUSES[0])


def _did_not_start(instance: Instance) -> RequestError:
    """The error for an instance that AWS stops again at once, as for a key that it may not use."""
    reason = instance.get("StateReason", {})
    return RequestError(
        f"AWS: the instance {instance['InstanceId']} is still stopped {START_SECONDS:.0f} s after "
        f"it was started: {reason.get('Message') or 'no reason given'}; see that its volumes are "
        "there and their keys may be used, and try again",
        str(reason.get("Code", "")),
    )


def disks_price(account: Account, pool: str) -> float:
    """What the disks of a pool cost in an hour, about, in US dollars."""
    disks = account.pages("ec2", "describe_volumes", "Volumes", Filters=[tags.of_pool(pool)])
    there = [each for each in disks if each.get("State") not in ("deleting", "deleted")]
    return sum(float(each["Size"]) for each in there) * GB_MONTH / MONTH_HOURS


def _there(instances: Iterable[Instance]) -> list[Instance]:
    return [each for each in instances if state_of(each) not in ENDED | STOPPED]


def _is_spot(instance: Instance) -> bool:
    return instance.get("InstanceLifecycle") == "spot"
