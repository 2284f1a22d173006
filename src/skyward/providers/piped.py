"""Pipes: commands run on a machine through the streams of programs that are started there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import resources

from skyward.errors import PoolStartError, UnreachableError

CHUNK = 256 << 10
KILL_SECONDS = 10.0
"""How long a command may take to begin, and to end, after its caller has given up."""

# The mark is another one for every command. The first line has the number of the shell around the
# command, the last one the command's status. A login shell may print a greeting before the first.
# Where input cannot end, `head` counts its bytes. What the command does not read is read by `cat`:
# bytes that nobody reads would block the whole connection. The shell keeps its own standard error
# open: containerd ends a program's input with the first of its output streams.
_RUN = r"""
printf '\001%s %s\n' "$0" "$shell"
size=$1; shift
if [ "$size" ]; then
    head -c "$size" | {
        ( exec "$@" 2>&1 )
        status=$?
        cat >/dev/null
        after
        printf '\001%s %s\n' "$0" "$status"
    }
else
    ( exec "$@" 2>&1 )
    status=$?
    rest
    after
    printf '\001%s %s\n' "$0" "$status"
fi
"""
# The shell leads a group of processes, or else what it has started is found by parents.
_KILL = r"""
shell=$1; all=$1; next=$1
while [ -n "$next" ]; do
    found=
    for stat in /proc/[0-9]*/stat; do
        read -r line 2>/dev/null <"$stat" || continue
        set -- ${line##*) }
        for one in $next; do [ "$2" = "$one" ] && found="$found ${line%% *}"; done
    done
    all="$all$found"; next=$found
done
kill -KILL "-$shell" 2>/dev/null
kill -KILL $all 2>/dev/null
after
"""
# Where the bootstrap has installed Python, the node's folder has a link to it.
_PYTHON = r"""
node=${3#unix:}
node=${node%/*}/python
if [ -x "$node" ]; then exec "$node" -c "$@"; fi
exec "$0" -c "$@"
"""
_LOADER = """\
import os, sys
text, size = b"", int(sys.argv.pop(1))
while len(text) < size: text += os.read(0, size - len(text)) or os._exit(1)
exec(compile(text, "relay", "exec"))
"""


class Piped:
    """What runs a command through the streams of a shell, on any machine that has one.

    A subclass says how a program is started, and why the streams of one were lost.
    """

    before, after = ":", ":"
    """What the shell around a command, whose number is in `$shell`, does before and after it."""
    ends_input = True
    """Whether a program's input ends when its socket is shut down for writing."""
    begins_again = False
    """Whether a command is begun again, once, if its streams end before its shell says a word.

    It may run twice then, so all that are run there have to bear that.
    """
    reads_rest = False
    """Whether the shell has to read what its command did not, before it says the status."""

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """A socket that is the standard input and output of a program on the machine.

        What the program writes to its standard error is dropped. The socket ends with the program;
        the program need not end with the socket. Raises an `OSError` or a `PoolStartError` if
        there is no program.
        """
        raise NotImplementedError

    async def why_lost(self) -> str:
        """Why the streams of a command have ended before the command."""
        raise NotImplementedError

    async def settle(self, end: socket.socket) -> None:
        """Wait for the end of what led to a program that has ended, and whose socket is closed."""

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a command below a shell; cancelling kills it."""

        async def once() -> _Command:
            running = await self._begin(command, input, output)
            work = asyncio.create_task(running.follow(input))
            try:
                await asyncio.shield(work)
            except BaseException:
                # Also if the caller is cancelled again.
                await asyncio.shield(asyncio.create_task(self._kill(running, work)))
                raise
            return running

        return await self._ended(once)

    async def call(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a command that ends by itself, also if the caller is cancelled."""

        async def once() -> _Command:
            running = await self._begin(command, input, output)
            await running.follow(input)
            return running

        return await self._ended(once)

    async def _ended(self, once: Callable[[], Awaitable[_Command]]) -> int:
        """The status of a command, which `once` waits for."""
        running = await once()
        if running.status is None and not running.shell and self.begins_again:
            running = await once()
        if running.status is None:
            raise UnreachableError(await self.why_lost())
        await self.settle(running.end)
        return running.status

    async def _begin(
        self, command: Sequence[str], input: bytes, output: Callable[[bytes], None] | None
    ) -> _Command:
        mark = uuid.uuid4().hex
        size = "" if self.ends_input else str(len(input))
        rest = "cat >/dev/null" if self.reads_rest else ":"
        functions = f"after() {{ {self.after}; }}; rest() {{ {rest}; }}"
        script = f"{functions}; shell=$$; {self.before}\n{_RUN}"
        end = await self.pipe(["sh", "-c", script, mark, size, *command])
        return _Command(end, mark.encode(), output, ends_input=self.ends_input)

    async def _kill(self, running: _Command, work: asyncio.Task[int | None]) -> None:
        """Kill a command that nobody waits for, with what it has started."""
        with contextlib.suppress(OSError, PoolStartError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                started = asyncio.create_task(running.started.wait())
                await asyncio.wait({work, started}, return_when=asyncio.FIRST_COMPLETED)
                started.cancel()
                if running.shell and running.status is None:
                    script = f"after() {{ {self.after}; }}\n{_KILL}"
                    with await self.pipe(["sh", "-c", script, "sh", running.shell]) as killing:
                        killing.setblocking(False)
                        while await asyncio.get_running_loop().sock_recv(killing, CHUNK):
                            pass
        work.cancel()
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()


class Kept(Piped):
    """What runs its programs below a keeper, which `dial` reaches by the name "keeper"."""

    async def dial(self, endpoint: str) -> socket.socket:
        """A blocking socket to an endpoint of the machine, or to its keeper."""
        raise NotImplementedError

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Have the keeper run a program."""
        end = await self.dial("keeper")
        asked = json.dumps({"ask": "run", "command": list(command)})
        end.setblocking(False)
        try:
            # If nobody takes it, the socket is at its end.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(end, asked.encode() + b"\n")
        except BaseException:
            end.close()
            raise
        end.setblocking(True)
        return end


class _Command:
    """A command that runs, and the socket that is its input and output."""

    def __init__(
        self,
        end: socket.socket,
        mark: bytes,
        output: Callable[[bytes], None] | None,
        *,
        ends_input: bool,
    ) -> None:
        end.setblocking(False)
        self.end, self._output, self._ends_input = end, output, ends_input
        self._mark = b"\1" + mark + b" "
        self._line = re.compile(self._mark + rb"(\d+)\n")
        self.started = asyncio.Event()
        self.shell = ""
        """The number of the shell around the command; empty until it has begun."""
        self.status: int | None = None

    async def follow(self, input: bytes) -> int | None:
        """Write the input, read the output, and close the socket; gives the status, if it came."""
        feeding = asyncio.create_task(self._feed(input))
        try:
            return await self._read()
        finally:
            feeding.cancel()
            try:
                await asyncio.wait({feeding})
            finally:
                # Also if it is killed at this very moment.
                self.end.close()

    async def _feed(self, input: bytes) -> None:
        # A command that does not read all of its input may have ended.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.end, input)
            if self._ends_input:
                self.end.shutdown(socket.SHUT_WR)

    async def _read(self) -> int | None:
        loop, held = asyncio.get_running_loop(), b""
        while self.status is None:
            try:
                data = await loop.sock_recv(self.end, CHUNK)
            except OSError:
                data = b""
            if not data:
                break
            held += data
            if not self.shell:
                first = self._line.search(held)
                if first is None:
                    continue
                self.shell, held = first[1].decode(), held[first.end() :]
                self.started.set()
            last = self._line.search(held)
            if last is not None:
                self.status, held = int(last[1]), held[: last.start()]
            whole = len(held) if last is not None else self._whole(held)
            said, held = held[:whole], held[whole:]
            if said and self._output is not None:
                self._output(said)
        return self.status

    def _whole(self, held: bytes) -> int:
        """How many bytes of the output cannot be the begin of the last line."""
        at = held.rfind(self._mark[:1], -len(self._mark) - 5)
        begins = at >= 0 and (held.startswith(self._mark, at) or self._mark.startswith(held[at:]))
        return at if begins else len(held)


@cache
def program(name: str) -> str:
    """The text of a program for a node: "keeper" or "relay"."""
    return (resources.files("skyward.providers.on_node") / f"{name}.py").read_text("utf-8")


def relay_command(python: str | None, endpoint: str, *options: str) -> tuple[list[str], bytes]:
    """The command of a relay to an endpoint, and what is to be sent to it first."""
    text = program("relay").encode()
    loaded = [_LOADER, str(len(text)), endpoint, *options]
    return ["sh", "-c", _PYTHON, python or "python3", *loaded], text
