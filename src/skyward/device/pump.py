"""The pump: lets the C++ cores speak over TLS by way of a plain socket pair."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from skyward.wire.channel import Channel

SIZE = 256 << 10


def plain_socket(channel: Channel) -> socket.socket:
    """A plain socket for the core; over TLS, one end of a pair whose other end is pumped."""
    sender, receiver = channel.detach()
    if channel.shares_memory:
        return sender
    near, far = socket.socketpair()
    _thread(_carry, far, sender, receiver).start()
    return near


def _thread(target: Callable[..., None], *ends: socket.socket) -> threading.Thread:
    return threading.Thread(target=target, args=ends, name="skyward-device-pump", daemon=True)


def _carry(far: socket.socket, sender: socket.socket, receiver: socket.socket) -> None:
    """Both directions, until either ends; then the sockets, whose owner this is, are closed."""
    with far, sender, receiver:
        back = _thread(_pump, receiver, far)
        back.start()
        _pump(far, sender)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(SIZE))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    for end in (source, target):
        # Wakes the other direction and the core: both then see the end of the stream.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(end, socket.SHUT_RDWR)
