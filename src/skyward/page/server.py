"""The page's server: one page, one stream of events, and metrics, over HTTP.

The standard library's server is enough: a page has few viewers, and each needs one thread that
waits. A pool then needs no further package to be looked at.

As a program, it serves the page of a kept pool on the loopback of the pool's head node. The agent
there starts it as a job, and carries the connections of those who look. It writes its port and its
token into the job's folder.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import signal
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from skyward import kernel
from skyward.closing import shut
from skyward.errors import ConfigurationError, SkywardError
from skyward.page import metrics
from skyward.page.hub import Hub

REQUEST_SECONDS = 10.0
"""How long a client may take to send its request, or to take a part of the answer."""
KEEP_ALIVE_SECONDS = 5.0
RETRY_MS = 1000
"""After so many milliseconds, a browser that has lost the stream asks for it again."""

UNPROVEN_MAX = 32
"""How many connections wait for a request with the token; one more ends the oldest."""

_EVERYWHERE = ("", "0.0.0.0", "::")


class PageServer:
    """Serves the page of a hub on a thread of its own, until it is closed, and the hub with it."""

    def __init__(self, hub: Hub, host: str = "127.0.0.1", port: int = 0) -> None:
        self.hub, self._host = hub, host.lower()
        self._token = secrets.token_urlsafe(24)
        page = resources.files("skyward.page").joinpath("page.html").read_text(encoding="utf-8")
        handler = type("_PageHandler", (_Handler,), {"page": self, "text": page})
        try:
            self._server = _Server((host, port), handler)
        except (OSError, OverflowError) as problem:
            raise ConfigurationError(
                f"the page cannot be served at {host!r}, port {port}: {problem}; give another "
                "port, or none for any that is free"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        if host in _EVERYWHERE:
            shown = socket.gethostname()
        self.address = f"http://{shown}:{self._server.server_port}"
        """Where the server listens, without the token."""
        self._ending, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="skyward-page-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Answer requests until `close`; unlike `serve_forever`, without looking for that."""
        with kernel.selector() as waiting:
            for each in (self._server, self._ending):
                waiting.register(each, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in waiting.select()]
                if self._ending in ready:
                    return
                self._server.handle_request()

    @property
    def url(self) -> str:
        """The address to open in a browser; who has it sees the pools."""
        return f"{self.address}/?token={self._token}"

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._server.server_port)

    @property
    def token(self) -> str:
        """The secret that every request must bring."""
        return self._token

    def close(self) -> None:
        """End the hub, with every stream, and the server."""
        self.hub.close()
        self._end.close()
        self._thread.join()
        self._ending.close()
        self._server.server_close()

    # For the handler.

    def knows(self, token: str) -> bool:
        """Whether that is the token; takes the same time for every wrong one."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def serves(self, host: str) -> bool:
        """Whether a request may name this host: a foreign name may have been made to lead here.

        The port may be another one: the agent of a head, or a tunnel, forwards one to this.
        """
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if self._host in _EVERYWHERE:
            return _is_own(name)
        return name == self._host or (_is_loopback(self._host) and _is_loopback(name))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A handler ends when its viewer is ended, or when its client is too slow.
    block_on_close = True
    # Somebody waits for requests already.
    timeout = 0
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._unproven: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; a crowd of strangers takes few threads and descriptors."""
        with self._lock:
            crowd = len(self._unproven) >= UNPROVEN_MAX
            oldest = next(iter(self._unproven)) if crowd else None
            self._unproven.pop(oldest, None)
            self._unproven[request] = None
            if oldest is not None:
                # With the lock: its thread closes it after that.
                shut(oldest)
        super().process_request(request, client_address)

    def note_proven(self, request: Any) -> None:
        """Note that a connection has brought the token, so nobody else ends it, or has ended."""
        with self._lock:
            self._unproven.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.note_proven(request)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # As the base class does, but without asking a name server for our name.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show a defect of ours; a client that has left is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    page: PageServer
    text: str
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "skyward", ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        # One request for each connection: no thread waits for a next one.
        self.close_connection = True
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "that is no address")
            return
        if not self.page.serves(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server has another name")
            return
        if not self.page.knows(self._token(parse_qs(asked.query))):
            self._refuse(
                HTTPStatus.FORBIDDEN, "the address lacks its token; open the one that was printed"
            )
            return
        self.server.note_proven(self.connection)
        if asked.path == "/":
            self._send_page()
        elif asked.path == "/stream":
            self._stream()
        elif asked.path == "/metrics":
            self._answer(HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.text(self.page.hub.measure()))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is only /, /stream and /metrics")

    def _token(self, query: dict[str, list[str]]) -> str:
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        return bearer if kind.lower() == "bearer" else query.get("token", [""])[0]

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{why}\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self._head(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        body = self.text.replace("{{nonce}}", nonce).encode()
        self._head(HTTPStatus.OK, "text/html; charset=utf-8")
        self.send_header(
            "Content-Security-Policy",
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
        )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        viewer = self.page.hub.join()
        if viewer is None:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open; close one")
            return
        try:
            self._head(HTTPStatus.OK, "text/event-stream; charset=utf-8")
            self.end_headers()
            self.wfile.write(f"retry: {RETRY_MS}\n\n".encode())
            while (batch := viewer.next(KEEP_ALIVE_SECONDS)) is not None:
                # An empty one is a comment, which shows whether the browser is still there.
                self.wfile.write(f"data: {batch}\n\n".encode() if batch else b": idle\n\n")
        finally:
            self.page.hub.leave(viewer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address has the token."""


def _is_loopback(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def _is_own(name: str) -> bool:
    """Whether a name of a request is an address, or this machine's own name."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name in ("localhost", socket.gethostname().lower(), socket.getfqdn().lower())


def main() -> None:
    """Serve the page of the kept pool that the argument names, until a signal."""
    # Imported here: a pool that serves its own page needs none of it.
    from skyward.nodes import records
    from skyward.worker.jobs import FOLDER
    from skyward.worker.services.page import ANNOUNCED

    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, end)
    name = sys.argv[1]
    try:
        records.read(name)
    except SkywardError as problem:
        sys.exit(str(problem))
    server = PageServer(Hub([name]))
    announced = Path(os.environ[FOLDER], ANNOUNCED)
    new = announced.with_suffix(".new")
    new.touch(0o600)
    new.write_text(json.dumps({"port": server.port, "token": server.token}))
    new.rename(announced)
    ended.wait()
    server.close()


if __name__ == "__main__":
    main()
