"""The pulse of a pool: at every beat, some nodes get heartbeats, and silent ones are lost."""

from __future__ import annotations

from collections.abc import Callable

from skyward.calls.loop import Loop
from skyward.nodes.contact import Contacts
from skyward.nodes.losses import Losses
from skyward.nodes.node import PING_SECONDS
from skyward.nodes.roster import Roster

PINGS_A_BEAT = 250
"""How many nodes get a heartbeat at one beat, if that is often enough for each of them."""
BEATS_MOST = 4
"""How many beats lie between two heartbeats of a node at most: 2 s. A node has 4 s to answer."""


class Pulse:
    """Beats as long as the pool is open, on the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        roster: Roster,
        contacts: Contacts,
        losses: Losses,
        orphan_timeout: float,
        also: Callable[[int], None],
    ) -> None:
        """`also` is what the pool does at every beat besides; it gets the beat's number."""
        self._loop, self._roster = loop, roster
        self._contacts, self._losses = contacts, losses
        self._orphan_timeout, self._also = orphan_timeout, also
        self._beats = 0
        self._begun = False

    def ping_while_starting(self) -> None:
        """Have agents know that the client is there, however long plugins take to start."""
        self._loop.later(PING_SECONDS, self._ping_all)

    def _ping_all(self) -> None:
        if self._roster.closed or self._begun:
            return
        self._loop.later(PING_SECONDS, self._ping_all)
        for node in self._roster.nodes:
            if node.control is not None:
                node.ping()

    def begin(self) -> None:
        """Beat from now on: the pool has started."""
        self._begun = True
        self._loop.later(PING_SECONDS, self._beat)

    def _beat(self) -> None:
        if self._roster.closed:
            return
        self._loop.later(PING_SECONDS, self._beat)
        self._beats += 1
        nodes = self._roster.nodes
        between = beats_between_pings(len(nodes), self._orphan_timeout)
        for node in nodes:
            if node.control is None:
                continue
            if (node.index + self._beats) % between == 0:
                node.ping()
            reason = self._contacts.why_lost(node)
            if reason:
                self._losses.lose(node, reason)
        self._also(self._beats)


def beats_between_pings(nodes: int, orphan_timeout: float) -> int:
    """How many beats there are between two heartbeats of a node: more in a large pool."""
    often = int(orphan_timeout / (4 * PING_SECONDS))
    return max(1, min(-(-nodes // PINGS_A_BEAT), BEATS_MOST, often))
