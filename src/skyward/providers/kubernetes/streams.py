"""Streams into a pod: a command with its output, and connections to sockets there.

The API server carries them in connections of our own, over SPDY or a WebSocket.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from skyward.errors import UnreachableError
from skyward.providers.kubernetes.access import Access
from skyward.providers.kubernetes.manifests import CONTAINER
from skyward.wire.handshake import with_tls

STDIN, STDOUT, STDERR, STATUS = range(4)
LINGER_SECONDS = 30.0
"""How long bytes are still sent whose sender has closed its end."""
_LENGTH = struct.Struct(">I")
CONNECT_SECONDS = 20.0
PING_SECONDS = 20.0
"""An idle connection is used so often, so that no load balancer closes it."""
DEAD_SECONDS = 60
"""How long the other end may leave packets without an answer before the connection is dead."""
PIECE = 128 << 10
"""Bytes in a message at most; the API server keeps a whole message in memory."""

SMALL = 8 << 10
"""Bytes that are rather copied than sent in a packet of their own."""
_WEB_PROTOCOL = "v4.channel.k8s.io"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_NO_MASK = bytes(4)
_SPDY_PROTOCOL = "portforward.k8s.io"
ERROR, DATA = 1, 3
"""The two streams of a forwarded port; those of a client are odd."""
_SPDY_VERSION = 0x8003
_SYN_STREAM, _RST_STREAM, _SPDY_PING, _GOAWAY = 1, 3, 6, 7
_FIN = 1
_CONTROL, _CONTENT = struct.Struct(">HHI"), struct.Struct(">II")


# Commands and connections.


def _exec(access: Access, pod: str, command: Sequence[str]) -> WebSocket:
    query = [("container", CONTAINER), ("stdin", "1"), ("stdout", "1"), ("stderr", "1")]
    query += [("command", each) for each in command]
    try:
        return open_websocket(access, access.path("pods", pod, "exec", query=query))
    except HandshakeError as problem:
        raise UnreachableError(f"pod {pod}: {_words(problem)}") from problem


def _words(problem: HandshakeError) -> str:
    try:
        return str(json.loads(problem.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(problem)


def forward(access: Access, pod: str, port: int) -> socket.socket:
    """A blocking socket to a port of the pod's loopback; both directions end together."""
    path = access.path("pods", pod, "portforward")
    kind: type[_Copying] = _Forwarding
    carrier: Carrier
    try:
        try:
            carrier = open_port(access, path, port)
        except HandshakeError as problem:
            if problem.status in (404, 500):
                raise
            # Not every proxy lets SPDY through, and not every Role has the right that it takes.
            carrier, kind = open_websocket(access, f"{path}?ports={port}"), _WebForwarding
    except HandshakeError as problem:
        raise UnreachableError(f"pod {pod}, port {port}: {_words(problem)}") from problem
    return kind(carrier).start("skyward-forward")


