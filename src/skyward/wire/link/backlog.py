"""The backlog of a link: bytes of its stream that the other end has not yet acknowledged."""

from __future__ import annotations

import mmap
from collections import deque

from skyward.errors import ProtocolError

CHUNK = 256 << 10
SPARE_CHUNKS = 16
NOTHING = memoryview(b"")


class Backlog:
    """A stretch of a byte stream, in chunks of equal size; chunks are reused."""

    def __init__(self) -> None:
        self._chunks: deque[memoryview] = deque()
        # The chunk freed last is used first: it is still in the processor's cache.
        self._spare: list[memoryview] = []
        self._acknowledged = 0
        self._sent = 0
        self.end = 0
        """The position after the last byte of the backlog."""

    @property
    def held(self) -> int:
        """How many bytes are kept."""
        return self.end - self._acknowledged

    @property
    def waiting(self) -> int:
        """How many bytes have not been sent yet."""
        return self.end - self._sent

    def room(self) -> memoryview:
        """Memory for the next bytes; after writing there, call `filled`."""
        index, used = divmod(self.end - self._first, CHUNK)
        if index == len(self._chunks):
            self._chunks.append(self._spare.pop() if self._spare else _new_chunk())
        return self._chunks[index][used:]

    def filled(self, count: int) -> None:
        """Append `count` bytes that the caller has written into `room`."""
        self.end += count

    def add(self, data: bytes | memoryview) -> None:
        """Append a copy; after an interrupt, `end` says how much was appended."""
        at = 0
        while at < len(data):
            room = self.room()
            count = min(len(room), len(data) - at)
            room[:count] = data[at : at + count]
            at += count
            self.end += count

    def unsent(self) -> memoryview:
        """The next bytes to send, up to the end of their chunk; empty when all are sent."""
        left = self.end - self._sent
        if not left:
            return NOTHING
        index, at = divmod(self._sent - self._first, CHUNK)
        return self._chunks[index][at : at + left]

    def sent(self, count: int) -> None:
        """Note that the next `count` bytes were sent."""
        self._sent += count

    def acknowledge(self, position: int) -> None:
        """Drop the bytes before this position: the other end has received them."""
        self._check(position)
        # Bytes of a write that has not returned are still in use here, even if they have arrived.
        self._forget_before(min(position, self._sent))

    def resume(self, position: int) -> None:
        """Go on, on a new connection, at the position up to which the other end has received."""
        self._check(position)
        self._forget_before(position)
        self._sent = position

    def restart(self, position: int) -> None:
        """Empty the backlog, and begin at a later position that the other end has reached."""
        while self._chunks:
            self._give_back(self._chunks.popleft())
        self._acknowledged = self._sent = self.end = position

    def _check(self, position: int) -> None:
        if not self._acknowledged <= position <= self.end:
            raise ProtocolError(
                f"the other end has {position} bytes of a stream that is between "
                f"{self._acknowledged} and {self.end}"
            )

    def _forget_before(self, position: int) -> None:
        for _ in range((position - self._first) // CHUNK):
            self._give_back(self._chunks.popleft())
        self._acknowledged = position

    def _give_back(self, chunk: memoryview) -> None:
        if len(self._spare) < SPARE_CHUNKS:
            self._spare.append(chunk)

    @property
    def _first(self) -> int:
        """The position at which the oldest chunk begins."""
        return self._acknowledged - self._acknowledged % CHUNK


def _new_chunk() -> memoryview:
    """Memory that exists only where it has been written to: most links carry a few small messages.

    The C library would write zeros to all of it once the process has freed larger pieces.
    """
    return memoryview(mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
