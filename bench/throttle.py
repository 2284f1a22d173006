"""A throttle: what nodes send to each other passes through it, at a limited rate for each node."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from skyward.device import meeting
from skyward.device.meeting import Meeting

PIECE = 64 << 10


class Allowance:
    """How fast one node may send, over all its connections together."""

    def __init__(self, rate: float) -> None:
        self._rate, self._next = rate, 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until so many more bytes may be sent."""
        with self._lock:
            now = time.monotonic()
            start = max(self._next, now)
            self._next = start + count / self._rate
        time.sleep(max(0.0, start - now))


class Throttle:
    """Stands between the processes of devices."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._allowances: dict[str, Allowance] = {}
        self._listeners: list[socket.socket] = []

    def between(self, here: str, there: str, endpoint: str) -> str:
        """Where the device `here` connects to reach the one `there`, instead of at the endpoint."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._listeners.append(listener)
        out, back = (self._allowances.setdefault(d, Allowance(self._rate)) for d in (here, there))
        _spawn(self._accept, listener, endpoint, out, back)
        return f"tcp:127.0.0.1:{listener.getsockname()[1]}"

    def _accept(
        self, listener: socket.socket, endpoint: str, out: Allowance, back: Allowance
    ) -> None:
        host, _, port = endpoint.removeprefix("tcp:").rpartition(":")
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                for end in (near, far):
                    # As on the connections whose bytes pass here.
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _spawn(_carry, near, far, out)
                _spawn(_carry, far, near, back)

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def _spawn(target: Any, *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _carry(source: socket.socket, target: socket.socket, allowance: Allowance) -> None:
    buffer = memoryview(bytearray(PIECE))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            allowance.take(count)
            target.sendall(buffer[:count])
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def throttled(rate: float) -> Iterator[None]:
    """Links made meanwhile pass through a throttle of so many bytes a second for each device."""
    throttle = Throttle(rate)
    try:
        with _rearranged(throttle.between):
            yield
    finally:
        throttle.close()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Links made meanwhile are those of nodes on different machines, with TLS."""
    with _rearranged(lambda own, other, endpoint: endpoint):
        yield


@contextlib.contextmanager
def _rearranged(endpoint_for: Callable[[str, str, str], str]) -> Iterator[None]:
    arrange = meeting.arrange

    def otherwise(link: int, own: str, here: Any, other: str, there: Any) -> Meeting:
        made = arrange(link, own, here, other, there)
        over_network = [each for each in made.endpoints if each.startswith("tcp:")]
        made.endpoints = tuple(endpoint_for(own, other, each) for each in over_network)
        return made

    meeting.arrange = otherwise
    try:
        yield
    finally:
        meeting.arrange = arrange
