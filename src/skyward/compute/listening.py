"""Listening: who is told what happens in a `Compute`: callback, log, trackers and the page."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward.errors import ConfigurationError
from skyward.events import Event
from skyward.listeners import EventListener, json_log
from skyward.nodes.fleet import Fleet
from skyward.page.door import door
from skyward.page.hub import hub

if TYPE_CHECKING:
    from skyward.page.server import PageServer

VARIABLE = "SKYWARD_LOG"
OnEvent = Callable[[Event], object]


def check_callback(on_event: OnEvent | None) -> None:
    """Refuse what cannot be called with an event."""
    if on_event is not None and not callable(on_event):
        raise ConfigurationError(
            f"Compute(on_event={on_event!r}): give a function that takes an event of sky.events"
        )


class Listening:
    """The listeners of one pool, and the pool's place on the pages of this process and `sky ui`."""

    def __init__(self, fleet: Fleet, on_event: OnEvent | None, *, attached: bool = False) -> None:
        """The options of a pool that one is `attached` to are those of the client that made it."""
        self._fleet = fleet
        self._listeners: list[EventListener] = []
        self._server: PageServer | None = None
        options, note = fleet.spec.options, fleet.console.note
        try:
            if (folder := options.tensorboard) is not None:
                fleet.dispatcher.teller.tracking.write_to(folder)
        except ConfigurationError as problem:
            if not attached:
                raise
            note(f"{fleet.spec.name}: {problem}")
        log = options.log or os.environ.get(VARIABLE)
        if log:
            self._listeners.append(json_log(log, note))
        if on_event is not None:
            self._listeners.append(EventListener("on_event", on_event, note))
        for listener in self._listeners:
            fleet.events.add(listener.take)
        hub.add(fleet)
        door.enter()

    def serve_page(self, host: str, port: int) -> str:
        """Serve a page, once, and return its URL."""
        # Imported here: few pools are looked at, and an HTTP server takes 20 ms to import.
        from skyward.page.server import PageServer

        if self._server is None:
            self._server = PageServer(hub, host, port)
            hub.hold()
        return self._server.url

    def close(self) -> None:
        """Give the listeners the last events, end their threads, and show the pool no more."""
        for listener in self._listeners:
            self._fleet.events.remove(listener.take)
            listener.close()
        self._listeners.clear()
        self._fleet.dispatcher.teller.tracking.close()
        hub.remove(self._fleet)
        door.leave()
        server, self._server = self._server, None
        if server is not None:
            server.close()
            hub.release()
