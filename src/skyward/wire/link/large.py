"""A large write: what is to be sent, and the connections of a pair that it is spread over."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from skyward.wire.link.pair import Pair
from skyward.wire.link.records import RECORD, RECORD_MAX, STRIPE_BIT, STRIPED_MIN

STRIPE_PART = 1 << 20
"""How much of a large write goes over one of several connections at a time."""
STRIPED_HEAD = 1 << 20
"""The most that may precede a frame's large body, so that it goes over the main connection."""


class Cursor:
    """A position in the bytes of several views, which can be moved back to send some again."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = self._offset = 0
        self.length = sum(map(len, views))
        self.position = 0
        """How many bytes lie before it."""

    @property
    def left(self) -> int:
        """How many bytes follow."""
        return self.length - self.position

    def seek(self, position: int) -> None:
        """Go to the position after so many bytes."""
        self.position = self._offset = position
        self._index = 0
        while self._index < len(self._views) and self._offset >= len(self._views[self._index]):
            self._offset -= len(self._views[self._index])
            self._index += 1

    def take(self, count: int) -> Iterator[memoryview]:
        """The next so many bytes, in as few pieces as they lie in.

        The cursor passes a piece when the next one is asked for.
        """
        while count and self._index < len(self._views):
            piece = self._views[self._index][self._offset : self._offset + count]
            if piece:
                yield piece
            count -= len(piece)
            self.position += len(piece)
            self._offset += len(piece)
            if self._offset == len(self._views[self._index]):
                self._index, self._offset = self._index + 1, 0


def may_be_striped(views: Sequence[memoryview]) -> bool:
    """Whether a frame is so large that several connections carry it faster, if there are any."""
    return sum(map(len, views)) >= STRIPED_MIN and len(views[0]) <= STRIPED_HEAD


class Spread:
    """Where the records of a large write go: to a pair's main connection, or to its stripes."""

    def __init__(self, pair: Pair, *, striped: bool) -> None:
        self._pair = pair
        self._striped = striped
        self._begun = False

    def send(self, cursor: Cursor) -> None:
        """Send the next record of what follows the cursor."""
        number, target, size = self._choose()
        length = min(size, cursor.left)
        head = RECORD.pack(length | number << STRIPE_BIT)
        if target is not self._pair.sender:
            self._pair.sender.sendall(head)
            for piece in cursor.take(length):
                target.sendall(piece)
            return
        for piece in cursor.take(length):
            self._pair.write(piece, head)
            head = b""

    def _choose(self) -> tuple[int, socket.socket, int]:
        """The number of a connection, the connection, and how much to send over it."""
        # The first record on the main connection: readers look for frames on no other.
        if self._striped and self._begun and self._pair.is_striped:
            return *self._pair.roomiest(), STRIPE_PART
        self._begun = True
        return 0, self._pair.sender, RECORD_MAX
