"""A host over SSH: programs that run there, sockets that are reached there, and nodes' machines."""

from __future__ import annotations

import asyncio
import contextlib
import select
import shlex
import signal as signals
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import asyncssh

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Machine
from skyward.providers.hosts import Destination
from skyward.providers.hosts.connections import (
    HostConnections,
    hold,
    opened,
    release,
    resolved,
)
from skyward.providers.piped import KILL_SECONDS, Piped

ALIVE_SECONDS = 5.0
RETIRE_SECONDS = 3.0
"""A connection on which the host does not answer for so long gets no new programs or streams."""
LONGEST_COMMAND = 120_000
"""Linux takes 131,072 bytes in one argument, and sshd hands the command over as one."""
WINDOW = 8 << 20
"""How much a host may send unread: enough for 100 MB/s at a round trip of 80 ms."""
BUFFER = 1 << 20
"""How many unread bytes the kernel and the event loop each hold."""

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
        self._bridges: set[Bridge] = set()
        self._programs: WeakKeyDictionary[socket.socket, Bridge] = WeakKeyDictionary()
        """The bridge of each program, by its socket."""
        self._background: set[asyncio.Task[Any]] = set()

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in a channel of a shared connection."""
        return await self.stream(f"exec {shlex.join(command)}")

    async def stream(self, line: str) -> socket.socket:
        """A socket that is the standard input and output of a command line."""
        bridge, end = await self._stream(line)
        self._programs[end] = bridge
        return end

    async def settle(self, end: socket.socket) -> None:
        """Wait until the channel is closed, and its connection if nobody else uses that."""
        await self._programs[end].closed.wait()
        while self._background:
            await asyncio.wait(self._background)

    async def answer(self, line: str, input: bytes = b"") -> tuple[int, bytes, bytes]:
        """The exit status of a command line, and what it writes to its two streams."""
        bridge, end = await self._stream(line)
        with end:
            end.setblocking(False)
            loop, output = asyncio.get_running_loop(), bytearray()
            feeding = asyncio.create_task(_feed(end, input))
            try:
                while data := await loop.sock_recv(end, BUFFER):
                    output += data
                await bridge.closed.wait()
            finally:
                feeding.cancel()
                await asyncio.wait({feeding})
        if bridge.status is None:
            raise UnreachableError(await self.why_lost())
        return bridge.status, bytes(output), bytes(bridge.errors)

    async def _stream(self, line: str) -> tuple[Bridge, socket.socket]:
        """Run a command line in a channel of a connection that takes one more."""
        if len(line.encode()) > LONGEST_COMMAND:
            raise ValueError(
                f"a command of {len(line.encode()):,} bytes is more than an SSH host takes; pass "
                "what is long as its input"
            )

        async def open_on(host: HostConnections) -> tuple[Bridge, socket.socket]:
            while True:
                place = await host.command_place()
                try:
                    return await self._bridge(host, place.connection, place.leave, f"exec:{line}")
                except OSError as error:
                    refused = isinstance(error.__cause__, asyncssh.ChannelOpenError)
                    if not (refused and place.was_full()):
                        raise

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

        async def open_on(host: HostConnections) -> tuple[Bridge, socket.socket]:
            connection, over = await host.connection(busy=endpoint != self._agent)
            return await self._bridge(host, connection, over, endpoint)

        return (await self._opened(open_on))[1]

    async def _opened(
        self, open_on: Callable[[HostConnections], Awaitable[tuple[Bridge, socket.socket]]]
    ) -> tuple[Bridge, socket.socket]:
        """A bridge that is built with the host's connections."""
        host = hold(self._destination)
        found = None
        try:
            found = await open_on(host)
        finally:
            try:
                await self._finish(release(host))
            except BaseException:
                # A caller that gave up while the connections were released.
                if found is not None:
                    found[1].close()
                raise
        return found

    async def _bridge(
        self,
        host: HostConnections,
        connection: asyncssh.SSHClientConnection,
        over: Callable[[], None],
        endpoint: str,
    ) -> tuple[Bridge, socket.socket]:
        """Build a bridge; `over` is called, once, when it has ended or cannot be built."""
        began = time.monotonic()
        kept = [hold(self._destination)]

        def ended(bridge: Bridge | None = None) -> None:
            if bridge is not None:
                self._bridges.discard(bridge)
            if kept:
                over()
                self._later(release(kept.pop()))

        try:
            async with asyncio.timeout(self._destination.timeout):
                bridge, end = await Bridge.built(connection, endpoint, ended)
        except (asyncssh.Error, OSError) as error:
            ended()
            if isinstance(error, TimeoutError):
                host.retire(connection)
            raise self._dial_error(error, connection, endpoint) from error
        except BaseException:
            ended()
            if time.monotonic() - began > RETIRE_SECONDS:
                host.retire(connection)
            raise
        if not bridge.closed.is_set():
            self._bridges.add(bridge)
        return bridge, end

    def _dial_error(
        self, error: Exception, connection: asyncssh.SSHClientConnection, endpoint: str
    ) -> OSError:
        name = self._destination.host.name
        # asyncssh also reports a refused channel when the connection was lost meanwhile.
        if isinstance(error, asyncssh.ChannelOpenError) and not connection.is_closed():
            if endpoint.startswith("exec:"):
                return UnreachableError(
                    f"SSH host {name}: it runs no command: {error.reason}; is MaxSessions 0 in its "
                    "sshd_config?"
                )
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                option = "StreamLocal" if endpoint.startswith("unix:") else "Tcp"
                return UnreachableError(
                    f"SSH host {name}: its sshd forbids the way to {endpoint}; set "
                    f"Allow{option}Forwarding yes in its sshd_config"
                )
            if error.code == asyncssh.OPEN_CONNECT_FAILED:
                return ConnectionRefusedError(f"SSH host {name}: {endpoint}: {error.reason}")
        if isinstance(error, TimeoutError):
            return UnreachableError(
                f"SSH host {name}: no answer for {self._destination.timeout:g} s; the next "
                "attempt makes a new connection"
            )
        return UnreachableError(f"SSH host {name}: the connection was lost: {error}")

    async def leave(self) -> None:
        """End what this process does on the host, and leave the host as it is."""
        for bridge in list(self._bridges):
            bridge.close()
        while self._background:
            await asyncio.wait(self._background)

    async def _finish(self, cleaning: Coroutine[Any, Any, None]) -> None:
        """Finish a clean-up even when the caller is cancelled."""
        await asyncio.shield(self._later(cleaning))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
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
        for bridge in list(self._bridges):
            bridge.close()
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
    options = await asyncio.to_thread(resolved, destination)
    return str(options.host), bool(destination.jump or options.tunnel or options.proxy_command)


