"""Connections to the API server that carry other streams: how they begin, and how they are used.

A carrier is used by one thread, since a TLS connection must not be read and written by two at once.
"""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from skyward.errors import UnreachableError
from skyward.providers.kubernetes.access import Access
from skyward.wire.connecting import with_tls

CONNECT_SECONDS = 20.0
PING_SECONDS = 20.0
"""An idle connection is used so often, so that no load balancer closes it."""
DEAD_SECONDS = 60
"""How long the other end may leave packets without an answer before the connection is dead."""
PIECE = 128 << 10
"""Bytes in a message at most; the API server keeps a whole message in memory."""

SMALL = 8 << 10
"""Bytes that are rather copied than sent in a packet of their own."""


class HandshakeError(UnreachableError):
    """The API server answered the request for another protocol with an HTTP error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status, self.body = status, body


class Carrier:
    """One connection that carries messages of several channels; nothing here blocks but `wait`."""

    def __init__(self, end: socket.socket, left: bytes) -> None:
        end.setblocking(False)
        self._end = end
        self._unread = left
        self._unsent: deque[memoryview] = deque()
        self._used = time.monotonic()
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self.drained = False
        """Whether all that has arrived was taken."""
        self.ended = False
        """Whether the other end has closed the connection."""

    def close(self) -> None:
        """Close the connection; what is not sent yet is lost."""
        self._end.close()

    def drop(self) -> None:
        """Forget what is not sent yet: nobody wants it any more."""
        self._unsent.clear()

    # What a protocol is about.

    def queue(self, channel: int, data: bytes | memoryview) -> None:
        """Queue a message on a channel."""
        raise NotImplementedError

    def _ping(self) -> None:
        """Queue a message that means nothing."""
        raise NotImplementedError

    def _messages(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """The whole messages at the begin of the data; keeps the rest in `_unread`."""
        raise NotImplementedError

    # Sending and receiving.

    def _append(self, head: bytes, data: bytes | memoryview) -> None:
        """Queue a head and what follows it, as one packet if it is small."""
        if len(data) <= SMALL:
            self._unsent.append(memoryview(head + data))
        else:
            self._unsent += (memoryview(head), memoryview(data))

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called again before more is queued."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what the connection takes now."""
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._end.send(part)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                return
            self._used = time.monotonic()
            if sent < len(part):
                self._unsent[0] = part[sent:]
            else:
                self._unsent.popleft()

    def receive(self) -> Iterator[tuple[int, memoryview]]:
        """Some messages that have arrived, with their channels; all must be taken.

        `drained` tells whether `wait` should be called before the next time.
        """
        self.drained = True
        try:
            data = self._end.recv(1 << 18)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            data = None
        except (ssl.SSLError, ConnectionError):
            data = b""
        if data:
            self._used = time.monotonic()
            self.drained = len(data) < SMALL and not self._has_decrypted()
        elif data is not None:
            self.ended = True
        if data or self._unread:
            yield from self._messages(memoryview(self._unread + (data or b"")))

    def _has_decrypted(self) -> bool:
        return isinstance(self._end, ssl.SSLSocket) and self._end.pending() > 0

    def wait(self, other: int = -1, events: int = 0, *, reading: bool = True) -> tuple[bool, bool]:
        """Wait until the connection can be used, or another descriptor as asked for.

        Gives whether something has arrived here, and whether something happened to the other.
        Without `reading`, what arrives stays in the connection.
        """
        if time.monotonic() - self._used > PING_SECONDS and not self._unsent:
            self._ping()
            self.flush()
        own = (select.POLLIN if reading else 0) | (select.POLLOUT if self._unsent else 0)
        polled = {self._end.fileno(): own} | ({other: events} if other >= 0 else {})
        if polled != self._polled:
            for descriptor in self._polled.keys() - polled.keys():
                self._poll.unregister(descriptor)
            for descriptor, wanted in polled.items():
                self._poll.register(descriptor, wanted)
            self._polled = polled
        decrypted = reading and self._has_decrypted()
        ready = dict(self._poll.poll(0 if decrypted else PING_SECONDS * 1000))
        arrived = decrypted or ready.get(self._end.fileno(), 0) & ~select.POLLOUT != 0
        return arrived and reading, other in ready


# Beginnings.


def upgraded(
    access: Access, method: str, path: str, headers: Mapping[str, str]
) -> tuple[socket.socket, bytes, bytes]:
    """A connection that speaks another protocol from now on, with the head and what came after it.

    Raises `HandshakeError` for refusals.
    """
    try:
        end = _connect(access)
    except OSError as problem:
        raise UnreachableError(
            f"the API server {access.server} does not answer: {problem}; is it up, and are you in "
            "its network?"
        ) from problem
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(access.server).netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"{name}: {value}" for name, value in access.identity()]
        end.sendall("\r\n".join([*lines, "", ""]).encode())
        head, left = _read_head(end)
        status = int(head.split(b" ", 2)[1])
        if status != 101:
            raise HandshakeError(status, _read_body(end, head, left))
    except BaseException:
        end.close()
        raise
    return end, head, left


def _connect(access: Access) -> socket.socket:
    parts = urlsplit(access.server)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if access.proxy:
        end = _through(access.proxy, host, port)
    else:
        end = socket.create_connection((host, port), CONNECT_SECONDS)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_death(end)
    if access.context is None:
        return end
    try:
        return with_tls(access.context, end, server_hostname=access.tls_server_name or host)
    except BaseException:
        end.close()
        raise


def _notice_death(end: socket.socket) -> None:
    """Have the kernel notice that the other end is gone, which a busy or a blocked one is not."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": DEAD_SECONDS // 3,
        "TCP_KEEPINTVL": DEAD_SECONDS // 6,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": DEAD_SECONDS * 1000,
    }
    for name, value in options.items():
        # Not every system has all of them.
        if (option := getattr(socket, name, None)) is not None:
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def _through(proxy: str, host: str, port: int) -> socket.socket:
    """A connection through an HTTP proxy."""
    parts = urlsplit(proxy)
    if parts.scheme != "http":
        raise UnreachableError(
            f"the proxy {parts.scheme}://{parts.hostname} cannot be used for commands and "
            "forwarded ports; name one with http://, or set NO_PROXY"
        )
    end = socket.create_connection((parts.hostname or "", parts.port or 3128), CONNECT_SECONDS)
    try:
        lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}"]
        if parts.username:
            pair = f"{parts.username}:{parts.password or ''}".encode()
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}")
        end.sendall("\r\n".join([*lines, "", ""]).encode())
        head, _ = _read_head(end)
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            raise UnreachableError(f"the proxy {parts.hostname} refused {host}:{port}: {status}")
    except BaseException:
        end.close()
        raise
    return end


def _read_head(end: socket.socket) -> tuple[bytes, bytes]:
    """An answer's head, and what came after it."""
    got = b""
    while b"\r\n\r\n" not in got:
        data = end.recv(4096)
        if not data or len(got) > 1 << 16:
            raise UnreachableError("the API server closed the connection")
        got += data
    head, _, left = got.partition(b"\r\n\r\n")
    return head, left


def _read_body(end: socket.socket, head: bytes, left: bytes) -> str:
    lengths = [
        int(line.partition(b":")[2])
        for line in head.splitlines()
        if line.lower().startswith(b"content-length:")
    ]
    wanted = lengths[0] if lengths else 1 << 16
    end.settimeout(2.0)
    with contextlib.suppress(OSError):
        while len(left) < wanted:
            data = end.recv(4096)
            if not data:
                break
            left += data
    return left.decode(errors="replace")
