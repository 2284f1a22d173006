"""Heartbeats: how long an agent has been silent, and how long a question to it is unanswered."""

from __future__ import annotations

from collections.abc import Callable

from skyward.wire.messages import Ping


class Heartbeats:
    """The heartbeats to one node's agent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard = clock()
        self._asked: float | None = None
        self._pings = 0

    def ask(self) -> Ping:
        """The next heartbeat; the answer is awaited from now on."""
        self._pings += 1
        self._asked = self._asked or self._clock()
        return Ping(self._pings)

    def hear(self) -> None:
        """Note that the agent has sent a message."""
        self._heard = self._clock()
        self._asked = None

    @property
    def silence(self) -> float:
        """For how many seconds the agent has sent no message."""
        return self._clock() - self._heard

    @property
    def unanswered(self) -> float:
        """For how many seconds a heartbeat has been unanswered; 0 if the client sent none."""
        return 0.0 if self._asked is None else self._clock() - self._asked
