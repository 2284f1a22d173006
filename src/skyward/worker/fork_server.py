"""The fork server: a process that forks an agent's executors, with their modules imported.

The agent forks it before the agent has threads. For each executor it forks twice: the kernel gives
an orphan to the nearest process above that adopts orphans, so the executor becomes the agent's
child. An orphan of somebody else that comes in that moment becomes the agent's child as well.

Executors start as any other program does elsewhere than on Linux, and where a variable is set that
a program reads when it starts. All executors of one fork server have the same secret for hashes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

import msgspec

from skyward import kernel

_AT_START = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON", "SKYWARD_", "TZ")
"""How variables begin that programs read when they start, or our modules when imported."""
_REQUEST_SIZE = 1 << 20
_DESCRIPTORS_MAX = 32
_PATIENCE_SECONDS = 60.0
"""How long a process may take to be forked, before the next ones start as programs."""
_SHOWN_AS = "skyward.fork_server"
"""In place of the agent's name, which has no room for more."""
_POLL_SECONDS = 0.005
"""How often to look for the end of a process, if somebody waits for a limited time."""


class ForkRequest(msgspec.Struct):
    """A process that a fork server is to start; its descriptors travel with it."""

    module: str
    """The module whose `main` it runs."""
    environment: dict[str, str]
    working_directory: str
    numbers: list[int]
    """The numbers that the descriptors get in the process."""


class Forked:
    """A child of this process that a fork server has forked; has what we use of `Popen`."""

    stdin = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; `subprocess.TimeoutExpired` if it takes longer."""
        if timeout is None and self.returncode is None:
            # Another thread may be the one that takes the exit code.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        deadline = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The agent's end."""

    def __init__(self, module: str) -> None:
        """Fork the server, which imports the module; only for a process with one thread."""
        self.module = module
        self._began_with = _at_start(os.environ)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        # Kernels before 4.11 look only at processes that were forked when their parent adopted.
        kernel.adopt_orphans()
        try:
            self._pid = os.fork()
        except OSError:
            self._ours.close()
            theirs.close()
            raise
        finally:
            kernel.adopt_orphans(False)
        if self._pid == 0:
            _serve(theirs, parent, module)
        theirs.close()
        self._ours.settimeout(_PATIENCE_SECONDS)
        self.ended = False

    def fork(self, request: ForkRequest, descriptors: Sequence[int]) -> Forked | None:
        """A process; None if it has to start as a program. Only for the agent's main thread."""
        if self.ended or _at_start(request.environment) != self._began_with:
            return None
        try:
            message = msgspec.json.encode(request)
        except UnicodeError:
            # Variables and folders may be any bytes.
            return None
        if len(message) > _REQUEST_SIZE or not kernel.adopt_orphans():
            return None
        said = b""
        try:
            # The server may have been killed, or stand still.
            with contextlib.suppress(OSError):
                socket.send_fds(self._ours, [message], descriptors)
                said = self._ours.recv(_REQUEST_SIZE)
        finally:
            kernel.adopt_orphans(False)
        if not said:
            self.end()
        if (pid := int(said or 0)) < 0:
            raise OSError(-pid, os.strerror(-pid))
        return Forked(pid) if pid else None

    def end(self) -> None:
        """End the server, which may be about to start what it was asked for; its children stay."""
        if not self.ended:
            self.ended = True
            self._ours.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


_server: ForkServer | None = None


def begin(module: str) -> None:
    """Have a server for this module's processes; only for a process with one thread."""
    global _server
    if kernel.IS_LINUX:
        # Without one, all works the same.
        with contextlib.suppress(OSError):
            _server = ForkServer(module)


def fork(request: ForkRequest, descriptors: Sequence[int]) -> Forked | None:
    """A process from this process's server; None if it has none for the module."""
    if _server is None or _server.module != request.module:
        return None
    return _server.fork(request, descriptors)


def end() -> None:
    """End this process's server, if it has one."""
    if _server is not None:
        _server.end()


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(_AT_START)}


# In the server.


def _serve(agent: socket.socket, parent: int, module: str) -> None:
    """Fork the processes that the agent asks for, until it ends; does not return."""
    try:
        kernel.end_with_parent()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # The streams of the agent are read until they end.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        _close_but(agent.fileno())
        # The agent may raise its own limit later, and processes get its descriptors' numbers.
        kernel.raise_descriptors()
        kernel.show_as(_SHOWN_AS)
        importlib.import_module(module)
        gc.freeze()
        while os.getppid() == parent:
            request, descriptors, _, _ = socket.recv_fds(agent, _REQUEST_SIZE, _DESCRIPTORS_MAX)
            if not request:
                break
            agent.send(str(_fork_orphan(request, descriptors)).encode())
            for descriptor in descriptors:
                os.close(descriptor)
    finally:
        os._exit(0)


def _fork_orphan(request: bytes, descriptors: Sequence[int]) -> int:
    """The number of a new process that is an orphan; a negative one is that of an error.

    0 if a process was killed before it told its number.
    """
    told, telling = os.pipe()
    try:
        try:
            between = os.fork()
            if between == 0:
                _fork_and_end(request, descriptors, telling)
        finally:
            os.close(telling)
        os.waitpid(between, 0)
        return int(os.read(told, 32) or 0)
    except OSError as problem:
        return -(problem.errno or 1)
    finally:
        os.close(told)


def _fork_and_end(request: bytes, descriptors: Sequence[int], telling: int) -> None:
    """Fork a process that tells its number, and end before it does; does not return."""
    try:
        if os.fork() == 0:
            # First: the agent may end its group as soon as it has the number.
            os.setsid()
            os.write(telling, str(os.getpid()).encode())
            _run(request, descriptors)
    except OSError as problem:
        os.write(telling, str(-(problem.errno or 1)).encode())
    os._exit(0)


def _run(message: bytes, descriptors: Sequence[int]) -> None:
    """Be the process that is wanted; does not return."""
    try:
        request = msgspec.json.decode(message, type=ForkRequest)
        _renumber(descriptors, request.numbers)
        _close_but(*request.numbers)
        kernel.show_as(request.module)
        for name in os.environ.keys() - request.environment.keys():
            del os.environ[name]
        os.environ.update(request.environment)
        os.chdir(request.working_directory)
        program = sys.modules[request.module]
        sys.modules["__main__"] = program
        sys.argv[:] = [str(program.__file__)]
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        program.main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _renumber(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors other numbers, also where one has the number that another one gets."""
    above = max([*descriptors, *numbers]) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)


def _close_but(*kept: int) -> None:
    """Close all descriptors but these and the standard streams."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            # The one that lists them is closed already.
            with contextlib.suppress(OSError):
                os.close(number)
