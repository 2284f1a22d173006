"""AWS: nodes as EC2 instances, bought when they are needed and gone afterwards."""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyward import checks
from skyward.errors import ConfigurationError, PoolStartError, UnavailableError
from skyward.market import Offer
from skyward.providers import Allocation, Capabilities, Order, Remains, Request
from skyward.providers.aws.failures import NO_CREDENTIALS, RequestError

if TYPE_CHECKING:
    from skyward.providers.aws.account import Account
    from skyward.providers.aws.instances import Instance, Instances
    from skyward.providers.aws.launches import Launches
    from skyward.providers.aws.machine import AWSMachine
    from skyward.providers.aws.site import Settings

__all__ = ["AWS"]

AMI = "SKYWARD_AWS_AMI"
PYTHON = "SKYWARD_AWS_PYTHON"
_REGION = re.compile(r"[a-z]{2,4}(?:-[a-z]+)+-\d+")
_STARTS = 3
"""How many offers to try whose instances end before they run."""
_IDS = {"subnet": "subnet-", "ami": "ami-", "reservation": "cr-"}


@dataclass(frozen=True)
class AWS:
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

    region: str | None = None
    profile: str | None = None
    subnet: str | None = None
    ami: str | None = None
    key: str | None = None
    reservation: str | None = None
    placement_group: str | None = None
    efa: bool | None = None
    public_ip: bool | None = None
    access: Literal["ssh", "ssm"] = "ssh"
    _: KW_ONLY
    instance_type: str | None = None
    """A type to buy, such as 'g6.xlarge'; if left out, the cheapest that has what is asked for."""
    architecture: Literal["x86_64", "arm64"] | None = None
    instance_profile: str | None = None
    """The name of an instance profile, whose role the instances have; access="ssm" needs one,
    unless the account manages all its instances."""
    admit: Sequence[str] = ()
    """Networks that may connect to the instances, such as '203.0.113.0/24'; if left out, this
    machine alone."""
    user: str | None = None
    """The user to log in as; if left out, the one that the AMI's name suggests."""
    python: str | None = None
    """An interpreter of the AMI that has skyward and all that is needed."""
    account: str | None = None
    """The number of the account that must be used; requests with credentials of another one are
    refused."""
    name: str = field(default="aws", init=False, repr=False)
    capabilities = Capabilities(
        sells=True,
        sweeps=True,
        answers=True,
        collects=True,
        stops=True,
        holds_keys=True,
        mounts_folders=False,
    )

    def __post_init__(self) -> None:
        for what in (
            *("region", "profile", "subnet", "ami", "key", "reservation", "placement_group"),
            *("instance_type", "instance_profile", "user", "python", "account"),
        ):
            value = getattr(self, what)
            if value is not None:
                checks.text(self, what, value)
            if value is not None and not value.startswith(_IDS.get(what, "")):
                raise checks.refused(
                    self, {what: value}, f"not an id of AWS; write one like '{_IDS[what]}0abc'"
                )
        if self.region is not None and not _REGION.fullmatch(self.region):
            raise checks.refused(
                self, {"region": self.region}, "not a region; write one such as 'us-east-1'"
            )
        for what in ("efa", "public_ip"):
            if getattr(self, what) is not None:
                checks.flag(self, what, getattr(self, what))
        if self.access not in ("ssh", "ssm"):
            raise checks.refused(self, {"access": self.access}, "choose 'ssh' or 'ssm'")
        if self.architecture not in (None, "x86_64", "arm64"):
            raise checks.refused(
                self, {"architecture": self.architecture}, "choose 'x86_64' or 'arm64'"
            )
        admit = checks.texts(self, "admit", self.admit)
        for network in admit:
            try:
                ipaddress.ip_network(network)
            except ValueError as problem:
                raise checks.refused(
                    self, {"admit": [network]}, f"{problem}; write one such as '203.0.113.0/24'"
                ) from None
        checks.store(self, admit=admit)

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
        from skyward.providers.aws.assortment import Assortment

        return Assortment(self._account(), self._settings()).offers(request)

    def why_none(self, request: Request) -> str:
        """Why there are no offers for a request, in a sentence."""
        from skyward.providers.aws.assortment import Assortment

        return Assortment(self._account(), self._settings()).why_none(request)

    async def ping(self) -> str:
        """Ask whose credentials these are, which needs no permission."""

        def ask() -> str:
            account = self._account()
            try:
                told = account.call("sts", "get_caller_identity", attempts=1)
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

    def _settings(self) -> Settings:
        from skyward.providers.aws.site import Settings

        asked = {each.name: getattr(self, each.name) for each in fields(Settings)}
        return Settings(**asked | {"ami": self.ami or os.environ.get(AMI) or None})

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
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> AWSMachine:
        """Buy an instance, and wait until it has booted."""
        from skyward.providers.aws.failures import CAPACITY, RequestError
        from skyward.providers.aws.machine import AWSMachine
        from skyward.providers.aws.user_data import watch

        known = await self._pool(order.pool)
        if order.request.keep and (former := await self._former(known, order)) is not None:
            return former
        for start in range(1, _STARTS + 1):
            bought = await known.launches.get(order)
            machine: AWSMachine | None = None
            try:
                order.bought(bought.id, bought.offer)
                order.tell("waiting for the machine to start")
                instance = await known.instances.running(bought.id)
                machine = AWSMachine(
                    known.instances,
                    instance,
                    order.node,
                    bought.keys,
                    through=self.access,
                    python=self._python,
                    offer=bought.offer,
                )
                request = order.request
                await machine.make(order, watch(idle=request.idle_timeout, ttl=request.ttl))
                return machine
            except BaseException as problem:
                ending = machine.destroy() if machine else known.instances.terminate(bought.id)
                await asyncio.shield(ending)
                code = problem.code.partition(".")[2] if isinstance(problem, RequestError) else ""
                if code not in CAPACITY or start == _STARTS:
                    raise
                # It was sold, and then there was none.
                known.launches.exclude(bought)
        raise AssertionError

    async def _former(self, known: _PoolOnAWS, order: Order) -> AWSMachine | None:
        """The machine that a node of a pool that stays has, if it can be used again.

        One that is stopped is started; one that runs and does not answer is ended.
        """
        from skyward.providers.aws import stopping
        from skyward.providers.aws.instances import state_of
        from skyward.providers.aws.machine import ANSWER_SECONDS, BOOT_SECONDS
        from skyward.providers.aws.user_data import watch

        instance = await stopping.former(known.instances, order.node)
        if instance is None:
            return None
        is_stopped = state_of(instance) in stopping.STOPPED
        if is_stopped:
            order.tell("starting the machine again")
            instance = await stopping.start(known.instances, instance)
        offer = await asyncio.to_thread(known.launches.offer_of, instance, order.request)
        machine = self._found(known.instances, instance, offer)
        machine.is_former = True
        order.bought(machine.id, offer)
        request = order.request
        try:
            await machine.make(
                order,
                watch(idle=request.idle_timeout, ttl=request.ttl),
                BOOT_SECONDS if is_stopped else ANSWER_SECONDS,
            )
        except PoolStartError:
            if is_stopped:
                raise
            await asyncio.shield(machine.destroy())
            return None
        return machine

    async def find(self, pool: str) -> list[AWSMachine]:
        """The instances with the pool's tag that have not ended."""
        from skyward.providers.aws.instances import ENDED, state_of

        known = await self._pool(pool)
        found = await known.instances.all()
        return [
            self._found(known.instances, each)
            for each in found.values()
            if state_of(each) not in ENDED
        ]

    def _found(
        self, instances: Instances, instance: Instance, offer: Offer | None = None
    ) -> AWSMachine:
        from skyward.providers.aws.instances import node_of
        from skyward.providers.aws.keys import keys_of
        from skyward.providers.aws.machine import AWSMachine
        from skyward.providers.aws.network import admit_again

        return AWSMachine(
            instances,
            instance,
            node_of(instance) or 0,
            keys_of(instances.pool, self.key),
            through=self.access,
            python=self._python,
            offer=offer,
            admit=lambda: admit_again(
                instances.account, instances.pool, str(instance["SubnetId"]), self.admit
            ),
        )

    async def check_stop(self, pool: str) -> None:
        """Refuse a pool that has spot instances: AWS does not stop them."""
        from skyward.providers.aws import stopping

        stopping.check((await (await self._pool(pool)).instances.all()).values())

    async def spare(self, pool: str, spared: bool) -> None:
        """Have the pool's instances keep their disks if they shut themselves down, or lose them."""
        from skyward.providers.aws import stopping

        await stopping.spare((await self._pool(pool)).instances, spared)

    async def stop(self, pool: str) -> float | None:
        """Stop the pool's instances; their disks stay, and cost."""
        from skyward.providers.aws import stopping

        instances = (await self._pool(pool)).instances
        await stopping.stop(instances)
        try:
            return await asyncio.to_thread(stopping.disks_price, instances.account, pool)
        except Exception:
            # The instances are stopped all the same, and must be recorded so.
            return None

    def export_keys(self, pool: str) -> dict[str, str]:
        """The keys that log in to the pool's instances; a key of the user's own is not in them."""
        from skyward.providers.aws import keys

        return keys.exported(keys.keys_of(pool, self.key))

    def import_keys(self, pool: str, texts: Mapping[str, str]) -> None:
        """Write the pool's keys down, where `keys_of` finds them."""
        from skyward.providers.aws import keys

        keys.imported(keys.keys_of(pool, self.key), texts)

    async def sweep(self, pool: str) -> None:
        """Remove the pool's security group, key pair, placement group and keys."""
        from skyward.providers.aws.keys import keys_of
        from skyward.providers.aws.site import STRATEGIES
        from skyward.providers.aws.sweeping import sweep

        known = _pools.get(asyncio.get_running_loop(), {}).pop((self, pool), None)
        # The keys are made first. Without credentials, nobody could ask AWS what there is.
        if known is not None and known.launches.asked and not keys_of(pool, None).folder.exists():
            return

        grouped = self.placement_group in STRATEGIES
        account = await asyncio.to_thread(self._own_account)
        await asyncio.to_thread(sweep, account, pool, grouped=grouped)

    async def remains(self) -> Sequence[Remains]:
        """Everything in the region that has the tag of a pool."""
        from skyward.providers.aws.account import is_used
        from skyward.providers.aws.sweeping import remains

        try:
            return await asyncio.to_thread(lambda: remains(self._account()))
        except ConfigurationError as problem:
            # Who has credentials may have instances, and must hear that nobody has looked.
            if is_used(self.profile):
                raise UnavailableError(str(problem)) from problem
            raise

    @property
    def _python(self) -> str | None:
        return self.python or os.environ.get(PYTHON) or None

    async def _pool(self, pool: str) -> _PoolOnAWS:
        """What this process knows of a pool; made once on each event loop."""
        from skyward.providers.aws.instances import Instances
        from skyward.providers.aws.launches import Launches

        here = _pools.setdefault(asyncio.get_running_loop(), {})
        key = self, pool
        if key not in here:
            account = await asyncio.to_thread(self._own_account)
            if key not in here:
                instances = Instances(account, pool)
                here[key] = _PoolOnAWS(instances, Launches(instances, self._settings()))
        return here[key]


@dataclass(frozen=True, slots=True)
class _PoolOnAWS:
    """A pool on AWS: its instances, and how more are bought."""

    instances: Instances
    launches: Launches


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[AWS, str], _PoolOnAWS]] = (
    weakref.WeakKeyDictionary()
)
