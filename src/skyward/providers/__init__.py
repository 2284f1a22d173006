"""Where machines come from: one module a provider, all behind one small protocol.

A provider makes machines and destroys them. What a machine must offer is small: run a command, and
carry bytes to a socket there. Everything else, from installing Python to starting the agent, is
done with these two. docs/providers.md shows how to write one, and `skyward.testing` has the tests
that every provider passes.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol, runtime_checkable

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError
from skyward.spec import Image, Volume
from skyward.worker.config import AgentConfig


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pool asks of a provider: what each machine is to be, and how many there may be."""

    accelerator: Accelerator | None
    vcpus: float | None
    memory_gb: float | None
    image: Image
    volumes: tuple[Volume, ...]
    most_nodes: int = 1
    """To so many the pool may grow."""


@dataclass(frozen=True, slots=True)
class Order:
    """One machine to be made, for one node of one pool."""

    pool: str
    """Unique; what is made must carry it, so that it can be found after a crash."""
    node: int
    wish: Wish


class Machine(Protocol):
    """A machine that a provider made, or found."""

    @property
    def id(self) -> str:
        """What the provider calls it; enough to destroy it later."""

    @property
    def node(self) -> int:
        """Which node of its pool it was made for."""

    @property
    def address(self) -> str:
        """How other machines of the pool reach this one."""

    @property
    def direct(self) -> str | None:
        """Where this process may try to connect to it; None when only `dial` leads there."""

    @property
    def python(self) -> str | None:
        """A Python that has skyward and all the image asks for; None where one is to be made."""

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a command with its standard input, and return its exit status.

        What it writes, to either stream, goes to `output` as it comes. Cancelling ends it. As in
        a shell, the status is 127 when there is no such command, and 128 + n after signal n;
        `UnreachableError` when the machine or the way to it is gone.
        """

    async def dial(self, endpoint: str) -> socket.socket:
        """A blocking socket that carries bytes to "unix:PATH" or "tcp:127.0.0.1:PORT" there.

        The way is private: nobody else can read it, and only this user can open it. Shutting
        half of it down does the same over there. An `OSError` when nobody listens, where the
        provider can tell; else a socket that is at its end.
        """

    async def alive(self) -> bool:
        """Whether the machine is there; False only when it is known to be gone for good.

        Its node is given up at once then. A `PoolStartError`, such as `UnreachableError`, when
        nobody answers who would know: the node is waited for, as long as `orphan_timeout` says.
        """

    async def destroy(self) -> None:
        """Remove it, whatever runs on it; returns when it is gone, and is fine if it was."""


@runtime_checkable
class Provider(Protocol):
    """A source of machines. A value: it holds no connection and makes nothing until asked."""

    @property
    def name(self) -> str:
        """What people call it; also its name in the registry."""

    def check(self, wish: Wish) -> None:
        """Refuse, with a `ConfigurationError`, what this provider can never give."""

    def describe(self) -> Mapping[str, Any]:
        """Its arguments as JSON, without secrets: `sky down` makes it anew from them."""

    def price(self, wish: Wish) -> float | None:
        """What a machine costs an hour, in US dollars; None when nobody knows."""

    async def create(self, order: Order) -> Machine:
        """Make a machine; raises `PoolStartError`, and then leaves nothing behind."""

    async def find(self, pool: str) -> Sequence[Machine]:
        """Every machine of a pool that is still there, also one whose `create` was cut short."""


class Host(Protocol):
    """A machine with an agent on it, as a pool uses it."""

    endpoint: str
    """Where the agent listens."""
    address: str
    """How the other nodes reach this one."""
    hostname: str
    """What the machine calls itself."""
    accelerators: int
    accelerator: str | None

    def start(self, config: AgentConfig) -> None:
        """Bring the agent up; returns when it listens, raises `PoolStartError` when it cannot."""

    def looks_dead(self) -> bool:
        """Whether it is known that the agent has ended or stands still; silence proves nothing."""

    def stop(self, seconds: float) -> None:
        """End the agent and the machine; kills what has not ended after so long. Idempotent."""


@runtime_checkable
class OwnWay(Protocol):
    """A host whose processes the network may not lead to directly."""

    def route(self, endpoints: str) -> str:
        """Of the places where a process there listens, the one to connect to."""

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """A stream to what listens at that endpoint there, opened within so many seconds.

        For the agent, and for the processes it announces later. `ConnectionRefusedError` only if
        it is known that nobody listens there; any other `OSError` is tried again.
        """


@runtime_checkable
class Hosting(Protocol):
    """A provider that brings agents up by itself, without machines in between."""

    @property
    def encrypted(self) -> bool:
        """Whether the way to the agent is a network, so that channels need credentials."""

    def check(self, wish: Wish) -> None:
        """Refuse, with a `ConfigurationError`, what this provider can never give."""

    def machine(self, node: int, pool: str, wish: Wish) -> Host:
        """A host for one node; nothing is created before its `start`."""


def crosses_a_network(provider: Provider | Hosting) -> bool:
    """Whether channels to its nodes need credentials."""
    return provider.encrypted if isinstance(provider, Hosting) else True


BUILT_IN = {
    "local": "skyward.providers.local:Local",
    "container": "skyward.providers.container:Container",
    "ssh": "skyward.providers.ssh:SSH",
}
"""Where each provider of ours is."""


def find_provider(name: str) -> type[Any]:
    """The class of a provider, by name: one of ours, or one that a package registered."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: type[Any] = getattr(importlib.import_module(module), attribute)
        return found
    for entry in metadata.entry_points(group="skyward.providers", name=name):
        loaded: type[Any] = entry.load()
        return loaded
    names = sorted({*BUILT_IN, *(e.name for e in metadata.entry_points(group="skyward.providers"))})
    raise ConfigurationError(
        f"no provider is called {name!r}; there are {', '.join(names)}, and packages may add more"
    )