class Bridge(asyncio.Protocol):
    """Copies bytes between one end of a socket pair and a channel, until either is closed."""

    def __init__(self, ended: Callable[[Bridge], None]) -> None:
        self._ended = ended
        self._far: _BridgeChannel | None = None
        self._near: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.status: int | None = None
        """The exit status of a command, after its end."""
        self.errors = bytearray()
        """The last that a command wrote to its standard error."""

    @classmethod
    async def built(
        cls,
        connection: asyncssh.SSHClientConnection,
        endpoint: str,
        ended: Callable[[Bridge], None],
    ) -> tuple[Bridge, socket.socket]:
        """Open a channel to an endpoint, and return the socket that leads to it.

        The endpoint "exec:COMMAND" is the standard input and output of a command on the host.
        """
        bridge = cls(ended)
        family, _, place = endpoint.partition(":")
        if family == "unix":
            await opened(connection.create_unix_connection(bridge._session, place, window=WINDOW))
        elif family == "exec":
            start = connection.create_session(bridge._session, place, encoding=None, window=WINDOW)
            await opened(start)
        else:
            host, _, port = place.rpartition(":")
            at = host.strip("[]"), int(port)
            await opened(connection.create_connection(bridge._session, *at, window=WINDOW))
        ours, theirs = socket.socketpair()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: bridge, ours)
        except BaseException:
            ours.close()
            theirs.close()
            bridge.close()
            raise
        return bridge, theirs

    def _session(self) -> _BridgeChannel:
        self._far = _BridgeChannel(self)
        return self._far

    def close(self) -> None:
        """Close both sides at once; readers see the end of the stream."""
        if self._near is not None:
            self._near.abort()
        if self._far is not None:
            self._far.channel.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading the channel: its data can be written to the socket now."""
        assert isinstance(transport, asyncio.Transport)
        assert self._far is not None
        self._near = transport
        transport.set_write_buffer_limits(BUFFER)
        self._far.join(transport)

    def data_received(self, data: bytes) -> None:
        """Write what the client sent to the channel."""
        assert self._far is not None
        with contextlib.suppress(BrokenPipeError):
            self._far.channel.write(data)

    def eof_received(self) -> bool:
        """Pass on that the client writes no more; close the channel if it does not read either."""
        assert self._far is not None
        assert self._near is not None
        with contextlib.suppress(BrokenPipeError):
            if _closed_by_peer(self._near.get_extra_info("socket")):
                self._far.channel.close()
            else:
                self._far.channel.write_eof()
        return not self._far.at_end

    def pause_writing(self) -> None:
        """Stop reading the channel: the client does not read."""
        assert self._far is not None
        self._far.channel.pause_reading()

    def resume_writing(self) -> None:
        """Read the channel again: the client reads."""
        assert self._far is not None
        self._far.channel.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the channel with the socket."""
        if self._far is not None:
            self._far.channel.close()
            if self._far.gone:
                self.finish()

    def finish(self) -> None:
        """Tell the owner, once, that the bridge is closed."""
        if not self.closed.is_set():
            self.closed.set()
            self._ended(self)


