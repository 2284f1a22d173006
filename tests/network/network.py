"""A network between a client and its nodes, made of TCP proxies, that can fail in every way."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import skyward as sky
from skyward.providers import Wish

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Network:
    """The way to one node: all its endpoints, each behind a port of our own."""

    def __init__(self) -> None:
        self.cuts = 0
        self.turning_away = False
        """Whether those who connect are hung up on."""
        self._routes: dict[str, socket.socket] = {}
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut_after: list[int] = []
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """Connect through here, as the client does."""
        with self._lock:
            if endpoint not in self._routes:
                self._routes[endpoint] = listener = socket.create_server(("127.0.0.1", 0))
                self._spawn(self._accept, listener, endpoint)
            port = self._routes[endpoint].getsockname()[1]
        end = socket.create_connection(("127.0.0.1", port), seconds)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self.cuts += 1
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut_after(self, counts: Iterable[int]) -> None:
        """Reset every connection after so many bytes, then after so many more, and so on."""
        with self._lock:
            self._cut_after = list(counts)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing passes, and nobody is told."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def freeze(self, seconds: float) -> threading.Thread:
        """Nothing passes for a while; join the thread to wait for the end of it."""

        def freeze() -> None:
            with self.frozen():
                time.sleep(seconds)

        thread = threading.Thread(target=freeze)
        self._flowing.clear()
        thread.start()
        return thread

    def close(self) -> None:
        """End it with all its threads."""
        for listener in self._routes.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._flowing.set()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _spawn(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="network", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp:").rpartition(":")
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                if self.turning_away:
                    raise ConnectionError
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((near, far))
            self._spawn(self._carry, near, far)
            self._spawn(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        buffer = memoryview(bytearray(1 << 18))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                self._flowing.wait()
                allowed = self._allowed(count)
                target.sendall(buffer[:allowed])
                if allowed < count:
                    self.cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _allowed(self, count: int) -> int:
        with self._lock:
            if not self._cut_after:
                return count
            if count < self._cut_after[0]:
                self._cut_after[0] -= count
                return count
            return self._cut_after.pop(0)


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
