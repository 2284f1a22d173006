"""A large write: a cursor in its bytes, and how they are spread over the connections of a pair."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from skyward.wire.link.pair import RECORD, RECORD_MAX, STRIPE_BIT, STRIPED_MIN, Pair

STRIPE_PART = 1 << 20
"""How much of a large write goes over one of several connections at a time."""
STRIPED_HEAD = 1 << 20
"""The longest head of a striped frame: the head must go over the main connection."""


class Cursor:
    """A position in the bytes of several views; it can move back, to send bytes again."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = self._offset = 0
        self.length = sum(map(len, views))
        self.position = 0
        """How many bytes lie before the cursor."""

    @property
    def left(self) -> int:
        """How many bytes lie after the cursor."""
        return self.length - self.position

    def seek(self, position: int) -> None:
        """Move the cursor to a position."""
        self.position = self._offset = position
        self._index = 0
        while self._index < len(self._views) and self._offset >= len(self._views[self._index]):
            self._offset -= len(self._views[self._index])
            self._index += 1

    def take(self, count: int) -> Iterator[memoryview]:
        """The next `count` bytes, one piece for each view.

        The cursor moves past a piece when the caller asks for the next one.
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
    """Sends the records of a large write over a pair's main connection and its stripes."""

    def __init__(self, pair: Pair, *, striped: bool) -> None:
        self._pair = pair
        self._striped = striped
        self._begun = False

    def send(self, cursor: Cursor) -> None:
        """Send one record, and move the cursor past its bytes."""
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
        # The first record goes over the main connection: a reader expects a new frame only there.
        if self._striped and self._begun and self._pair.is_striped:
            return *self._pair.roomiest(), STRIPE_PART
        self._begun = True
        return 0, self._pair.sender, RECORD_MAX
