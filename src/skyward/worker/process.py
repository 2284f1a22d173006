"""Child processes of an agent: how one starts, announces itself, ends with its agent, is told of.

Each holds a lifeline, a pipe from the agent: when it closes, the child ends itself. A byte on it is
the number of a question: where are you?
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import msgspec

from skyward import kernel
from skyward.worker import fork_server

LEAVE = signal.SIGUSR2
"""The signal by which an executor leaves its hooks and ends; user code may use SIGTERM."""
Show = Callable[[str, bool], None]
"""Shows a line, or, if the second value is true, a state that the next one replaces."""

_HINTS: dict[int, str] = {
    signal.SIGSEGV: "a segmentation fault in C code",
    signal.SIGABRT: "an abort in C code",
    signal.SIGBUS: "a bus error: memory behind a file was gone",
    signal.SIGKILL: "killed from outside",
}


class ChildProcess:
    """A Python module that runs as a process of its own, and ends with its agent.

    The process reads its configuration from its standard input, announces itself with a line on the
    status pipe, and holds the lifeline. It leads a process group, which ends as a whole.
    """

    def __init__(
        self,
        module: str,
        configure: Callable[[int, int], msgspec.Struct],
        *,
        working_directory: str,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        inherited: Iterable[int] = (),
    ) -> None:
        """`configure` gets the descriptors of status and lifeline that the process will have.

        Only for the agent's main thread: the kernel ends a process with the *thread* that started
        it.
        """
        self._status, status = os.pipe()
        held, self._lifeline = os.pipe()
        told, telling = os.pipe()
        passed = (status, held, *inherited)
        request = fork_server.ForkRequest(
            module, dict(environment), working_directory, [0, 1, 2, *passed]
        )
        try:
            streams = (told, stdout, stderr)
            self._process = fork_server.fork(request, (*streams, *passed)) or subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=told,
                stdout=stdout,
                stderr=stderr,
                pass_fds=passed,
                env=environment,
                cwd=working_directory,
                start_new_session=True,
            )
        except BaseException:
            os.close(telling)
            raise
        finally:
            for end in (status, held, told):
                os.close(end)
        self.pid = self._process.pid
        # What is written goes into the pipe when that is closed; the process may have ended.
        with contextlib.suppress(BrokenPipeError), os.fdopen(telling, "wb") as pipe:
            pipe.write(msgspec.json.encode(configure(status, held)))

    @property
    def stderr(self) -> IO[bytes]:
        """The process's standard error, if the process was started with a pipe for it."""
        assert self._process.stderr is not None
        return self._process.stderr

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def announcement(self, show: Show | None = None) -> dict[str, Any] | None:
        """Wait for the line that the process announces itself with; None if it ends without one.

        Before, the process may show what it does: lines, and states that the next one replaces.
        """
        with os.fdopen(self._status, "rb") as lines:
            for line in lines:
                said = msgspec.json.decode(line, type=dict[str, Any])
                if show is None or "shows" not in said:
                    return said
                show(said["shows"], said["transient"])
        return None

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end of the process; `subprocess.TimeoutExpired` if it takes longer."""
        return self._process.wait(seconds)

    def follow(self) -> int:
        """Wait for the end of the process, and end its group; call it only once."""
        code = self._process.wait()
        kill_group(self.pid)
        os.close(self._lifeline)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self._process.send_signal(number)

    def ask(self, number: int) -> bool:
        """Ask the process, over its lifeline, where it is; False if it has ended."""
        try:
            return os.write(self._lifeline, bytes([number])) == 1
        except OSError:
            return False

    def end(self) -> None:
        """Kill the process and everything that it started."""
        kill_group(self.pid)


def ending(code: int, *, out_of_memory: bool = False) -> str:
    """How a process ended, in words, from the code that `wait` returned.

    >>> ending(-11)
    'its process was killed by SIGSEGV (a segmentation fault in C code)'
    """
    if code >= 0:
        return f"its process ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        # Real-time signals between the first and the last have no name.
        name = f"signal {-code}"
    hint = _HINTS.get(-code, "")
    if out_of_memory and -code == signal.SIGKILL:
        hint = "the machine ran out of memory; use less, or ask for more with memory_gb"
    return f"its process was killed by {name}" + (f" ({hint})" if hint else "")


def oom_kills() -> int:
    """How many processes of this machine the kernel has killed for lack of memory."""
    if not kernel.IS_LINUX:
        return 0
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as lines:
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def kill_group(pid: int) -> None:
    """Kill a process that leads a group, and everything in that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# In the child.


def hold_lifeline(descriptor: int, asked: Callable[[int], None]) -> None:
    """End this process and its group when the agent closes the pipe, or dies.

    `asked` is called with the number of every question that the agent asks.
    """
    kernel.end_with_parent()
    threading.Thread(
        target=_watch, args=(descriptor, asked), name="skyward-lifeline", daemon=True
    ).start()


def _watch(descriptor: int, asked: Callable[[int], None]) -> None:
    # First the answer to a question that nobody asked: it tells the agent which thread this is.
    number = b"\0"
    while number:
        try:
            asked(number[0])
        except Exception:
            # The process must still end with its agent, which notices that no answer comes.
            traceback.print_exc(file=sys.__stderr__)
        number = os.read(descriptor, 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
