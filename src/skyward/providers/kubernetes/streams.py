"""Streams into a pod: a command with its output, and connections to sockets there."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from skyward.errors import UnreachableError
from skyward.providers.kubernetes import spdy
from skyward.providers.kubernetes.access import Access
from skyward.providers.kubernetes.carrier import PIECE, Carrier, HandshakeError
from skyward.providers.kubernetes.manifests import CONTAINER
from skyward.providers.kubernetes.websocket import WebSocket, open_websocket

STDIN, STDOUT, STDERR, STATUS = range(4)
LINGER_SECONDS = 30.0
"""How long bytes are still sent whose sender has closed its end."""
_LENGTH = struct.Struct(">I")


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


# Connections.


def forward(access: Access, pod: str, port: int) -> socket.socket:
    """A blocking socket to a port of the pod's loopback; both directions end together."""
    path = access.path("pods", pod, "portforward")
    kind: type[_Copying] = _Forwarding
    carrier: Carrier
    try:
        try:
            carrier = spdy.open_port(access, path, port)
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
            self._carrier.queue(spdy.DATA, data)
        else:
            self._sends = self._receives = False

    def _take(self, channel: int, data: memoryview) -> None:
        if channel == spdy.DATA and data:
            self._unwritten.append(data)
        elif channel == spdy.DATA or data:
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
