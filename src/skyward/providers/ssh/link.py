"""Links: one SSH connection to a host, shared by all that this process does there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.constants import MSG_IGNORE

from skyward.errors import ConfigurationError
from skyward.providers.ssh import failures
from skyward.providers.ssh.hosts import Destination

CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
    "aes256-ctr",
    "aes128-ctr",
)
"""AES-GCM first: with it one connection carries twice what it does with asyncssh's own first."""
KEEPALIVE_SECONDS = 10
KEEPALIVE_MISSES = 3
"""A silent host is given up after 30 to 40 s; a cut that is shorter goes unnoticed."""
FAREWELL_SECONDS = 3.0
"""How long a host that may be dead gets to take the last bytes."""
COMMANDS_EACH = 8
"""How many commands share a connection: an sshd takes 10 unless told otherwise. One that takes
fewer says so, and is remembered."""


class Link:
    """The way to one host on one event loop; opened when first used, and again when lost."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.users = 0
        self._lines: list[_Line] = []
        self._coming: dict[bool, asyncio.Task[_Line]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether there is a connection that nobody has closed."""
        return any(not line.connection.is_closed() for line in self._lines)

    async def connection(
        self, *, busy: bool = False
    ) -> tuple[asyncssh.SSHClientConnection, Callable[[], None]]:
        """One for a stream, and what to call, once, when that is over.

        Those that may carry a lot share another than the rest: on a slow network they would hold
        up the rest for so long that the host looked dead.
        """
        line = await self._line(lambda line: line.busy == busy, busy)
        line.streams += 1

        def over() -> None:
            line.streams -= 1
            self._close_if_of_no_use(line)

        return line.connection, over

    @contextlib.asynccontextmanager
    async def command(
        self, session: asyncssh.SSHClientSession[bytes], text: str
    ) -> AsyncIterator[None]:
        """Start a command where there is room for one more, on a further connection if need be."""
        while True:
            line = await self._line(lambda line: not line.busy and line.commands < line.room)
            line.commands += 1
            try:
                start = line.connection.create_session(lambda: session, text, encoding=None)
                try:
                    await opened(start)
                except asyncssh.ChannelOpenError:
                    if line.commands == 1:
                        raise
                    line.room = line.commands - 1
                    continue
                yield
                return
            finally:
                line.commands -= 1
                self._close_if_of_no_use(line)

    async def _line(self, fits: Callable[[_Line], bool], busy: bool = False) -> _Line:
        """One that is there, at once, or else the next to come that has room for us, too."""
        while True:
            for line in list(self._lines):
                if line.connection.is_closed():
                    self._drop(line)
            for line in self._lines:
                if fits(line) and not line.doubted:
                    return line
            line = await self._coming_line(busy)
            # Many may have waited for it, and it takes only so many commands.
            if fits(line):
                return line

    def _close_if_of_no_use(self, line: _Line) -> None:
        """Close what is used for nothing new and carries nothing any more."""
        if line.doubted and not line.commands and not line.streams and line in self._lines:
            line.connection.close()
            self._drop(line)

    def _drop(self, line: _Line) -> None:
        """See the end of a connection that is closed, while others go on."""
        self._lines.remove(line)
        leaving = asyncio.create_task(line.leave())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _coming_line(self, busy: bool) -> _Line:
        """Connect. That goes on though whoever asked gives up: on a slow network they all would."""
        coming = self._coming.get(busy)
        if coming is None:
            coming = self._coming[busy] = asyncio.create_task(self._connect(busy))
            coming.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(coming)

    async def _connect(self, busy: bool) -> _Line:
        try:
            line = _Line(*await _connected(self.destination), busy)
            self._lines.append(line)
            return line
        finally:
            del self._coming[busy]

    def doubt(self, connection: asyncssh.SSHClientConnection | None = None) -> None:
        """Use this connection, or any, for nothing new: it does not answer.

        What goes on there may yet, until the connection turns out to be dead; after the last of it
        the connection is closed.
        """
        for line in list(self._lines):
            line.doubted |= connection in (None, line.connection)
            self._close_if_of_no_use(line)

    async def close(self) -> None:
        """Close all connections, and the way to them."""
        for coming in list(self._coming.values()):
            coming.cancel()
            await asyncio.wait({coming})
        lines, self._lines = self._lines, []
        for line in lines:
            line.connection.close()
        for line in lines:
            await line.leave()
        while self._leaving:
            await asyncio.wait(self._leaving)


