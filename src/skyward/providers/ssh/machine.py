"""A node's machine on an SSH host: a folder there, the commands in it, and bridges to sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import quote

import asyncssh

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Machine
from skyward.providers.ssh.bridge import Bridge
from skyward.providers.ssh.commands import (
    HAS_FOLDER,
    KILL,
    LIST_FOLDERS,
    LONGEST_COMMAND,
    MAKE_FOLDER,
    REMOVE_FOLDER,
    RUN,
    CommandSession,
    command_line,
)
from skyward.providers.ssh.connections import HostConnections, hold, release
from skyward.providers.ssh.hosts import Destination
from skyward.providers.ssh.options import resolved

ALIVE_SECONDS = 5.0
RETIRE_SECONDS = 3.0
"""A connection on which the host does not answer for so long gets no new commands or streams."""
KILL_SECONDS = 10.0


class SSHMachine(Machine):
    """The folder of one node on a host, and the commands that run in it."""

    def __init__(
        self, pool: str, node: int, destination: Destination, address: str, direct: str | None
    ) -> None:
        self._destination = destination
        self._label = label(pool, node)
        self._kept: HostConnections | None = None
        self._agent = ""
        self._bridges: set[Bridge] = set()
        self._background: set[asyncio.Task[Any]] = set()
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
        work = asyncio.create_task(self._script(MAKE_FOLDER, output=said.extend))
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

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a command in the folder, without a terminal, as the leader of a process group."""
        line = command_line(RUN, self._label, *command)
        if len(line.encode()) > LONGEST_COMMAND:
            raise ValueError(
                f"a command of {len(line.encode()):,} bytes is more than an SSH host takes; pass "
                "what is long as its input"
            )
        async with self._connections() as host:
            session = CommandSession(output, announced=True)
            work = asyncio.create_task(self._execute(host, session, line, input))
            try:
                return await asyncio.shield(work)
            except BaseException:
                if not work.done() or session.failure is not None:
                    await self._finish(self._kill(session, work))
                raise

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a channel of a shared connection."""
        # The pool dials the agent first: it sends little, and its messages must not wait.
        self._agent = self._agent or endpoint
        end = None
        try:
            async with self._connections() as host:
                end = await self._bridged(host, endpoint)
        except BaseException:
            # A caller that gave up while the connections were released must not leak the socket.
            if end is not None:
                end.close()
            raise
        return end

    async def stream(self, line: str) -> socket.socket:
        """A socket that is the standard input and output of a command line.

        The command runs outside of the folder, which need not exist.
        """
        async with self._connections() as host:
            while True:
                place = await host.command_place()
                try:
                    return await self._bridge(host, place.connection, place.leave, f"exec:{line}")
                except OSError as error:
                    refused = isinstance(error.__cause__, asyncssh.ChannelOpenError)
                    if not (refused and place.was_full()):
                        raise

    async def _bridged(self, host: HostConnections, endpoint: str) -> socket.socket:
        connection, over = await host.connection(busy=endpoint != self._agent)
        return await self._bridge(host, connection, over, endpoint)

    async def _bridge(
        self,
        host: HostConnections,
        connection: asyncssh.SSHClientConnection,
        over: Callable[[], None],
        endpoint: str,
    ) -> socket.socket:
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
        if not bridge.over:
            self._bridges.add(bridge)
        return end

    def _dial_error(
        self, error: Exception, connection: asyncssh.SSHClientConnection, endpoint: str
    ) -> OSError:
        name = self._destination.host.name
        # asyncssh also reports a refused channel when the connection was lost meanwhile.
        if isinstance(error, asyncssh.ChannelOpenError) and not connection.is_closed():
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
        self._close_bridges()
        await self._finish(self._release())
        while self._background:
            await asyncio.wait(self._background)

    async def destroy(self) -> None:
        """Kill every process that runs in the folder, and remove the folder."""
        self._close_bridges()
        try:
            said = bytearray()
            status = await self._script(REMOVE_FOLDER, output=said.extend)
            if status:
                raise PoolStartError(
                    f"{self.id}: cannot remove its folder: {said.decode(errors='replace')}"
                )
        finally:
            await self.leave()

    def _close_bridges(self) -> None:
        for bridge in list(self._bridges):
            bridge.close()

    async def _release(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await release(kept)

    @contextlib.asynccontextmanager
    async def _connections(self) -> AsyncIterator[HostConnections]:
        host = hold(self._destination)
        try:
            yield host
        finally:
            await self._finish(release(host))

    async def _script(self, script: str, *arguments: str, output: Any = None) -> int:
        """Run one of the scripts of `commands` on this folder."""
        line = command_line(script, self._label, *arguments)
        async with self._connections() as host:
            return await self._execute(host, CommandSession(output, announced=False), line, b"")

    async def execute(self, session: CommandSession, line: str, input: bytes = b"") -> int:
        """Run a command line outside of the folder, which need not exist; gives its status."""
        async with self._connections() as host:
            return await self._execute(host, session, line, input)

    async def _execute(
        self, host: HostConnections, session: CommandSession, line: str, input: bytes
    ) -> int:
        name = self._destination.host.name
        try:
            async with host.command(session, line):
                await session.feed(input)
                status = await session.ended
        except PoolStartError:
            raise
        except asyncssh.ChannelOpenError as error:
            raise UnreachableError(
                f"SSH host {name}: it runs no command: {error.reason}; is MaxSessions 0 in its "
                "sshd_config?"
            ) from error
        except (asyncssh.Error, OSError) as error:
            raise UnreachableError(
                f"SSH host {name}: the connection was lost while a command ran: {error}"
            ) from error
        finally:
            session.close()
        if session.failure is not None:
            raise session.failure
        if session.gone:
            raise UnreachableError(f"{self.id} is not there: its folder on the host was removed")
        if status is None:
            raise UnreachableError(
                f"SSH host {name}: the connection was lost while a command ran; whether it "
                "still runs there is not known"
            )
        return status

    async def _kill(self, session: CommandSession, work: asyncio.Task[int]) -> None:
        """Kill a command: an sshd leaves it running when its channel is closed."""
        with contextlib.suppress(PoolStartError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                waiting = asyncio.create_task(session.started.wait())
                await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if session.leader is not None and not session.over:
                    await self._script(KILL, session.leader)
                    await asyncio.wait({work})
        await _ended(work)

    async def _finish(self, cleaning: Coroutine[Any, Any, None]) -> None:
        """Finish a clean-up even when the caller is cancelled."""
        await asyncio.shield(self._later(cleaning))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


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
    machine = SSHMachine("", 0, destination, "", None)
    said = bytearray()
    await machine._script(LIST_FOLDERS, output=said.extend)
    return said.decode(errors="replace").split()


async def resolve_host(destination: Destination) -> tuple[str, bool]:
    """The name or address of a host in the ssh configuration, and whether it has jump hosts."""
    options = await asyncio.to_thread(resolved, destination)
    return str(options.host), bool(destination.jump or options.tunnel or options.proxy_command)