class _Copying:
    """Copies between a socket here and a carrier, on one thread."""

    _far: socket.socket

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._unwritten: deque[memoryview] = deque()
        self._sends = self._receives = True
        """Whether each direction is still open."""
        self._until: float | None = None
        """When to give up what is not sent yet, if the user of the socket is gone."""

    def start(self, name: str) -> socket.socket:
        """Copy on a thread; gives the end of it, a blocking socket."""
        # The other end is the user's alone: when nobody has it any more, the copying ends.
        near, self._far = socket.socketpair()
        self._far.setblocking(False)
        threading.Thread(target=self._run, name=name, daemon=True).start()
        return near

    def _run(self) -> None:
        with (
            contextlib.closing(self._carrier),
            contextlib.closing(self._far),
            contextlib.suppress(OSError, UnreachableError),
        ):
            there = here = True
            while self._goes_on():
                there, here = self._step(there=there, here=here)

    def _goes_on(self) -> bool:
        if self._until is not None and time.monotonic() > self._until:
            return False
        unsent = self._carrier.has_unsent
        return bool(self._sends or self._receives or self._unwritten or unsent)

    def _step(self, *, there: bool, here: bool) -> tuple[bool, bool]:
        """Copy what can be copied, and wait for more; gives where there is some."""
        carrier = self._carrier
        if here and self._sends and not carrier.has_unsent:
            self._read_here()
        carrier.flush()
        while there and not self._unwritten:
            for channel, data in carrier.receive():
                self._take(channel, data)
                self._write_here()
            if carrier.ended:
                self._end()
            there = not (carrier.drained or carrier.ended)
        self._write_here()
        if not self._goes_on():
            return False, False
        reads_here = self._sends and not carrier.has_unsent
        wanted = (select.POLLIN if reads_here else 0) | (select.POLLOUT if self._unwritten else 0)
        # A socket whose user is gone would wake this thread again and again: it is asked once.
        other = self._far.fileno() if wanted or self._until is None else -1
        there, here = carrier.wait(other, wanted, reading=not self._unwritten)
        if here and not wanted:
            self._until = time.monotonic() + LINGER_SECONDS
        return there, here

    def _read_here(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._send(self._far.recv(PIECE))

    def _write_here(self) -> None:
        while self._unwritten:
            part = self._unwritten[0]
            try:
                sent = self._far.send(part)
            except BlockingIOError:
                return
            if sent < len(part):
                self._unwritten[0] = part[sent:]
            else:
                self._unwritten.popleft()

    def _send(self, data: bytes) -> None:
        """Send what was read here; empty bytes are the end of it."""
        raise NotImplementedError

    def _take(self, channel: int, data: memoryview) -> None:
        """Deal with what has arrived."""
        raise NotImplementedError

    def _end(self) -> None:
        """Deal with the end of both directions, from there."""
        self._sends = self._receives = False
        self._carrier.drop()


class _Forwarding(_Copying):
    """A forwarded port over SPDY: a stream for data, and one for an error."""

    def _send(self, data: bytes) -> None:
        if data:
            self._carrier.queue(DATA, data)
        else:
            self._sends = self._receives = False

    def _take(self, channel: int, data: memoryview) -> None:
        if channel == DATA and data:
            self._unwritten.append(data)
        elif channel == DATA or data:
            # The end, or a message that says why; the user of the socket sees its end.
            self._end()


class _WebForwarding(_Copying):
    """A forwarded port over a WebSocket: a channel for data, and one for an error."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._headers = {0, 1}
        """Channels that have not told their port yet: the first message of each."""

    def _send(self, data: bytes) -> None:
        if data:
            self._carrier.queue(0, data)
        else:
            self._sends = self._receives = False

    def _take(self, channel: int, data: memoryview) -> None:
        if channel in self._headers:
            self._headers.discard(channel)
        elif channel == 0:
            self._unwritten.append(data)
        else:
            self._end()


def execute(
    access: Access, pod: str, command: Sequence[str], refused: Callable[[str], None]
) -> socket.socket:
    """A blocking socket that is the input and output of a program in the pod.

    The API server's protocol cannot end the input: it stays open. `refused` gets the words with
    which the pod starts no program.
    """
    return _Executing(_exec(access, pod, command), refused).start("skyward-exec")


class _Executing(_Copying):
    """The streams of a program."""

    def __init__(self, carrier: Carrier, refused: Callable[[str], None]) -> None:
        super().__init__(carrier)
        self._refused = refused

    def _send(self, data: bytes) -> None:
        if data:
            self._carrier.queue(STDIN, data)
        self._sends = bool(data)

    def _take(self, channel: int, data: memoryview) -> None:
        if channel == STATUS:
            told = json.loads(bytes(data))
            exited = (told.get("details") or {}).get("causes")
            if told.get("status") != "Success" and not exited:
                self._refused(str(told.get("message", "")))
            self._end()
        elif channel == STDOUT:
            self._unwritten.append(data)


def relay(access: Access, pod: str, command: Sequence[str], text: bytes) -> socket.socket:
    """A blocking socket that leads, through a framed relay in the pod, to a socket there."""
    websocket = _exec(access, pod, command)
    websocket.queue(STDIN, text)
    return _Relaying(websocket).start("skyward-relay")


class _Relaying(_Copying):
    """A connection through a relay, each of whose directions can end alone."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._undecoded = bytearray()

    def _send(self, data: bytes) -> None:
        self._carrier.queue(STDIN, _LENGTH.pack(len(data)) + data)
        self._sends = bool(data)

    def _take(self, channel: int, data: memoryview) -> None:
        if channel == STATUS:
            self._end()
        if channel != STDOUT:
            return
        self._undecoded += data
        at = 0
        while len(self._undecoded) >= at + _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._undecoded, at)
            start = at + _LENGTH.size
            if len(self._undecoded) < start + size:
                break
            at = start + size
            if size:
                self._unwritten.append(memoryview(bytes(self._undecoded[start:at])))
            else:
                self._receives = False
        del self._undecoded[:at]

    def _write_here(self) -> None:
        super()._write_here()
        if not (self._receives or self._unwritten):
            with contextlib.suppress(OSError):
                self._far.shutdown(socket.SHUT_WR)


# Connections to the API server.


