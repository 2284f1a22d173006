"""The head's page: the page that a pool's head node serves, brought to this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from skyward.closing import Closing
from skyward.compute.workbench import Reachable
from skyward.errors import ConfigurationError, NodeLostError, PoolError, SkywardError
from skyward.nodes.kept import ReachedPool, way_back
from skyward.wire.channel import ServiceConnection

CONNECTIONS_MOST = 128
_PIECE = 64 << 10


class HeadPage(Closing):
    """The page of a pool's head; the page stays when this is closed.

    >>> with HeadPage(pool) as page:
    ...     print(page.url)
    """

    def __init__(self, pool: ReachedPool, *, port: int = 0) -> None:
        """`port` is the port of this machine's loopback; 0 for any that is free."""
        self.node = _head(pool)
        """The node that serves the page."""
        environment, private = way_back(pool.record)
        name = self._name = pool.record.name
        self._connection = pool.service(self.node, "page")
        try:
            told = self._ask("open", name=name, environment=environment, private=private)
            self._here = ForwardedPort(pool, self.node, int(told["port"]), here=port)
        except BaseException:
            self._connection.close()
            raise
        self._job = str(told["job"])
        self.found = bool(told["found"])
        """Whether the page was served already."""
        self.address = f"http://127.0.0.1:{self._here.port}"
        """Where the page is on this machine, without the token."""
        self.url = f"{self.address}/?token={told['token']}"
        """The address to open in a browser; who has it sees the pool."""

    def _ask(self, what: str, **arguments: Any) -> Any:
        try:
            return self._connection.ask(what, **arguments)
        except (EOFError, OSError) as problem:
            raise _lost(self._name, problem) from problem

    def wait(self) -> str:
        """Wait until the page has ended, and return why; `close` of another thread ends this."""
        try:
            return str(self._connection.ask("wait", job=self._job))
        except (PoolError, EOFError, OSError) as problem:
            return f"the pool has ended, or cannot be reached: {problem}"

    def close(self) -> None:
        """End the way here; the page stays on the head."""
        with contextlib.suppress(OSError):
            self._connection.channel.abort()
        self._here.close()
        self._connection.close()


class ForwardedPort(Closing):
    """A port of this machine's loopback that leads to a port of a node's loopback.

    The bytes go over the pool's own connections, so the node opens no port to the network.
    """

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
        self._accepting = threading.Thread(target=self._accept, name="skyward-port", daemon=True)
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
                target=self._carry, args=(connection,), name="skyward-port", daemon=True
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
            target=_carry_there,
            args=(connection, service),
            name="skyward-port",
            daemon=True,
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


def stop_page(pool: ReachedPool) -> bool:
    """End the page of a pool's head; whether there was one."""
    with pool.service(_head(pool), "page") as connection:
        try:
            return bool(connection.ask("stop"))
        except (EOFError, OSError) as problem:
            raise _lost(pool.record.name, problem) from problem


def _head(pool: ReachedPool) -> int:
    if not pool.nodes:
        raise ConfigurationError(
            f"{pool.record.name} has no node now; `sky ps` shows the pools that are there"
        )
    return min(pool.nodes)


def _lost(name: str, problem: Exception) -> NodeLostError:
    return NodeLostError(
        f"the head of {name} is gone: {problem}; `sky ps` shows the pools that are there"
    )


def _carry_there(connection: socket.socket, service: ServiceConnection) -> None:
    with contextlib.suppress(OSError):
        data = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(_PIECE):
                service.send("bytes", data)
        service.send("bytes")
