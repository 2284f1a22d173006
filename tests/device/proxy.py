"""A TCP proxy that loses connections on purpose."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Stands between a client and its servers, and cuts, holds or refuses what passes."""

    def __init__(self, server: str = "") -> None:
        self.server = server
        self.connections = 0
        self.cuts = 0
        self.refusing = False
        """Whether those who connect are hung up on."""
        self._listeners: dict[str, socket.socket] = {}
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        """Of each connection, the client's end and the server's."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut_after: list[int] = []
        self._hold_after, self._holds = 0, threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.endpoint = self.endpoint_for(server) if server else ""

    def endpoint_for(self, server: str) -> str:
        """Where to connect instead of there."""
        with self._lock:
            if server not in self._listeners:
                self._listeners[server] = socket.create_server(("127.0.0.1", 0))
                self._spawn(self._accept, self._listeners[server], server)
            return f"tcp:127.0.0.1:{self._listeners[server].getsockname()[1]}"

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            pairs, self.pairs = self.pairs, []
            self.cuts += 1
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def leave(self) -> None:
        """Reset every connection, and refuse those who come again where they came before."""
        with self._lock:
            listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def cut_after(self, counts: Iterable[int]) -> None:
        """Reset every connection after so many bytes, then after so many more, and so on."""
        with self._lock:
            self._cut_after = list(counts)

    @contextlib.contextmanager
    def hold(self, after: int = 0) -> Iterator[threading.Event]:
        """A link without a word: nothing passes, and nothing is closed either.

        Begins after so many bytes, of which the event tells.
        """
        holds = threading.Event()
        with self._lock:
            self._hold_after, self._holds = after, holds
        if not after:
            self._hold()
        try:
            yield holds
        finally:
            with self._lock:
                self._hold_after = 0
            self._flowing.set()

    def _hold(self) -> None:
        self._flowing.clear()
        self._holds.set()

    def close(self) -> None:
        """End it with all its threads."""
        self._flowing.set()
        self.leave()
        for thread in self._threads:
            thread.join()

    def _spawn(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, server: str) -> None:
        host, _, port = server.removeprefix("tcp:").rpartition(":")
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refusing:
                near.close()
                continue
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.pairs.append((near, far))
            over = threading.Barrier(2)
            self._spawn(self._carry, near, far, over)
            self._spawn(self._carry, far, near, over)

    def _carry(self, source: socket.socket, target: socket.socket, over: threading.Barrier) -> None:
        buffer = memoryview(bytearray(1 << 18))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                self._flowing.wait()
                allowed, cuts = self._allowed(count)
                try:
                    target.sendall(buffer[:allowed])
                finally:
                    if cuts:
                        self.cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        # Whoever sends to a socket that nobody reads any more would wait until it is closed.
        over.wait()
        target.close()

    def _allowed(self, count: int) -> tuple[int, bool]:
        """How many of the bytes pass, and whether everything is cut after them."""
        with self._lock:
            if self._hold_after:
                self._hold_after = max(0, self._hold_after - count)
                if not self._hold_after:
                    self._hold()
            if not self._cut_after:
                return count, False
            if count < self._cut_after[0]:
                self._cut_after[0] -= count
                return count, False
            return self._cut_after.pop(0), True
