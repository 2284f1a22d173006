"""Capacity that the user has reserved on AWS: reservations, and blocks for a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyward.errors import ConfigurationError, UnavailableError
from skyward.providers import Request
from skyward.providers.aws.account import Account


@dataclass(frozen=True, slots=True)
class Reservation:
    """A capacity reservation."""

    id: str
    instance_type: str
    zone: str
    state: str
    available: int
    is_block: bool
    starts: str

    def check(self, request: Request) -> None:
        """Raise if the reservation cannot be used for a request now."""
        if request.allocation != "on-demand":
            raise ConfigurationError(
                f"AWS(reservation={self.id!r}): reserved capacity is no spot capacity; leave "
                f"allocation={request.allocation!r} out"
            )
        if self.state != "active":
            when = f", and begins at {self.starts}" if self.starts else ""
            raise UnavailableError(
                f"AWS(reservation={self.id!r}): it is {self.state}, not active{when}; try again "
                "when it is"
            )
        if not self.available:
            raise UnavailableError(
                f"AWS(reservation={self.id!r}): all its {self.instance_type} are in use; end "
                "another pool first, or name another reservation"
            )

    def arguments(self) -> dict[str, Any]:
        """What a launch says to use the reservation."""
        target = {"CapacityReservationTarget": {"CapacityReservationId": self.id}}
        arguments: dict[str, Any] = {"CapacityReservationSpecification": target}
        if self.is_block:
            arguments["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
        return arguments


def reserved(account: Account, reservation: str) -> Reservation:
    """The reservation of that id."""
    found = account.call(
        "ec2", "describe_capacity_reservations", CapacityReservationIds=[reservation]
    )["CapacityReservations"]
    if not found:
        raise ConfigurationError(
            f"AWS(reservation={reservation!r}): {account.region} has no such reservation"
        )
    each = found[0]
    return Reservation(
        id=str(each["CapacityReservationId"]),
        instance_type=str(each["InstanceType"]),
        zone=str(each["AvailabilityZone"]),
        state=str(each["State"]),
        available=int(each.get("AvailableInstanceCount", 0)),
        is_block=each.get("ReservationType") == "capacity-block",
        starts=str(each.get("StartDate", "")),
    )
