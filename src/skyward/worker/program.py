"""A program: one command of a node, in the care of a process that ends what the command started.

`RunningProgram` is the agent's end. The process's standard streams are those of the command. On the
control pipe the process reads its configuration, with the length in front, and then the numbers of
signals for the command, a byte each; when the agent closes the pipe or dies, everything ends. On
the status pipe it says that the command runs, and how it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from skyward import kernel
from skyward.worker.output_log import OutputLog
from skyward.worker.process import kill_group

if TYPE_CHECKING:
    import psutil

END_SECONDS = 5.0
"""How long a program's process may take to end its command and what that has started."""
SIGNAL_MAX = 64
_LENGTH = struct.Struct("<I")
"""The length of the configuration, in front of it."""
TERMINATE_SECONDS = 1.0
"""How long processes have to end on SIGTERM before they are killed."""
_PIECE = 64 << 10


class ProgramConfig(msgspec.Struct):
    """Everything the process needs to know of its command."""

    command: list[str]
    working_directory: str
    environment: dict[str, str]
    status: int = -1
    """Descriptor on which the process tells the agent of the command."""
    terminal: bool = False
    """Whether the standard streams are a terminal that the command controls."""
    log: str = ""
    """A folder in which the command's output is kept; empty to keep nothing."""
    keep: int = 0
    """How many bytes of output are kept."""
    stays: bool = False
    """Whether what a command leaves behind goes on after it, until the agent ends it."""


class ProgramStatus(msgspec.Struct, omit_defaults=True):
    """A line on the status pipe."""

    pid: int = 0
    problem: str = ""
    """Why the command could not be started."""
    code: int | None = None
    """The exit code as a shell tells it: 130 if SIGINT has ended the command. None if the agent,
    or its end, has ended it."""


class RunningProgram:
    """One command on this node, in the care of a process of its own.

    The command ends when `close` is called or the agent ends, with everything that it has started.
    """

    def __init__(self, config: ProgramConfig, streams: Sequence[int]) -> None:
        """Start the command with these descriptors as its standard streams; they stay open here."""
        self._status, status = os.pipe()
        control, self._control = os.pipe()
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skyward.worker.program", str(control)],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                pass_fds=(status, control),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            os.close(self._control)
            raise
        finally:
            os.close(status)
            os.close(control)
        told = msgspec.json.encode(msgspec.structs.replace(config, status=status))
        told = _LENGTH.pack(len(told)) + told
        with contextlib.suppress(BrokenPipeError):
            while told:
                told = told[os.write(self._control, told) :]
        self._lines: IO[bytes] = os.fdopen(self._status, "rb")

    def next_status(self) -> ProgramStatus | None:
        """Wait for what the process says of its command: that it runs, then how it has ended.

        None if the process was killed. One thread calls this.
        """
        line = self._lines.readline()
        return msgspec.json.decode(line, type=ProgramStatus) if line else None

    def signal(self, number: int) -> None:
        """Send a signal to the command and its group; nothing happens if it has ended."""
        if not 0 < number <= SIGNAL_MAX:
            raise ValueError(f"{number} is no signal")
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._control >= 0:
                os.write(self._control, bytes([number]))

    def end(self) -> None:
        """Have the command and everything below it end; any thread may call this."""
        with self._lock:
            if self._control >= 0:
                os.close(self._control)
                self._control = -1

    def wait(self) -> None:
        """Wait until the program's process has ended by itself."""
        self._process.wait()

    def close(self) -> None:
        """End the command if it runs, and wait until it has ended."""
        self.end()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            kill_group(self._process.pid)
            self._process.wait()

    def forget(self) -> None:
        """Close the status pipe, once nobody reads it."""
        self._lines.close()


