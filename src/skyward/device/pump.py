"""The pump: lets the C++ cores speak over TLS by way of a plain socket pair."""

from __future__ import annotations

import contextlib
import socket
import threading

from skyward.wire.channel import Channel

SIZE = 256 << 10


def plain_socket(channel: Channel) -> socket.socket:
    """A plain socket for the core; over TLS, one end of a pair whose other end is pumped."""
    sender, receiver = channel.detach()
    if channel.shares_memory:
        return sender
    near, far = socket.socketpair()
    for source, target in ((far, sender), (receiver, far)):
        threading.Thread(
            target=_pump, args=(source, target), name="skyward-device-pump", daemon=True
        ).start()
    return near


def _pump(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(SIZE))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    for end in (source, target):
        # Wakes the other direction and the core: both then see the end of the stream.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(end, socket.SHUT_RDWR)
