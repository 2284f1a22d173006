"""AWS: nodes as EC2 instances, bought when they are needed and gone afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyward import checks
from skyward.errors import ConfigurationError, SkywardError, UnavailableError
from skyward.providers import Capabilities, Offer, Remains, Request, file_here
from skyward.providers.aws.account import NO_CREDENTIALS, RequestError, is_used, profiles
from skyward.providers.aws.settings import Settings
from skyward.providers.hosts import openssh

if TYPE_CHECKING:
    from skyward.providers.aws.catalogue import Catalogue
    from skyward.providers.aws.instances import Instances
    from skyward.providers.aws.launches import AWSAllocation

__all__ = ["AWS"]


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
        moves=True,
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
            account = self.account_here()
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
        self.account_here()
        openssh.check("AWS")
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
        used = self.account_here()
        account = self.account or used.id or None
        return told | {"region": used.region, "account": account, "admit": list(self.admit)}

    @classmethod
    def arguments_here(cls, arguments: Mapping[str, Any], home: str) -> Mapping[str, Any]:
        """The profile and the key, if they are here; credentials of another account are refused."""
        profile = arguments.get("profile")
        if profile is not None and profile not in profiles():
            profile = None
        return {**arguments, "profile": profile, "key": file_here(arguments.get("key"), home)}

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        profile = f" with the profile {self.profile}" if self.profile else ""
        return f"aws in {self.account_here().region}{profile}"

    def _catalogue(self) -> Catalogue:
        from skyward.providers.aws.catalogue import Catalogue

        return Catalogue(self.account_here(), self.told())

    # Machines.

    def allocate(self, pool: str) -> AWSAllocation:
        """The pool's instances, bought together."""
        from skyward.providers.aws.launches import AWSAllocation

        return AWSAllocation(pool, self.told())

    async def check_stop(self, pool: str) -> None:
        """Refuse a pool that has spot instances: AWS does not stop them."""
        await (await self._instances(pool)).check_stop()

    async def spare(self, pool: str, spared: bool) -> None:
        """Have the pool's instances keep their disks if they shut themselves down, or lose them."""
        await (await self._instances(pool)).on_shutdown("stop" if spared else "terminate")

    async def stop(self, pool: str) -> float | None:
        """Stop the pool's instances; their disks stay, and cost."""
        instances = await self._instances(pool)
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
        """Write the pool's keys down, where the allocation looks for them."""
        from skyward.providers.aws.site import Keys

        Keys(pool, self.key).write(texts)

    async def remains(self) -> Sequence[Remains]:
        """Everything in the region that has the tag of a pool."""
        from skyward.providers.aws.site import remains

        try:
            return await asyncio.to_thread(lambda: remains(self.account_here()))
        except ConfigurationError as problem:
            # Who has credentials may have instances, and must hear that nobody has looked.
            if is_used(self.profile):
                raise UnavailableError(str(problem)) from problem
            raise

    async def _instances(self, pool: str) -> Instances:
        from skyward.providers.aws.instances import Instances

        return Instances(await asyncio.to_thread(self.own_account), pool)