class _Supervisor:
    """The process's end: starts the command, and ends all that is below it."""

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
        self._alone = False
        """Whether no process is left below this one; known only where the kernel tells."""

    def run(self) -> None:
        """Start the command, and stay until it has ended and everything below it as well."""
        inner = None
        if self._config.log:
            self._output, inner = os.pipe()
            os.set_blocking(self._output, False)
            self._log = OutputLog(Path(self._config.log), self._config.keep)
        try:
            child = self._started(inner)
        except (OSError, ValueError, subprocess.SubprocessError) as problem:
            self._tell(ProgramStatus(problem=_why(problem, self._config)))
            return
        finally:
            if inner is not None:
                os.close(inner)
        self._let_go_of_streams()
        self._tell(ProgramStatus(pid=child.pid))
        goes_on = self._watch(child, lambda: self._code is not None)
        if goes_on and self._config.stays and self._code == 0:
            self._drain()
            self._tell(ProgramStatus(code=0))
            self._reap(child)
            self._watch(child, lambda: self._alone)
        # Long after the command has ended, its number may be another's.
        has_group = not (self._config.stays and self._code is not None and kernel.IS_LINUX)
        if has_group:
            _signal(child.pid, signal.SIGHUP)
        end_descendants()
        if has_group:
            # Without the kernel's help, what the command has left in its group is an orphan by now.
            _signal(child.pid, signal.SIGKILL)
        self._drain()
        if self._log is not None:
            # On some file systems, the last write fails here.
            with contextlib.suppress(OSError):
                self._log.close()
                # If the agent has ended, this is how the next one knows when.
                os.utime(self._config.log)
        self._tell(ProgramStatus(code=self._code))

    def _started(self, output: int | None) -> subprocess.Popen[bytes]:
        config = self._config
        return subprocess.Popen(
            config.command,
            stdin=subprocess.DEVNULL if config.log else None,
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
        # If this process is killed, nobody is left to end the command.
        kernel.end_with_parent()
        if self._config.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def _let_go_of_streams(self) -> None:
        """Give up the command's streams: their readers wait until nobody can write."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(nothing)

    def _watch(self, child: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> bool:
        """Wait until it is over, or must end; whether nobody has ended it."""
        poll = select.poll()
        for end in (self._control, self._woken, self._output):
            if end >= 0:
                poll.register(end, select.POLLIN)
        while not is_over():
            for descriptor, _ in poll.poll():
                if descriptor == self._control:
                    numbers = os.read(self._control, 4096)
                    if not numbers:
                        return False
                    for number in numbers:
                        _signal(child.pid, number)
                elif descriptor == self._woken:
                    if signal.SIGTERM in os.read(self._woken, 4096):
                        return False
                    self._reap(child)
                elif not self._read_output():
                    poll.unregister(self._output)
        return True

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == child.pid:
                    code = child.returncode = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code
        except ChildProcessError:
            # Elsewhere, a daemon may be there all the same: nobody adopts it.
            self._alone = kernel.IS_LINUX

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

    def _tell(self, status: ProgramStatus) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._config.status, msgspec.json.encode(status) + b"\n")


# The processes below this one, whatever sessions they have. On Linux this process adopts orphans,
# so that a daemon stays its descendant. Elsewhere, a daemon with a session of its own survives.


def end_descendants(seconds: float = TERMINATE_SECONDS) -> None:
    """Terminate, then kill, every descendant of this process."""
    if _reap():
        return
    # Imported here: it takes 20 ms, and most programs leave nothing behind.
    import psutil

    deadline = time.monotonic() + seconds
    for child in _descendants():
        with contextlib.suppress(psutil.Error):
            child.terminate()
    while _descendants() and time.monotonic() < deadline:
        time.sleep(0.01)
    # In a loop: a process that forks meanwhile leaves a child, which this process adopts.
    while left := _descendants():
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)


def _reap() -> bool:
    """Take note of children that have ended; whether none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _descendants() -> list[psutil.Process]:
    import psutil

    _reap()
    return list(psutil.Process().children(recursive=True))


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
    length = _exactly(control, _LENGTH.size)
    told = _exactly(control, *_LENGTH.unpack(length)) if length else b""
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
    kernel.adopt_orphans()
    config = _configuration(control)
    if config is not None:
        _Supervisor(config, control).run()


if __name__ == "__main__":
    main()
