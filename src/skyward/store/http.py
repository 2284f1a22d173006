"""A store behind a model server: reads and writes files over HTTP, and resumes broken reads."""

from __future__ import annotations

import builtins
import contextlib
import http.client
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
import urllib3
from urllib3 import BaseHTTPResponse, HTTPConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from skyward.checks import argument
from skyward.errors import ConfigurationError, StoreError
from skyward.store.places import (
    AUTHORITY,
    MARK,
    PROTOCOL,
    TOKEN,
    Buffer,
    FileEntry,
    Files,
    chosen_token,
    full,
    is_loopback,
    store_at,
)

PAUSES = (0.1, 0.3, 0.9)
"""Seconds before each new attempt; after progress, the pauses start again at the first."""
_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 60.0
"""How long the server may take to answer, or to send or receive one slice."""
_SLICE = 1 << 20
"""How many bytes are sent or received at a time: a broken connection costs no more than this, and
`sendall` has one time limit for all of its bytes."""
_KEPT = 32
"""How many connections are kept open between requests."""
_NEARBY = 1 << 20
"""The receive buffer of a connection within this machine. Without a limit, the buffers of eight
connections grow beyond the processor's caches, and loading was measured a third slower."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/")

_log = logging.getLogger("skyward.store")
_Made = TypeVar("_Made")


class _Listing(msgspec.Struct):
    now: float
    files: list[FileEntry]


class _HttpConnection(HTTPConnection):
    """A connection whose uploads get more time than connecting does."""

    def connect(self) -> None:
        super().connect()
        _adjust(self)


class _HttpsConnection(HTTPSConnection):
    """The same, encrypted."""

    def connect(self) -> None:
        super().connect()
        _adjust(self)


def _adjust(connection: HTTPConnection) -> None:
    connection.sock.settimeout(_SILENT_SECONDS)
    if is_loopback(connection.host):
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NEARBY)


class HttpFiles(Files):
    """The files of one model server."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url, self._base = _checked(url)
        self._token = chosen_token(token)
        where = urlsplit(self.url)
        host = where.hostname or ""
        if self._token and where.scheme == "http" and not is_loopback(host):
            _log.warning(
                "%s: the token travels in the clear, readable on the way; "
                "serve with a certificate and use https://",
                self.url,
            )
        self._pool, self._process = self._opened(), os.getpid()

    def __repr__(self) -> str:
        return f"HttpFiles({self.url!r})"

    def read(self, path: str, start: int, length: int) -> bytes:
        return bytes(self._range(path, start, length, None))

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        return len(self._range(path, start, len(buffer), buffer))

    def size(self, path: str) -> int | None:
        def ask() -> int | None:
            with self._exchange("HEAD", path, "reading") as answer:
                if answer.status == 404:
                    return None
                return int(answer.headers.get("Content-Length") or 0)

        return self._repeated(path, "reading", ask)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Upload a file whole; the server renames it into place when it has all of it."""
        self._put(path, parts, {})

    def create(self, path: str, data: bytes) -> bool:
        """Upload a file unless it exists; the server decides that."""
        made, attempts = self._put(path, [data], {"If-None-Match": "*"})
        # The answer to the first attempt may have got lost after the file was made.
        return made or (attempts > 1 and self.read(path, 0, len(data) + 1) == data)

    def list(self, folder: str) -> builtins.list[FileEntry]:
        """Every file below a folder, with times converted to this machine's clock."""

        def ask() -> bytes:
            with self._exchange("GET", f"{folder}/", "listing") as answer:
                return answer.read()

        try:
            found = msgspec.json.decode(self._repeated(folder, "listing", ask), type=_Listing)
        except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
            raise StoreError(
                f"{self.url}/{folder}/: not a listing: {problem}; "
                "check that both ends have the same version of skyward"
            ) from None
        # The time after the answer, not before: a file that seems younger is kept longer.
        ahead = time.time() - found.now
        return [FileEntry(each.path, each.size, each.modified + ahead) for each in found.files]

    def delete(self, path: str) -> None:
        def ask() -> None:
            with self._exchange("DELETE", path, "deleting"):
                pass

        self._repeated(path, "deleting", ask)

    def _range(self, path: str, start: int, length: int, into: memoryview | None) -> memoryview:
        """The filled part of the buffer; makes a buffer if none is given."""
        if length == 0:
            if self.size(path) is None:
                raise FileNotFoundError(f"{self.url}/{path}")
            return memoryview(b"")
        buffer, done, tag = into, 0, ""

        def ask() -> memoryview:
            nonlocal buffer, done, tag
            headers = {"Range": f"bytes={start + done}-{start + length - 1}"}
            if tag and done:
                headers["If-Match"] = tag
            with self._exchange("GET", path, "reading", headers) as answer:
                if answer.status == 404:
                    raise FileNotFoundError(f"{self.url}/{path}")
                if answer.status == 412:
                    done = 0
                    raise ConnectionResetError("the file was replaced while it was read")
                if answer.status == 416:
                    return memoryview(b"") if buffer is None else buffer[:done]
                left = min(self._extent(answer, path, start + done), length - done)
                if buffer is None:
                    buffer = memoryview(bytearray(left))
                tag, end = answer.headers.get("ETag") or "", done + left
                # Not by the answer itself: its `readinto`, `read` and `read1` make bytes of each
                # slice, which are then copied, a fifth of the time of a load; and urllib3 has no
                # public name for the response of http.client, which fills a buffer.
                raw: Any = answer._original_response  # type: ignore[attr-defined]
                while done < end:
                    count = raw.readinto(buffer[done : min(done + _SLICE, end)])
                    if not count:
                        raise ConnectionResetError(
                            f"it broke off {end - done} bytes before the end"
                        )
                    done += count
                if raw.isclosed():  # all is read
                    answer.release_conn()
                return buffer[:done]

        return self._repeated(path, "reading", ask, lambda: done)

    def _extent(self, answer: BaseHTTPResponse, path: str, start: int) -> int:
        """How many bytes the answer has; checks that they begin at the requested position."""
        found = _RANGE.match(answer.headers.get("Content-Range") or "")
        begin = int(found[1]) if found and answer.status == 206 else 0
        if begin != start or answer.length_remaining is None:
            raise StoreError(
                f"{self.url}/{path}: asked for the bytes from {start} on and got those from "
                f"{begin}; if there is a proxy in between, let ranges through"
            )
        return answer.length_remaining

    def _put(self, path: str, parts: Sequence[Buffer], headers: dict[str, str]) -> tuple[bool, int]:
        """Whether the file was written (False if it existed), and the number of attempts."""
        views = [memoryview(part).cast("B") for part in parts]
        body = [view[at : at + _SLICE] for view in views for at in range(0, len(view), _SLICE)]
        headers = headers | {"Content-Length": str(sum(map(len, views)))}
        attempts = 0

        def ask() -> bool:
            nonlocal attempts
            attempts += 1
            with self._exchange("PUT", path, "writing", headers, body) as answer:
                return answer.status != 412

        return self._repeated(path, "writing", ask), attempts

    def _repeated(
        self,
        path: str,
        doing: str,
        ask: Callable[[], _Made],
        progress: Callable[[], int] = lambda: 0,
    ) -> _Made:
        """Send a request, and send it again if the connection breaks."""
        pauses, reached = iter(PAUSES), 0
        while True:
            try:
                return ask()
            except (StoreError, FileNotFoundError):
                raise
            except (OSError, HTTPError) as wrapped:
                problem = _cause(wrapped)
                if progress() > reached:
                    pauses, reached = iter(PAUSES), progress()
                pause = next(pauses, None)
                if pause is None or _is_final(problem):
                    raise self._unreachable(f"{self.url}/{path}: {doing}", problem) from wrapped
                _log.debug("%s/%s: %s is repeated after: %s", self.url, path, doing, problem)
            time.sleep(pause)

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        doing: str,
        headers: dict[str, str] | None = None,
        body: Sequence[memoryview] | None = None,
    ) -> Iterator[BaseHTTPResponse]:
        """One request; the connection is kept if the answer is read to its end."""
        headers = dict(headers or {})
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        answer = self._connections().urlopen(
            method,
            f"{self._base}/{quote(path)}",
            body,  # type: ignore[arg-type]  # takes what can be sent again, not only what is typed
            headers,
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        try:
            self._check(answer, method, path, doing)
            yield answer
            if method != "GET":
                answer.read(_SLICE)
        finally:
            # Closes the connection if there is more to read; if not, it has been released already.
            answer.close()
            answer.release_conn()

    def _connections(self) -> HTTPConnectionPool:
        if self._process != os.getpid():
            # Forked: the parent still uses its connections, and may hold the pool's lock.
            self._parents, self._pool, self._process = self._pool, self._opened(), os.getpid()
        return self._pool

    def _opened(self) -> HTTPConnectionPool:
        secure = {"ssl_context": _context()} if self.url.startswith("https:") else {}
        timeout = urllib3.Timeout(connect=_CONNECT_SECONDS, read=_SILENT_SECONDS)
        pool = urllib3.connection_from_url(self.url, maxsize=_KEPT, timeout=timeout, **secure)
        pool.ConnectionCls = _HttpsConnection if secure else _HttpConnection
        return pool

    def _check(self, answer: BaseHTTPResponse, method: str, path: str, doing: str) -> None:
        """Raise unless a model server answered, with a status that the caller can handle."""
        status = answer.status
        mark = answer.headers.get(MARK)
        if mark != PROTOCOL:
            raise self._foreign(answer, mark)
        expected = {"GET": (404, 412, 416), "HEAD": (404,), "PUT": (412,), "DELETE": (404,)}
        if status < 300 or status in expected[method]:
            return
        reason = answer.read(500).decode(errors="replace").strip().partition("\n")[0]
        where = f"{self.url}/{path}: {doing} failed"
        if status == 401:
            problem = "the server refused the token" if self._token else "the server wants a token"
            raise StoreError(f"{where}: {problem}; pass {argument('token')} or set {TOKEN}")
        if status == 507:
            raise full(f"{where}: {reason}", " on the server")
        raise StoreError(f"{where}: {status} {reason or answer.reason}")

    def _foreign(self, answer: BaseHTTPResponse, mark: str | None) -> StoreError:
        if mark is not None:
            return StoreError(
                f"{self.url}: a model server of version {mark[:20]}, and this end speaks version "
                f"{PROTOCOL}; install the same skyward on both"
            )
        place = answer.headers.get("Location")
        leads = f" and leads to {place[:200]}, where no token is sent" if place else ""
        return StoreError(
            f"{self.url}: this is no model server: it answers {answer.status} "
            f"{answer.reason}{leads}; check the address, or start a server there with "
            "`sky models serve DIR`"
        )

    def _unreachable(self, where: str, problem: Exception) -> StoreError:
        if isinstance(problem, ssl.SSLCertVerificationError):
            return StoreError(
                f"{where} failed: the server's certificate is not trusted: "
                f"{problem.verify_message}; name the file of its authority in {AUTHORITY}"
            )
        if isinstance(problem, ssl.SSLError):
            return StoreError(
                f"{where} failed: the server does not speak TLS: {problem.reason or problem}; "
                "use http:// if the server has no certificate"
            )
        if isinstance(problem, http.client.HTTPException | ConnectionResetError):
            advice = "check the server's log; a server with a certificate needs https://"
        else:
            advice = "check the address and the network, and that `sky models serve` runs there"
        reason = str(problem) or type(problem).__name__
        if isinstance(problem, TimeoutError):
            reason = "no answer in time"
        return StoreError(f"{where} failed: {reason}; {advice}")


def _cause(problem: Exception) -> Exception:
    """What went wrong, without what urllib3 wraps around it."""
    inner = problem.args[-1] if problem.args else None
    inner = inner if isinstance(inner, Exception) else problem.__cause__
    return inner if isinstance(inner, Exception) else problem


def _context() -> ssl.SSLContext:
    """Trust the system's authorities and those in the user's file."""
    context = ssl.create_default_context()
    place = os.environ.get(AUTHORITY)
    if place:
        try:
            context.load_verify_locations(place)
        except OSError as problem:
            raise ConfigurationError(
                f"{AUTHORITY}={place!r}: no certificates can be read there: {problem}; "
                "name a PEM file"
            ) from None
    return context


def _checked(url: str) -> tuple[str, str]:
    """The address without a trailing slash, and the path in it."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigurationError(
            f"{store_at('http...://***@...')}: no credentials in the address; pass "
            f"{argument('token')}"
        )
    try:
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        port_fits = False
    odd = any(ord(sign) <= 32 or ord(sign) >= 127 for sign in url)
    if not parts.hostname or not port_fits or parts.query or parts.fragment or odd:
        raise ConfigurationError(
            f"{store_at(re.split('[?#]', url)[0])}: not a server's address; write http://host:8470"
        )
    base = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{base}", base


def _is_final(problem: Exception) -> bool:
    """Whether another attempt would end the same way."""
    if isinstance(problem, socket.gaierror):
        return problem.errno != socket.EAI_AGAIN
    return isinstance(problem, ssl.SSLError) and not isinstance(problem, ssl.SSLEOFError)
