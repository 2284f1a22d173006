"""Listeners: the user's callbacks for events, and logs of them, each on a thread of its own."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from skyward.errors import ConfigurationError
from skyward.events import Event, EventsDropped, as_dict

WAITING_MOST = 10_000
"""How many events may wait for a listener; those that come then are dropped."""
PATIENCE = 5.0
"""After so many seconds without an event taken, `close` stops waiting for a listener."""


class EventListener:
    """Gives events to a callback, in order, on a thread of its own.

    A callback that fails is reported once, and gets the next events. One that is too slow misses
    events; `EventsDropped` stands where they were.
    """

    def __init__(
        self,
        name: str,
        callback: Callable[[Event], object],
        note: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` stands for the callback in messages; `note` shows one; `ended` frees things."""
        self._name, self._callback, self._note, self._ended = name, callback, note, ended
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._dropped = 0
        self._taken = 0
        self._told_failure = self._told_dropped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="skyward-events", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Have the callback get an event; it is dropped if too many wait."""
        if self._waiting.qsize() >= WAITING_MOST:
            with self._lock:
                self._dropped += 1
        else:
            self._waiting.put(event)

    def close(self) -> None:
        """End when the events that wait are taken; a callback that hangs is not waited for."""
        self._waiting.put(None)
        before = -1
        while (
            threading.current_thread() is not self._thread
            and self._thread.is_alive()
            and self._taken != before
        ):
            before = self._taken
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                self._give(event)
                if self._dropped and self._waiting.qsize() < WAITING_MOST // 2:
                    self._tell_dropped(event)
        finally:
            self._ended()

    def _give(self, event: Event) -> None:
        self._taken += 1
        try:
            self._callback(event)
        except Exception as problem:
            if not self._told_failure:
                self._told_failure = True
                self._note(
                    f"{self._name} failed at {type(event).__name__}: {problem!r}; it gets the next "
                    "events, and further failures are not reported"
                )

    def _tell_dropped(self, last: Event) -> None:
        with self._lock:
            count, self._dropped = self._dropped, 0
        if not self._told_dropped:
            self._told_dropped = True
            self._note(
                f"{self._name} is too slow: {count} events were dropped; have it do less, or put "
                "events into a queue of its own"
            )
        self._give(EventsDropped(time.time(), last.pool, count))


def json_log(where: str, note: Callable[[str], None]) -> EventListener:
    """A listener that writes every event as one line of JSON to a file, or to stderr for "-"."""
    if where == "-":
        return EventListener("the log on stderr", lambda event: _write(sys.stderr, event), note)
    try:
        file = open(where, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    except OSError as problem:
        raise ConfigurationError(
            f"the log {where!r} cannot be written: {problem.strerror}; give Options(log=...) or "
            "SKYWARD_LOG a file in a folder that is there, or '-' for stderr"
        ) from None

    def close() -> None:
        with contextlib.suppress(OSError):
            file.close()

    return EventListener(f"the log {where!r}", lambda event: _write(file, event), note, close)


def _write(file: IO[str], event: Event) -> None:
    # One write for each line: other pools and processes may append to the same file.
    file.write(json.dumps(as_dict(event), ensure_ascii=False) + "\n")
    file.flush()
