"""Where Slurm's commands run: on this machine, or on a login node that is reached over SSH."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skyward.errors import ConfigurationError, UnreachableError
from skyward.providers.hosts import Destination
from skyward.providers.on_node.keeper import KNOWN_ENTRIES, home_entries

if TYPE_CHECKING:
    from skyward.providers.hosts.machine import HostConnections, SSHHost

CALL_SECONDS = 60.0
"""How long a command of Slurm's may take: its controller may be busy."""
CLOSE_SECONDS = 3.0
NOT_FOUND = 127
_LOCAL = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("TMPDIR", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK", "DISPLAY", "OLDPWD", "PWD", "INVOCATION_ID"),
)
"""Variables that name things of the login node, which Slurm would take to the others."""
_OF_SBATCH = ("SBATCH_CLUSTERS",)
"""Variables that lead `sbatch` to where the other commands do not look."""
_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Of the variables that a job of Slurm's has, those that another job may have, too."""


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """What a command said, and its exit status."""

    status: int
    output: str
    words: str
    """What it wrote to its standard error."""


class Login(Protocol):
    """A place where Slurm's commands run."""

    @property
    def name(self) -> str:
        """The place, for people."""

    def open(self) -> None:
        """Keep what connects to the place, until `close`."""

    async def call(self, command: Sequence[str], input: bytes = b"") -> CommandAnswer:
        """Run a command to its end; raises `UnreachableError` if the place is out of reach."""

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """A blocking socket that is a command's standard input and output."""

    async def connect(self, address: str, port: int) -> socket.socket:
        """Connect to a port of a machine that the place can reach."""

    async def home(self) -> dict[str, int]:
        """The file system's numbers of well-known entries of the home folder; empty if unknown."""

    async def close(self) -> None:
        """Close the connections."""


def _answer(status: int, output: bytes | bytearray, words: bytes | bytearray) -> CommandAnswer:
    return CommandAnswer(status, output.decode(errors="replace"), words.decode(errors="replace"))


def _silent(command: str, login: Login) -> UnreachableError:
    return UnreachableError(
        f"`{command}` on {login.name} did not answer for {CALL_SECONDS:g} s; is the controller of "
        "Slurm up? see `scontrol ping`"
    )


def here_environment() -> dict[str, str]:
    """This process's environment for Slurm's commands, which take it to the nodes.

    If this process runs in a job, that job's variables would be options of its commands.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (*_LOCAL, *_OF_SBATCH)
        and (not name.startswith("SLURM_") or name in _OF_SLURM)
    }


class Here:
    """This machine, which is a login node of the cluster."""

    name = "this machine"

    def __init__(self) -> None:
        self._background: set[asyncio.Task[None]] = set()
        self._processes: set[asyncio.subprocess.Process] = set()

    def open(self) -> None:
        """Nothing connects to this machine."""

    async def call(self, command: Sequence[str], input: bytes = b"") -> CommandAnswer:
        """Run a command as a child process."""
        process = await self._start(command, asyncio.subprocess.PIPE, asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                output, words = await process.communicate(input)
        except TimeoutError:
            raise _silent(command[0], self) from None
        finally:
            await self._end(process)
        return _answer(process.returncode or 0, output, words)

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Give one end of a socket pair to a child process."""
        ours, theirs = socket.socketpair()
        try:
            process = await self._start(command, theirs.fileno(), theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._processes.add(process)
        self._later(self._reap(process))
        return ours

    async def connect(self, address: str, port: int) -> socket.socket:
        """Connect directly."""
        return await asyncio.to_thread(socket.create_connection, (address, port), CALL_SECONDS)

    async def home(self) -> dict[str, int]:
        """Look at the folder itself."""
        return home_entries()

    async def close(self) -> None:
        """End the processes whose sockets are still open."""
        for process in list(self._processes):
            await self._end(process)
        while self._background:
            await asyncio.wait(self._background)

    async def _start(
        self, command: Sequence[str], input: int, output: int
    ) -> asyncio.subprocess.Process:
        speaks = output == asyncio.subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=input,
                stdout=output,
                stderr=asyncio.subprocess.PIPE if speaks else asyncio.subprocess.DEVNULL,
                env=here_environment(),
                # Ctrl-C in a terminal is for the client, which decides what ends.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no `{command[0]}` on this machine; run this on a login node of the "
                'Slurm cluster, or name one: Slurm(login="me@cluster")'
            ) from None

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # srun passes a first SIGTERM on, and goes on waiting.
                process.kill()
            await process.wait()

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._processes.discard(process)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Remote:
    """A login node that is reached over SSH."""

    def __init__(self, name: str, destination: Destination) -> None:
        self.name, self._destination = name, destination
        self._machine: SSHHost | None = None
        self._held: HostConnections | None = None
        self._in_login_shell = False
        """Whether only a login shell finds Slurm's commands."""

    def open(self) -> None:
        """Hold the connection, so that not every command makes a new one."""
        from skyward.providers.hosts.machine import hold

        self._held = self._held or hold(self._destination)

    async def call(self, command: Sequence[str], input: bytes = b"") -> CommandAnswer:
        """Run a command as the login shell's only one."""
        answer = await self._call(self._line(command), input)
        if answer.status == NOT_FOUND and not self._in_login_shell:
            # Many sites put Slurm on the path in files that only a login shell reads.
            self._in_login_shell = True
            answer = await self._call(self._line(command), input)
            if answer.status == NOT_FOUND:
                self._in_login_shell = False
                raise ConfigurationError(
                    f"Slurm(login={self.name!r}): there is no `{command[0]}` on that host; name a "
                    "login node of the cluster"
                )
        return answer

    def _line(self, command: Sequence[str]) -> str:
        line = shlex.join(command)
        return f"bash -lc {shlex.quote(f'exec {line}')}" if self._in_login_shell else line

    async def _call(self, line: str, input: bytes) -> CommandAnswer:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return _answer(*await self._host().answer(line, input))
        except TimeoutError:
            raise _silent(line.split()[0], self) from None

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Bridge a socket to the channel of a command."""
        return await self._host().stream(self._line(command))

    async def connect(self, address: str, port: int) -> socket.socket:
        """Connect through the login node."""
        at = f"[{address}]" if ":" in address else address
        return await self._host().dial(f"tcp:{at}:{port}")

    async def home(self) -> dict[str, int]:
        """Ask `stat`; the folder in which a command of SSH runs is the home folder."""
        command = ["stat", "--dereference", "--format=%i %n", *KNOWN_ENTRIES]
        answer = await self._call(shlex.join(command), b"")
        pairs = (line.split(" ", 1) for line in answer.output.splitlines() if " " in line)
        return {name: int(number) for number, name in pairs if number.isdigit()}

    async def close(self) -> None:
        """Close the connection, if no other pool uses it."""
        from skyward.providers.hosts.machine import release

        machine, self._machine = self._machine, None
        if machine is not None:
            await machine.leave()
        held, self._held = self._held, None
        if held is not None:
            await release(held)

    def _host(self) -> SSHHost:
        from skyward.providers.hosts.machine import SSHHost

        if self._machine is None:
            self._machine = SSHHost(self._destination)
        return self._machine
