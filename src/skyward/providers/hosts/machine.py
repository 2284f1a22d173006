"""A host over SSH: programs that run there, sockets that are reached there, and nodes' machines."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol
from urllib.parse import quote
from weakref import WeakKeyDictionary

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Machine
from skyward.providers.hosts import CLOSE_SECONDS, Destination, openssh
from skyward.providers.piped import KILL_SECONDS, Piped

ALIVE_SECONDS = 5.0
RETIRE_SECONDS = 3.0
"""A connection on which the host does not answer for so long gets no new programs or streams."""
LONGEST_COMMAND = 120_000
"""Linux takes 131,072 bytes in one argument, and sshd hands the command over as one."""
CHUNK = 1 << 20
COMMANDS_EACH = 8
"""How many commands share a connection. An sshd allows 10 unless its configuration says otherwise;
one that allows fewer refuses a command, and that connection gets no more from then on."""

_MACHINES = '"${XDG_CACHE_HOME:-$HOME/.cache}/skyward/machines/"'
_FOLDER = f'd={_MACHINES}"$1"; '
# A command leads a process group, and the shell that waits for it stays in the machine's folder.
# The folder proves that a group is the machine's own: the kernel may have used its number again.
REMOVE_FOLDER = (
    _FOLDER
    + """
cd /
if [ -d "$d" ]; then
  d=$(cd "$d" && pwd -P)
  for f in "$d"/*.group; do
    [ -e "$f" ] || continue
    p=${f##*/}; p=${p%.group}
    if [ -d /proc/self ] && [ "$(readlink "/proc/$p/cwd")" != "$d" ]; then continue; fi
    kill -KILL "-$p" 2>/dev/null
  done
  ls -ld /proc/[0-9]*/cwd 2>/dev/null | while IFS= read -r line; do
    case $line in
      *"-> $d"|*"-> $d/"*) p=${line#*/proc/}; kill -KILL "${p%%/*}" 2>/dev/null;;
    esac
  done
  rm -rf "$d"
fi
"""
)
MAKE_FOLDER = REMOVE_FOLDER + _FOLDER + 'umask 077; mkdir -p "$d" && [ -w "$d" ]'
HAS_FOLDER = _FOLDER + '[ -d "$d" ]'
LIST_FOLDERS = f"cd {_MACHINES} 2>/dev/null && ls -1 || :"


class SSHHost(Piped):
    """A host, as far as this process uses it."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._agent = ""
        self._channels: set[HostChannel] = set()
        self._programs: WeakKeyDictionary[socket.socket, HostChannel] = WeakKeyDictionary()
        """The channel of each program, by its socket."""
        self._background: set[asyncio.Task[Any]] = set()

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in a channel of a shared connection."""
        return await self.stream(f"exec {shlex.join(command)}")

    async def stream(self, line: str) -> socket.socket:
        """A socket that is the standard input and output of a command line."""
        channel, end = await self._stream(line)
        self._programs[end] = channel
        return end

    async def settle(self, end: socket.socket) -> None:
        """Wait until the channel is closed, and its connection if nobody else uses that."""
        await self._programs[end].closed.wait()
        while self._background:
            await asyncio.wait(self._background)

    async def answer(self, line: str, input: bytes = b"") -> tuple[int, bytes, bytes]:
        """The exit status of a command line, and what it writes to its two streams."""
        channel, end = await self._stream(line)
        with end:
            end.setblocking(False)
            loop, output = asyncio.get_running_loop(), bytearray()
            feeding = asyncio.create_task(_feed(end, input))
            try:
                while data := await loop.sock_recv(end, CHUNK):
                    output += data
                await channel.closed.wait()
            finally:
                feeding.cancel()
                await asyncio.wait({feeding})
        if channel.status is None:
            raise UnreachableError(await self.why_lost())
        return channel.status, bytes(output), bytes(channel.errors)

    async def _stream(self, line: str) -> tuple[HostChannel, socket.socket]:
        """Run a command line in a channel of a connection that takes one more."""
        if len(line.encode()) > LONGEST_COMMAND:
            raise ValueError(
                f"a command of {len(line.encode()):,} bytes is more than an SSH host takes; pass "
                "what is long as its input"
            )

        async def open_on(host: HostConnections) -> tuple[HostChannel, socket.socket]:
            while True:
                place = await host.command_place()
                try:
                    return await self._open(host, place.connection, place.leave, f"exec:{line}")
                except ConnectionRefusedError as error:
                    if not place.was_full():
                        raise UnreachableError(
                            f"SSH host {self._destination.host.name}: it runs no command: {error}; "
                            "is MaxSessions 0 in its sshd_config?"
                        ) from None

        return await self._opened(open_on)

    async def why_lost(self) -> str:
        """What is known of a command whose channel has ended."""
        return (
            f"SSH host {self._destination.host.name}: the connection was lost while a command "
            "ran; whether it still runs there is not known"
        )

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a channel of a shared connection."""
        # The pool dials the agent first: it sends little, and its messages must not wait.
        self._agent = self._agent or endpoint

        async def open_on(host: HostConnections) -> tuple[HostChannel, socket.socket]:
            connection, over = await host.connection(busy=endpoint != self._agent)
            return await self._open(host, connection, over, endpoint)

        return (await self._opened(open_on))[1]

    async def _opened(
        self, open_on: Callable[[HostConnections], Awaitable[tuple[HostChannel, socket.socket]]]
    ) -> tuple[HostChannel, socket.socket]:
        """A channel that is opened with the host's connections."""
        host = hold(self._destination)
        found = None
        try:
            try:
                found = await open_on(host)
            except ConnectionAbortedError:
                # The connection had ended, and nobody had noticed: the next one is a new one.
                try:
                    found = await open_on(host)
                except ConnectionAbortedError as error:
                    raise UnreachableError(str(error)) from None
        finally:
            try:
                await self._finish(release(host))
            except BaseException:
                # A caller that gave up while the connections were released.
                if found is not None:
                    found[1].close()
                raise
        return found

    async def _open(
        self,
        host: HostConnections,
        connection: HostCarrier,
        over: Callable[[], None],
        endpoint: str,
    ) -> tuple[HostChannel, socket.socket]:
        """Open a channel; `over` is called, once, when it has ended or cannot be opened."""
        began = time.monotonic()
        kept = [hold(self._destination)]

        def ended(channel: HostChannel | None = None) -> None:
            if channel is not None:
                self._channels.discard(channel)
            if kept:
                over()
                self._later(release(kept.pop()))

        try:
            async with asyncio.timeout(self._destination.timeout):
                channel, end = await connection.open(endpoint, ended)
        except OSError as error:
            ended()
            if isinstance(error, TimeoutError):
                host.retire(connection)
            raise self._open_error(error, endpoint) from error
        except BaseException:
            ended()
            if time.monotonic() - began > RETIRE_SECONDS:
                host.retire(connection)
            raise
        if not channel.closed.is_set():
            self._channels.add(channel)
        return channel, end

    def _open_error(self, error: OSError, endpoint: str) -> OSError:
        host = f"SSH host {self._destination.host.name}"
        if isinstance(error, ConnectionAbortedError):
            return ConnectionAbortedError(f"{host}: the connection was lost: {error}")
        if isinstance(error, PermissionError):
            return UnreachableError(
                f"{host}: its sshd forbids the way to {endpoint}; set AllowTcpForwarding yes in "
                "its sshd_config"
            )
        if isinstance(error, ConnectionRefusedError):
            if endpoint.startswith("exec:"):
                return ConnectionRefusedError(str(error))
            # An sshd that forbids Unix sockets says the same as one that finds nobody at them.
            forbids = "; or its sshd_config has AllowStreamLocalForwarding no"
            unix = endpoint.startswith("unix:")
            return ConnectionRefusedError(f"{host}: {endpoint}: {error}{forbids if unix else ''}")
        if isinstance(error, TimeoutError):
            return UnreachableError(
                f"{host}: no answer for {self._destination.timeout:g} s; the next attempt makes a "
                "new connection"
            )
        return UnreachableError(f"{host}: the connection was lost: {error}")

    async def leave(self) -> None:
        """End what this process does on the host, and leave the host as it is."""
        for channel in list(self._channels):
            channel.close()
        # A channel has a hold on its connection until the host has confirmed that it is closed.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._channels:
                    await next(iter(self._channels)).closed.wait()
        for channel in list(self._channels):
            channel.finish()
        while self._background:
            await asyncio.wait(self._background)

    async def _finish(self, cleaning: Coroutine[Any, Any, None]) -> None:
        """Finish a clean-up even when the caller is cancelled."""
        await asyncio.shield(self._later(cleaning))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        for tasks in (self._background, hosts_here().background):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task


class SSHMachine(SSHHost, Machine):
    """The folder of one node on a host, and the commands that run in it."""

    def __init__(
        self, pool: str, node: int, destination: Destination, address: str, direct: str | None
    ) -> None:
        super().__init__(destination)
        self._label = label(pool, node)
        folder = (
            f'd="${{XDG_CACHE_HOME:-$HOME/.cache}}/skyward/machines/"{shlex.quote(self._label)}'
        )
        self.before = f'{folder}; cd "$d" 2>/dev/null || exit; : >"$shell.group"'
        self.after = f'{folder}; rm -f "$d/$shell.group"'
        self._kept: HostConnections | None = None
        self._host = SSHHost(destination)
        """Runs the scripts that are not commands of the node's."""
        host = destination.host
        user = f"{host.user}@" if host.user else ""
        port = f":{host.port}" if host.port else ""
        self.id = f"ssh://{user}{host.name}{port}/{self._label}"
        self.node = node
        self.address = address
        self.direct = direct

    def __repr__(self) -> str:
        return f"SSHMachine({self.id!r})"

    async def make(self) -> None:
        """Make the folder, removing one that a lost node left; the connection stays open."""
        self._kept = hold(self._destination)
        said = bytearray()
        work = asyncio.create_task(self._script(MAKE_FOLDER, said))
        try:
            if status := await asyncio.shield(work):
                raise PoolStartError(
                    f"SSH host {self._destination.host.name}: a shell there could not make a "
                    f"folder below ~/.cache/skyward (exit status {status}); it said: "
                    f"{said.decode(errors='replace').strip() or 'nothing'}"
                )
        except BaseException:
            await self._finish(self._give_up(work))
            raise

    async def _give_up(self, work: asyncio.Task[int]) -> None:
        """Wait for the script that makes the folder, then remove the folder."""
        if self._kept is not None and self._kept.connected:
            await asyncio.wait({work}, timeout=KILL_SECONDS)
            with contextlib.suppress(PoolStartError, TimeoutError):
                async with asyncio.timeout(KILL_SECONDS):
                    await self._script(REMOVE_FOLDER)
        await _ended(work)
        await self._release()

    async def why_lost(self) -> str:
        """Whether the folder is still there, and else what is known of the command."""
        with contextlib.suppress(UnreachableError):
            if not await self.alive():
                return f"{self.id} is not there: its folder on the host was removed"
        return await super().why_lost()

    async def alive(self) -> bool:
        """Whether the host still has the folder; it must answer within `ALIVE_SECONDS`."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                return await self._script(HAS_FOLDER) == 0
        except TimeoutError:
            if self._kept is not None:
                self._kept.retire()
            raise UnreachableError(
                f"SSH host {self._destination.host.name}: no answer for {ALIVE_SECONDS:g} s"
            ) from None

    async def leave(self) -> None:
        """End what this process does on the host, and leave the host as it is."""
        await self._finish(self._release())
        await self._host.leave()
        await super().leave()

    async def destroy(self) -> None:
        """Kill every process that runs in the folder, and remove the folder."""
        for channel in list(self._channels):
            channel.close()
        try:
            said = bytearray()
            status = await self._script(REMOVE_FOLDER, said)
            if status:
                raise PoolStartError(
                    f"{self.id}: cannot remove its folder: {said.decode(errors='replace')}"
                )
        finally:
            await self.leave()

    async def _release(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await release(kept)

    async def _script(self, script: str, said: bytearray | None = None) -> int:
        """Run one of the scripts above on this folder."""
        return await self._host.call(
            ["sh", "-c", script, "sh", self._label],
            output=None if said is None else said.extend,
        )


async def _feed(end: socket.socket, data: bytes) -> None:
    """Write all of the input, if it is read, and its end."""
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_sendall(end, data)
        end.shutdown(socket.SHUT_WR)


async def _ended(work: asyncio.Task[int]) -> None:
    """Cancel a task and wait until it has ended, however it ends."""
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()


def label(pool: str, node: int) -> str:
    """The name of a machine's folder."""
    return f"{quote(pool, safe='')}-{node}"


async def labels(destination: Destination) -> list[str]:
    """The names of all folders that machines of any pool have on a host."""
    said = bytearray()
    await SSHHost(destination).call(["sh", "-c", LIST_FOLDERS], output=said.extend)
    return said.decode(errors="replace").split()


async def resolve_host(destination: Destination) -> tuple[str, bool]:
    """The name or address of a host in the ssh configuration, and whether it has jump hosts."""
    if openssh.program():
        login = await asyncio.to_thread(openssh.resolved, destination)
    else:
        from skyward.providers.hosts import library

        login = await asyncio.to_thread(library.resolved, destination)
    return login.host, login.is_behind


# The connections to hosts.


class HostChannel(Protocol):
    """One command or stream of a connection."""

    closed: asyncio.Event
    status: int | None
    """The exit status of a command, after its end."""
    errors: bytearray
    """The last that a command wrote to its standard error."""

    def close(self) -> None:
        """Close it at once; whoever reads its socket sees the end."""

    def finish(self) -> None:
        """Take it for closed, and say so to its owner, whether the host has confirmed it or not."""


class HostCarrier(Protocol):
    """One connection to a host: a `Master` of OpenSSH's, or a `LibraryConnection` of asyncssh's."""

    def is_closed(self) -> bool:
        """Whether it carries nothing more."""

    def close(self) -> None:
        """Have it end, with all its channels."""

    async def finish(self) -> None:
        """Wait for the end of a connection that is closed."""

    async def open(
        self, endpoint: str, ended: Callable[[Any], None]
    ) -> tuple[HostChannel, socket.socket]:
        """Open a channel to an endpoint, and return the socket that leads to it.

        The endpoint "exec:COMMAND" is the standard input and output of a command on the host.
        `ended` is called, once, when an open channel is closed. Raises `ConnectionRefusedError` if
        nobody listens there, or the host takes no more commands; `PermissionError` if the host
        forbids it; `ConnectionAbortedError` if the connection was lost before the host was asked;
        and another `OSError` if it was lost later.
        """


async def connect(destination: Destination) -> HostCarrier:
    """Log in with the program `ssh`, or with asyncssh where that cannot carry connections."""
    if openssh.program():
        return await openssh.Master.started(destination)
    # An extra, and slow to import.
    from skyward.providers.hosts import library

    return await library.LibraryConnection.started(destination)


class HostConnections:
    """The connections to one host on one event loop; opened when needed, and again when lost."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.users = 0
        self._open: list[_Connection] = []
        self._opening: dict[bool, asyncio.Task[_Connection]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unfinished: set[HostCarrier] = set()
        """All connections whose end nobody has seen."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection that nobody has closed."""
        return any(not each.connection.is_closed() for each in self._open)

    async def connection(self, *, busy: bool = False) -> tuple[HostCarrier, Callable[[], None]]:
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
        closing = asyncio.create_task(self._finish(connection.connection))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _finish(self, connection: HostCarrier) -> None:
        await connection.finish()
        self._unfinished.discard(connection)

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
            connection = _Connection(await connect(self.destination), busy)
            self._open.append(connection)
            self._unfinished.add(connection.connection)
            return connection
        finally:
            del self._opening[busy]

    def retire(self, connection: HostCarrier | None = None) -> None:
        """Start nothing new on a connection that does not answer; on None, on any of them.

        Its commands and streams go on until the connection is known to be dead. After the last of
        them the connection is closed.
        """
        for each in list(self._open):
            each.retired |= connection in (None, each.connection)
            self._close_if_unused(each)

    async def close(self) -> None:
        """Close all connections; whoever calls this again goes on where the last was cancelled."""
        for opening in list(self._opening.values()):
            opening.cancel()
            await asyncio.wait({opening})
        self._open.clear()
        for each in self._unfinished:
            each.close()
        await asyncio.gather(*map(self._finish, self._unfinished))
        while self._closing:
            await asyncio.wait(self._closing)


class _Connection:
    """One connection to a host, and how many commands and streams use it."""

    def __init__(self, connection: HostCarrier, busy: bool) -> None:
        self.connection = connection
        self.busy = busy
        self.retired = False
        self.commands = 0
        self.room = COMMANDS_EACH
        self.streams = 0


class CommandPlace:
    """The place of a command on a connection, which takes only so many."""

    def __init__(self, connection: _Connection, left: Callable[[_Connection], None]) -> None:
        self._on, self._left = connection, left

    @property
    def connection(self) -> HostCarrier:
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


class HostsOfLoop:
    """The hosts to which one event loop has connections, all of which end before the loop does.

    Whoever ends a loop, as `asyncio.run` does, cancels its tasks and then closes its asynchronous
    generators. So one of these waits for what was cancelled, and for what began after that.
    """

    def __init__(self) -> None:
        self.held: dict[Destination, HostConnections] = {}
        self.closing: set[HostConnections] = set()
        self.background: set[asyncio.Task[Any]] = set()
        self.ended = False
        self._end: AsyncGenerator[None, None] | None = self._waiting()
        with contextlib.suppress(StopIteration):
            self._end.asend(None).send(None)

    async def _waiting(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            problems: list[BaseException] = []
            while self.held or self.closing or self.background:
                self.closing.update(self.held.values())
                self.held.clear()
                # One that is out of reach keeps no other waiting, nor open.
                closed = list(self.closing)
                found = await asyncio.gather(
                    *(host.close() for host in closed), return_exceptions=True
                )
                self.closing.difference_update(closed)
                problems += [each for each in found if isinstance(each, BaseException)]
                while self.background:
                    await asyncio.wait(self.background)
            # It refers to the loop, which is forgotten with the last reference to it.
            self.ended, self._end = True, None
            for problem in problems:
                raise problem


_hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, HostsOfLoop] = WeakKeyDictionary()
"""A connection belongs to the loop that opened it."""


def hosts_here() -> HostsOfLoop:
    """The hosts of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _hosts:
        _hosts[loop] = HostsOfLoop()
    return _hosts[loop]


def hold(destination: Destination) -> HostConnections:
    """The connections to a destination; they stay until released as often as held."""
    here = hosts_here()
    if here.ended:
        raise UnreachableError(f"SSH host {destination.host.name}: the event loop is being closed")
    host = here.held.get(destination)
    if host is None:
        host = here.held[destination] = HostConnections(destination)
    host.users += 1
    return host


async def release(host: HostConnections) -> None:
    """Let go of a host; the last user to do so closes its connections."""
    host.users -= 1
    if host.users == 0:
        here = hosts_here()
        if here.held.get(host.destination) is host:
            del here.held[host.destination]
        here.closing.add(host)
        await host.close()
        here.closing.discard(host)
