"""Where machines come from: one module a provider, all behind one small protocol."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from skyward.accelerators import Accelerator
from skyward.spec import Image, Volume
from skyward.wire.identity import Credentials
from skyward.worker.config import AgentConfig


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pool asks of each of its machines."""

    accelerator: Accelerator | None
    vcpus: float | None
    memory_gb: float | None
    image: Image
    volumes: tuple[Volume, ...]


class Machine(Protocol):
    """One machine with an agent on it."""

    endpoint: str
    """Where the agent listens."""
    address: str
    """How the other nodes reach this one."""
    accelerators: int
    accelerator: str | None

    def start(self, config: AgentConfig) -> None:
        """Bring the agent up; returns when it listens, raises `PoolStartError` when it cannot."""

    def looks_dead(self) -> bool:
        """Whether the provider can tell that the agent has ended or stands still."""

    def stop(self, seconds: float) -> None:
        """End the agent and the machine; kills what has not ended after so long. Idempotent."""


@runtime_checkable
class OwnWay(Protocol):
    """A machine whose processes the network does not lead to directly."""

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """A stream to what listens at that endpoint there, opened within so many seconds.

        For the agent, and for the processes it announces later. `ConnectionRefusedError` only if
        it is known that nobody listens there; any other `OSError` is tried again.
        """


@runtime_checkable
class Provider(Protocol):
    """A source of machines. A value: it holds no connection and makes nothing until asked."""

    @property
    def encrypted(self) -> bool:
        """Whether the way to the machine is a network, so that channels need credentials."""

    def check(self, wish: Wish) -> None:
        """Refuse, with a `ConfigurationError`, what this provider can never give."""

    def machine(self, node: int, pool: str, wish: Wish) -> Machine:
        """A machine for one node; nothing is created before its `start`."""


__all__ = ["Credentials", "Machine", "OwnWay", "Provider", "Wish"]
