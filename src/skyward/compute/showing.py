"""Showing: a pool on the page, from when it starts to when it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyward.page.door import door
from skyward.page.hub import hub
from skyward.pool import Pool

if TYPE_CHECKING:
    from skyward.page.server import PageServer


class Showing:
    """One pool among those that the pages of this process, and `sky ui`, show."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._server: PageServer | None = None
        hub.add(pool)
        door.enter()

    def serve(self, host: str, port: int) -> str:
        """Serve a page, once, and return its URL."""
        # Imported here: few pools are looked at, and an HTTP server takes 20 ms to import.
        from skyward.page.server import PageServer

        if self._server is None:
            self._server = PageServer(hub, host, port)
            hub.hold()
        return self._server.url

    def close(self) -> None:
        """Show the pool no more, and end its page."""
        hub.remove(self._pool)
        door.leave()
        server, self._server = self._server, None
        if server is not None:
            server.close()
            hub.release()
