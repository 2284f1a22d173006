"""The model server: serves a store's folder to other machines until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from skyward.checks import argument
from skyward.errors import ConfigurationError
from skyward.store.places import TOKEN, guarding_token, is_loopback

if TYPE_CHECKING:
    from aiohttp import web

PORT = 8470
WAITING_SECONDS = 75.0
"""How long a connection may be open without a whole request."""
_CLOSING_SECONDS = 2.0
"""How long requests in flight have when the server ends."""
_READ = 1 << 20

_log = logging.getLogger("skyward.store")


def serve(
    directory: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    token: str | None = None,
    read_only: bool = False,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    durable: bool = False,
    started: Callable[[str], None] | None = None,
) -> None:
    """Serve a folder over HTTP until SIGINT or SIGTERM; call it on the main thread.

    Port 0 takes a free port. `started` is called with the address once the server listens; for a
    host such as 0.0.0.0, the address has this machine's name. Without `started`, the address is
    logged. Without a token, anyone who reaches the port may read and write; so other machines need
    one, unless `insecure` says that the network is trusted. `certificate` and `key` name PEM files
    and turn on HTTPS. With `durable`, the server answers an upload when the file is on the disk.
    """
    root = _checked_folder(directory, read_only)
    secret = guarding_token(token)
    private = is_loopback(host)
    if secret is None and not private and not insecure:
        raise ConfigurationError(
            f"{argument('host', host)}: without a token anyone in the network could use the store; "
            f"pass {argument('token')} or set {TOKEN}, or allow it with "
            f"{argument('insecure', True)}"
        )
    context = _context(certificate, key)
    try:
        from skyward.store.web import Interface
    except ImportError as problem:
        raise ConfigurationError(
            f"the model server needs aiohttp ({problem}); install skyward-torch[server]"
        ) from None
    interface = Interface(root, token=secret, read_only=read_only, durable=durable, private=private)
    asyncio.run(_run(interface.application(), host, port, context, started or _announced))


async def _run(
    app: web.Application,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    started: Callable[[str], None],
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with _listening(app, host, port, context) as address:
        started(address)
        await ended.wait()


@contextlib.asynccontextmanager
async def _listening(
    app: web.Application, host: str, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[str]:
    from aiohttp import web

    errors = logging.getLogger("skyward.store.server")
    errors.addFilter(_is_server_fault)
    runner = web.AppRunner(
        app,
        access_log=logging.getLogger("skyward.store.access"),
        logger=errors,
        keepalive_timeout=WAITING_SECONDS,
        read_bufsize=_READ,
        shutdown_timeout=_CLOSING_SECONDS,
        # A decompressed upload would be longer than its Content-Length.
        auto_decompress=False,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=context)
        try:
            await site.start()
        except (OSError, OverflowError) as problem:
            raise ConfigurationError(
                f"{argument('host', host)}, {argument('port', port)}: cannot listen: "
                f"{problem}; choose another port, or 0 for a free one"
            ) from None
        bound = runner.addresses[0][1]
        name = _reachable_name() if is_everywhere(host) else host
        name = f"[{name}]" if ":" in name else name
        yield f"{'http' if context is None else 'https'}://{name}:{bound}"
    finally:
        await runner.cleanup()


def _is_server_fault(record: logging.LogRecord) -> bool:
    """Whether a traceback belongs in the log; False for those that any client can cause.

    A client causes one with bytes that are no HTTP request, or by leaving during an answer.
    """
    from aiohttp.http_exceptions import HttpProcessingError

    problem = record.exc_info[1] if record.exc_info else None
    return not isinstance(problem, HttpProcessingError | ConnectionError)


def is_everywhere(host: str) -> bool:
    """Whether a server on this host listens on every address of the machine."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _reachable_name() -> str:
    """The host name of this machine if it resolves, otherwise `localhost`."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "localhost"
    return name


def _announced(address: str) -> None:
    _log.info("serving models at %s", address)


def _checked_folder(directory: str | os.PathLike[str], read_only: bool) -> Path:
    root = Path(directory).expanduser().absolute()
    try:
        if not read_only:
            root.mkdir(parents=True, exist_ok=True)
        if not root.is_dir():
            raise NotADirectoryError(f"{root} is no folder")
    except OSError as problem:
        raise ConfigurationError(
            f"directory={str(directory)!r}: cannot be served: {problem}; name the store's folder"
        ) from None
    return root


def _context(
    certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
) -> ssl.SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise ConfigurationError(
            f"{argument('key')} without {argument('certificate')}; pass both, or neither"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # With an empty password, OpenSSL does not ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as problem:
        raise ConfigurationError(
            f"{argument('certificate', os.fspath(certificate))}, "
            f"{argument('key', key and os.fspath(key))}: cannot be used: {problem}; "
            "name PEM files, the key without a password"
        ) from None
    return context
