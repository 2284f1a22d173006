"""The instances of a pool: one request for all of them, to look at them or to end them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from skyward.errors import UnavailableError
from skyward.providers.aws import tags
from skyward.providers.aws.account import Account
from skyward.providers.aws.failures import RequestError
from skyward.providers.together import GATHER_SECONDS

PAUSES = (1.0, 6.0)
"""The first and the longest pause between two looks at instances that start."""
APPEAR_SECONDS = 60.0
"""How long a new instance may be unknown: AWS tells all its parts of it one by one."""
ENDED = frozenset({"shutting-down", "terminated"})
Instance = Mapping[str, Any]


class Instances:
    """The instances of one pool, on one event loop."""

    def __init__(self, account: Account, pool: str) -> None:
        self.account = account
        self.pool = pool
        self._looking: asyncio.Task[dict[str, Instance]] | None = None
        self._ending: dict[str, asyncio.Future[None]] = {}
        self._ender: asyncio.Task[None] | None = None
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
        found = self.account.pages(
            "ec2", "describe_instances", "Reservations", Filters=[tags.of_pool(self.pool)]
        )
        return {each["InstanceId"]: each for group in found for each in group["Instances"]}

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
        waiting = self._ending.get(instance)
        if waiting is None:
            waiting = self._ending[instance] = asyncio.get_running_loop().create_future()
        if self._ender is None or self._ender.done():
            self._ender = asyncio.create_task(self._terminate_soon())
        await asyncio.shield(waiting)

    async def _terminate_soon(self) -> None:
        while self._ending:
            await asyncio.sleep(GATHER_SECONDS)
            taken, self._ending = self._ending, {}
            try:
                await asyncio.to_thread(self._terminate, list(taken))
            except BaseException as problem:
                for each in taken.values():
                    if not each.done():
                        each.set_exception(problem)
                        each.exception()
                if not isinstance(problem, Exception):
                    raise
            else:
                self._ended |= taken.keys()
                for each in taken.values():
                    if not each.done():
                        each.set_result(None)

    def _terminate(self, ids: list[str]) -> None:
        while True:
            try:
                self.account.call("ec2", "terminate_instances", InstanceIds=ids)
                return
            except RequestError as problem:
                if problem.code != "InvalidInstanceID.NotFound":
                    raise
            if len(ids) > 1:
                # One of them is forgotten already; it must not keep the others.
                for each in ids:
                    self._terminate([each])
                return
            if not self._is_new(ids[0]):
                return
            time.sleep(PAUSES[0])


def state_of(instance: Instance) -> str:
    """The state of an instance: pending, running, shutting-down, terminated, stopping, stopped."""
    return str(instance["State"]["Name"])


def node_of(instance: Instance) -> int | None:
    """The number of the node that an instance was launched for; None if its tags do not say."""
    nodes = tags.numbers(tags.tags_of(instance).get(tags.NODES, ""))
    place = int(instance.get("AmiLaunchIndex", 0))
    return nodes[place] if place < len(nodes) else None
