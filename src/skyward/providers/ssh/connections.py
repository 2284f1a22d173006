"""The connections to one SSH host, shared by all that this process does there."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import asyncssh

from skyward.providers.ssh import failures
from skyward.providers.ssh.hosts import Destination
from skyward.providers.ssh.options import CIPHERS, config_files, known_hosts_files, resolved

CLOSE_SECONDS = 3.0
"""How long a host that may be dead has to confirm that a connection is closed."""
COMMANDS_EACH = 8
"""How many commands share a connection. An sshd allows 10 unless its configuration says otherwise;
one that allows fewer refuses a command, and that connection gets no more from then on."""


class HostConnections:
    """The connections to one host on one event loop; opened when needed, and again when lost."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.users = 0
        self._open: list[_Connection] = []
        self._opening: dict[bool, asyncio.Task[_Connection]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether there is a connection that nobody has closed."""
        return any(not each.connection.is_closed() for each in self._open)

    async def connection(
        self, *, busy: bool = False
    ) -> tuple[asyncssh.SSHClientConnection, Callable[[], None]]:
        """A connection for one stream, and what the caller calls, once, when the stream is over.

        Busy streams, which may carry much, share a connection of their own: on a slow network they
        would delay the others for so long that the host looked dead.
        """
        chosen = await self._choose(lambda each: each.busy == busy, busy)
        chosen.streams += 1

        def over() -> None:
            chosen.streams -= 1
            self._close_if_unused(chosen)

        return chosen.connection, over

    @contextlib.asynccontextmanager
    async def command(
        self, session: asyncssh.SSHClientSession[bytes], text: str
    ) -> AsyncIterator[None]:
        """Start a command on a connection that takes one more; a new connection if none does."""
        while True:
            place = await self.command_place()
            try:
                start = place.connection.create_session(lambda: session, text, encoding=None)
                await opened(start)
            except asyncssh.ChannelOpenError:
                place.leave()
                if not place.was_full():
                    raise
                continue
            except BaseException:
                place.leave()
                raise
            try:
                yield
                return
            finally:
                place.leave()

    async def command_place(self) -> CommandPlace:
        """The place of one command, on a connection that takes one more."""
        chosen = await self._choose(lambda each: not each.busy and each.commands < each.room)
        chosen.commands += 1
        return CommandPlace(chosen, self._close_if_unused)

    async def _choose(self, fits: Callable[[_Connection], bool], busy: bool = False) -> _Connection:
        """An open connection that fits, or else the next that opens and has room for us too."""
        while True:
            for each in list(self._open):
                if each.connection.is_closed():
                    self._remove(each)
            for each in self._open:
                if fits(each) and not each.retired:
                    return each
            new = await self._next(busy)
            # Several callers may have waited for this connection, and it takes only so many.
            if fits(new):
                return new

    def _close_if_unused(self, connection: _Connection) -> None:
        """Close a retired connection after its last command and stream."""
        unused = not connection.commands and not connection.streams
        if connection.retired and unused and connection in self._open:
            connection.connection.close()
            self._remove(connection)

    def _remove(self, connection: _Connection) -> None:
        """Wait in the background until a closed connection has ended."""
        self._open.remove(connection)
        closing = asyncio.create_task(connection.finish())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _next(self, busy: bool) -> _Connection:
        """The next connection that opens.

        Opening goes on when a caller gives up: on a slow network every caller would.
        """
        opening = self._opening.get(busy)
        if opening is None:
            opening = self._opening[busy] = asyncio.create_task(self._connect(busy))
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(opening)

    async def _connect(self, busy: bool) -> _Connection:
        try:
            connection = _Connection(*await _connected(self.destination), busy)
            self._open.append(connection)
            return connection
        finally:
            del self._opening[busy]

    def retire(self, connection: asyncssh.SSHClientConnection | None = None) -> None:
        """Start nothing new on a connection that does not answer; on None, on any of them.

        Its commands and streams go on until the connection is known to be dead. After the last of
        them the connection is closed.
        """
        for each in list(self._open):
            each.retired |= connection in (None, each.connection)
            self._close_if_unused(each)

    async def close(self) -> None:
        """Close all connections, and let go of the hosts that they go through."""
        for opening in list(self._opening.values()):
            opening.cancel()
            await asyncio.wait({opening})
        closed, self._open = self._open, []
        for each in closed:
            each.connection.close()
        for each in closed:
            await each.finish()
        while self._closing:
            await asyncio.wait(self._closing)


class _Connection:
    """One connection to a host, and how many commands and streams use it."""

    def __init__(
        self, connection: asyncssh.SSHClientConnection, jump: _JumpStream | None, busy: bool
    ) -> None:
        self.connection = connection
        self.busy = busy
        self.retired = False
        self._jump = jump
        self.commands = 0
        self.room = COMMANDS_EACH
        self.streams = 0

    async def finish(self) -> None:
        """Wait for the end of a closed connection, and let go of the host it went through."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.connection.wait_closed()
        except TimeoutError:
            self.connection.abort()
        if self._jump is not None:
            await self._jump.close()


class CommandPlace:
    """The place of a command on a connection, which takes only so many."""

    def __init__(self, connection: _Connection, left: Callable[[_Connection], None]) -> None:
        self._on, self._left = connection, left

    @property
    def connection(self) -> asyncssh.SSHClientConnection:
        """The connection itself."""
        return self._on.connection

    def was_full(self) -> bool:
        """Whether a host that refused the command may take it on another connection.

        To be asked when the place has been given back: the connection takes no more from then on.
        """
        if self._on.commands == 0:
            return False
        self._on.room = self._on.commands
        return True

    def leave(self) -> None:
        """Give the place back, once."""
        self._on.commands -= 1
        self._left(self._on)


class _JumpStream:
    """A stream through a jump host, which carries a connection to the host behind it."""

    def __init__(self, host: HostConnections) -> None:
        self._host = host
        self._over: Callable[[], None] | None = None

    async def open(self) -> asyncssh.SSHClientConnection:
        """The connection to the jump host."""
        connection, self._over = await self._host.connection()
        return connection

    async def close(self) -> None:
        """Let go of the jump host."""
        if self._over is not None:
            self._over()
        await release(self._host)


_held: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Destination, HostConnections]] = (
    weakref.WeakKeyDictionary()
)
"""A connection belongs to the loop that opened it."""


