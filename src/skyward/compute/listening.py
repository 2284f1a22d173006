"""Listening: who gets the events of a `Compute`: its callback, its log, and trackers."""

from __future__ import annotations

import os
from collections.abc import Callable

from skyward.errors import ConfigurationError
from skyward.events import Event
from skyward.listeners import EventListener, json_log
from skyward.pool import Pool

VARIABLE = "SKYWARD_LOG"
OnEvent = Callable[[Event], object]


def check_callback(on_event: OnEvent | None) -> None:
    """Refuse what cannot be called with an event."""
    if on_event is not None and not callable(on_event):
        raise ConfigurationError(
            f"Compute(on_event={on_event!r}): give a function that takes an event of sky.events"
        )


class Listening:
    """The listeners of one pool."""

    def __init__(
        self,
        pool: Pool,
        on_event: OnEvent | None,
        note: Callable[[str], None],
        *,
        attached: bool = False,
    ) -> None:
        """`note` shows a problem of a listener to the user.

        The options of a pool that one is `attached` to are those of the client that made it.
        """
        self._pool = pool
        self._listeners: list[EventListener] = []
        try:
            if (folder := pool.spec.options.tensorboard) is not None:
                pool.teller.tracking.write_to(folder)
        except ConfigurationError as problem:
            if not attached:
                raise
            note(f"{pool.spec.name}: {problem}")
        log = pool.spec.options.log or os.environ.get(VARIABLE)
        if log:
            self._listeners.append(json_log(log, note))
        if on_event is not None:
            self._listeners.append(EventListener("on_event", on_event, note))
        for listener in self._listeners:
            pool.events.add(listener.take)

    def close(self) -> None:
        """Give the listeners the last events, and end their threads."""
        for listener in self._listeners:
            self._pool.events.remove(listener.take)
            listener.close()
        self._listeners.clear()
        self._pool.teller.tracking.close()