class _Line:
    """One connection of a link, and what it runs."""

    def __init__(
        self, connection: asyncssh.SSHClientConnection, way: _Way | None, busy: bool
    ) -> None:
        self.connection = connection
        self.busy = busy
        self.doubted = False
        self._way = way
        self.commands = 0
        self.room = COMMANDS_EACH
        self.streams = 0

    async def leave(self) -> None:
        """See a closed connection's end, and let go of the way there."""
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self.connection.wait_closed()
        except TimeoutError:
            self.connection.abort()
        if self._way is not None:
            await self._way.leave()


class _Way:
    """The way of a connection through another host: a stream there."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._over: Callable[[], None] | None = None

    async def connection(self) -> asyncssh.SSHClientConnection:
        """What to connect through."""
        connection, self._over = await self._link.connection()
        return connection

    async def leave(self) -> None:
        """Let go of that host."""
        if self._over is not None:
            self._over()
        await release(self._link)


_links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Destination, Link]] = (
    weakref.WeakKeyDictionary()
)
"""A connection belongs to the loop that opened it."""


def hold(destination: Destination) -> Link:
    """The link to a destination; stays until it is released as often as it was held."""
    here = _links.setdefault(asyncio.get_running_loop(), {})
    link = here.get(destination)
    if link is None:
        link = here[destination] = Link(destination)
    link.users += 1
    return link


async def release(link: Link) -> None:
    """Let go of a link; the last to do so closes it."""
    link.users -= 1
    if link.users == 0:
        here = _links.get(asyncio.get_running_loop(), {})
        if here.get(link.destination) is link:
            del here[link.destination]
        await link.close()


def open_links() -> int:
    """How many links this event loop holds."""
    return len(_links.get(asyncio.get_running_loop(), {}))


class _Witness(asyncssh.SSHClient):
    """Keeps the host key that was not accepted, for the message."""

    def __init__(self, meeting: failures.Meeting) -> None:
        self._meeting = meeting

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        """Asked only about keys that are not known; the answer is always no."""
        self._meeting.shown = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Likewise for the authority behind a certificate."""
        self._meeting.shown = key
        return False


def resolved(destination: Destination) -> asyncssh.SSHClientConnectionOptions:
    """What the arguments and the ssh configuration file come to; reads key files."""
    place = destination.place
    given: dict[str, Any] = {}
    if place.user is not None:
        given["username"] = place.user
    if place.port is not None:
        given["port"] = place.port
    if destination.key is not None:
        given |= _with_key(Path(destination.key).expanduser())
    try:
        return asyncssh.SSHClientConnectionOptions(
            host=place.name,
            config=_files(destination.config),
            connect_timeout=destination.timeout,
            keepalive_interval=KEEPALIVE_SECONDS,
            keepalive_count_max=KEEPALIVE_MISSES,
            password_auth=False,
            kbdint_auth=False,
            agent_forwarding=False,
            x11_forwarding=False,
            request_pty=False,
            encoding=None,
            **given,
        )
    except (asyncssh.Error, asyncssh.KeyImportError, OSError, ValueError) as error:
        source = f" with {destination.config}" if destination.config else ""
        raise ConfigurationError(f"SSH host {place.name!r}{source}: {error}") from error


def _files(config: str | None) -> list[str]:
    path = Path(config).expanduser() if config else None
    return [str(path)] if path is not None and os.access(path, os.R_OK) else []


