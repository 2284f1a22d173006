"""An SSH host as a machine of a pool: commands in a folder of its own, and bridges to sockets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import quote

import asyncssh

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers.ssh.bridge import Bridge
from skyward.providers.ssh.hosts import Destination
from skyward.providers.ssh.link import (
    Link,
    command_line,
    hold,
    release,
    resolved,
)

ALIVE_SECONDS = 5.0
DOUBT_SECONDS = 3.0
"""A connection on which nobody answers for so long is not used for anything new."""
CUT_SECONDS = 10.0
LONGEST_COMMAND = 120_000
"""Linux takes 131,072 bytes in one argument, and sshd hands the command over as one."""
CHUNK = 256 << 10

_FOLDER = 'd="${XDG_CACHE_HOME:-$HOME/.cache}/skyward/machines/$1"; '
# A command leads a process group, and the shell that waits for it stays in the machine's folder:
# that is how a group is known to be the machine's own, long after its number may be used again.
_CLEAN = (
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
_MAKE = _CLEAN + _FOLDER + 'umask 077; mkdir -p "$d" && [ -w "$d" ]'
_RUN = (
    _FOLDER
    + """
shift
cd "$d" 2>/dev/null || { printf '\\nskyward gone\\n'; exit 0; }
: > $$.group; printf '\\nskyward %s\\n' $$
exec 2>/dev/null
( exec "$@" 2>&1 )
s=$?; rm -f "$d/$$.group"; exit $s
"""
)
_CUT = _FOLDER + 'kill -KILL "-$2" 2>/dev/null || kill -KILL "$2" 2>/dev/null; rm -f "$d/$2.group"'
_THERE = _FOLDER + '[ -d "$d" ]'
# The user's own shell may greet before that line: what it says is not the command's.
_LEADER = re.compile(rb"^skyward (\d+|gone)\n", re.MULTILINE)
_LIST = 'cd "${XDG_CACHE_HOME:-$HOME/.cache}/skyward/machines" 2>/dev/null && ls -1 || :'


class SSHMachine:
    """One node's part of a host."""

    def __init__(
        self, pool: str, node: int, destination: Destination, address: str, direct: str | None
    ) -> None:
        self._destination = destination
        self._label = label(pool, node)
        self._kept: Link | None = None
        self._agent = ""
        self._bridges: set[Bridge] = set()
        self._background: set[asyncio.Task[Any]] = set()
        place = destination.place
        user = f"{place.user}@" if place.user else ""
        port = f":{place.port}" if place.port else ""
        self.id = f"ssh://{user}{place.name}{port}/{self._label}"
        self.node = node
        self.address = address
        self.direct = direct
        self.python: str | None = None

    def __repr__(self) -> str:
        return f"SSHMachine({self.id!r})"

    async def make(self) -> None:
        """Make its folder, in place of one that a lost node left; keeps the connection open."""
        self._kept = hold(self._destination)
        said = bytearray()
        work = asyncio.create_task(self._script(_MAKE, output=said.extend))
        try:
            if status := await asyncio.shield(work):
                raise PoolStartError(
                    f"SSH host {self._destination.place.name}: a shell there could not make a "
                    f"folder below ~/.cache/skyward (exit status {status}); it said: "
                    f"{said.decode(errors='replace').strip() or 'nothing'}"
                )
        except BaseException:
            await self._finish(self._give_up(work))
            raise

    async def _give_up(self, work: asyncio.Task[int]) -> None:
        """Remove what was made, after the script that may still be making it."""
        if self._kept is not None and self._kept.connected:
            await asyncio.wait({work}, timeout=CUT_SECONDS)
            with contextlib.suppress(PoolStartError, TimeoutError):
                async with asyncio.timeout(CUT_SECONDS):
                    await self._script(_CLEAN)
        await _ended(work)
        await self._let_go()

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Without a terminal, in the machine's folder, leading a process group of its own."""
        line = command_line(_RUN, self._label, *command)
        if len(line.encode()) > LONGEST_COMMAND:
            raise ValueError(
                f"a command of {len(line.encode()):,} bytes is more than an SSH host takes; pass "
                "what is long as its input"
            )
        async with self._link() as link:
            session = _Session(output, announced=True)
            work = asyncio.create_task(self._execute(link, session, line, input))
            try:
                return await asyncio.shield(work)
            except BaseException:
                if not work.done() or session.failure is not None:
                    await self._finish(self._cut(session, work))
                raise

    async def dial(self, endpoint: str) -> socket.socket:
        """Through a channel of the shared connection."""
        # What is dialled first is the agent, which says little and must be heard.
        self._agent = self._agent or endpoint
        end = None
        try:
            async with self._link() as link:
                end = await self._bridged(link, endpoint)
        except BaseException:
            # Whoever asked may have given up while the link was let go of, and gets nothing.
            if end is not None:
                end.close()
            raise
        return end

    async def _bridged(self, link: Link, endpoint: str) -> socket.socket:
        connection, over = await link.connection(busy=endpoint != self._agent)
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
                link.doubt(connection)
            raise self._no_bridge(error, connection, endpoint) from error
        except BaseException:
            ended()
            if time.monotonic() - began > DOUBT_SECONDS:
                link.doubt(connection)
            raise
        if not bridge.over:
            self._bridges.add(bridge)
        return end

    def _no_bridge(
        self, error: Exception, connection: asyncssh.SSHClientConnection, endpoint: str
    ) -> OSError:
        name = self._destination.place.name
        # On a connection that was lost meanwhile, asyncssh says that the channel was refused.
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
                f"SSH host {name}: no answer for {self._destination.timeout:g} s; it will be "
                "connected to anew"
            )
        return UnreachableError(f"SSH host {name}: the connection was lost: {error}")

    async def alive(self) -> bool:
        """Whether the host still has the machine's folder, which it must say within seconds."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                return await self._script(_THERE) == 0
        except TimeoutError:
            if self._kept is not None:
                self._kept.doubt()
            raise UnreachableError(
                f"SSH host {self._destination.place.name}: no answer for {ALIVE_SECONDS:g} s"
            ) from None

    async def destroy(self) -> None:
        """End its commands and whatever else runs in its folder, and remove that."""
        for bridge in list(self._bridges):
            bridge.close()
        try:
            said = bytearray()
            status = await self._script(_CLEAN, output=said.extend)
            if status:
                raise PoolStartError(
                    f"{self.id}: cannot remove its folder: {said.decode(errors='replace')}"
                )
        finally:
            await self._finish(self._let_go())
        while self._background:
            await asyncio.wait(self._background)

    async def _let_go(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await release(kept)

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        link = hold(self._destination)
        try:
            yield link
        finally:
            await self._finish(release(link))

    async def _script(self, script: str, *arguments: str, output: Any = None) -> int:
        """Run one of the scripts above."""
        line = command_line(script, self._label, *arguments)
        async with self._link() as link:
            return await self._execute(link, _Session(output, announced=False), line, b"")

    async def _execute(self, link: Link, session: _Session, line: str, input: bytes) -> int:
        name = self._destination.place.name
        try:
            async with link.command(session, line):
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

    async def _cut(self, session: _Session, work: asyncio.Task[int]) -> None:
        """End a command for sure: an sshd leaves it running when its channel is closed."""
        with contextlib.suppress(PoolStartError, TimeoutError):
            async with asyncio.timeout(CUT_SECONDS):
                waiting = asyncio.create_task(session.started.wait())
                await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if session.leader is not None and not session.over:
                    await self._script(_CUT, session.leader)
                    await asyncio.wait({work})
        await _ended(work)

    async def _finish(self, cleaning: Coroutine[Any, Any, None]) -> None:
        """See a cleaning through even when whoever waits for it is cancelled."""
        await asyncio.shield(self._later(cleaning))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Session(asyncssh.SSHClientSession[bytes]):
    """The channel of one command."""

    def __init__(self, output: Callable[[bytes], None] | None, *, announced: bool) -> None:
        self._output = output
        self._header: bytearray | None = bytearray() if announced else None
        self._channel: Any = None
        self._room = asyncio.Event()
        self._room.set()
        self._status: int | None = None
        self.started = asyncio.Event()
        self.leader: str | None = None
        self.gone = False
        self.over = False
        self.failure: BaseException | None = None
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def feed(self, data: bytes) -> None:
        """Write its input, no faster than it is read."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            for start in range(0, len(view), CHUNK):
                await self._room.wait()
                self._channel.write(view[start : start + CHUNK])
            self._channel.write_eof()

    def close(self) -> None:
        """Let the channel go."""
        if self._channel is not None:
            self._channel.abort()

    def connection_made(self, chan: Any) -> None:
        """The channel is open."""
        self._channel = chan

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        """What it wrote; before anything else, the shell around it says who leads the group."""
        if self._header is not None:
            self._header += data
            match = _LEADER.search(self._header)
            if match is None:
                return
            data = bytes(self._header[match.end() :])
            self._header = None
            self.gone = match[1] == b"gone"
            self.leader = None if self.gone else match[1].decode()
            self.started.set()
        if data and self._output is not None and self.failure is None:
            try:
                self._output(data)
            except BaseException as error:
                # Raised here it would end the connection, and everybody else's commands with it.
                self.failure = error
                self._end(None)

    def pause_writing(self) -> None:
        """It does not read its input."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It reads again."""
        self._room.set()

    def exit_status_received(self, status: int) -> None:
        """It ended."""
        self._status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        """It was killed, with the shell around it."""
        self._status = 128 + _number(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self.over = True
        self._end(self._status)

    def _end(self, status: int | None) -> None:
        self._room.set()
        self.started.set()
        if not self.ended.done():
            self.ended.set_result(status)


async def _ended(work: asyncio.Task[int]) -> None:
    """Cancel a task, and see its end without minding how it ended."""
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()


def _number(name: str) -> int:
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        return 0


def label(pool: str, node: int) -> str:
    """What a machine's folder is called."""
    return f"{quote(pool, safe='')}-{node}"


async def labels(destination: Destination) -> list[str]:
    """The machines that are on a host, of any pool."""
    machine = SSHMachine("", 0, destination, "", None)
    said = bytearray()
    await machine._script(_LIST, output=said.extend)
    return said.decode(errors="replace").split()


async def way_to(destination: Destination) -> tuple[str, bool]:
    """A host's name or address as the ssh configuration has it, and whether others come before."""
    options = await asyncio.to_thread(resolved, destination)
    return str(options.host), bool(destination.jump or options.tunnel or options.proxy_command)