class _BridgeChannel(
    asyncssh.SSHTCPSession[bytes],
    asyncssh.SSHUNIXSession[bytes],
    asyncssh.SSHClientSession[bytes],
):
    """The side of a bridge that is the SSH channel."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._near: asyncio.Transport | None = None
        self.channel: Any
        self.at_end = False
        self.gone = False

    def connection_made(self, chan: Any) -> None:
        """Keep the channel."""
        self.channel = chan

    def session_started(self) -> None:
        """Leave data in the channel until there is a socket to write it to."""
        if self._near is None:
            self.channel.pause_reading()

    def join(self, near: asyncio.Transport) -> None:
        """Take the socket to write to."""
        self._near = near
        if self.gone:
            near.close()
            return
        self.channel.resume_reading()
        if self.at_end:
            self._end_near()

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        """Write what the host sent to the socket; keep what a command says of its failure."""
        assert self._near is not None
        if datatype is None:
            self._near.write(data)
        else:
            self._bridge.errors += data
            del self._bridge.errors[:-BUFFER]

    def exit_status_received(self, status: int) -> None:
        """Keep the exit status."""
        self._bridge.status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        """Keep the signal that killed the command."""
        number = getattr(signals, f"SIG{signal}", 0)
        self._bridge.status = 128 + int(number)

    def eof_received(self) -> bool:
        """Pass on that the host will send no more; this is called on paused channels, too."""
        self.at_end = True
        self._end_near()
        return True

    def _end_near(self) -> None:
        if self._near is not None and not self._near.is_closing():
            with contextlib.suppress(OSError):
                self._near.write_eof()

    def pause_writing(self) -> None:
        """Stop reading the socket: the host does not read."""
        if self._near is not None:
            self._near.pause_reading()

    def resume_writing(self) -> None:
        """Read the socket again: the host reads."""
        if self._near is not None:
            self._near.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the socket with the channel, after writing what has arrived."""
        self.gone = True
        if self._near is not None:
            if exc is not None:
                self._near.abort()
            else:
                self._near.close()
        self._bridge.finish()


def _closed_by_peer(end: Any) -> bool:
    """Whether the other end of a socket pair is closed for reading, too."""
    poll = select.poll()
    poll.register(end.fileno(), 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
