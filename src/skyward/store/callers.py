"""The connections to a model server: how long, and how many, may wait without asking anything."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from skyward.store.access import MARK, PROTOCOL

WAITING_SECONDS = 75.0
"""How long a connection may be open without a whole request."""
WAITING = 256
"""How many of them there may be; then the one that has waited longest makes room."""

_log = logging.getLogger("skyward.store")


class Callers(web.Server):
    """Answers as the server of an application does, and keeps nobody who does not ask."""

    def __init__(self, application: web.Server, **settings: Any) -> None:
        super().__init__(self._answered, request_factory=application.request_factory)
        self._handler = application.request_handler
        self._settings = settings
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def __call__(self) -> web.RequestHandler:
        """The protocol of a new connection."""
        return _Caller(self, loop=asyncio.get_running_loop(), **self._settings)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Somebody calls."""
        super().connection_made(handler, transport)
        self.wait_for(handler)

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Somebody is gone."""
        self._heard(handler)
        super().connection_lost(handler, exc)

    def wait_for(self, caller: web.RequestHandler) -> None:
        """Give a connection its time to ask something."""
        self._heard(caller)
        loop = asyncio.get_running_loop()
        self._waiting[caller] = loop.call_later(WAITING_SECONDS, caller.force_close)
        if len(self._waiting) > WAITING:
            longest = next(iter(self._waiting))
            self._heard(longest)
            longest.force_close()

    def _heard(self, caller: web.RequestHandler) -> None:
        timer = self._waiting.pop(caller, None)
        if timer is not None:
            timer.cancel()

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        self._heard(request.protocol)
        return await self._handler(request)


class _Caller(web.RequestHandler):
    """One connection."""

    def __init__(self, callers: Callers, **settings: Any) -> None:
        super().__init__(callers, **settings)
        self._callers = callers

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer, and wait for the next question."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if self.transport is not None:
                self._callers.wait_for(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is said to one who does not speak HTTP, or when our own code fails."""
        if isinstance(exc, HttpProcessingError):
            # Anyone can cause this, as often as they like: no traceback for each.
            _log.debug("%s sent no HTTP request: %r", request.remote, exc)
            answer: web.StreamResponse = web.Response(
                status=status, text="that is no request a model server understands\n"
            )
        elif isinstance(exc, ConnectionError):
            # Nobody is there to read this, nor the traceback of a download that was given up.
            _log.debug("%s left: %r", request.remote, exc)
            answer = web.Response(status=status)
        else:
            answer = super().handle_error(request, status, exc, message)
        mark(answer)
        answer.force_close()
        return answer


def mark(answer: web.StreamResponse) -> None:
    """Say whose answer it is."""
    answer.headers["X-Content-Type-Options"] = "nosniff"
    # The last one: who finds it whole has found all the others.
    answer.headers[MARK] = PROTOCOL
