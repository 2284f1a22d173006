"""The nursery: a process from which an agent's executors are forked, with their modules imported.

It is forked from the agent before that has threads, and forks twice for each executor: the kernel
gives an orphan to the process above that adopts orphans, so the executor becomes the agent's child.
Elsewhere than on Linux executors start as any other program does, and so they do where a variable
counts that a program reads when it starts.
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
_BIRTH_SIZE = 1 << 20
_DESCRIPTORS_MAX = 32
_PATIENCE_SECONDS = 60.0
"""How long a process may take to be forked, before the next ones start as programs."""
_POLL_SECONDS = 0.005
"""How often to look for the end of a process, if somebody waits for a limited time."""


class Birth(msgspec.Struct):
    """A process that a nursery is to fork; its descriptors travel with it."""

    module: str
    """The module whose `main` it runs."""
    environment: dict[str, str]
    working_directory: str
    numbers: list[int]
    """The numbers that the descriptors get in the process."""


class Forked:
    """A child of this process that a nursery has forked: the part of `subprocess.Popen` we use."""

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


class Nursery:
    """The agent's end."""

    def __init__(self, module: str) -> None:
        """Fork the nursery, which imports the module; only for a process with one thread."""
        self.module = module
        self._began_with = _at_start(os.environ)
        self._nursery, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            _tend(agent, parent, module)
        agent.close()
        self._nursery.settimeout(_PATIENCE_SECONDS)
        self.ended = False

    def fork(self, birth: Birth, descriptors: Sequence[int]) -> Forked | None:
        """A process; None if it has to start as a program. Only for the agent's main thread."""
        if self.ended or _at_start(birth.environment) != self._began_with:
            return None
        if not kernel.adopt_orphans():
            return None
        said = b""
        # Too large a birth, or a nursery that was killed or stopped.
        with contextlib.suppress(OSError):
            socket.send_fds(self._nursery, [msgspec.json.encode(birth)], descriptors)
            said = self._nursery.recv(_BIRTH_SIZE)
        kernel.adopt_orphans(False)
        if not said:
            # An answer that comes late would be taken for that to the next birth.
            self.ended = True
            self._nursery.close()
            return None
        if (pid := int(said)) < 0:
            raise OSError(-pid, os.strerror(-pid))
        return Forked(pid)


_nursery: Nursery | None = None


def begin(module: str) -> None:
    """Have a nursery for this module's processes; only for a process with one thread."""
    global _nursery
    if kernel.IS_LINUX:
        # Without one, all works the same.
        with contextlib.suppress(OSError):
            _nursery = Nursery(module)


def fork(birth: Birth, descriptors: Sequence[int]) -> Forked | None:
    """A process from this process's nursery; None if it has none for the module."""
    if _nursery is None or _nursery.module != birth.module:
        return None
    return _nursery.fork(birth, descriptors)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(_AT_START)}


# In the nursery.


def _tend(agent: socket.socket, parent: int, module: str) -> None:
    """Fork a process for each birth, until the agent ends; does not return."""
    try:
        kernel.end_with_parent()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # The streams of the agent are read until they end.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        _close_but(agent.fileno())
        kernel.show_as(__name__)
        importlib.import_module(module)
        gc.freeze()
        while os.getppid() == parent:
            birth, descriptors, _, _ = socket.recv_fds(agent, _BIRTH_SIZE, _DESCRIPTORS_MAX)
            if not birth:
                break
            agent.send(str(_forked_twice(birth, descriptors)).encode())
            for descriptor in descriptors:
                os.close(descriptor)
    finally:
        os._exit(0)


def _forked_twice(birth: bytes, descriptors: Sequence[int]) -> int:
    """The number of a new process that is an orphan; a negative one is that of an error."""
    told, telling = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            try:
                pid = os.fork()
            except OSError as problem:
                pid = -(problem.errno or 1)
            if pid == 0:
                _become(msgspec.json.decode(birth, type=Birth), descriptors)
            os.write(telling, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        return int(os.read(told, 32))
    except OSError as problem:
        return -(problem.errno or 1)
    finally:
        os.close(told)
        os.close(telling)


def _become(birth: Birth, descriptors: Sequence[int]) -> None:
    """Be the process that is wanted; does not return."""
    try:
        os.setsid()
        _renumber(descriptors, birth.numbers)
        _close_but(*birth.numbers)
        kernel.show_as(birth.module)
        for name in os.environ.keys() - birth.environment.keys():
            del os.environ[name]
        os.environ.update(birth.environment)
        os.chdir(birth.working_directory)
        program = sys.modules[birth.module]
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
