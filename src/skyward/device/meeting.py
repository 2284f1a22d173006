"""A meeting: how the process of one device reaches that of another, which the client tells it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from skyward.wire.handshake import Credentials

BACKLOGS = {
    "device-ops": 8 << 20,
    "device-bulk": 16 << 20,
    "device-bulk-1": 16 << 20,
    "device-bulk-2": 16 << 20,
    "device-bulk-3": 16 << 20,
}
"""The links of a device by role, and how many uncounted bytes each may send.

Bulk bytes go over several: one thread encrypts about as much as one connection's other end reads.
"""
ON_ONE_HOST = ("device-ops", "device-bulk")
"""The connections of a device whose process is on the client's host."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a device's process listens, and who may connect to it."""

    pool: str
    name: str
    """The name in its certificate."""
    endpoints: tuple[str, ...]
    """Where other processes may try to reach it, the best place first."""
    issue: Callable[[], Credentials | None]
    """Makes credentials that the pool accepts; None if it has none, or if its key is not here."""


class Meeting(msgspec.Struct):
    """Everything the process of one device needs to know to connect to that of another."""

    link: int
    own: str
    """The name of the device that connects, for people."""
    other: str
    pool: str
    name: str
    endpoints: tuple[str, ...]
    is_of_own_pool: bool
    """Whether the process's own credentials are good there."""
    credentials: tuple[str, str, str] | None
    """Those that are good there otherwise; None if there are none."""


def arrange(link: int, own: str, here: Whereabouts, other: str, there: Whereabouts) -> Meeting:
    """Describe to the process `here` how it reaches the one `there`."""
    is_of_own_pool = here.pool == there.pool
    issued = None if is_of_own_pool else there.issue()
    return Meeting(
        link=link,
        own=own,
        other=other,
        pool=there.pool,
        name=there.name,
        endpoints=there.endpoints,
        is_of_own_pool=is_of_own_pool,
        credentials=(issued.authority, issued.certificate, issued.key) if issued else None,
    )
