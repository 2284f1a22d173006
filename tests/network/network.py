"""A network between a client and its nodes, made of TCP proxies, that can fail in every way."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import skyward as sky
from skyward.providers import Wish
from skyward.wire.identity import direct

from ..device.proxy import Proxy


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


@dataclass(frozen=True)
class Remote:
    """A provider: processes on this machine, each reached over a network of its own."""

    networks: dict[int, Network] = field(default_factory=dict, compare=False)
    local: sky.Local = field(default_factory=lambda: sky.Local(transport="tcp"))

    @property
    def encrypted(self) -> bool:
        return True

    def check(self, wish: Wish) -> None:
        self.local.check(wish)

    def machine(self, node: int, pool: str, wish: Wish) -> Any:
        network = self.networks.setdefault(node, Network())
        machine = self.local.machine(node, pool, wish)
        machine.dial = network.dial  # type: ignore[attr-defined]
        machine.route = str  # type: ignore[attr-defined]
        return machine

    def close(self) -> None:
        for network in self.networks.values():
            network.close()
