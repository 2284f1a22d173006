"""Python's modules over the simulated kernel, and programs that are loaded with them.

Each process has its own copy of Skyward and of every standard module that waits, tells the time,
draws numbers, or reaches files, processes and the network. Other modules are shared: they compute.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import importlib
import io
import mmap
import os
import queue
import re
import resource
import select
import signal
import socket
import sqlite3
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from .kernel import (
    Counter,
    File,
    Kernel,
    NullFile,
    Process,
    RealFile,
    WaitQueue,
    pipe,
)
from .network import Epoll, Network, Poll, number_of, pair, socket_class, wait_for

COPIED = (
    "threading",
    "_threading_local",
    "queue",
    "concurrent",
    "selectors",
    "socket",
    "subprocess",
    "asyncio",
    "tempfile",
    "shutil",
    "pathlib",
    "random",
    "secrets",
    "uuid",
    "skyward",
    "tests.simulation.vendor",
)
"""Modules of which every process has a copy, over the simulated ones."""
MAIN_IDENT = 1


def is_private(name: str) -> bool:
    """Whether each process has a module of that name of its own."""
    root = name.partition(".")[0]
    return root in COPIED or root in SIMULATED or name in COPIED


SIMULATED = {
    *("time", "_thread", "select", "_socket", "os", "io", "signal", "_posixsubprocess", "fcntl"),
    *(
        "psutil",
        "ctypes",
        "faulthandler",
        "resource",
        "ssl",
        "mmap",
        "atexit",
        "_queue",
        "_asyncio",
    ),
}


class Disk:
    """What may go wrong with files; nothing unless the world says so."""

    def __init__(self) -> None:
        self.check: Callable[[str, Any], None] = lambda operation, what: None


class Machinery:
    """The kernel, the network and the disk that all simulated modules use."""

    def __init__(self) -> None:
        self.kernel = Kernel(0)
        self.kernel.is_private = is_private
        self.network = Network(self.kernel)
        self.disk = Disk()
        self.nobody = Process(
            self.kernel, 999, None, argv=["nobody"], environment={}, directory="/", host="client"
        )

    @property
    def process(self) -> Any:
        """Who runs; a stand-in while programs are loaded."""
        current = self.kernel.current
        return self.nobody if current is None else current.process

    # `_thread`.

    def thread_module(self) -> types.ModuleType:
        kernel, it = self.kernel, self

        class Lock:
            __slots__ = ("__weakref__", "_held", "_queue")

            def __init__(self) -> None:
                self._held = False
                self._queue = WaitQueue()

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                kernel.pause()
                if not self._held:
                    self._held = True
                    return True
                if not blocking:
                    return False
                until = None if timeout < 0 else kernel.now + timeout
                while self._held:
                    if until is not None and kernel.now >= until:
                        return False
                    kernel.wait((self._queue,), until)
                self._held = True
                return True

            def release(self) -> None:
                if not self._held:
                    raise RuntimeError("release unlocked lock")
                self._held = False
                self._queue.wake()
                kernel.pause()

            def locked(self) -> bool:
                return self._held

            def _at_fork_reinit(self) -> None:
                self._held = False

            __enter__ = acquire

            def __exit__(self, *_: object) -> None:
                self.release()

        class RLock:
            __slots__ = ("__weakref__", "_count", "_owner", "_queue")

            def __init__(self) -> None:
                self._count = 0
                self._owner: Any = None
                self._queue = WaitQueue()

            def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
                me = kernel.current
                if self._count and self._owner is me:
                    self._count += 1
                    return True
                kernel.pause()
                until = None if timeout < 0 else kernel.now + timeout
                while self._count:
                    if not blocking or (until is not None and kernel.now >= until):
                        return False
                    kernel.wait((self._queue,), until)
                self._count, self._owner = 1, me
                return True

            def release(self) -> None:
                if self._owner is not kernel.current or not self._count:
                    raise RuntimeError("cannot release un-acquired lock")
                self._count -= 1
                if not self._count:
                    self._owner = None
                    self._queue.wake()

            def _is_owned(self) -> bool:
                return bool(self._count) and self._owner is kernel.current

            def _release_save(self) -> tuple[int, Any]:
                state = (self._count, self._owner)
                self._count, self._owner = 0, None
                self._queue.wake()
                return state

            def _acquire_restore(self, state: tuple[int, Any]) -> None:
                while self._count:
                    kernel.wait((self._queue,))
                self._count, self._owner = state

            def _at_fork_reinit(self) -> None:
                self._count, self._owner = 0, None

            __enter__ = acquire

            def __exit__(self, *_: object) -> None:
                self.release()

        class Local:
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                made = object.__new__(cls)
                object.__setattr__(made, "_arguments", (args, kwargs))
                object.__setattr__(made, "_without", {})
                return made

            def _here(self) -> dict[str, Any]:
                thread = kernel.current
                if thread is None:
                    return object.__getattribute__(self, "_without")
                found = thread.local.get(id(self))
                if found is None:
                    found = thread.local[id(self)] = {}
                    if type(self).__init__ is not object.__init__:
                        args, kwargs = object.__getattribute__(self, "_arguments")
                        self.__init__(*args, **kwargs)
                return found

            def __getattribute__(self, name: str) -> Any:
                if name == "__dict__":
                    return Local._here(self)
                here = Local._here(self)
                if name in here:
                    return here[name]
                return object.__getattribute__(self, name)

            def __setattr__(self, name: str, value: Any) -> None:
                Local._here(self)[name] = value

            def __delattr__(self, name: str) -> None:
                try:
                    del Local._here(self)[name]
                except KeyError:
                    raise AttributeError(name) from None

        def start_new_thread(work: Any, args: tuple[Any, ...], kwargs: Any = None) -> int:
            kernel.pause()

            def body() -> None:
                with contextlib.suppress(SystemExit):
                    work(*args, **(kwargs or {}))

            return kernel.thread(it.process, body).ident

        def get_ident() -> int:
            return MAIN_IDENT if kernel.current is None else kernel.current.ident

        def set_sentinel() -> Lock:
            lock = Lock()
            if kernel.current is not None:
                kernel.current.sentinel = lock
            return lock

        import _thread as real

        module = _copy(real, "_thread")
        module.__dict__.update(
            allocate_lock=Lock,
            allocate=Lock,
            LockType=Lock,
            RLock=RLock,
            _local=Local,
            start_new_thread=start_new_thread,
            start_new=start_new_thread,
            get_ident=get_ident,
            get_native_id=get_ident,
            _set_sentinel=set_sentinel,
            daemon_threads_allowed=lambda: True,
            interrupt_main=lambda number=signal.SIGINT: kernel.signal(it.process, number),
        )
        return module

    def queue_module(self) -> types.ModuleType:
        kernel = self.kernel

        class SimpleQueue:
            __slots__ = ("__weakref__", "_changed", "_items")

            def __init__(self) -> None:
                self._items: deque[Any] = deque()
                self._changed = WaitQueue()

            def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
                self._items.append(item)
                self._changed.wake()
                kernel.pause()

            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                kernel.pause()
                until = None if timeout is None else kernel.now + timeout
                while not self._items:
                    if not block or (until is not None and kernel.now >= until):
                        raise queue.Empty
                    kernel.wait((self._changed,), until)
                return self._items.popleft()

            put_nowait = put

            def get_nowait(self) -> Any:
                return self.get(block=False)

            def empty(self) -> bool:
                return not self._items

            def qsize(self) -> int:
                return len(self._items)

            __class_getitem__ = classmethod(types.GenericAlias)

        module = types.ModuleType("_queue")
        module.__dict__.update(SimpleQueue=SimpleQueue, Empty=queue.Empty)
        return module

    # `time`, `signal`, `select`.

    def time_module(self) -> types.ModuleType:
        kernel = self.kernel
        module = _copy(time, "time")

        def wall() -> float:
            return kernel.now + kernel.wall

        def monotonic() -> float:
            return kernel.now

        def date(seconds: float | None = None) -> time.struct_time:
            return time.gmtime(wall() if seconds is None else seconds)

        module.__dict__.update(
            time=wall,
            time_ns=lambda: int(wall() * 1e9),
            monotonic=monotonic,
            monotonic_ns=lambda: int(kernel.now * 1e9),
            perf_counter=monotonic,
            perf_counter_ns=lambda: int(kernel.now * 1e9),
            process_time=monotonic,
            thread_time=monotonic,
            gmtime=date,
            localtime=date,
            strftime=lambda form, given=None: time.strftime(form, given or date()),
            sleep=kernel.sleep,
        )
        return module

    def signal_module(self) -> types.ModuleType:
        kernel, it = self.kernel, self

        def set_handler(number: int, handler: Any) -> Any:
            process = it.process
            if process is it.nobody:
                return signal.SIG_DFL
            before = process.handlers.get(number, signal.SIG_DFL)
            process.handlers[int(number)] = handler
            return before

        def set_wakeup_fd(number: int, *, warn_on_full_buffer: bool = True) -> int:
            before, it.process.wakeup = it.process.wakeup, number
            return int(before)

        def pthread_kill(ident: int, number: int) -> None:
            kernel.signal(it.process, number)

        module = _copy(signal, "signal")
        module.__dict__.update(
            signal=set_handler,
            getsignal=lambda number: it.process.handlers.get(number, signal.SIG_DFL),
            set_wakeup_fd=set_wakeup_fd,
            pthread_kill=pthread_kill,
            raise_signal=lambda number: kernel.signal(it.process, number),
            siginterrupt=lambda number, flag: None,
            pthread_sigmask=lambda how, mask: set(),
            alarm=lambda seconds: 0,
            setitimer=lambda *given: (0.0, 0.0),
        )
        return module

    def select_module(self) -> types.ModuleType:
        kernel, it = self.kernel, self

        class epoll:  # noqa: N801 - the name of Python's
            def __init__(self, sizehint: int = -1, flags: int = 0) -> None:
                self._file = Epoll(kernel)
                self._number = it.process.add(self._file)

            closed = property(lambda self: self._number < 0)

            def fileno(self) -> int:
                return self._number

            def close(self) -> None:
                number, self._number = self._number, -1
                if number >= 0:
                    it.process.close(number)

            def register(self, file: Any, mask: int = select.EPOLLIN | select.EPOLLOUT) -> None:
                self._file.control(it.process, "add", number_of(file), mask)

            def modify(self, file: Any, mask: int) -> None:
                self._file.control(it.process, "modify", number_of(file), mask)

            def unregister(self, file: Any) -> None:
                self._file.control(it.process, "remove", number_of(file))

            def poll(self, timeout: float | None = None, maxevents: int = -1) -> Any:
                if self._number < 0:
                    raise ValueError("I/O operation on closed epoll object")
                return self._file.poll(timeout, maxevents)

            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                self.close()

        def select_(reading: Any, writing: Any, other: Any, timeout: float | None = None) -> Any:
            watched: dict[int, int] = {}
            for each in reading:
                watched[number_of(each)] = 1
            for each in writing:
                watched[number_of(each)] = watched.get(number_of(each), 0) | 4
            found = dict(wait_for(kernel, watched, timeout))
            return (
                [each for each in reading if found.get(number_of(each), 0) & 0x39],
                [each for each in writing if found.get(number_of(each), 0) & 0x2C],
                [],
            )

        class poll(Poll):  # noqa: N801 - the name of Python's
            def __init__(self) -> None:
                super().__init__(kernel)

        module = _copy(select, "select")
        module.__dict__.update(epoll=epoll, poll=poll, select=select_)
        return module

    def socket_module(self) -> types.ModuleType:
        import _socket as real

        kernel, it = self.kernel, self
        base = socket_class(kernel, self.network)

        def socketpair(
            family: int = socket.AF_UNIX, kind: int = socket.SOCK_STREAM, proto: int = 0
        ) -> Any:
            kernel.pause()
            ends = pair(kernel, int(family), int(kind), it.process.host)
            for end in ends:
                end.owner = it.process.pid
            return tuple(base(fileno=it.process.add(end)) for end in ends)

        def getaddrinfo(
            host: Any, port: Any, family: int = 0, kind: int = 0, proto: int = 0, flags: int = 0
        ) -> Any:
            name = host.decode() if isinstance(host, bytes) else host or "0.0.0.0"
            name = "127.0.0.1" if name == "localhost" else name
            return [(socket.AF_INET, kind or socket.SOCK_STREAM, 6, "", (name, int(port or 0)))]

        module = _copy(real, "_socket")
        module.__dict__.update(
            socket=base,
            SocketType=base,
            socketpair=socketpair,
            getaddrinfo=getaddrinfo,
            gethostname=lambda: it.process.host,
            gethostbyname=lambda name: name,
            dup=lambda number: it.process.add(it.process.get(number)),
            close=lambda number: it.process.close(number),
        )
        return module

    # `os`, `io`, `fcntl`, processes.

    def os_module(self) -> types.ModuleType:
        kernel, it, disk = self.kernel, self, self.disk
        module = _copy(os, "os")

        def simulated(number: Any) -> File | None:
            kernel.pause()
            found: File | None = it.process.descriptors.get(number)
            return found

        def read(number: int, size: int) -> bytes:
            file = simulated(number)
            return os.read(number, size) if file is None else file.read(size)

        def write(number: int, data: Any) -> int:
            file = simulated(number)
            if file is None:
                disk.check("write", number)
                done = os.write(number, data)
                it.stamp(number)
                return done
            return file.write(bytes(data))

        def pwrite(number: int, data: Any, offset: int) -> int:
            kernel.pause()
            disk.check("write", number)
            done = os.pwrite(number, data, offset)
            it.stamp(number)
            return done

        def utime(path: Any, times: Any = None, **given: Any) -> None:
            if times is None and not given:
                it.stamp(path)
            else:
                os.utime(path, times, **given)

        def close(number: int) -> None:
            if simulated(number) is not None:
                it.process.close(number)
            else:
                os.close(number)
                it.process.files.discard(number)

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            kernel.pause()
            disk.check("open", path)
            number = os.open(_translated(path), flags, mode, dir_fd=dir_fd)
            it.process.files.add(number)
            if flags & os.O_CREAT and not os.fstat(number).st_size:
                it.stamp(number)
            return number

        def memfd_create(name: str, flags: int = 0) -> int:
            number = os.memfd_create(name, flags)
            it.process.files.add(number)
            return number

        def make_pipe(flags: int = 0) -> tuple[int, int]:
            kernel.pause()
            reading, writing = pipe(kernel)
            if flags & os.O_NONBLOCK:
                reading.blocking = writing.blocking = False
            return it.process.add(reading), it.process.add(writing)

        def dup(number: int) -> int:
            file = simulated(number)
            if file is not None:
                return int(it.process.add(file))
            made = os.dup(number)
            it.process.files.add(made)
            return made

        def dup2(number: int, to: int, inheritable: bool = True) -> int:
            file = simulated(number)
            it.process.put(to, RealFile(kernel, number) if file is None else file)
            return to

        def set_blocking(number: int, flag: bool) -> None:
            file = simulated(number)
            if file is None:
                os.set_blocking(number, flag)
            else:
                file.blocking = flag

        def get_blocking(number: int) -> bool:
            file = simulated(number)
            return os.get_blocking(number) if file is None else file.blocking

        def fstat(number: int) -> Any:
            file = simulated(number)
            if isinstance(file, RealFile):
                return os.fstat(file.number)
            return os.fstat(number) if file is None else os.stat("/dev/null")

        def kill(pid: int, number: int) -> None:
            kernel.pause()
            process = kernel.processes.get(pid)
            if process is None or process.reaped:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            kernel.signal(process, number)

        def killpg(group: int, number: int) -> None:
            kernel.pause()
            found = [p for p in kernel.processes.values() if p.group == group and not p.reaped]
            if not found:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            me = it.process
            for process in [p for p in found if p is not me] + [p for p in found if p is me]:
                kernel.signal(process, number)

        def getpgid(pid: int) -> int:
            process = it.process if pid == 0 else kernel.processes.get(pid)
            if process is None or process.reaped:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            return int(process.group)

        def setsid() -> int:
            it.process.group = it.process.pid
            return int(it.process.pid)

        def waitpid(pid: int, flags: int = 0) -> tuple[int, int]:
            me = it.process
            while True:
                mine = [
                    p
                    for p in kernel.processes.values()
                    if p.parent is me and not p.reaped and (pid <= 0 or p.pid == pid)
                ]
                if not mine:
                    raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
                for process in mine:
                    if process.dead:
                        process.reaped = True
                        status = process.status
                        return process.pid, (-status if status < 0 else status << 8)
                if flags & os.WNOHANG:
                    return 0, 0
                kernel.wait((me.children_changed,))

        def exit_now(status: int) -> None:
            kernel.end(it.process, status)

        def urandom(size: int) -> bytes:
            return kernel.random.randbytes(size)

        def chdir(path: Any) -> None:
            os.chdir(path)
            it.process.directory = os.getcwd()

        def fsync(number: int) -> None:
            kernel.pause()
            disk.check("fsync", number)

        def checked(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                kernel.pause()
                disk.check(name, args[0] if args else "")
                return real(*args, **kwargs)

            return call

        def fork() -> int:
            """The caller goes on as the child; as its parent, only `detached.leave` is known."""
            caller = sys._getframe(1)
            if caller.f_code.co_name != "leave":
                return int(unsupported())
            given = dict(caller.f_locals)

            def stay_behind(pid: int) -> None:
                detached = sys.modules["skyward.worker.detached"]
                it.process.close(given["announcing"])
                detached._stay_behind(given["folder"], given["announced"], pid)

            kernel.split(stay_behind)
            return 0

        def eventfd(value: int = 0, flags: int = 0) -> int:
            made = Counter(kernel, value)
            made.blocking = not flags & os.EFD_NONBLOCK
            return int(it.process.add(made))

        def unsupported(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        module.__dict__.update(
            environ={},
            read=read,
            write=write,
            pwrite=pwrite,
            utime=utime,
            close=close,
            open=open_,
            memfd_create=memfd_create,
            pipe=make_pipe,
            pipe2=make_pipe,
            dup=dup,
            dup2=dup2,
            set_blocking=set_blocking,
            get_blocking=get_blocking,
            set_inheritable=lambda number, flag: None,
            get_inheritable=lambda number: True,
            fstat=fstat,
            isatty=lambda number: False,
            fdopen=lambda number, *args, **kwargs: it.open(number, *args, **kwargs),
            kill=kill,
            killpg=killpg,
            getpgid=getpgid,
            getpgrp=lambda: it.process.group,
            getsid=lambda pid: getpgid(pid),
            setsid=setsid,
            getpid=lambda: it.process.pid,
            getppid=lambda: it.process.parent.pid if it.process.parent is not None else 1,
            waitpid=waitpid,
            _exit=exit_now,
            abort=lambda: kernel.end(it.process, -signal.SIGABRT),
            urandom=urandom,
            chdir=chdir,
            fsync=fsync,
            fdatasync=fsync,
            eventfd=eventfd,
            register_at_fork=lambda **given: None,
            cpu_count=lambda: 2,
            sched_getaffinity=lambda pid: {0, 1},
            fork=fork,
            forkpty=unsupported,
            getloadavg=lambda: (0.0, 0.0, 0.0),
            getenv=lambda name, default=None: module.environ.get(name, default),
            **{
                name: checked(name)
                for name in (
                    *("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "link"),
                    *("stat", "scandir", "listdir"),
                )
            },
        )
        module.__dict__.pop("pidfd_open", None)
        module.__dict__.pop("posix_spawn", None)
        return module

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any
    ) -> Any:
        """`open`, also of simulated descriptors."""
        process = self.process
        if isinstance(file, int) and file in process.descriptors:
            closefd = kwargs.get("closefd", True)
            raw = SimulatedFile(self, file, mode, closefd=closefd)
            if buffering == 0:
                return raw
            binary: Any
            if raw.writable() and raw.readable():
                binary = io.BufferedRWPair(raw, raw)
            elif raw.writable():
                binary = SharedWriter(self.kernel, raw)
            else:
                binary = io.BufferedReader(raw)
            if "b" in mode:
                return binary
            names = ("encoding", "errors", "newline")
            text = dict(zip(names, args, strict=False)) | {
                name: kwargs[name] for name in names if name in kwargs
            }
            return io.TextIOWrapper(
                binary, **(text or {"encoding": "utf-8"}), line_buffering=buffering == 1
            )
        if not isinstance(file, int):
            if (status := self._status(os.fspath(file))) is not None:
                return io.BytesIO(status.encode()) if "b" in mode else io.StringIO(status)
            if self.kernel.current is not None:
                self.kernel.pause()
                self.disk.check("write" if set(mode) & set("wax+") else "open", file)
            file = _translated(file)
        else:
            process.files.discard(file)
        if process is self.nobody:
            return builtins.open(file, mode, buffering, *args, **kwargs)
        if set(mode) & set("wax+"):
            made = self._written(file, mode, buffering, *args, **kwargs)
        else:
            made = builtins.open(file, mode, buffering, *args, **kwargs)  # noqa: SIM115
        process.opened.add(made)
        return made

    def _written(
        self,
        file: Any,
        mode: str,
        buffering: int,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """What `open` returns for a file that is written."""
        raw = WrittenFile(self, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        made: Any
        if "+" in mode:
            made = io.BufferedRandom(raw, size)
        else:
            made = SharedWriter(self.kernel, raw, size)
        if "b" not in mode:
            made = io.TextIOWrapper(made, encoding, errors, newline, buffering == 1)
            made.mode = mode
        return made

    def stamp(self, file: Any) -> None:
        """Have a file's time be that of the world, not that of the machine that simulates it."""
        now = self.kernel.now + self.kernel.wall
        os.utime(file, (now, now))

    def _status(self, path: Any) -> str | None:
        """What /proc says of a simulated process, if it is that file."""
        if not isinstance(path, str) or not path.startswith("/proc/"):
            return None
        found = re.fullmatch(r"/proc/(\d+)/stat", path)
        if found is None:
            return None
        process = self.kernel.processes.get(int(found[1]))
        if process is None or process.reaped:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        state = "Z" if process.dead else "T" if process.stopped else "S"
        began = int(process.began * 100)
        return f"{process.pid} ({process.name}) {state} {'0 ' * 18}{began} 0 0"

    def io_module(self) -> types.ModuleType:
        module = _copy(io, "io")
        module.__dict__["open"] = self.open
        return module

    def fcntl_module(self) -> types.ModuleType:
        kernel, it = self.kernel, self

        def flock(file: Any, operation: int) -> None:
            while True:
                kernel.pause()
                try:
                    fcntl.flock(file, operation | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if operation & fcntl.LOCK_NB:
                        raise
                kernel.sleep(0.001)

        def control(file: Any, command: int, argument: Any = 0) -> Any:
            if number_of(file) in it.process.descriptors:
                return 0
            return fcntl.fcntl(file, command, argument)

        def ioctl(file: Any, request: int, argument: Any = 0, mutate: bool = True) -> Any:
            found = it.process.descriptors.get(number_of(file))
            if found is None:
                raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
            way = getattr(found, "incoming", None) or getattr(found, "way", None)
            if isinstance(argument, (bytearray, memoryview)) or hasattr(argument, "__setitem__"):
                waiting = 0 if way is None else len(way.data)
                view = memoryview(argument).cast("B")
                view[:4] = waiting.to_bytes(4, sys.byteorder)
                return 0
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

        module = _copy(fcntl, "fcntl")
        module.__dict__.update(flock=flock, fcntl=control, ioctl=ioctl)
        return module

    def subprocess_module(self) -> types.ModuleType:
        kernel, it = self.kernel, self

        def fork_exec(
            args: Any,
            executables: Any,
            close_fds: bool,
            kept: Any,
            directory: Any,
            environment: Any,
            p2cread: int,
            p2cwrite: int,
            c2pread: int,
            c2pwrite: int,
            errread: int,
            errwrite: int,
            *rest: Any,
        ) -> int:
            # Then: the error pipe's two ends, restore_signals, start_new_session, process_group,
            # three for users and groups, the umask, and what the child does first.
            new_session, prepare = rest[3], rest[9]
            me: Process = it.process
            argv = [os.fsdecode(each) for each in args]
            if environment is None:
                variables = dict(sys.modules["os"].environ)
            else:
                pairs = (os.fsdecode(each).partition("=") for each in environment)
                variables = {name: value for name, _, value in pairs}
            child = kernel.spawn(
                me,
                argv=argv,
                environment=variables,
                directory=os.fsdecode(directory) if directory else me.directory,
                host=variables.get("SIMULATED_HOST", me.host),
                session=None if new_session else me.group,
            )
            child.handlers.update({n: h for n, h in me.handlers.items() if h == signal.SIG_IGN})
            for number, given in ((0, p2cread), (1, c2pwrite), (2, errwrite)):
                file = me.descriptors.get(number if given == -1 else given)
                child.put(number, NullFile(kernel) if file is None else file)
            for number in kept:
                if number in me.descriptors and number not in (rest[0], rest[1]):
                    child.put(number, me.descriptors[number])
                elif number in me.files:
                    child.put(number, RealFile(kernel, number))
            if prepare is not None:
                with kernel.as_process(child):
                    prepare()
            kernel.note(f"starts {' '.join(argv[-3:])} as {child.pid}")
            return int(child.pid)

        module = types.ModuleType("_posixsubprocess")
        module.fork_exec = fork_exec  # type: ignore[attr-defined]
        return module

    def psutil_module(self) -> types.ModuleType:
        kernel, it = self.kernel, self

        class SimulatedProcess:
            def __init__(self, pid: int | None = None) -> None:
                self.pid = it.process.pid if pid is None else pid
                self._process()

            def _process(self) -> Process:
                process = kernel.processes.get(self.pid)
                if process is None or process.reaped:
                    raise psutil.NoSuchProcess(self.pid)
                return process

            def create_time(self) -> float:
                return self._process().began

            def is_running(self) -> bool:
                return not self._process().dead

            def status(self) -> str:
                process = self._process()
                if process.dead:
                    return str(psutil.STATUS_ZOMBIE)
                return str(psutil.STATUS_STOPPED if process.stopped else psutil.STATUS_SLEEPING)

            def children(self, recursive: bool = False) -> list[SimulatedProcess]:
                mine = [
                    p.pid
                    for p in kernel.processes.values()
                    if p.parent is not None and p.parent.pid == self.pid and not p.reaped
                ]
                found = [SimulatedProcess(pid) for pid in mine]
                if recursive:
                    for each in list(found):
                        found += each.children(recursive=True)
                return found

            def parent(self) -> SimulatedProcess | None:
                parent = self._process().parent
                return None if parent is None else SimulatedProcess(parent.pid)

            def ppid(self) -> int:
                parent = self._process().parent
                return 1 if parent is None else parent.pid

            def memory_info(self) -> Any:
                return types.SimpleNamespace(rss=1 << 20, vms=1 << 20)

            def kill(self) -> None:
                kernel.signal(self._process(), signal.SIGKILL)

            def send_signal(self, number: int) -> None:
                kernel.signal(self._process(), number)

        module = _copy(psutil, "psutil")
        module.__dict__.update(
            Process=SimulatedProcess,
            pid_exists=lambda pid: pid in kernel.processes and not kernel.processes[pid].reaped,
        )
        return module

    def ctypes_module(self) -> types.ModuleType:
        _kernel, it = self.kernel, self
        libc = ctypes.CDLL(None)

        class Library:
            def __getattr__(self, name: str) -> Any:
                return getattr(libc, name)

            def prctl(self, option: int, argument: int, *_: int) -> int:
                if option == 1:
                    it.process.death_signal = int(argument)
                elif option == 36:
                    it.process.adopts = bool(argument)
                return 0

            def fflush(self, stream: Any) -> int:
                return 0

        class PythonApi:
            def PyThreadState_SetAsyncExc(self, ident: Any, kind: Any) -> int:  # noqa: N802
                wanted = getattr(ident, "value", ident)
                for thread in it.process.threads:
                    if thread.ident == wanted:
                        thread.thrown = getattr(kind, "value", kind)
                        return 1
                return 0

        def load(name: Any, *args: Any, **kwargs: Any) -> Any:
            return Library() if name is None else ctypes.CDLL(name, *args, **kwargs)

        module = _copy(ctypes, "ctypes")
        module.__dict__.update(CDLL=load, pythonapi=PythonApi())
        return module

    def mmap_module(self) -> types.ModuleType:
        it = self

        class Map(mmap.mmap):
            def __new__(cls, number: int, *args: Any, **kwargs: Any) -> Any:
                file = it.process.descriptors.get(number)
                if isinstance(file, RealFile):
                    number = file.number
                return super().__new__(cls, number, *args, **kwargs)

        module = _copy(mmap, "mmap")
        module.__dict__["mmap"] = Map
        return module

    def sqlite_module(self) -> types.ModuleType:
        kernel, disk = self.kernel, self.disk

        def connect(path: Any, *args: Any, **given: Any) -> sqlite3.Connection:
            kernel.pause()
            try:
                disk.check("write", str(path))
            except OSError as problem:
                raise sqlite3.OperationalError(f"disk I/O error: {problem}") from None
            return sqlite3.connect(path, *args, **given)

        module = _copy(sqlite3, "sqlite3")
        module.__dict__["connect"] = connect
        return module

    def faulthandler_module(self) -> types.ModuleType:
        module = types.ModuleType("faulthandler")
        for name in ("register", "unregister", "enable", "disable", "dump_traceback"):
            setattr(module, name, lambda *args, **kwargs: None)
        return module

    def resource_module(self) -> types.ModuleType:
        module = _copy(resource, "resource")
        module.__dict__.update(
            getrlimit=lambda kind: (1 << 20, 1 << 20), setrlimit=lambda kind, limits: None
        )
        return module

    def atexit_module(self) -> types.ModuleType:
        module = types.ModuleType("atexit")
        registered: list[Any] = []

        def register(work: Any, *args: Any, **kwargs: Any) -> Any:
            registered.append((work, args, kwargs))
            return work

        def unregister(work: Any) -> None:
            registered[:] = [each for each in registered if each[0] != work]

        def run() -> None:
            while registered:
                work, args, kwargs = registered.pop()
                work(*args, **kwargs)

        module.__dict__.update(register=register, unregister=unregister, _run_exitfuncs=run)
        return module


def _copy(module: types.ModuleType, name: str) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(module.__dict__)
    return made


def _translated(path: Any) -> Any:
    """A file of a simulated process that is named by its descriptor is one of this process."""
    text = os.fspath(path) if not isinstance(path, int) else path
    if isinstance(text, str) and text.startswith("/proc/") and "/fd/" in text:
        return f"/proc/self/fd/{text.rpartition('/')[2]}"
    return path


class WrittenFile(io.FileIO):
    """A real file that is written: any write may fail."""

    def __init__(
        self, machinery: Machinery, file: Any, mode: str, closefd: bool, opener: Any
    ) -> None:
        self._it = machinery
        super().__init__(file, mode, closefd, opener)
        if not os.fstat(self.fileno()).st_size:
            machinery.stamp(self.fileno())

    def write(self, data: Any) -> int:
        it = self._it
        if it.kernel.current is not None:
            it.kernel.pause()
            it.disk.check("write", self.name)
        done = super().write(data)
        it.stamp(self.fileno())
        return done


class SharedWriter(io.BufferedWriter):
    """A buffer at which threads wait for each other, as they do in Python.

    To the lock of Python's own, all are one thread: the second one would be refused.
    """

    def __init__(self, kernel: Kernel, raw: Any, size: int = io.DEFAULT_BUFFER_SIZE) -> None:
        super().__init__(raw, size)
        self._kernel = kernel
        self._user: Any = None
        self._free = WaitQueue()

    def write(self, data: Any) -> int:
        with self._used():
            return super().write(data)

    def flush(self) -> None:
        with self._used():
            super().flush()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        me = self._kernel.current
        if me is None or self._user is me:
            yield
            return
        while self._user is not None:
            self._kernel.wait((self._free,))
        self._user = me
        try:
            yield
        finally:
            self._user = None
            self._free.wake()


class SimulatedFile(io.RawIOBase):
    """A file object of a simulated descriptor."""

    def __init__(self, machinery: Machinery, number: int, mode: str, *, closefd: bool) -> None:
        self._it = machinery
        self._number = number
        self._reads = "r" in mode or "+" in mode
        self._writes = bool(set(mode) & set("wa+"))
        self._closefd = closefd
        self._mode = mode
        self.name = number

    @property
    def mode(self) -> str:
        return self._mode

    def fileno(self) -> int:
        return self._number

    def readable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return self._writes

    def isatty(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int | None:
        self._it.kernel.pause()
        try:
            found = self._it.process.get(self._number).read(len(buffer))
        except BlockingIOError:
            return None
        buffer[: len(found)] = found
        return len(found)

    def write(self, data: Any) -> int | None:
        self._it.kernel.pause()
        try:
            return int(self._it.process.get(self._number).write(bytes(data)))
        except BlockingIOError:
            return None

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._closefd and self._it.kernel.current is not None:
                process = self._it.process
                if self._number in process.descriptors:
                    process.close(self._number)

    def __del__(self) -> None:
        """Nothing: what a process leaves open is closed with it."""


# Programs.


class Program:
    """A copy of Skyward with all modules that it uses, for one process."""

    def __init__(self, machinery: Machinery, preload: list[str]) -> None:
        from . import tls

        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if is_private(name)}
        made = {
            "_thread": machinery.thread_module(),
            "time": machinery.time_module(),
            "signal": machinery.signal_module(),
            "select": machinery.select_module(),
            "_socket": machinery.socket_module(),
            "os": machinery.os_module(),
            "io": machinery.io_module(),
            "fcntl": machinery.fcntl_module(),
            "_posixsubprocess": machinery.subprocess_module(),
            "psutil": machinery.psutil_module(),
            "ctypes": machinery.ctypes_module(),
            "faulthandler": machinery.faulthandler_module(),
            "resource": machinery.resource_module(),
            "atexit": machinery.atexit_module(),
            "mmap": machinery.mmap_module(),
            "_queue": machinery.queue_module(),
            "sqlite3": machinery.sqlite_module(),
            "_asyncio": None,
        }
        sys.modules.update(made)  # type: ignore[arg-type]
        finder = _Opener(machinery)
        sys.meta_path.insert(0, finder)
        try:
            importlib.import_module("socket")
            sys.modules["ssl"] = tls.module(sys.modules["socket"])
            _seed_from(importlib.import_module("random"), made["os"].urandom)
            importlib.import_module("subprocess")._USE_VFORK = False
            sys.modules["subprocess"]._USE_POSIX_SPAWN = False
            for name in preload:
                importlib.import_module(name)
            self.modules = {name: m for name, m in sys.modules.items() if is_private(name)}
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if is_private(name)]:
                del sys.modules[name]
            sys.modules.update(hidden)


def _seed_from(module: types.ModuleType, urandom: Callable[[int], bytes]) -> None:
    """Have the module `random`, which asks the real system in C, begin as the world says."""
    seed = module.Random.seed

    def seeded(self: Any, a: Any = None, version: int = 2) -> None:
        seed(self, int.from_bytes(urandom(16)) if a is None else a, version)

    module.Random.seed = seeded


class _Opener:
    """Gives `open` of the simulated world to the modules that are copied."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not is_private(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
            return spec
        spec.loader = _Loader(spec.loader, self._machinery)
        return spec


_codes: dict[str, Any] = {}


class _Loader:
    def __init__(self, loader: Any, machinery: Machinery) -> None:
        self._loader = loader
        self._machinery = machinery

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        if name not in _codes:
            _codes[name] = self._loader.get_code(name)
        module.__dict__["open"] = self._machinery.open
        exec(_codes[name], module.__dict__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
