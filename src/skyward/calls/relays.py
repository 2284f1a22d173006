"""Relays: which executors have which large buffers, so that the client sends each only once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RELAY_MIN = 1 << 20
"""For fewer bytes, sending from the client is faster than fetching from another executor."""


@dataclass(slots=True, eq=False)
class Neighbor:
    """An executor that others may fetch buffers from."""

    address: str = ""
    """Where the other executors reach this one; empty if they cannot."""
    certified: str = ""
    """The name in its certificate."""
    connected: bool = True
    """Whether the client has a connection to the executor now."""


class Relays:
    """The executors that have each buffer of one pool; used over networks only."""

    def __init__(self) -> None:
        self._holders: dict[bytes, list[Neighbor]] = {}
        """For each digest, the executors in the order in which the client sent it to them, or told
        them to fetch it."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def give(
        self, neighbor: Neighbor, digests: Sequence[bytes], *, fetch: bool
    ) -> tuple[Neighbor, int] | None:
        """Note that an executor gets these buffers; returns the executor to fetch them from.

        This is the executor that got the buffers last. So the executors form a chain, in which
        every executor receives and sends each buffer once. The number is the step in the chain.
        Returns None if the client has to send the buffers.
        """
        with self._lock:
            holders = [self._holders.setdefault(digest, []) for digest in digests]
            source = None
            if fetch and holders:
                source = next(
                    (
                        other
                        for other in reversed(holders[0])
                        if other.address and other.connected
                        if all(other in others for others in holders)
                    ),
                    None,
                )
            for others in holders:
                if neighbor not in others:
                    others.append(neighbor)
            return None if source is None else (source, next(self._numbers))

    def take(self, neighbor: Neighbor, digests: Iterable[bytes]) -> None:
        """Note that an executor does not have these buffers any more."""
        with self._lock:
            for digest in digests:
                others = self._holders.get(digest, [])
                if neighbor in others:
                    others.remove(neighbor)
                if not others:
                    self._holders.pop(digest, None)
