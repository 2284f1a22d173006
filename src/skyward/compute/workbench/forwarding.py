"""Forwarding: a port of this machine's loopback that leads to a port of a node's loopback.

The bytes go over the pool's own connections, so the node opens no port to the network.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from skyward.closing import Closing
from skyward.compute.workbench import Reachable
from skyward.errors import ConfigurationError, SkywardError
from skyward.wire.channel import ServiceConnection

CONNECTIONS_MOST = 128
_PIECE = 64 << 10


class Forwarding(Closing):
    """Listens on the loopback here, and carries each connection to the node until it is closed."""

    def __init__(self, pool: Reachable, node: int, port: int, *, here: int = 0) -> None:
        """`here` is the port of this machine; 0 for any that is free."""
        self._pool, self._node, self._there = pool, node, port
        self._lock = threading.Lock()
        self._open: dict[socket.socket, ServiceConnection | None] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        try:
            self._listener = socket.create_server(("127.0.0.1", here))
        except (OSError, OverflowError) as problem:
            raise ConfigurationError(
                f"port {here} of 127.0.0.1 cannot be had: {problem}; give another port, or none "
                "for any that is free"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        """The port of this machine."""
        self._accepting = threading.Thread(
            target=self._accept, name="skyward-forwarding", daemon=True
        )
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue
            carrying = threading.Thread(
                target=self._carry, args=(connection,), name="skyward-forwarding", daemon=True
            )
            with self._lock:
                if self._closed or len(self._open) >= CONNECTIONS_MOST:
                    connection.close()
                    continue
                self._open[connection] = None
                self._threads.add(carrying)
                carrying.start()

    def _carry(self, connection: socket.socket) -> None:
        """Carry one connection; one that the node does not take is closed."""
        try:
            with contextlib.suppress(SkywardError, OSError, EOFError):
                with self._pool.service(self._node, "forward") as service:
                    with self._lock:
                        if self._closed:
                            return
                        self._open[connection] = service
                    service.ask("connect", port=self._there)
                    self._carry_both_ways(connection, service)
        finally:
            with self._lock:
                del self._open[connection]
                self._threads.discard(threading.current_thread())
            connection.close()

    def _carry_both_ways(self, connection: socket.socket, service: ServiceConnection) -> None:
        there = threading.Thread(
            target=_carry_there, args=(connection, service), name="skyward-forwarding", daemon=True
        )
        there.start()
        try:
            while True:
                reply, data = service.next_part()
                if not reply.more:
                    break
                connection.sendall(data)
        finally:
            # Also wakes the other thread.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            there.join()

    def close(self) -> None:
        """End the port and all connections."""
        with self._lock:
            self._closed = True
            connections, threads = dict(self._open), list(self._threads)
        # `shutdown` ends an `accept` of another thread, which `close` alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection, service in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            if service is not None:
                with contextlib.suppress(OSError):
                    service.channel.abort()
        for thread in [self._accepting, *threads]:
            thread.join()


def _carry_there(connection: socket.socket, service: ServiceConnection) -> None:
    with contextlib.suppress(OSError):
        data = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(_PIECE):
                service.send("bytes", data)
        service.send("bytes")
