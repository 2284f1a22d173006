"""AWS: nodes as EC2 instances, bought when they are needed and gone afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward import checks
from skyward.errors import ConfigurationError, PoolStartError, SkywardError, UnavailableError
from skyward.market import Offer
from skyward.providers import Allocation, Capabilities, Order, Remains, Request
from skyward.providers.aws.account import CAPACITY, NO_CREDENTIALS, RequestError
from skyward.providers.aws.settings import Settings

if TYPE_CHECKING:
    from skyward.providers.aws.account import Account
    from skyward.providers.aws.catalogue import Catalogue
    from skyward.providers.aws.launches import Launches
    from skyward.providers.aws.machine import AWSMachine

__all__ = ["AWS"]

AMI = "SKYWARD_AWS_AMI"
PYTHON = "SKYWARD_AWS_PYTHON"
_STARTS = 3
"""How many offers to try whose instances end before they run."""


@dataclass(frozen=True)
class AWS(Settings):
    """Nodes as EC2 instances of your own account.

    The region, the profile and the credentials are those of the `aws` command, if left out. `key`
    is the path of a private key to log in with; without it, each pool has its own for as long as it
    lives. `placement_group` is "cluster", "spread" or "partition" for a group that is made with the
    pool and removed with it, or the name of one that exists. `efa` says whether to use the Elastic
    Fabric Adapter; if left out, several nodes with accelerators use it where the machines have it.
    `access="ssm"` connects through AWS Systems Manager: the instances then admit no one but each
    other.

    >>> with sky.Compute(sky.AWS(), accelerator=sky.accelerators.L4(), nodes=2) as compute: ...
    """

    name: str = field(default="aws", init=False, repr=False)
    capabilities = Capabilities(
        sells=True,
        answers=True,
        collects=True,
        stops=True,
        holds_keys=True,
        mounts_folders=False,
    )

    def __repr__(self) -> str:
        return checks.shown(self)

    # What it sells.

    def in_region(self, region: str) -> AWS:
        """The same account in a region."""
        if self.region not in (None, region):
            raise ConfigurationError(
                f"Compute(region={region!r}) with {self}: two regions; give only one"
            )
        return replace(self, region=region)

    def offers(self, request: Request) -> list[Offer]:
        """The types that have what is asked for, cheapest first; kept for the next time."""
        return self._catalogue().offers(request)

    def why_none(self, request: Request) -> str:
        """Why there are no offers for a request, in a sentence."""
        return self._catalogue().why_none(request)

    async def ping(self) -> str:
        """Ask whose credentials these are, which needs no permission."""

        def ask() -> str:
            account = self._account()
            try:
                told = account.call("sts", "get_caller_identity", attempts=2)
            except RequestError as problem:
                if problem.code in NO_CREDENTIALS:
                    raise ConfigurationError(str(problem)) from problem
                raise
            return f"{told['Arn']} in {account.region}"

        return await asyncio.to_thread(ask)

    def price(self, request: Request) -> float | None:
        """The price of the first offer."""
        try:
            return next((each.hourly_cost for each in self.offers(request)), None)
        except UnavailableError:
            return None

    # Requests.

    def check(self, request: Request) -> None:
        """Refuse what no instance can have, and an account that cannot be used at all."""
        self._account()
        if importlib.util.find_spec("asyncssh") is None:
            raise ConfigurationError(
                "AWS needs the package asyncssh; install it with: pip install 'skyward-torch[aws]'"
            )
        for volume in request.volumes:
            if volume.target != volume.source:
                raise ConfigurationError(
                    f"{volume}: an instance mounts nothing but its own disk; leave target out and "
                    "give a path that the AMI has, or read data from S3 in your function"
                )
        if self.key is not None and not Path(self.key).expanduser().exists():
            raise ConfigurationError(
                f"AWS(key={self.key!r}): there is no such file; name a private key's, or leave key "
                "out: then each pool has its own"
            )
        if self.reservation is not None and request.allocation != "on-demand":
            raise ConfigurationError(
                f"AWS(reservation={self.reservation!r}) with allocation={request.allocation!r}: "
                "reserved capacity is no spot capacity; give only one"
            )
        if self.access == "ssm":
            from skyward.providers.aws import session

            if not session.is_installed():
                raise ConfigurationError(
                    f"AWS(access='ssm') needs AWS's {session.PLUGIN}, which is not on the PATH; "
                    "install it, or use access='ssh'"
                )

    def describe(self) -> dict[str, Any]:
        """The arguments, with the region that is meant; keys by their path."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        used = self._account()
        more = {"region": used.region, "account": used.id or None, "admit": list(self.admit)}
        return told | more

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        profile = f" with the profile {self.profile}" if self.profile else ""
        return f"aws in {self._account().region}{profile}"

    def _catalogue(self) -> Catalogue:
        from skyward.providers.aws.catalogue import Catalogue

        return Catalogue(self._account(), self._told())

    def _told(self) -> AWS:
        """The same with what the environment says, where the user does not."""
        return replace(
            self,
            ami=self.ami or os.environ.get(AMI) or None,
            python=self.python or os.environ.get(PYTHON) or None,
        )

    def _account(self) -> Account:
        from skyward.providers.aws.account import shared_account

        return shared_account(self.region, self.profile)

    def _own_account(self) -> Account:
        """The account, once it is known to be the one that was meant."""
        used = self._account()
        if self.account is not None and used.id not in ("", self.account):
            raise ConfigurationError(
                f"AWS: the credentials here are of the account {used.id}, and this needs "
                f"{self.account}; set AWS_PROFILE, or log in to that account"
            )
        return used

    # Machines.

    def allocate(self, pool: str) -> Allocation[AWSMachine]:
        """The pool's machines, and what they share."""
        return AWSAllocation(self, pool)

    async def create(self, order: Order) -> AWSMachine:
        """Buy an instance, and wait until it has booted."""
        from skyward.providers.aws.machine import AWSMachine

        known = await self._pool(order.pool)
        if order.request.keep and (former := await self._former(known, order)) is not None:
            return former
        for start in range(1, _STARTS + 1):
            bought = await known.get(order)
            machine: AWSMachine | None = None
            try:
                order.bought(bought.id, bought.offer)
                order.tell("waiting for the machine to start")
                instance = await known.instances.running(bought.id)
                machine = AWSMachine(
                    *(known.instances, known.settings, instance, order.node, bought.offer),
                    is_new=True,
                )
                await machine.make(order)
                return machine
            except BaseException as problem:
                ending = machine.destroy() if machine else known.instances.terminate(bought.id)
                await asyncio.shield(ending)
                code = problem.code.partition(".")[2] if isinstance(problem, RequestError) else ""
                if code not in CAPACITY or start == _STARTS:
                    raise
                # It was sold, and then there was none.
                known.exclude(bought)
        raise AssertionError

    async def _former(self, known: Launches, order: Order) -> AWSMachine | None:
        """The machine that a node of a pool that stays has, if it can be used again.

        One that is stopped is started; one that runs and does not answer is ended.
        """
        from skyward.providers.aws.instances import STOPPED, state_of
        from skyward.providers.aws.machine import ANSWER_SECONDS, BOOT_SECONDS, AWSMachine

        instance = await known.instances.former(order.node)
        if instance is None:
            return None
        is_stopped = state_of(instance) in STOPPED
        if is_stopped:
            order.tell("starting the machine again")
            instance = await known.instances.start(instance)
        offer = await asyncio.to_thread(known.offer_of, instance, order.request)
        machine = AWSMachine(known.instances, known.settings, instance, order.node, offer)
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

    async def find(self, pool: str) -> list[AWSMachine]:
        """The instances with the pool's tag that have not ended."""
        from skyward.providers.aws.instances import ENDED, node_of, state_of
        from skyward.providers.aws.machine import AWSMachine

        known = await self._pool(pool)
        return [
            AWSMachine(known.instances, known.settings, each, node_of(each) or 0)
            for each in (await known.instances.all()).values()
            if state_of(each) not in ENDED
        ]

    async def check_stop(self, pool: str) -> None:
        """Refuse a pool that has spot instances: AWS does not stop them."""
        await (await self._pool(pool)).instances.check_stop()

    async def spare(self, pool: str, spared: bool) -> None:
        """Have the pool's instances keep their disks if they shut themselves down, or lose them."""
        await (await self._pool(pool)).instances.on_shutdown("stop" if spared else "terminate")

    async def stop(self, pool: str) -> float | None:
        """Stop the pool's instances; their disks stay, and cost."""
        instances = (await self._pool(pool)).instances
        await instances.stop()
        try:
            return await instances.disks_price()
        except SkywardError:
            # The instances are stopped all the same, and must be recorded so.
            return None

    def export_keys(self, pool: str) -> dict[str, str]:
        """The keys that log in to the pool's instances; a key of the user's own is not in them."""
        from skyward.providers.aws.site import Keys

        return Keys(pool, self.key).read()

    def import_keys(self, pool: str, texts: Mapping[str, str]) -> None:
        """Write the pool's keys down, where `create` and `find` look for them."""
        from skyward.providers.aws.site import Keys

        Keys(pool, self.key).write(texts)

    async def sweep(self, pool: str) -> None:
        """Remove the pool's security group, key pair, placement group and keys."""
        from skyward.providers.aws.catalogue import STRATEGIES
        from skyward.providers.aws.site import Keys, sweep

        known = _pools.get(asyncio.get_running_loop(), {}).pop((self, pool), None)
        # The keys are made first. Without credentials, nobody could ask AWS what there is.
        if known is not None and known.asked and not Keys(pool).folder.exists():
            return

        grouped = self.placement_group in STRATEGIES
        account = await asyncio.to_thread(self._own_account)
        await asyncio.to_thread(sweep, account, pool, grouped=grouped)

    async def remains(self) -> Sequence[Remains]:
        """Everything in the region that has the tag of a pool."""
        from skyward.providers.aws.account import is_used
        from skyward.providers.aws.site import remains

        try:
            return await asyncio.to_thread(lambda: remains(self._account()))
        except ConfigurationError as problem:
            # Who has credentials may have instances, and must hear that nobody has looked.
            if is_used(self.profile):
                raise UnavailableError(str(problem)) from problem
            raise

    async def _pool(self, pool: str) -> Launches:
        """What this process knows of a pool; made once on each event loop."""
        from skyward.providers.aws.instances import Instances
        from skyward.providers.aws.launches import Launches

        here = _pools.setdefault(asyncio.get_running_loop(), {})
        key = self, pool
        if key not in here:
            account = await asyncio.to_thread(self._own_account)
            if key not in here:
                here[key] = Launches(Instances(account, pool), self._told())
        return here[key]


class AWSAllocation(Allocation["AWSMachine"]):
    """The instances of a pool."""

    def __init__(self, provider: AWS, pool: str) -> None:
        super().__init__(provider, pool)
        self._provider = provider

    async def sweep(self) -> None:
        """Remove the pool's security group, key pair, placement group and keys."""
        await self._provider.sweep(self.pool)


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[AWS, str], Launches]] = (
    weakref.WeakKeyDictionary()
)
