"""Streams into a pod: a command with its output, and connections to sockets there.

The API server carries them in connections of our own, over SPDY or a WebSocket. Ports are forwarded
by a process that runs this file: their bytes do not pass the client's interpreter. It starts in
50 ms, since this file imports nothing but the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

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

ROOM = 64 << 10
"""Bytes that are received at once at most; TLS has 16 KiB in a record."""
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


class Server(NamedTuple):
    """An API server: its address, and what TLS takes."""

    url: str
    proxy: str
    """The proxy to it, if there is one."""
    name: str
    """The name in its certificate, if it is not that of its address."""
    is_verified: bool
    authority_file: str | None
    authority: str | None
    certificate_file: str | None
    """The user's own, if he has one."""
    key_file: str | None


Headers = Iterable[tuple[str, str]]


# The process that forwards ports.

_PROGRAM = "import sys; sys.path.append(sys.argv[1]); import streams; streams.serve()"
ORPHAN_SECONDS = 5.0
"""How often the process looks whether its client has been killed."""
CLOSE_SECONDS = 5.0
"""How long the process may take to send the last bytes of ports that nobody uses any more."""


class Forwarder:
    """The process that forwards ports, which starts with the first one, and again if it has died.

    It listens nowhere: it gets a socket for each port from its client, and ends with its client.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The number of the process, if there is one."""
        return self._process.pid if self._process is not None else None

    def connect(self, server: Server, headers: Headers, path: str, port: int) -> socket.socket:
        """A blocking socket to a port of the pod whose path this is; both directions end together.

        Raises `HandshakeError` for refusals, and another `ConnectionError` for other failures.
        """
        asked = json.dumps([server, list(headers), path, port]).encode()
        for again in (True, False):
            near, far = socket.socketpair()
            try:
                with far:
                    self._hand_over(far)
                _send_text(near, asked)
                told = json.loads(_receive_text(near))
            except ConnectionError:
                near.close()
                # It has been killed meanwhile, and the next one does better.
                if again:
                    continue
                raise
            except BaseException:
                near.close()
                raise
            break
        if told is None:
            return near
        near.close()
        raise HandshakeError(*told) if isinstance(told, list) else ConnectionError(told)

    def _hand_over(self, end: socket.socket) -> None:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the connection to the API server was closed")
            if self._control is not None:
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(self._control, [b"\0"], [end.fileno()])
                    return
            self._end()
            socket.send_fds(self._start(), [b"\0"], [end.fileno()])

    def _start(self) -> socket.socket:
        self._control, its = socket.socketpair()
        nothing = subprocess.DEVNULL
        with its:
            # In a session of its own: Ctrl-C in a terminal is for the client, which may go on.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(__file__).parent)],
                stdin=its.fileno(),
                stdout=nothing,
                stderr=nothing,
                cwd="/",
                start_new_session=True,
            )
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None

    def close(self) -> None:
        """End the process, after it has sent the last bytes."""
        with self._lock:
            self._closed = True
            self._end()


def serve() -> None:
    """Forward ports, each to a socket that comes through the standard input, until that ends."""
    client = os.getppid()
    with socket.socket(fileno=0) as control:
        # A child of the client may have the other end, too: its end need not be the client's.
        waiting = select.poll()
        waiting.register(control, select.POLLIN)
        while True:
            if not waiting.poll(ORPHAN_SECONDS * 1000):
                if os.getppid() != client:
                    os._exit(1)
                continue
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return  # The threads send what they have.
            end = socket.socket(fileno=descriptors[0])
            threading.Thread(target=_serve_one, args=(end,)).start()


def _serve_one(end: socket.socket) -> None:
    with contextlib.closing(end), contextlib.suppress(ConnectionError):
        server, headers, path, port = json.loads(_receive_text(end))
        told: object = None
        try:
            copying = _open_forwarding(Server(*server), headers, path, port)
        except HandshakeError as problem:
            told = [problem.status, problem.body]
        except (OSError, ValueError, LookupError) as problem:  # Also for an answer that is no HTTP.
            told = str(problem) or type(problem).__name__
        else:
            try:
                _send_text(end, b"null")
            except OSError:
                copying.close()
                return
            copying.run(end)
            return
        _send_text(end, json.dumps(told).encode())


def _open_forwarding(server: Server, headers: Headers, path: str, port: int) -> _Copying:
    try:
        return _Forwarding(open_port(server, headers, path, port))
    except HandshakeError as problem:
        if problem.status in (404, 500):
            raise
        # Not every proxy lets SPDY through, and not every Role has the right that it takes.
        return _WebForwarding(open_websocket(server, headers, f"{path}?ports={port}"))


def _send_text(end: socket.socket, text: bytes) -> None:
    end.sendall(_LENGTH.pack(len(text)) + text)