def hold(destination: Destination) -> HostConnections:
    """The connections to a destination; they stay until released as often as held."""
    here = _held.setdefault(asyncio.get_running_loop(), {})
    host = here.get(destination)
    if host is None:
        host = here[destination] = HostConnections(destination)
    host.users += 1
    return host


async def release(host: HostConnections) -> None:
    """Let go of a host; the last user to do so closes its connections."""
    host.users -= 1
    if host.users == 0:
        here = _held.get(asyncio.get_running_loop(), {})
        if here.get(host.destination) is host:
            del here[host.destination]
        await host.close()


def hosts_held() -> int:
    """To how many hosts this event loop holds connections."""
    return len(_held.get(asyncio.get_running_loop(), {}))


class _HostKeyRecorder(asyncssh.SSHClient):
    """Keeps the host key that was not accepted, for the error message."""

    def __init__(self, attempt: failures.ConnectionAttempt) -> None:
        self._attempt = attempt

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        """Refuse the key; asyncssh asks only about keys that are not known."""
        self._attempt.shown = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Refuse the authority of a certificate likewise."""
        self._attempt.shown = key
        return False


async def _connected(
    destination: Destination,
) -> tuple[asyncssh.SSHClientConnection, _JumpStream | None]:
    """Connect, through jump hosts where the destination names them."""
    options = await asyncio.to_thread(resolved, destination)
    files = known_hosts_files(destination, options)
    attempt = await asyncio.to_thread(failures.ConnectionAttempt, destination, options, files)
    through = None
    jump = destination.jump or options.tunnel
    if jump and jump != "none":
        before = destination.through(str(jump))
        # `Host *` with a ProxyJump names the jump host itself, too.
        if before.host.name not in (destination.host.name, options.host):
            through = _JumpStream(hold(before))
    try:
        tunnel = await through.open() if through is not None else None
        with attempt.explained():
            # `connect` takes for not given what is not repeated here.
            connection = await asyncssh.connect(
                destination.host.name,
                () if destination.host.port is None else destination.host.port,
                tunnel=tunnel,
                config=config_files(destination.config),
                options=options,
                known_hosts=attempt.known,
                client_factory=lambda: _HostKeyRecorder(attempt),
                encryption_algs=() if options.config.get("Ciphers", None) else CIPHERS,
            )
    except BaseException:
        if through is not None:
            await through.close()
        raise
    return connection, through


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