class HandshakeError(UnreachableError):
    """The API server answered the request for another protocol with an HTTP error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status, self.body = status, body


class Carrier:
    """One connection that carries messages of several channels; nothing here blocks but `wait`.

    A carrier is used by one thread: a TLS connection must not be read and written by two at once.
    """

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


class WebSocket(Carrier):
    """A WebSocket: `exec` without kubectl.

    The API server speaks the subprotocol v4.channel.k8s.io: the first byte of every message names
    its channel. A library for WebSockets would mask every byte that the client sends. The protocol
    asks for a mask so that proxies are not misled by what a browser's script chose to send; these
    bytes are TLS of our own, or a command's input inside the API server's TLS. So the mask is zero,
    and bulk bytes are not touched.
    """

    def queue(self, channel: int, data: bytes | memoryview) -> None:
        """Queue a message on a channel."""
        self._queue(_BINARY, bytes([channel]), data)

    def _ping(self) -> None:
        self._queue(_PING, b"")

    def _queue(self, kind: int, first: bytes, data: bytes | memoryview = b"") -> None:
        size = len(first) + len(data)
        if size < 126:
            head = struct.pack(">BB", 0x80 | kind, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack(">BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", 0x80 | kind, 0x80 | 127, size)
        self._append(head + _NO_MASK + first, data)

    def _messages(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        at = 0
        while (found := _frame(data, at)) is not None:
            kind, start, at = found
            if kind in (_BINARY, _TEXT, _CONTINUED):
                # The API server does not split messages: each frame begins with its channel.
                if at > start:
                    yield data[start], data[start + 1 : at]
            elif kind == _PING:
                self._queue(_PONG, bytes(data[start:at]))
            elif kind == _CLOSE:
                self.ended = True
        self._unread = bytes(data[at:])


def _frame(data: memoryview, at: int) -> tuple[int, int, int] | None:
    """The kind, begin and end of the next frame's content; None if it is not all there yet."""
    have = len(data) - at
    if have < 2:
        return None
    kind, size, start = data[at] & 0x0F, data[at + 1] & 0x7F, at + 2
    if size == 126:
        if have < 4:
            return None
        size, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
    elif size == 127:
        if have < 10:
            return None
        size, start = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
    return (kind, start, start + size) if len(data) >= start + size else None


def open_websocket(access: Access, path: str) -> WebSocket:
    """Open a WebSocket at a path of the API server; raises `HandshakeError` for its refusals."""
    key = base64.b64encode(os.urandom(16))
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key.decode(),
        "Sec-WebSocket-Protocol": _WEB_PROTOCOL,
    }
    end, head, left = upgraded(access, "GET", path, headers)
    if base64.b64encode(hashlib.sha1(key + _GUID).digest()) not in head:
        end.close()
        raise UnreachableError(f"{access.server}: no WebSocket in its answer")
    return WebSocket(end, left)


class Spdy(Carrier):
    """SPDY/3.1: port forwarding as kubectl does it.

    The containers' runtime removes the mask of a WebSocket byte by byte, even one of zeros, and
    takes more than twice the time for it. SPDY has no mask. Where a proxy lets no SPDY through, a
    WebSocket serves.
    """

    def begin(self, streams: Mapping[int, Mapping[str, str]]) -> None:
        """Begin streams with their headers."""
        # Without SPDY's dictionary, which is optional: its only use is to save a few bytes.
        packer = zlib.compressobj()
        for stream, headers in streams.items():
            block = struct.pack(">I", len(headers))
            for name, value in headers.items():
                for text in (name.lower().encode(), value.encode()):
                    block += struct.pack(">I", len(text)) + text
            packed = packer.compress(block) + packer.flush(zlib.Z_SYNC_FLUSH)
            self._control(_SYN_STREAM, struct.pack(">IIBB", stream, 0, 0, 0) + packed)

    def queue(self, channel: int, data: bytes | memoryview) -> None:
        """Queue bytes for a stream; none are its end."""
        flags = 0 if data else _FIN
        self._append(_CONTENT.pack(channel, flags << 24 | len(data)), data)

    def _ping(self) -> None:
        self._control(_SPDY_PING, struct.pack(">I", 1))

    def _control(self, kind: int, content: bytes) -> None:
        self._append(_CONTROL.pack(_SPDY_VERSION, kind, len(content)), content)

    def _messages(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """What streams have sent; an empty message is the end of one."""
        at = 0
        while len(data) - at >= 8:
            first, second = _CONTENT.unpack_from(data, at)
            flags, size = second >> 24, second & 0xFFFFFF
            if len(data) - at - 8 < size:
                break
            content = data[at + 8 : at + 8 + size]
            at += 8 + size
            if not first >> 31:
                if content:
                    yield first, content
                if flags & _FIN:
                    yield first, content[:0]
            else:
                self._answer(first & 0xFFFF, content)
        self._unread = bytes(data[at:])

    def _answer(self, kind: int, content: memoryview) -> None:
        if kind == _SPDY_PING and not content[3] & 1:
            # The other end's own; the client's pings, which come back, are odd.
            self._control(_SPDY_PING, bytes(content))
        elif kind in (_GOAWAY, _RST_STREAM):
            self.ended = True


def open_port(access: Access, path: str, port: int) -> Spdy:
    """Forward a port of a pod; raises `HandshakeError` for refusals."""
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "SPDY/3.1",
        "X-Stream-Protocol-Version": _SPDY_PROTOCOL,
        "Content-Length": "0",
    }
    end, _, left = upgraded(access, "POST", path, headers)
    opened = Spdy(end, left)
    about = {"port": str(port), "requestID": "0"}
    opened.begin({ERROR: {**about, "streamType": "error"}, DATA: {**about, "streamType": "data"}})
    opened.queue(ERROR, b"")
    return opened


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