def _receive_text(end: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(end, _LENGTH.size))
    return _receive_exactly(end, size)


def _receive_exactly(end: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        data = end.recv(size - len(got))
        if not data:
            raise ConnectionResetError("the process that forwards ports has ended")
        got += data
    return got


# Copying.


class _Copying:
    """Copies between a socket here and a carrier, on one thread."""

    _far: socket.socket

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._room = memoryview(bytearray(PIECE))
        """For what is read here; a carrier has sent it before more is read."""
        self._unwritten: deque[memoryview] = deque()
        self._sends = self._receives = True
        """Whether each direction is still open."""
        self._until: float | None = None
        """When to give up what is not sent yet, if the user of the socket is gone."""

    def start(self, name: str) -> socket.socket:
        """Copy on a thread; gives the end of it, a blocking socket."""
        # The other end is the user's alone: when nobody has it any more, the copying ends.
        near, self._far = socket.socketpair()
        threading.Thread(target=self.run, args=(self._far,), name=name, daemon=True).start()
        return near

    def close(self) -> None:
        """Close the carrier; nothing has been copied yet."""
        self._carrier.close()

    def run(self, far: socket.socket) -> None:
        """Copy between the socket and the carrier until the end of both."""
        self._far = far
        far.setblocking(False)
        with (
            contextlib.closing(self._carrier),
            contextlib.closing(far),
            contextlib.suppress(OSError),
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
        if self._sends and self._receives and not (self._unwritten or carrier.has_unsent):
            return carrier.trade(self._far)
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
            self._send(self._room[: self._far.recv_into(self._room)])

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

    def _send(self, data: memoryview) -> None:
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

    def _send(self, data: memoryview) -> None:
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

    def _send(self, data: memoryview) -> None:
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


class Executing(_Copying):
    """The streams of a program.

    The API server's protocol cannot end the input: it stays open. `refused` gets the words with
    which the pod starts no program.
    """

    def __init__(self, carrier: Carrier, refused: Callable[[str], None]) -> None:
        super().__init__(carrier)
        self._refused = refused

    def _send(self, data: memoryview) -> None:
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


class Relaying(_Copying):
    """A connection through a framed relay in the pod, each of whose directions can end alone."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(carrier)
        self._undecoded = bytearray()

    def _send(self, data: memoryview) -> None:
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


class HandshakeError(ConnectionError):
    """The API server answered the request for another protocol with an HTTP error."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status, self.body = status, body

    @property
    def words(self) -> str:
        """What the API server said."""
        try:
            return str(json.loads(self.body)["message"])
        except (ValueError, KeyError, TypeError):
            return str(self)


class Carrier:
    """One connection that carries messages of several channels; nothing here blocks but `wait`.

    A carrier is used by one thread: a TLS connection must not be read and written by two at once.
    """

    def __init__(self, end: socket.socket, left: bytes) -> None:
        end.setblocking(False)
        self._end = end
        self._unread = left
        self._room = memoryview(bytearray(ROOM))
        """For what arrives; all of it is taken before more is received."""
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
            count = self._end.recv_into(self._room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            count = None
        except (ssl.SSLError, ConnectionError):
            count = 0
        if count:
            self._used = time.monotonic()
            self.drained = count < SMALL and not self._has_decrypted()
        elif count is not None:
            self.ended = True
        data = self._room[: count or 0]
        if self._unread:
            data = memoryview(self._unread + data)
        if data:
            yield from self._messages(data)

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
        self._watch({self._end.fileno(): own} | ({other: events} if other >= 0 else {}))
        decrypted = reading and self._has_decrypted()
        ready = dict(self._poll.poll(0 if decrypted else PING_SECONDS * 1000))
        arrived = decrypted or ready.get(self._end.fileno(), 0) & ~select.POLLOUT != 0
        return arrived and reading, other in ready

    def _watch(self, polled: dict[int, int]) -> None:
        if polled != self._polled:
            for descriptor in self._polled.keys() - polled.keys():
                self._poll.unregister(descriptor)
            for descriptor, wanted in polled.items():
                self._poll.register(descriptor, wanted)
            self._polled = polled

    def trade(self, far: socket.socket) -> tuple[bool, bool]:
        """Wait until something has arrived here or there; a carrier may copy it at once."""
        return self.wait(far.fileno(), select.POLLIN)


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


def open_websocket(server: Server, headers: Headers, path: str) -> WebSocket:
    """Open a WebSocket at a path of the API server; raises `HandshakeError` for its refusals."""
    key = base64.b64encode(os.urandom(16))
    wanted = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key.decode(),
        "Sec-WebSocket-Protocol": _WEB_PROTOCOL,
    }
    end, head, left = upgraded(server, "GET", path, [*wanted.items(), *headers])
    if base64.b64encode(hashlib.sha1(key + _GUID).digest()) not in head:
        end.close()
        raise ConnectionError(f"{server.url}: no WebSocket in its answer")
    return WebSocket(end, left)


class Spdy(Carrier):
    """SPDY/3.1: port forwarding as kubectl does it.

    The containers' runtime removes the mask of a WebSocket byte by byte, even one of zeros, and
    takes more than twice the time for it. SPDY has no mask. Where a proxy lets no SPDY through, a
    WebSocket serves.
    """

    def __init__(self, end: socket.socket, left: bytes) -> None:
        super().__init__(end, left)
        self._outgoing = memoryview(bytearray(_CONTENT.size + PIECE))

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

    def trade(self, far: socket.socket) -> tuple[bool, bool]:
        """Copy between the data's stream and a socket, as long as each message goes whole at once.

        In few steps: between two messages, the processor's caches forget what runs here, and each
        line takes a microsecond.
        """
        here, there = far.fileno(), self._end.fileno()
        if self._unread:
            return self.wait(here, select.POLLIN)
        self._watch({there: select.POLLIN, here: select.POLLIN})
        head, outgoing, room = _CONTENT.size, self._outgoing, self._room
        content, pause = outgoing[head:], PING_SECONDS * 1000
        while not self._unsent:
            ready = self._poll.poll(pause)
            if not ready:
                self._ping()
                self.flush()
            for descriptor, event in ready:
                if event != select.POLLIN:
                    return descriptor == there, descriptor == here
                if descriptor == here:
                    size = far.recv_into(content)
                    if not size:
                        return False, True
                    _CONTENT.pack_into(outgoing, 0, DATA, size)
                    self._unsent.append(outgoing[: head + size])
                    self.flush()
                    if self._unsent:
                        break
                    continue
                try:
                    size = self._end.recv_into(room)
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except (ssl.SSLError, ConnectionError):
                    size = 0
                if size < head or _CONTENT.unpack_from(room) != (DATA, size - head):
                    self._unread, self.ended = bytes(room[:size]), not size
                    return True, False
                try:
                    sent = head + far.send(room[head:size])
                except BlockingIOError:
                    sent = head
                if sent < size:
                    self._unread = _CONTENT.pack(DATA, size - sent) + room[sent:size]
                    return True, False
        return False, False

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


def open_port(server: Server, headers: Headers, path: str, port: int) -> Spdy:
    """Forward a port of a pod; raises `HandshakeError` for refusals."""
    wanted = {
        "Connection": "Upgrade",
        "Upgrade": "SPDY/3.1",
        "X-Stream-Protocol-Version": _SPDY_PROTOCOL,
        "Content-Length": "0",
    }
    end, _, left = upgraded(server, "POST", path, [*wanted.items(), *headers])
    opened = Spdy(end, left)
    about = {"port": str(port), "requestID": "0"}
    opened.begin({ERROR: {**about, "streamType": "error"}, DATA: {**about, "streamType": "data"}})
    opened.queue(ERROR, b"")
    return opened


# Beginnings.


def upgraded(
    server: Server, method: str, path: str, headers: Headers
) -> tuple[socket.socket, bytes, bytes]:
    """A connection that speaks another protocol from now on, with the head and what came after it.

    Raises `HandshakeError` for refusals.
    """
    try:
        end = _connect(server)
    except OSError as problem:
        raise ConnectionError(
            f"the API server {server.url} does not answer: {problem}; is it up, and are you in "
            "its network?"
        ) from problem
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(server.url).netloc}"]
        lines += [f"{name}: {value}" for name, value in headers]
        end.sendall("\r\n".join([*lines, "", ""]).encode())
        head, left = _read_head(end)
        status = int(head.split(b" ", 2)[1])
        if status != 101:
            raise HandshakeError(status, _read_body(end, head, left))
    except BaseException:
        end.close()
        raise
    return end, head, left


def _connect(server: Server) -> socket.socket:
    parts = urlsplit(server.url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if server.proxy:
        end = _through(server.proxy, host, port)
    else:
        end = socket.create_connection((host, port), CONNECT_SECONDS)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_death(end)
    if parts.scheme != "https":
        return end
    try:
        # Here, and not in the middle of `wrap_socket`, which would leave its new socket open.
        end.getpeername()
        return _context(server).wrap_socket(end, server_hostname=server.name or host)
    except BaseException:
        end.close()
        raise


@functools.lru_cache(maxsize=4)
def _context(server: Server) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=server.authority_file, cadata=server.authority)
    if not server.is_verified:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    if server.certificate_file:
        made.load_cert_chain(server.certificate_file, server.key_file)
    return made


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
        raise ConnectionError(
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
            raise ConnectionError(f"the proxy {parts.hostname} refused {host}:{port}: {status}")
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
            raise ConnectionError("the API server closed the connection")
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