def _with_key(path: Path) -> dict[str, Any]:
    """The options for one key: the file, or what the agent holds when it has a passphrase."""
    try:
        asyncssh.read_private_key(path)
    except asyncssh.KeyEncryptionError:
        public = path.with_name(path.name + ".pub")
        identities = {"agent_identities": [str(public)]} if public.exists() else {}
        return {"client_keys": [str(path)], "ignore_encrypted": True, **identities}
    except asyncssh.KeyImportError as error:
        if "passphrase" in str(error).lower():
            return {"client_keys": [str(path)], "ignore_encrypted": True}
        raise ConfigurationError(f"SSH(key={str(path)!r}): not a private key: {error}") from error
    except OSError as error:
        raise ConfigurationError(
            f"SSH(key={str(path)!r}): {error.strerror}; name the private key's file, or leave key "
            "out to use your agent and the keys in ~/.ssh"
        ) from error
    return {"client_keys": [str(path)], "agent_path": None}


def _known_hosts_files(
    destination: Destination, options: asyncssh.SSHClientConnectionOptions
) -> list[Path]:
    if destination.known_hosts is not None:
        return [Path(destination.known_hosts).expanduser()]
    configured: Any = options.config.get("UserKnownHostsFile", None)
    mine = configured or ["~/.ssh/known_hosts"]
    shared: Any = options.config.get("GlobalKnownHostsFile", None) or ["/etc/ssh/ssh_known_hosts"]
    return [Path(each).expanduser() for each in [*mine, *shared]]


async def _connected(
    destination: Destination,
) -> tuple[asyncssh.SSHClientConnection, _Way | None]:
    """Connect, through other hosts where the way leads there."""
    options = await asyncio.to_thread(resolved, destination)
    files = _known_hosts_files(destination, options)
    meeting = await asyncio.to_thread(failures.Meeting, destination, options, files)
    way = None
    jump = destination.jump or options.tunnel
    if jump and jump != "none":
        before = destination.through(str(jump))
        # `Host *` with a ProxyJump names the jump host itself, too.
        if before.place.name not in (destination.place.name, options.host):
            way = _Way(hold(before))
    try:
        tunnel = await way.connection() if way is not None else None
        with meeting.explained():
            # Whatever is not repeated here, `connect` takes for not given.
            connection = await asyncssh.connect(
                destination.place.name,
                () if destination.place.port is None else destination.place.port,
                tunnel=tunnel,
                config=_files(destination.config),
                options=options,
                known_hosts=meeting.known,
                client_factory=lambda: _Witness(meeting),
                encryption_algs=() if options.config.get("Ciphers", None) else CIPHERS,
            )
    except BaseException:
        if way is not None:
            await way.leave()
        raise
    _spare_empty_packets(connection)
    return connection, way


def _spare_empty_packets(connection: asyncssh.SSHClientConnection) -> None:
    """Have asyncssh send a packet where it would send two.

    Before each it puts an empty one, against an attack on the CBC mode of ciphers, which is the
    only one that needs it.
    """
    cipher = connection.get_extra_info("send_cipher")
    if not cipher or "cbc" in cipher:
        return
    send = connection.send_packet

    def send_packet(kind: int, *parts: bytes, **options: Any) -> None:
        if kind != MSG_IGNORE:
            send(kind, *parts, **options)

    connection.send_packet = send_packet  # type: ignore[method-assign, assignment]


async def opened(opening: Coroutine[Any, Any, tuple[Any, Any]]) -> None:
    """Open a channel; one that opens after its opener was cancelled is closed again."""
    task = asyncio.create_task(opening)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abandon)
        raise


def _abandon(task: asyncio.Task[tuple[Any, Any]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


def command_line(script: str, *arguments: str) -> str:
    """A shell script with its arguments, as one line for whatever shell the user has there."""
    return "exec sh -c " + " ".join(shlex.quote(part) for part in (script, "sh", *arguments))
