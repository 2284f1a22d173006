"""Connections to a model server: kept while nobody uses them, encrypted where the address says."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading

from skyward.errors import ConfigurationError
from skyward.store.access import AUTHORITY, is_loopback

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""How long the other end may take for anything: to answer, or to move one slice."""
_NEARBY = 1 << 20
"""What a connection within this machine may hold. Left alone, eight of them grow beyond the
processor's caches, and loading was measured a third slower."""


class Lines:
    """Connections to one server that are kept while nobody uses them."""

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
            # Forked: the parent goes on with these, and may have held the lock.
            self._lock, self._process = threading.Lock(), os.getpid()
            self.close()
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        line = (
            http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
            if self._context is None
            else http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_SECONDS, context=self._context
            )
        )
        try:
            line.connect()
            line.sock.settimeout(SILENT_SECONDS)
            if is_loopback(self._host):
                line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEARBY)
        except BaseException:
            line.close()
            raise
        line.auto_open = 0
        return line, False

    def give(self, line: http.client.HTTPConnection) -> None:
        """Keep a connection for the next one."""
        with self._lock:
            self._idle.append(line)

    def close(self) -> None:
        """Close those that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()


def closed(line: http.client.HTTPConnection, answer: http.client.HTTPResponse | None) -> None:
    """Close a connection and its answer: one that nobody read to its end keeps the socket open."""
    line.close()
    if answer is not None:
        answer.close()


def _context() -> ssl.SSLContext:
    """Trusts the system's authorities, and those of the user's own."""
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
