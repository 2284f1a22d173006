"""A network between a client and its nodes, made of TCP proxies, that can fail in every way."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import skyward as sky
from skyward.providers import Machine, Order
from skyward.wire.handshake import direct

from ..conftest import ALL
from ..device.proxy import Proxy

OUTAGE_SECONDS = 30.0 if ALL else 12.0
"""How long a network is away: three times the silence after which a node is `reconnecting`."""
DIAL_SECONDS = 30.0


class Network(Proxy):
    """The way to one node: all its endpoints, each behind a port of our own."""

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """Connect through here, as the client does."""
        return direct(self.endpoint_for(endpoint), seconds)

    def freeze(self, seconds: float) -> threading.Thread:
        """Nothing passes for a while; join the thread to wait for the end of it."""

        def freeze() -> None:
            with self.hold():
                time.sleep(seconds)

        thread = threading.Thread(target=freeze)
        self._flowing.clear()
        thread.start()
        return thread


class Beyond:
    """A machine of this host that only its network leads to."""

    direct = None

    def __init__(self, machine: Machine, network: Network) -> None:
        self._machine, self._network = machine, network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through the network."""
        return await asyncio.to_thread(self._network.dial, endpoint, DIAL_SECONDS)


@dataclass(frozen=True)
class Remote(sky.Local):
    """A provider: processes on this machine, each reached over a network of its own."""

    transport: Literal["auto", "unix", "tcp"] = "tcp"
    networks: dict[int, Network] = field(default_factory=dict, compare=False)

    async def create(self, order: Order) -> Any:
        """Make a machine, and its network the first time."""
        network = self.networks.setdefault(order.node, Network())
        return Beyond(await super().create(order), network)

    def close(self) -> None:
        for network in self.networks.values():
            network.close()
