"""The settings of AWS: what the user asks of it besides machines, checked."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, Self

from skyward import checks
from skyward.errors import ConfigurationError
from skyward.providers import Request
from skyward.providers.aws.account import Account, shared_account

AMI = "SKYWARD_AWS_AMI"
PYTHON = "SKYWARD_AWS_PYTHON"
_REGION = re.compile(r"[a-z]{2,4}(?:-[a-z]+)+-\d+")
_IDS = {"subnet": "subnet-", "ami": "ami-", "reservation": "cr-"}


@dataclass(frozen=True)
class Settings:
    """The arguments of `AWS`, which says what they mean."""

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

    def told(self) -> Self:
        """The same with what the environment says, where the user does not."""
        return replace(
            self,
            ami=self.ami or os.environ.get(AMI) or None,
            python=self.python or os.environ.get(PYTHON) or None,
        )

    def account_here(self) -> Account:
        """The account of the credentials that there are."""
        return shared_account(self.region, self.profile)

    def own_account(self) -> Account:
        """The account, once it is known to be the one that was meant."""
        used = self.account_here()
        if self.account is not None and used.id not in ("", self.account):
            raise ConfigurationError(
                f"AWS: the credentials here are of the account {used.id}, and this needs "
                f"{self.account}; set AWS_PROFILE, or log in to that account"
            )
        return used

    def wants_efa(self, request: Request) -> bool:
        """Whether to use EFA: as the user says, or for several nodes with our own AMI's driver."""
        if self.efa is not None:
            return self.efa
        several = request.most_nodes > 1 and request.accelerator is not None
        return several and self.ami is None
