"""A program: the process that runs one command for the agent, and ends what the command started.

Its standard streams are those of the command. On the control pipe it reads its configuration, with
the length in front, and then the numbers of signals for the command, a byte each; when the agent
closes the pipe or dies, everything ends. On the status pipe it says that the command runs, and how
it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import msgspec

from skyward import kernel
from skyward.worker import descendants
from skyward.worker.output_log import OutputLog

LENGTH = struct.Struct("<I")
"""The length of the configuration, in front of it."""
ENDED = "ended.json"
_PIECE = 64 << 10


class ProgramConfig(msgspec.Struct):
    """Everything the process needs to know of its command."""

    command: list[str]
    working_directory: str
    environment: dict[str, str]
    status: int
    """Descriptor on which the process tells the agent of the command."""
    terminal: bool = False
    """Whether the standard streams are a terminal that the command controls."""
    job: str = ""
    """A folder in which the command's output and its end are kept; empty to keep nothing."""
    keep: int = 0
    """How many bytes of output are kept."""


class ProgramStatus(msgspec.Struct, omit_defaults=True):
    """A line on the status pipe."""

    pid: int = 0
    problem: str = ""
    """Why the command could not be started."""
    code: int | None = None
    """The exit code as a shell tells it: 130 if SIGINT has ended the command."""


class ProgramEnd(msgspec.Struct):
    """How a kept command has ended."""

    when: float
    code: int | None = None
    """None if the node's agent ended before the command did."""
    problem: str = ""


class _Supervisor:
    def __init__(self, config: ProgramConfig, control: int) -> None:
        self._config, self._control = config, control
        woken, waking = os.pipe()
        for end in (woken, waking, control):
            os.set_blocking(end, False)
        self._woken = woken
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self._output = -1
        self._log: OutputLog | None = None
        self._code: int | None = None

    def run(self) -> None:
        """Start the command, and stay until it has ended and everything below it as well."""
        inner = None
        if self._config.job:
            self._output, inner = os.pipe()
            os.set_blocking(self._output, False)
            self._log = OutputLog(Path(self._config.job, "output"), self._config.keep)
        try:
            child = self._started(inner)
        except (OSError, ValueError, subprocess.SubprocessError) as problem:
            said = _why(problem, self._config)
            self._note_end(said)
            self._tell(ProgramStatus(problem=said))
            return
        finally:
            if inner is not None:
                os.close(inner)
        self._let_go_of_streams()
        self._tell(ProgramStatus(pid=child.pid))
        self._watch(child)
        _signal(child.pid, signal.SIGHUP)
        descendants.end_all()
        # Without the kernel's help, what the command has left in its group is an orphan by now.
        _signal(child.pid, signal.SIGKILL)
        self._drain()
        self._note_end()
        self._tell(
            ProgramStatus(code=self._code if self._code is not None else 128 + signal.SIGHUP)
        )

    def _started(self, output: int | None) -> subprocess.Popen[bytes]:
        config = self._config
        return subprocess.Popen(
            config.command,
            stdin=subprocess.DEVNULL if config.job else None,
            stdout=output,
            stderr=output,
            cwd=config.working_directory,
            env=config.environment,
            start_new_session=True,
            # Safe: this process has one thread.
            preexec_fn=self._prepare_child,
        )

    def _prepare_child(self) -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if kernel.IS_LINUX:
            # If this process is killed, nobody is left to end the command.
            pr_set_pdeathsig = 1
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if self._config.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def _let_go_of_streams(self) -> None:
        """Give up the command's streams: their readers wait until nobody can write."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(nothing)

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        """Wait until the command ends, or must end."""
        poll = select.poll()
        for end in (self._control, self._woken, self._output):
            if end >= 0:
                poll.register(end, select.POLLIN)
        while self._code is None:
            for descriptor, _ in poll.poll():
                if descriptor == self._control:
                    numbers = os.read(self._control, 4096)
                    if not numbers:
                        return
                    for number in numbers:
                        _signal(child.pid, number)
                elif descriptor == self._woken:
                    if signal.SIGTERM in os.read(self._woken, 4096):
                        return
                    self._reap(child)
                elif not self._read_output():
                    poll.unregister(self._output)

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == child.pid:
                    code = child.returncode = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code

    def _read_output(self) -> bool:
        """Keep what the command has written; whether there may be more."""
        data = os.read(self._output, _PIECE)
        # On a full disk the command goes on, and its output is lost.
        with contextlib.suppress(OSError):
            if self._log is not None:
                self._log.write(data)
        return bool(data)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._output >= 0 and self._read_output():
                pass

    def _note_end(self, problem: str = "") -> None:
        if not self._config.job:
            return
        if self._log is not None:
            # On some file systems, the last write fails here.
            with contextlib.suppress(OSError):
                self._log.close()
        mark = Path(self._config.job, ENDED)
        with contextlib.suppress(OSError):
            new = mark.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(ProgramEnd(time.time(), self._code, problem)))
            new.rename(mark)

    def _tell(self, status: ProgramStatus) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._config.status, msgspec.json.encode(status) + b"\n")


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError, ValueError, OSError):
        os.killpg(group, number)


def _why(problem: Exception, config: ProgramConfig) -> str:
    """Why a command could not be started, in words."""
    name = config.command[0] if config.command else ""
    if isinstance(problem, FileNotFoundError):
        if problem.filename == config.working_directory:
            return f"there is no folder {config.working_directory}"
        return f"there is no program {name!r} on the node"
    if isinstance(problem, PermissionError):
        return f"{name!r} may not be run: {problem.strerror}"
    return f"{name!r} could not be started: {problem}"


def _configuration(control: int) -> ProgramConfig | None:
    """The configuration, and no byte after it: signals may follow."""
    length = _exactly(control, LENGTH.size)
    told = _exactly(control, *LENGTH.unpack(length)) if length else b""
    return msgspec.json.decode(told, type=ProgramConfig) if told else None


def _exactly(descriptor: int, count: int) -> bytes:
    """So many bytes; none if the pipe ends before."""
    read = b""
    while len(read) < count:
        data = os.read(descriptor, count - len(read))
        if not data:
            return b""
        read += data
    return read


def main() -> None:
    """Run the command that the control pipe, whose number is the argument, describes."""
    control = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descendants.adopt_orphans()
    config = _configuration(control)
    if config is not None:
        _Supervisor(config, control).run()


if __name__ == "__main__":
    main()
