"""Retries: when a node that did not start is started again, and when it no longer is."""

from __future__ import annotations

from collections.abc import Callable

RETRY_PAUSES = (5.0, 300.0)
"""The first and the longest pause before a node that did not start is tried again."""
BOUGHT_IN_VAIN = 3
"""After so many machines in a row that were bought and did not become ready, no more are bought."""


class Retries:
    """The starts of one node that failed; the caller holds the node's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.failed = 0
        """How many starts in a row have failed."""
        self.at: float | None = None
        """When the failed node is started again; None if it is not, or at the next call."""
        self.at_next_call = False
        """Whether the failed node is started again when a call waits for it."""
        self.may_help = True
        """Whether the last failure may pass without the user."""
        self._in_vain = 0
        self._clock = clock

    @property
    def exhausted(self) -> bool:
        """Whether too many machines were bought in vain."""
        return self._in_vain >= BOUGHT_IN_VAIN

    @property
    def is_due(self) -> bool:
        """Whether the node has waited long enough for its next start."""
        return self.at is not None and self._clock() >= self.at

    def fail(self, *, again: bool, may_help: bool) -> None:
        """Note that a start has failed; with `again`, the node is started again later."""
        self.at, self.at_next_call, self.may_help = None, False, may_help
        if again and not self.exhausted:
            first, longest = RETRY_PAUSES
            self.at = self._clock() + min(first * 2**self.failed, longest)
        self.failed += 1

    def buy_in_vain(self) -> None:
        """Note that a machine was bought and did not become ready."""
        self._in_vain += 1

    def await_call(self) -> None:
        """Start the node again at the next call, and not before."""
        self.at, self.at_next_call = None, True

    def begin(self) -> None:
        """Note that the node is started again."""
        self.at, self.at_next_call = None, False
        if self.exhausted:
            # Only the user starts such a node again.
            self._in_vain = 0

    def succeed(self) -> None:
        """Note that the node is ready."""
        self.failed = self._in_vain = 0
