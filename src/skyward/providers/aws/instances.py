"""The instances of a pool: one request for all of them, to look at, to end, to stop and start."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any, Literal

from skyward.errors import PoolError, UnavailableError
from skyward.providers.allocation import GATHER_SECONDS
from skyward.providers.aws import tags
from skyward.providers.aws.account import CAPACITY, Account, RequestError

PAUSES = (1.0, 6.0)
"""The first and the longest pause between two looks at instances that start."""
APPEAR_SECONDS = 60.0
"""How long a new instance may be unknown: AWS tells all its parts of it one by one."""
STOP_SECONDS = 600.0
"""How long instances may take to stop; large ones take minutes."""
START_SECONDS = 120.0
"""How long AWS may call an instance stopped after it was asked to start it."""
GB_MONTH = 0.08
"""What a gigabyte of a disk costs in a month, in US dollars, in most regions."""
MONTH_HOURS = 730
STOPPED = frozenset({"stopping", "stopped"})
ENDED = frozenset({"shutting-down", "terminated"})
Instance = Mapping[str, Any]


class Instances:
    """The instances of one pool, on one event loop.

    They are waited for here and not by the SDK: its waits block a thread, ask for each node, and
    give up on all instances for one.
    """

    def __init__(self, account: Account, pool: str) -> None:
        self.account = account
        self.pool = pool
        self._looking: asyncio.Task[dict[str, Instance]] | None = None
        self._ending: set[str] = set()
        self._ender: asyncio.Task[None] | None = None
        """The task that ends those, unless it has begun."""
        self._ended: set[str] = set()
        self._bought: dict[str, float] = {}

    def expect(self, instance: str) -> None:
        """Say that an instance was bought just now: AWS may not know it everywhere yet."""
        self._bought[instance] = time.monotonic()

    def _is_new(self, instance: str) -> bool:
        bought = self._bought.get(instance)
        return bought is not None and time.monotonic() - bought < APPEAR_SECONDS

    async def all(self) -> dict[str, Instance]:
        """All instances by id, once those that were bought just now are among them."""
        while True:
            found = await self.look(fresh=True)
            if not any(map(self._is_new, self._bought.keys() - found.keys() - self._ended)):
                return found
            await asyncio.sleep(PAUSES[0])

    async def look(self, *, fresh: bool = False) -> dict[str, Instance]:
        """All instances by id; callers at the same time share one request.

        With `fresh`, one that was under way already does not do.
        """
        if fresh and self._looking is not None:
            await asyncio.wait({self._looking})
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(asyncio.to_thread(self._describe))
        return await asyncio.shield(self._looking)

    def _describe(self) -> dict[str, Instance]:
        found = described(self.account, tags.of_pool(self.pool))
        return {each["InstanceId"]: each for each in found}

    async def running(self, instance: str) -> Instance:
        """Wait until an instance runs; raises with AWS's reason if it ends instead."""
        began, (pause, longest) = time.monotonic(), PAUSES
        while True:
            found = (await self.look()).get(instance)
            state = state_of(found) if found is not None else "pending"
            if found is not None and state == "running":
                return found
            if found is None and time.monotonic() - began > APPEAR_SECONDS:
                raise UnavailableError(f"AWS: the instance {instance} is not there; try again")
            if state != "pending":
                reason = (found or {}).get("StateReason", {})
                raise RequestError(
                    f"AWS: the instance {instance} did not start but is {state}: "
                    f"{reason.get('Message') or 'no reason given'}; see that volumes may be made "
                    "and encrypted, and try again",
                    str(reason.get("Code", "")),
                )
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)

    async def terminate(self, instance: str) -> None:
        """End an instance; returns when AWS has begun to, after which it costs nothing."""
        if instance in self._ended:
            return
        self._ending.add(instance)
        if self._ender is None:
            self._ender = asyncio.create_task(self._terminate_soon())
        await asyncio.shield(self._ender)

    async def _terminate_soon(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        taken, self._ending, self._ender = self._ending, set(), None
        await asyncio.to_thread(self._terminate, list(taken))
        self._ended |= taken

    def _terminate(self, ids: list[str]) -> None:
        for attempt in itertools.count():
            try:
                self.account.call("ec2", "terminate_instances", InstanceIds=ids)
                return
            except RequestError as problem:
                # One that ends itself at this moment may have lost a part of it already.
                loses = problem.code == "InvalidNetworkInterfaceID.NotFound" and attempt < 10
                if problem.code != "InvalidInstanceID.NotFound" and not loses:
                    raise
            if len(ids) > 1:
                # One of them is forgotten already; it must not keep the others.
                for each in ids:
                    self._terminate([each])
                return
            if not loses and not self._is_new(ids[0]):
                return
            time.sleep(PAUSES[0])

    # Kept pools are stopped with their disks, and started again.

    async def check_stop(self) -> None:
        """Refuse to stop spot instances."""
        spot = [each["InstanceId"] for each in await self._there() if is_spot(each)]
        if spot:
            raise PoolError(
                f"AWS does not stop spot instances of this kind ({', '.join(sorted(spot))})"
            )

    async def on_shutdown(
        self, behaviour: Literal["stop", "terminate"], instance: str = ""
    ) -> None:
        """Say what becomes of an instance, or all, that shuts itself down.

        Terminated, it loses its disk.
        """
        names = [instance] if instance else [each["InstanceId"] for each in await self._there()]
        changes = (
            asyncio.to_thread(
                self.account.call,
                *("ec2", "modify_instance_attribute"),
                InstanceId=each,
                Attribute="instanceInitiatedShutdownBehavior",
                Value=behaviour,
            )
            for each in names
        )
        await asyncio.gather(*changes)

    async def stop(self) -> None:
        """Stop all instances, and wait until they have stopped."""
        running = [each["InstanceId"] for each in await self._there()]
        if running:
            await asyncio.to_thread(self.account.call, "ec2", "stop_instances", InstanceIds=running)
        deadline = time.monotonic() + STOP_SECONDS
        pause, longest = PAUSES
        done = ENDED | {"stopped"}
        while late := [
            id for id, each in (await self.look(fresh=True)).items() if state_of(each) not in done
        ]:
            if time.monotonic() > deadline:
                raise PoolError(
                    f"AWS: the instances {', '.join(late)} have not stopped after "
                    f"{STOP_SECONDS:.0f} s"
                )
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)

    async def disks_price(self) -> float:
        """What the disks of the instances cost in an hour, about, in US dollars."""
        mine = [tags.of_pool(self.pool)]
        disks = await asyncio.to_thread(
            self.account.pages, "ec2", "describe_volumes", "Volumes", Filters=mine
        )
        there = [each for each in disks if each.get("State") not in ("deleting", "deleted")]
        return sum(float(each["Size"]) for each in there) * GB_MONTH / MONTH_HOURS

    async def former(self, node: int) -> Instance | None:
        """The instance that a node has, running or not; None if it has none."""
        for each in (await self.all()).values():
            if node_of(each) == node and state_of(each) not in ENDED:
                return each
        return None

    async def start(self, instance: Instance) -> Instance:
        """Start an instance that is stopped, or about to be, and wait until it runs."""
        id = str(instance["InstanceId"])
        deadline = time.monotonic() + STOP_SECONDS
        while state_of(instance) == "stopping" and time.monotonic() < deadline:
            await asyncio.sleep(PAUSES[0])
            instance = (await self.look(fresh=True)).get(id, instance)
        # First: without a client, the instance shuts itself down.
        await self.on_shutdown("stop", id)
        try:
            await asyncio.to_thread(self.account.call, "ec2", "start_instances", InstanceIds=[id])
        except RequestError as problem:
            if problem.code not in CAPACITY:
                raise
            raise UnavailableError(
                f"AWS has no room now to start the instance {id} again, and it stays stopped: "
                f"{problem}; try later"
            ) from problem
        deadline = time.monotonic() + START_SECONDS
        while True:
            found = (await self.look(fresh=True)).get(id)
            if found is None or state_of(found) != "stopped":
                return await self.running(id)
            if time.monotonic() > deadline:
                # AWS stops it again at once, as for a key that it may not use.
                reason = found.get("StateReason", {})
                raise RequestError(
                    f"AWS: the instance {id} is still stopped {START_SECONDS:.0f} s after it was "
                    f"started: {reason.get('Message') or 'no reason given'}; see that its volumes "
                    "are there and their keys may be used, and try again",
                    str(reason.get("Code", "")),
                )
            await asyncio.sleep(PAUSES[0])

    async def _there(self) -> list[Instance]:
        """Those that run, or will."""
        found = (await self.all()).values()
        return [each for each in found if state_of(each) not in ENDED | STOPPED]


def described(account: Account, which: Mapping[str, Any]) -> list[Instance]:
    """The instances that a filter finds."""
    return account.pages("ec2", "describe_instances", "Reservations[].Instances[]", Filters=[which])


def is_spot(instance: Instance) -> bool:
    """Whether an instance is bought from what is left over."""
    return instance.get("InstanceLifecycle") == "spot"


def state_of(instance: Instance) -> str:
    """The state of an instance: pending, running, shutting-down, terminated, stopping, stopped."""
    return str(instance["State"]["Name"])


def node_of(instance: Instance) -> int | None:
    """The number of the node that an instance was launched for; None if its tags do not say."""
    nodes = tags.numbers(tags.tags_of(instance).get(tags.NODES, ""))
    place = int(instance.get("AmiLaunchIndex", 0))
    return nodes[place] if place < len(nodes) else None
