"""Relays: which executors have which large buffers, so that the client sends each only once.

The first executors of a broadcast form a chain: each receives and sends the buffer once, which is
the fastest way for few of them. Behind the chain, each executor passes the buffer on to two others
at most. So a thousand executors are 13 steps deep, and the loss of one concerns few others.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

RELAY_MIN = 1 << 20
"""For fewer bytes, sending from the client is faster than fetching from another executor."""
CHAIN = 8
"""How many executors form the chain: a step takes about a millisecond, and the second copy that an
executor of a tree sends takes as long as the first."""
BRANCHES = 2
"""How many executors fetch a buffer from one executor at most, as long as there are others."""
OTHER_SOURCES = 2
"""How many other executors are tried before the client sends a buffer that did not come."""


@dataclass(slots=True, eq=False)
class Neighbor:
    """An executor that others may fetch buffers from, and whose objects they may call."""

    address: str = ""
    """Where the other executors reach this one; empty if they cannot."""
    certified: str = ""
    """The name in its certificate."""
    endpoints: str = ""
    """All places where processes of this and of other nodes may reach it."""
    offered: bool = False
    """Whether it knows that tasks call its objects."""
    connected: bool = True
    """Whether the client has a connection to the executor now."""


@dataclass(slots=True)
class Copy:
    """One executor's copy of a buffer, which is there or on its way."""

    source: Neighbor | None = None
    """The executor that it is fetched from; None if the client sends it."""
    number: int = 0
    """The number of the fetch; 0 if the client sends it."""
    others: int = 0
    """How many other sources were tried before this one."""
    passed_on: int = 0
    """How many executors were told to fetch it from here."""


@dataclass(slots=True)
class Copies:
    """The copies of one buffer."""

    held: dict[Neighbor, Copy] = field(default_factory=dict)
    """In the order in which the executors were sent it, or told to fetch it."""
    free: deque[Neighbor] = field(default_factory=deque)
    """Executors that may pass it on; some may have lost it since."""
    busy: list[Neighbor] = field(default_factory=list)
    """Executors that pass it on to as many as they should."""
    listed: set[Neighbor] = field(default_factory=set)
    """Those in `free` or `busy`: nobody is there twice."""


class Relays:
    """The executors that have each buffer of one pool; used over networks only."""

    def __init__(self) -> None:
        self._copies: dict[bytes, Copies] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def give(
        self, neighbor: Neighbor, digests: Sequence[bytes], *, fetch: bool
    ) -> tuple[Neighbor, int] | None:
        """Note that an executor gets these buffers; returns the executor to fetch them from.

        The number counts up: an executor waits only for executors with lower numbers. Returns None
        if the client has to send the buffers.
        """
        with self._lock:
            copies = [self._copies.setdefault(digest, Copies()) for digest in digests]
            source = _next_source(copies) if fetch and copies else None
            number = 0 if source is None else next(self._numbers)
            for each in copies:
                _hold(each, neighbor, Copy(source, number))
            return None if source is None else (source, number)

    def again(
        self, neighbor: Neighbor, missed: Mapping[bytes, Copy]
    ) -> tuple[Neighbor, int] | None:
        """Another executor to fetch buffers from that did not come; None if the client sends them.

        The fetch keeps its number: executors that wait for this one go on waiting, and the new
        source is one with a lower number, which does not wait for this one.
        """
        with self._lock:
            copies = [self._copies.setdefault(digest, Copies()) for digest in missed]
            last = next(iter(missed.values()))
            source = None
            together = all(each.number == last.number for each in missed.values())
            if together and last.others < OTHER_SOURCES:
                source = _other_source(copies, last)
            number = 0 if source is None else last.number
            for each, copy in zip(copies, missed.values(), strict=True):
                _hold(each, neighbor, Copy(source, number, last.others + 1, copy.passed_on))
            return None if source is None else (source, number)

    def miss(self, neighbor: Neighbor, digests: Iterable[bytes]) -> dict[bytes, Copy]:
        """Note that an executor lacks buffers; returns the copies that it should have fetched."""
        with self._lock:
            taken = {digest: self._take(neighbor, digest) for digest in digests}
        return {digest: copy for digest, copy in taken.items() if copy is not None and copy.number}

    def take(self, neighbor: Neighbor, digests: Iterable[bytes]) -> None:
        """Note that an executor does not have these buffers any more."""
        with self._lock:
            for digest in digests:
                self._take(neighbor, digest)

    def _take(self, neighbor: Neighbor, digest: bytes) -> Copy | None:
        copies = self._copies.get(digest)
        if copies is None:
            return None
        copy = copies.held.pop(neighbor, None)
        if not copies.held:
            del self._copies[digest]
        return copy


def _hold(copies: Copies, neighbor: Neighbor, copy: Copy) -> None:
    if neighbor.address and neighbor not in copies.listed:
        copies.listed.add(neighbor)
        copies.free.append(neighbor)
    before = copies.held.get(neighbor)
    if before is not None:
        copy.passed_on = before.passed_on
    copies.held[neighbor] = copy


def _can_pass_on(neighbor: Neighbor, copies: Sequence[Copies]) -> bool:
    """Whether others can reach an executor, and it has all buffers."""
    reachable = bool(neighbor.address) and neighbor.connected
    return reachable and all(neighbor in each.held for each in copies)


def _next_source(copies: Sequence[Copies]) -> Neighbor | None:
    """The executor that passes the buffers on to the next one.

    The time does not depend on the number of executors, unless many of them are out of reach.
    """
    first = copies[0]
    if len(first.held) < CHAIN:
        for neighbor in reversed(first.held):
            if _can_pass_on(neighbor, copies):
                first.held[neighbor].passed_on += 1
                return neighbor
        return None
    if not first.free:
        # Executors have been lost with those that they could have passed it on to.
        first.free.extend(first.busy)
        for neighbor in first.busy:
            if neighbor in first.held:
                first.held[neighbor].passed_on = 0
        first.busy.clear()
    for _ in range(len(first.free)):
        neighbor = first.free[0]
        copy = first.held.get(neighbor)
        if copy is None:
            first.listed.discard(first.free.popleft())
        elif copy.passed_on >= BRANCHES:
            first.busy.append(first.free.popleft())
        elif _can_pass_on(neighbor, copies):
            copy.passed_on += 1
            return neighbor
        else:
            first.free.rotate(-1)
    return None


def _other_source(copies: Sequence[Copies], last: Copy) -> Neighbor | None:
    """An executor from which to fetch what another one did not pass on."""

    def fits(neighbor: Neighbor) -> bool:
        return (
            neighbor is not last.source
            and _can_pass_on(neighbor, copies)
            and all(each.held[neighbor].number < last.number for each in copies)
        )

    first, above, number = copies[0], last.source, last.number
    while above is not None:
        # Further up, the bytes have come further.
        if fits(above):
            return above
        known = first.held.get(above)
        if known is None or known.number >= number:
            # It has lost the buffer, and may have it again from one that fetched it from there.
            break
        above, number = known.source, known.number
    return next(filter(fits, first.held), None)
