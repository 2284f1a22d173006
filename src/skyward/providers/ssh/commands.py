"""Commands on an SSH host: the scripts that run and end them, and the channel of each."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import signal
from collections.abc import Callable
from typing import Any

import asyncssh

LONGEST_COMMAND = 120_000
"""Linux takes 131,072 bytes in one argument, and sshd hands the command over as one."""
CHUNK = 256 << 10

_FOLDER = 'd="${XDG_CACHE_HOME:-$HOME/.cache}/skyward/machines/$1"; '
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
RUN = (
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
KILL = _FOLDER + 'kill -KILL "-$2" 2>/dev/null || kill -KILL "$2" 2>/dev/null; rm -f "$d/$2.group"'
HAS_FOLDER = _FOLDER + '[ -d "$d" ]'
# The user's login shell may print a greeting before that line; it is not the command's output.
_LEADER = re.compile(rb"^skyward (\d+|gone)\n", re.MULTILINE)
LIST_FOLDERS = 'cd "${XDG_CACHE_HOME:-$HOME/.cache}/skyward/machines" 2>/dev/null && ls -1 || :'


class CommandSession(asyncssh.SSHClientSession[bytes]):
    """The channel of one command."""

    def __init__(
        self,
        output: Callable[[bytes], None] | None,
        *,
        announced: bool,
        errors: Callable[[bytes], None] | None = None,
    ) -> None:
        """Without `errors`, `output` gets the bytes of both streams."""
        self._output, self._errors = output, errors
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
        """Write the command's input, no faster than the command reads it."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            for start in range(0, len(view), CHUNK):
                await self._room.wait()
                self._channel.write(view[start : start + CHUNK])
            self._channel.write_eof()

    def close(self) -> None:
        """Close the channel at once."""
        if self._channel is not None:
            self._channel.abort()

    def connection_made(self, chan: Any) -> None:
        """Keep the channel."""
        self._channel = chan

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        """Pass output on; first comes a line of the shell around the command, with its number."""
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
        take = self._errors if datatype is not None and self._errors else self._output
        if data and take is not None and self.failure is None:
            try:
                take(data)
            except BaseException as error:
                # Raised here, it would end the connection and the commands of all others on it.
                self.failure = error
                self._end(None)

    def pause_writing(self) -> None:
        """Stop writing: the command does not read its input."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Write again: the command reads."""
        self._room.set()

    def exit_status_received(self, status: int) -> None:
        """Keep the exit status."""
        self._status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        """Keep the signal that killed the command and the shell around it."""
        self._status = 128 + _number(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session: the channel is closed."""
        self.over = True
        self._end(self._status)

    def _end(self, status: int | None) -> None:
        self._room.set()
        self.started.set()
        if not self.ended.done():
            self.ended.set_result(status)


def _number(name: str) -> int:
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        return 0


def command_line(script: str, *arguments: str) -> str:
    """A shell script with its arguments as one line, which any login shell understands."""
    return "exec sh -c " + " ".join(shlex.quote(part) for part in (script, "sh", *arguments))
