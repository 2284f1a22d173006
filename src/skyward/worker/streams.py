"""A worker's ends of streams: arguments that arrive, and results that leave, item by item."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from skyward.objects import encoding
from skyward.wire.channel import Channel
from skyward.wire.messages import Credit

WINDOW = 16
"""How many items a sender may be ahead of its receiver."""
HELD_SECONDS = 1.0
"""After so long without permission to send an item, the client is told that the worker waits."""


class InputStream:
    """An iterator over items that the client sends; asks for more before it is empty."""

    def __init__(self, task: int, index: int, channel: Channel, hurry: Callable[[], None]) -> None:
        self._task, self._index, self._channel, self._hurry = task, index, channel, hurry
        self._items: queue.SimpleQueue[tuple[bool, Any] | None] = queue.SimpleQueue()
        """None only has the one who waits look again."""
        self._owed = 0
        self._done = False

    def put(self, pieces: Any) -> None:
        """Take an item that has arrived."""
        self._items.put((True, pieces))

    def finish(self, problem: Any) -> None:
        """End the stream: the client's iterator has ended, or has raised the given exception."""
        self._items.put((False, problem))

    def __iter__(self) -> InputStream:
        return self

    def __next__(self) -> Any:
        if self._done:
            raise StopIteration
        if self._owed <= WINDOW // 2:
            self._channel.send(Credit(self._task, self._index, WINDOW - self._owed))
            self._owed = WINDOW
        more, pieces = self._take()
        if more:
            self._owed -= 1
            return encoding.decode(*pieces)
        self._done = True
        if pieces is None:
            raise StopIteration
        raise encoding.decode(*pieces).rebuild()

    def _take(self) -> tuple[bool, Any]:
        """Wait for the next item, or for the end."""
        while True:
            if self._items.empty():
                self._hurry()
            if (found := self._items.get()) is not None:
                return found


class OutputStream:
    """The client's permission to send items of a task's own iterator."""

    def __init__(self, hurry: Callable[[], None], wait: Callable[[int], None]) -> None:
        """`wait` tells the client that this many items were permitted and sent, and one waits."""
        self._hurry, self._wait = hurry, wait
        self._credit = 0
        self._permitted = 0
        self._closed = False
        # Not a lock: an interrupt raised in a thread could leave a lock taken.
        self._granted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def grant(self, count: int) -> None:
        """Permit `count` more items, which the client asks for; -1 closes the stream."""
        if count < 0:
            self.close()
        else:
            self._granted.put(count)

    def close(self) -> None:
        """Permit no more items."""
        self._closed = True
        self._granted.put(0)

    def take(self) -> bool:
        """Wait until an item may be sent; False when the client wants no more."""
        while not self._credit and not self._closed:
            if self._granted.empty():
                self._hurry()
            granted = self._next_grant()
            self._credit += granted
            self._permitted += granted
        self._credit -= 1
        return not self._closed

    def _next_grant(self) -> int:
        try:
            return self._granted.get(timeout=HELD_SECONDS)
        except queue.Empty:
            self._wait(self._permitted)
            return self._granted.get()
