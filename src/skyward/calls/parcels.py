"""Parcels: encoded objects ready to be sent, with their large buffers named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skyward.objects.blobs import Blob
from skyward.objects.encoding import Encoded

HEAVY_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class Parcel:
    """An encoded object; its large buffers have digests, and may be held in shareable memory."""

    encoded: Encoded
    blobs: list[Blob] = field(default_factory=list)
    """The large buffers in shareable memory; empty if they are sent from the caller's memory."""
    digests: list[bytes] = field(default_factory=list)
    large: list[memoryview] = field(default_factory=list)
    by_value: Callable[[], Parcel] | None = None
    """Makes the same parcel without references to a device's memory, for an executor that cannot
    open that memory."""

    @property
    def heavy(self) -> bool:
        """Whether sending the parcel may move many bytes through a socket."""
        return bool(self.large) or self.encoded.size > HEAVY_BYTES


@dataclass(slots=True, eq=False)
class NamedParcel:
    """A parcel that executors keep under a key: a function's code, or data from `put`."""

    key: bytes
    parcel: Parcel
    frozen: bool
    """Whether it is data from `put`, which executors keep until its handle dies."""
    fresh: bool = False
    """Whether each task gets an object of its own: the result of another task."""
