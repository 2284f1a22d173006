"""The anteroom: tasks whose buffers are still on their way, kept in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skyward.wire.channel import Channel
from skyward.wire.messages import Define, Missing, Run
from skyward.worker.definitions import Definitions
from skyward.worker.inbox import Inbox, Pieces


@dataclass(slots=True)
class Guest:
    """A task that has come, though perhaps not all that it names."""

    run: Run
    body: bytearray
    reported: bool = False
    """Whether the client was told what is missing, and will send the task again."""


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
        self._guests: deque[Guest] = deque()
        self._channel: Channel
        self._lock = threading.Lock()

    @property
    def occupied(self) -> bool:
        """Whether somebody waits here, who may be let in at any time."""
        return bool(self._guests)

    def enter(self, channel: Channel, run: Run, body: bytearray) -> None:
        """A task has come, or come again."""
        with self._lock:
            self._channel = channel
            if not self._guests and self._is_complete(run):
                pieces, _ = self._inbox.find(channel, run.payload, body)
                assert pieces is not None
                self._admit(run, pieces)
                return
            for guest in self._guests:
                if guest.run.task == run.task:
                    guest.run, guest.body, guest.reported = run, body, False
                    break
            else:
                self._guests.append(Guest(run, body))
            self._let_in()

    def define(self, channel: Channel, define: Define, body: bytearray) -> None:
        """An object has come that tasks name by its key."""
        with self._lock:
            self._channel = channel
            self._definitions.add(channel, define, body)
            self._let_in()

    def forget(self, keys: Iterable[bytes]) -> None:
        """No task will name these keys again."""
        with self._lock:
            self._definitions.forget(keys)

    def settle(self) -> None:
        """Buffers have come, or will not: let in whom that concerns."""
        with self._lock:
            self._let_in()

    def leave(self, task: int) -> None:
        """A task is cancelled."""
        with self._lock:
            self._guests = deque(guest for guest in self._guests if guest.run.task != task)
            self._let_in()

    def clear(self) -> list[int]:
        """The client takes back those that wait here."""
        with self._lock:
            given = [guest.run.task for guest in self._guests]
            self._guests.clear()
        return given

    def _let_in(self) -> None:
        while self._guests:
            guest = self._guests[0]
            run = guest.run
            if guest.reported or self._awaits(run):
                return
            pieces, missing = self._inbox.find(self._channel, run.payload, guest.body)
            keys = self._definitions.lacking(self._channel, _keys(run))
            if pieces is None or keys:
                guest.reported = True
                self._channel.send(Missing(run.task, missing, keys, False))
                return
            self._guests.popleft()
            self._admit(run, pieces)

    def _is_complete(self, run: Run) -> bool:
        """The usual case: it names nothing but its code, which is here."""
        return not (run.payload.buffers or run.handles) and self._definitions.has(run.code)

    def _awaits(self, run: Run) -> bool:
        return self._inbox.awaits(run.payload) or self._definitions.awaits(_keys(run))


def _keys(run: Run) -> tuple[bytes, ...]:
    return run.code, *run.handles
