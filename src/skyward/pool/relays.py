"""Relays: which executors have which large buffers, so that each leaves the client once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyward.pool.lane import Lane

RELAY_MIN = 1 << 20
"""Less than this is sent sooner than it is asked for."""


class Relays:
    """The whereabouts of buffers in one pool, over networks only."""

    def __init__(self) -> None:
        self._holders: dict[bytes, list[Lane]] = {}
        """For each digest, in the order in which they were given it, or told to fetch it."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def give(self, lane: Lane, digests: Sequence[bytes], *, fetch: bool) -> tuple[Lane, int] | None:
        """A lane is to have these: the one whose executor will pass all of them on to it, if any.

        The one that was last given them, so that they all form a chain, in which every executor
        receives and sends each buffer once; with the number of this link of it. None if they have
        to be sent to it.
        """
        with self._lock:
            holders = [self._holders.setdefault(digest, []) for digest in digests]
            source = None
            if fetch and holders:
                source = next(
                    (
                        other
                        for other in reversed(holders[0])
                        if other.peer and not other.lost and not other.paused
                        if all(other in others for others in holders)
                    ),
                    None,
                )
            for others in holders:
                if lane not in others:
                    others.append(lane)
            return None if source is None else (source, next(self._numbers))

    def take(self, lane: Lane, digests: Iterable[bytes]) -> None:
        """A lane's executor does not have these any more."""
        with self._lock:
            for digest in digests:
                others = self._holders.get(digest, [])
                if lane in others:
                    others.remove(lane)
                if not others:
                    self._holders.pop(digest, None)
