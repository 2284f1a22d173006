"""A route: where the connections of a device's link come from, one after another."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol

from skyward.errors import SkywardError
from skyward.wire.channel import Channel
from skyward.wire.identity import GREETING_SECONDS

REFUSED_SECONDS = 2.0
"""A host that refuses connections for so long has no such process any more."""
PAUSES = (0.02, 1.0)
"""The first and the longest pause between two attempts to connect."""
GREETING = struct.Struct("<16sQ")
"""First on every connection: the link's token, and the bytes received so far."""


class LinkLost(Exception):
    """No connection can be had any more; the message says why."""


class Route(Protocol):
    """Where a link's connections come from."""

    def open(self, received: int) -> tuple[Channel, int]:
        """The next connection, and how much of ours the other end has; or raises `LinkLost`."""

    def close(self) -> None:
        """Make a waiting `open` raise."""


class Dial:
    """The client's route: it connects, again and again if need be."""

    def __init__(self, first: Channel, connect: Callable[[], Channel], patience: float) -> None:
        self._first: Channel | None = first
        self._connect = connect
        self._patience = patience
        self._token = secrets.token_bytes(16)
        self._closed = threading.Event()

    def open(self, received: int) -> tuple[Channel, int]:
        """Connect and say how far we got."""
        if self._first is not None:
            first, self._first = self._first, None
            return first, self._greet(first, received)
        started = answered = time.monotonic()
        pause, longest = PAUSES
        while not self._closed.is_set():
            try:
                channel = self._connect()
                return channel, self._greet(channel, received)
            except (OSError, EOFError, SkywardError) as problem:
                now = time.monotonic()
                if not isinstance(problem, ConnectionRefusedError):
                    answered = now
                if now - answered > REFUSED_SECONDS:
                    raise LinkLost("its process has ended") from problem
                if now - started > self._patience:
                    raise LinkLost(
                        f"its connection was lost, and a new one could not be made within "
                        f"{self._patience:g} s ({problem})"
                    ) from problem
            self._closed.wait(pause)
            pause = min(2 * pause, longest)
        raise LinkLost("it was closed")

    def _greet(self, channel: Channel, received: int) -> int:
        sender, receiver = channel.detach()
        try:
            for end in (sender, receiver):
                end.settimeout(GREETING_SECONDS)
            sender.sendall(GREETING.pack(self._token, received))
            return _read_greeting(receiver)[1]
        except BaseException:
            channel.close()
            raise

    def close(self) -> None:
        """Connect no more."""
        self._closed.set()


class Door:
    """The worker's route: the client comes, and only the one that came first comes again."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._token: bytes | None = None
        self._waiting: tuple[Channel, int] | None = None
        self._inside: Channel | None = None
        self._closed = False
        self._changed = threading.Condition()

    def knock(self, channel: Channel) -> None:
        """A proven peer asks to go on with the link, or to begin it."""
        _, receiver = channel.detach()
        try:
            receiver.settimeout(GREETING_SECONDS)
            token, arrived = _read_greeting(receiver)
        except (OSError, EOFError):
            channel.close()
            return
        with self._changed:
            self._token = self._token or token
            if self._closed or not hmac.compare_digest(self._token, token):
                channel.close()
                return
            if self._waiting is not None:
                self._waiting[0].close()
            self._waiting = (channel, arrived)
            if self._inside is not None:
                # The client has left it; we may not have noticed.
                self._inside.abort()
            self._changed.notify_all()

    def open(self, received: int) -> tuple[Channel, int]:
        """Wait for the client and say how far we got."""
        deadline = time.monotonic() + self._patience
        while True:
            with self._changed:
                self._inside = None
                while self._waiting is None:
                    if self._closed or not self._changed.wait(deadline - time.monotonic()):
                        raise LinkLost(
                            f"its connection was lost, and the client did not come back within "
                            f"{self._patience:g} s"
                        )
                (channel, arrived), self._waiting = self._waiting, None
                self._inside, token = channel, self._token
            sender, _ = channel.detach()
            try:
                sender.settimeout(GREETING_SECONDS)
                sender.sendall(GREETING.pack(token, received))
            except OSError:
                channel.close()
                continue
            return channel, arrived

    def close(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self._closed = True
            if self._waiting is not None:
                self._waiting[0].close()
                self._waiting = None
            self._changed.notify_all()


def _read_greeting(receiver: socket.socket) -> tuple[bytes, int]:
    data = b""
    while len(data) < GREETING.size:
        more = receiver.recv(GREETING.size - len(data))
        if not more:
            raise EOFError("the other end closed the connection")
        data += more
    token, received = GREETING.unpack(data)
    return token, received
