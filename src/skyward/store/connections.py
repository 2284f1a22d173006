"""Connections to a model server: kept open between requests, encrypted for https://."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading

from skyward.errors import ConfigurationError
from skyward.store.places import AUTHORITY, is_loopback

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""How long the server may take to answer, or to send or receive one slice."""
_NEARBY = 1 << 20
"""The receive buffer of a connection within this machine. Without a limit, the buffers of eight
connections grow beyond the processor's caches, and loading was measured a third slower."""


class HttpConnections:
    """The connections to one server, kept open between requests."""

    def __init__(self, scheme: str, host: str, port: int | None) -> None:
        self._host = host
        self._port = port
        self._context = _context() if scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it had been used before."""
        if self._process != os.getpid():
            # Forked: the parent still uses these connections, and may have held the lock.
            self._lock, self._process = threading.Lock(), os.getpid()
            self.close()
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
            if self._context is None
            else http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_SECONDS, context=self._context
            )
        )
        try:
            connection.connect()
            connection.sock.settimeout(SILENT_SECONDS)
            if is_loopback(self._host):
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEARBY)
        except BaseException:
            connection.close()
            raise
        connection.auto_open = 0
        return connection, False

    def give(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection for the next request."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def close(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse | None) -> None:
    """Close a connection and its answer: an answer not read to its end keeps the socket open."""
    connection.close()
    if answer is not None:
        answer.close()


def _context() -> ssl.SSLContext:
    """Trust the system's authorities and those in the user's file."""
    context = ssl.create_default_context()
    place = os.environ.get(AUTHORITY)
    if place:
        try:
            context.load_verify_locations(place)
        except OSError as problem:
            raise ConfigurationError(
                f"{AUTHORITY}={place!r}: no certificates can be read there: {problem}; "
                "name a PEM file"
            ) from None
    return context
