"""The anteroom: tasks whose buffers are still on their way from a peer, kept in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from skyward.wire.channel import Channel
from skyward.wire.messages import Missing, Run
from skyward.worker.definitions import Definitions
from skyward.worker.inbox import Inbox, Pieces


class Anteroom:
    """Lets tasks in once all they need is here, in the order in which they came.

    The order matters: tasks of two broadcasts that wait for each other would wait for ever if
    some workers began with the first and others with the second.
    """

    def __init__(
        self, inbox: Inbox, definitions: Definitions, admit: Callable[[Run, Pieces], None]
    ) -> None:
        self._inbox, self._definitions = inbox, definitions
        self._admit = admit
        self._waiting: deque[tuple[Channel, Run, bytearray]] = deque()
        self._lock = threading.Lock()

    @property
    def occupied(self) -> bool:
        """Whether somebody waits here, who may be let in at any time."""
        return bool(self._waiting)

    def enter(self, channel: Channel, run: Run, body: bytearray) -> None:
        """A task has come, though perhaps not all that it names."""
        with self._lock:
            if self._waiting or self._awaits(run):
                self._waiting.append((channel, run, body))
            else:
                self._let_in(channel, run, body)

    def settle(self) -> None:
        """Buffers have come, or will not: let in whom that concerns."""
        with self._lock:
            while self._waiting and not self._awaits(self._waiting[0][1]):
                self._let_in(*self._waiting.popleft())

    def leave(self, task: int) -> None:
        """A task is cancelled."""
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each[1].task != task)
        self.settle()

    def clear(self) -> list[int]:
        """The client takes back those that wait here."""
        with self._lock:
            given = [run.task for _, run, _ in self._waiting]
            self._waiting.clear()
        return given

    def _awaits(self, run: Run) -> bool:
        return self._inbox.awaits(run.payload) or self._definitions.awaits(_keys(run))

    def _let_in(self, channel: Channel, run: Run, body: bytearray) -> None:
        pieces, missing = self._inbox.find(channel, run.payload, body)
        keys = self._definitions.lacking(channel, _keys(run))
        if pieces is None or keys:
            channel.send(Missing(run.task, missing, keys, False))
        else:
            self._admit(run, pieces)


def _keys(run: Run) -> tuple[bytes, ...]:
    return run.code, *run.handles
