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


@dataclass(frozen=True, slots=True)
class Request:
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
    request: Request


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

    def check(self, request: Request) -> None:
        """Refuse, with a `ConfigurationError`, what this provider can never give."""

    def describe(self) -> Mapping[str, Any]:
        """Its arguments as JSON, without secrets: `sky down` makes it anew from them."""

    def price(self, request: Request) -> float | None:
        """What a machine costs an hour, in US dollars; None when nobody knows."""

    async def create(self, order: Order) -> Machine:
        """Make a machine; raises `PoolStartError`, and then leaves nothing behind."""

    async def find(self, pool: str) -> Sequence[Machine]:
        """Every machine of a pool that is still there, also one whose `create` was cut short."""


def encrypted(provider: Provider) -> bool:
    """Whether the channels to a provider's machines need credentials.

    They do, unless the provider has an attribute `encrypted` that says otherwise.
    """
    return bool(getattr(provider, "encrypted", True))


def is_here(provider: Provider) -> bool:
    """Whether a provider's machines are this machine, by its attribute `here`.

    Then a machine has an attribute `equipment`, no bootstrap is needed, and the agent is a child
    process that ends with the client: there is nothing to write into the journal.
    """
    return bool(getattr(provider, "here", False))


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a machine that needs no bootstrap has for its node."""

    folder: str
    """The node's own, private and short: its sockets and the agent's log are made there."""
    hostname: str
    accelerators: int = 0
    accelerator: str | None = None
    working_directory: str | None = None
    """Where the workers run, and what they can import from; None for the client's own."""


def equipment_of(machine: Machine) -> Equipment | None:
    """The machine's attribute `equipment`; None where the bootstrap has to find out and install."""
    found = getattr(machine, "equipment", None)
    return found if isinstance(found, Equipment) else None


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
