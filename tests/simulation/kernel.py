"""The simulated kernel: threads and processes in an order that a seed chooses, time that jumps.

A thread of a simulated process is a greenlet. It goes on until it waits, or until the seed has it
pause in a call of the kernel's; then the kernel chooses among all that can go on. If none can, the
clock jumps to the next timer. So a run takes no longer than its work, and the same seed gives the
same run.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import heapq
import itertools
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from random import Random
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

from greenlet import getcurrent, greenlet

PIPE_SIZE = 65536
FIRST_DESCRIPTOR = 100_000
"""Simulated descriptors are numbered from here: smaller ones are files of the real system."""
PAUSES = 16
"""A thread pauses in one of so many calls of the kernel's, though it could go on."""
LAGS = (0.0005, 0.005, 0.05, 0.3)
"""So long a thread at most waits for a processor of a busy machine."""
SWITCHED = ("argv", "orig_argv", "stdin", "stdout", "stderr", "path", "excepthook")
"""What each process has of its own in the module `sys`."""


def _modules_of_interpreter() -> ctypes.c_void_p:
    """Where the interpreter has the address of the dict that `import` uses."""
    state = ctypes.pythonapi.PyInterpreterState_Get
    state.restype = ctypes.c_void_p
    words = (ctypes.c_void_p * 4096).from_address(state())
    at = next(at for at, word in enumerate(words) if word == id(sys.modules))
    return ctypes.c_void_p.from_buffer(words, at * ctypes.sizeof(ctypes.c_void_p))


_interpreter_modules = _modules_of_interpreter()


def _use(modules: dict[str, ModuleType]) -> None:
    """Have `sys.modules` be this dict, which somebody keeps: to copy it takes 100 us."""
    sys.modules = modules
    _interpreter_modules.value = id(modules)


class Stuck(AssertionError):
    """Nothing can go on, and no timer is set; or the run takes more steps than any may."""


class WaitQueue:
    """The threads that wait for a change of something."""

    __slots__ = ("threads",)

    def __init__(self) -> None:
        self.threads: list[Thread] = []

    def wake(self) -> None:
        """Let all of them look again."""
        if self.threads:
            for thread in self.threads:
                thread.kernel.make_ready(thread)


class Thread:
    """A thread of a simulated process."""

    __slots__ = (
        "done",
        "green",
        "ident",
        "kernel",
        "local",
        "process",
        "ready",
        "sentinel",
        "thrown",
        "token",
    )

    def __init__(self, kernel: Kernel, process: Process, work: Callable[[], None]) -> None:
        self.kernel = kernel
        self.process = process
        self.ident = next(kernel.idents)
        self.ready = False
        self.token = 0
        """Counts the waits, so that a timer of an earlier one wakes nobody."""
        self.thrown: BaseException | type[BaseException] | None = None
        """What the thread raises when it goes on."""
        self.local: dict[int, dict[str, Any]] = {}
        self.sentinel: Any = None
        self.done = False
        self.green = greenlet(work, kernel.hub)


class Kernel:
    """All that the simulated processes share: the clock, the order, descriptors, the network."""

    def __init__(self, seed: int | str, *, steps: int = 3_000_000) -> None:
        self.random = Random(seed)
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        """The wall clock is ahead of the monotonic one by so much; it may jump."""
        self.hub = getcurrent()
        self.idents = itertools.count(1)
        self.pids = itertools.count(1000)
        self.ready: list[Thread] = []
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.current: Thread | None = None
        self.known = 0
        self.shared: dict[str, ModuleType] = {}
        """The modules of which there is one for all processes."""
        self.loaded: Process | None = None
        """Whose modules are in `sys.modules`."""
        self.processes: dict[int, Process] = {}
        self.living = 0
        """How many of them have not ended."""
        self.listeners: dict[object, Any] = {}
        """Sockets that listen, by address."""
        self.steps = 0
        self.most_steps = steps
        self.history: deque[str] = deque(maxlen=4000)
        self.start: Callable[[Process, Callable[[], None] | None], None]
        """Runs a process on its main thread: its program, or something else that it has to do."""
        self.abandoned: list[greenlet] = []
        """Threads of killed processes: they must not be collected, which would run their ends."""
        self.pausing = True
        self.pauses = float(PAUSES)
        self.lag = 0.0
        """In how many of its pauses a thread goes on only later: the machine is busy."""
        self.moments: dict[str, list[tuple[int, int, Callable[[], None]]]] = {}
        """What is to be done when so many moments of a kind have passed."""
        self.passed: collections.Counter[str] = collections.Counter()
        """How many moments of each kind have passed."""
        self.yields = False
        """Whether the next call of the kernel's lets others go on: something happens now."""
        self.is_private: Callable[[str], bool] = lambda name: False
        """Whether each process has a module of that name of its own."""

    def note(self, text: str) -> None:
        """Write down an event of the run."""
        who = self.current.process.name if self.current is not None else "world"
        self.history.append(f"{self.now - 1000:10.6f} {who}: {text}")

    # The order.

    def make_ready(self, thread: Thread) -> None:
        """Let a thread go on when its turn comes."""
        if not thread.ready and not thread.done and not thread.process.dead:
            thread.ready = True
            self.ready.append(thread)

    def at(self, due: float, action: Callable[[], None]) -> None:
        """Do something in the kernel at a time."""
        heapq.heappush(self.timers, (due, next(self.count), action))

    def wait(self, queues: Iterable[WaitQueue], until: float | None = None) -> None:
        """Let the current thread wait until one of the queues wakes it, or until a time."""
        thread = self.current
        assert thread is not None
        thread.token += 1
        if until is not None:
            token = thread.token

            def due() -> None:
                if thread.token == token:
                    self.make_ready(thread)

            self.at(until, due)
        queues = list(queues)
        for queue in queues:
            queue.threads.append(thread)
        try:
            self.hub.switch()
        finally:
            thread.token += 1
            for queue in queues:
                queue.threads.remove(thread)
            self.interrupt(thread)

    def sleep(self, seconds: float) -> None:
        """Let the current thread wait for so long."""
        until = self.now + max(0.0, seconds)
        while True:
            self.wait((), until)
            if self.now >= until:
                return

    def pause(self) -> None:
        """A call of the kernel's: takes a little time; lets others go on if the seed says so."""
        thread = self.current
        if thread is None:
            return
        if self._gave_way(thread) or thread.process.pending or thread.thrown is not None:
            self.interrupt(thread)

    def give_way(self) -> None:
        """The same at the end of a call: nothing is raised between it and its result."""
        if self.current is not None:
            self._gave_way(self.current)

    def _gave_way(self, thread: Thread) -> bool:
        self.now += 2e-6
        if "call" in self.moments:
            self.moment("call")
        if not self.yields and not (self.pausing and self.random.random() * self.pauses < 1):
            return False
        self.yields = False
        if self.lag and self.random.random() < self.lag:
            until = self.now + self.random.random() * self.random.choice(LAGS)
            self.at(until, lambda: self.make_ready(thread))
            while self.now < until:
                self.hub.switch()
        else:
            self.make_ready(thread)
            self.hub.switch()
        return True

    def after(self, kind: str, count: int, action: Callable[[], None]) -> None:
        """Do something when so many more moments of a kind have passed.

        There are "call", of any simulated thread, "send" and "connect", between hosts, "start" and
        "end", of processes.
        """
        waiting = self.moments.setdefault(kind, [])
        heapq.heappush(waiting, (self.passed[kind] + count, next(self.count), action))

    def moment(self, kind: str) -> None:
        """Something of a kind happens: do what was to be done then, before the thread goes on."""
        self.passed[kind] += 1
        waiting = self.moments.get(kind)
        while waiting and waiting[0][0] <= self.passed[kind]:
            self.at(self.now, heapq.heappop(waiting)[2])
            self.yields = self.current is not None

    def interrupt(self, thread: Thread) -> None:
        """Run the signal handlers of a process on its main thread; raise what is to be raised."""
        process = thread.process
        while process.pending and thread is process.main:
            number = process.pending.popleft()
            handler = process.handlers.get(number, signal.SIG_DFL)
            if callable(handler):
                handler(number, sys._getframe())
        if thread.thrown is not None:
            problem, thread.thrown = thread.thrown, None
            raise problem

    def run(self, until: Callable[[], bool]) -> None:
        """Let threads go on until something is so."""
        while not until():
            if self.ready:
                index = int(self.random.random() * len(self.ready))
                self.ready[index], self.ready[-1] = self.ready[-1], self.ready[index]
                self.step(self.ready.pop())
            elif self.timers:
                due, _, action = heapq.heappop(self.timers)
                self.now = max(self.now, due)
                action()
            else:
                raise Stuck("nothing can go on, and no timer is set")
            while self.timers and self.timers[0][0] <= self.now:
                heapq.heappop(self.timers)[2]()

    def step(self, thread: Thread) -> None:
        """Let one thread go on until it waits, pauses or ends."""
        self.steps += 1
        if self.steps > self.most_steps:
            raise Stuck(f"no end after {self.steps:,} steps and {self.now - 1000:,.0f} s")
        thread.ready = False
        if thread.process.dead or thread.done:
            return
        if thread.process.stopped:
            thread.process.halted.append(thread)
            return
        self.enter(thread.process)
        self.current = thread
        try:
            thread.green.switch()
        finally:
            self.current = None

    def enter(self, process: Process) -> None:
        """Have `sys` and `sys.modules` be those of a process."""
        before = self.loaded
        if before is process:
            return
        if before is not None:
            if len(sys.modules) != self.known:
                self.share()
            for name in SWITCHED:
                before.system[name] = getattr(sys, name)
        _use(process.modules or self.shared)
        for name, value in process.system.items():
            setattr(sys, name, value)
        if before is None or before.directory != process.directory:
            try:
                os.chdir(process.directory)
            except FileNotFoundError:
                # It has removed its own folder, and goes on for a moment.
                os.chdir("/")
        self.known = len(sys.modules)
        self.loaded = process

    def enter_again(self, process: Process, modules: dict[str, ModuleType]) -> None:
        """The same, of a process that has its own modules only now."""
        self.share()
        self.loaded = None
        process.modules = self.shared | modules
        self.enter(process)

    def share(self) -> None:
        """Give all processes the modules that one has imported, unless each has its own."""
        found = sys.modules.items()
        more = {
            name: each
            for name, each in found
            if name not in self.shared and not self.is_private(name)
        }
        self.shared.update(more)
        for process in self.processes.values():
            if process.modules and not process.dead:
                process.modules.update(more)

    def stacks(self) -> str:
        """Where each thread is."""
        lines = []
        for process in self.processes.values():
            if process.dead:
                continue
            lines.append(f"{process.name} on {process.host}{' (stopped)' * process.stopped}")
            for thread in process.threads:
                lines.append(f"  thread {thread.ident}{' (main)' * (thread is process.main)}")
                frame = thread.green.gr_frame
                for each in traceback.extract_stack(frame)[-14:] if frame is not None else ():
                    if "/simulation/" not in each.filename:
                        file = each.filename.rpartition("/")[2]
                        lines.append(f"    {file}:{each.lineno} {each.name}: {each.line}")
        return "\n".join(lines)

    # Processes.

    def spawn(self, parent: Process | None, **given: Any) -> Process:
        """Start a process."""
        process = Process(self, next(self.pids), parent, **given)
        self.processes[process.pid] = process
        self.living += 1
        process.main = self.thread(process, lambda: self.start(process, None))
        self.moment("start")
        return process

    @contextlib.contextmanager
    def as_process(self, process: Process) -> Iterator[None]:
        """Let the current thread do something as another process, before that has a thread."""
        thread = self.current
        assert thread is not None
        before, thread.process = thread.process, process
        try:
            yield
        finally:
            thread.process = before

    def split(self, stay_behind: Callable[[int], None]) -> None:
        """Fork: the current thread goes on as the child, with the program that it has.

        The parent gets another program, and does `stay_behind` with the child's number.
        """
        thread = self.current
        assert thread is not None
        parent = thread.process
        child = Process(
            self,
            next(self.pids),
            parent,
            argv=parent.argv,
            environment=parent.environment,
            directory=parent.directory,
            host=parent.host,
            session=parent.group,
        )
        self.processes[child.pid] = child
        self.living += 1
        for number, file in parent.descriptors.items():
            child.put(number, file)
        child.handlers = dict(parent.handlers)
        child.modules, child.main = parent.modules, thread
        child.system = {name: getattr(sys, name) for name in SWITCHED}
        child.threads.append(thread)
        parent.threads.remove(thread)
        thread.process = child
        parent.modules = {}
        parent.main = self.thread(
            parent, lambda: self.start(parent, lambda: stay_behind(child.pid))
        )
        self.loaded = child

    def thread(self, process: Process, work: Callable[[], None]) -> Thread:
        """Start a thread of a process."""

        def body() -> None:
            try:
                work()
            finally:
                # A process that has forked goes on as its child.
                if not thread.process.dead:
                    thread.done = True
                    thread.process.threads.remove(thread)
                    if thread.sentinel is not None:
                        thread.sentinel.release()

        thread = Thread(self, process, body)
        process.threads.append(thread)
        self.make_ready(thread)
        return thread

    def end(self, process: Process, status: int) -> None:
        """End a process at once: its descriptors are closed, its threads never go on."""
        if process.dead:
            return
        self.note(f"process {process.pid} ({process.name}) ends with {status}")
        process.dead = True
        self.moment("end")
        self.living -= 1
        process.status = status
        self.abandoned += [thread.green for thread in process.threads]
        for number in list(process.descriptors):
            process.close(number)
        for number in process.files:
            with contextlib.suppress(OSError):
                os.close(number)
        process.files.clear()
        for file in list(process.opened):
            if not file.closed:
                os.close(file.fileno())
        adopting = process.parent
        while adopting is not None and not adopting.adopts:
            adopting = adopting.parent
        for child in self.processes.values():
            if child.parent is process:
                child.parent = adopting
                child.reaped = child.reaped or (child.dead and adopting is None)
                if adopting is not None and child.dead and not child.reaped:
                    adopting.children_changed.wake()
                    self.signal(adopting, signal.SIGCHLD)
                if child.death_signal and not child.dead:
                    self.signal(child, child.death_signal)
        parent = process.parent
        if parent is not None:
            parent.children_changed.wake()
            self.signal(parent, signal.SIGCHLD)
        else:
            # The first process of a host reaps what has no parent any more.
            process.reaped = True
        if self.current is not None and self.current.process is process:
            self.hub.switch()

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to a process."""
        if process.dead or number == 0:
            return
        if number == signal.SIGKILL:
            self.end(process, -number)
            return
        if number == signal.SIGSTOP:
            process.stopped = True
            return
        if number == signal.SIGCONT:
            process.stopped = False
            halted, process.halted = process.halted, []
            for thread in halted:
                self.make_ready(thread)
        handler = process.handlers.get(number, signal.SIG_DFL)
        if handler == signal.SIG_IGN:
            return
        if handler == signal.SIG_DFL:
            if number not in (signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG):
                self.end(process, -number)
            return
        process.pending.append(number)
        if process.wakeup >= 0 and process.wakeup in process.descriptors:
            process.descriptors[process.wakeup].write(bytes([number]))
        if process.main is not None and not process.main.done:
            self.make_ready(process.main)


class Process:
    """A simulated process: its program, descriptors, environment, signals and threads."""

    def __init__(
        self,
        kernel: Kernel,
        pid: int,
        parent: Process | None,
        *,
        argv: list[str],
        environment: dict[str, str],
        directory: str,
        host: str,
        session: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.pid = pid
        self.parent = parent
        self.argv = argv
        self.environment = environment
        self.directory = directory
        self.host = host
        named = argv[argv.index("-m") + 1] if "-m" in argv else argv[0]
        self.name = f"{named.rpartition('.')[2]}-{pid}"
        self.group = pid if session is None else session
        self.began = kernel.now + kernel.wall
        self.modules: dict[str, ModuleType] = {}
        """Its `sys.modules`; empty as long as it has no program."""
        self.system: dict[str, Any] = {}
        self.descriptors: dict[int, File] = {}
        self.files: set[int] = set()
        """Descriptors of real files."""
        self.opened: WeakSet[Any] = WeakSet()
        """File objects of real files."""
        self.threads: list[Thread] = []
        self.main: Thread | None = None
        self.handlers: dict[int, Callable[[int, FrameType | None], Any] | int] = {
            signal.SIGPIPE: signal.SIG_IGN
        }
        self.pending: deque[int] = deque()
        self.wakeup = -1
        self.stopped = False
        self.halted: list[Thread] = []
        self.dead = False
        self.reaped = False
        self.status = 0
        self.death_signal = 0
        self.adopts = False
        """Whether it is the parent of descendants whose own parent has ended."""
        self.children_changed = WaitQueue()

    def add(self, file: File) -> int:
        """The lowest free descriptor for an open file."""
        number = FIRST_DESCRIPTOR
        while number in self.descriptors:
            number += 1
        self.put(number, file)
        return number

    def put(self, number: int, file: File) -> None:
        """Have a descriptor be that of an open file."""
        if number in self.descriptors:
            self.close(number)
        file.references += 1
        self.descriptors[number] = file

    def get(self, number: int) -> File:
        """The open file of a descriptor."""
        found = self.descriptors.get(number)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def close(self, number: int) -> None:
        """Close a descriptor; the file is closed with its last one."""
        file = self.get(number)
        del self.descriptors[number]
        file.references -= 1
        if file.references == 0:
            file.closed()


# Open files.


class File:
    """Something that is read, written and waited for through descriptors."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.references = 0
        self.blocking = True
        self.changed = WaitQueue()

    def events(self) -> int:
        """What `poll` says of it: 1 readable, 4 writable, 8 error, 16 hung up."""
        return 0

    def closed(self) -> None:
        """Nobody has it open any more."""

    def read(self, size: int) -> bytes:
        raise OSError(errno.EINVAL, "not readable")

    def write(self, data: bytes) -> int:
        raise OSError(errno.EINVAL, "not writable")

    def wait(self, until: float | None = None) -> None:
        """Wait until something has changed; at once an error if it does not block."""
        if not self.blocking:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if until is not None and self.kernel.now >= until:
            raise TimeoutError("timed out")
        self.kernel.wait((self.changed,), until)


class Bytes:
    """Bytes on their way in one direction, with what of them is there already."""

    def __init__(self, kernel: Kernel, size: int = PIPE_SIZE) -> None:
        self.kernel = kernel
        self.size = size
        self.data = bytearray()
        self.attached: list[tuple[int, list[Any]]] = []
        """Open files that travel: the position of the byte that has them."""
        self.taken = 0
        self.given = 0
        self.ended = False
        """Whether the writer has closed it."""
        self.broken = False
        """Whether the reader has closed it."""

    @property
    def room(self) -> int:
        return self.size - len(self.data)

    def put(self, data: bytes | memoryview) -> None:
        self.data += data
        self.given += len(data)

    def take(self, size: int) -> bytes:
        """Up to so many bytes; never across a byte that brings open files."""
        if self.attached and self.attached[0][0] > self.taken:
            size = min(size, self.attached[0][0] - self.taken)
        found = bytes(self.data[:size])
        del self.data[:size]
        self.taken += len(found)
        return found


class PipeEnd(File):
    """One end of a pipe."""

    def __init__(self, kernel: Kernel, way: Bytes, *, reads: bool) -> None:
        super().__init__(kernel)
        self.way = way
        self.reads = reads
        self.other: PipeEnd

    def events(self) -> int:
        if self.reads:
            return (1 if self.way.data else 0) | (16 if self.way.ended else 0)
        return (4 if self.way.room else 0) | (8 if self.way.broken else 0)

    def closed(self) -> None:
        if self.reads:
            self.way.broken = True
        else:
            self.way.ended = True
        self.other.changed.wake()

    def read(self, size: int) -> bytes:
        while not self.way.data:
            if self.way.ended:
                return b""
            self.wait()
        found = self.way.take(size)
        self.other.changed.wake()
        return found

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if self.way.broken:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            room = self.way.room
            # What fits into a pipe's page is never torn.
            if room <= 0 or (len(view) <= 4096 and room < len(view)):
                if done and not self.blocking:
                    break
                self.wait()
                continue
            part = view[done : done + room]
            self.way.put(part)
            done += len(part)
            self.other.changed.wake()
        return done


def pipe(kernel: Kernel) -> tuple[PipeEnd, PipeEnd]:
    """The two ends of a new pipe."""
    way = Bytes(kernel)
    reading = PipeEnd(kernel, way, reads=True)
    writing = PipeEnd(kernel, way, reads=False)
    reading.other, writing.other = writing, reading
    return reading, writing


class Counter(File):
    """An eventfd."""

    def __init__(self, kernel: Kernel, value: int) -> None:
        super().__init__(kernel)
        self.value = value

    def events(self) -> int:
        return 4 | (1 if self.value else 0)

    def read(self, size: int) -> bytes:
        while not self.value:
            self.wait()
        value, self.value = self.value, 0
        return value.to_bytes(8, "little")

    def write(self, data: bytes) -> int:
        self.value += int.from_bytes(data[:8], "little")
        self.changed.wake()
        return 8


class RealFile(File):
    """A file of the real system behind a simulated descriptor."""

    def __init__(self, kernel: Kernel, number: int) -> None:
        super().__init__(kernel)
        self.number = os.dup(number)

    def events(self) -> int:
        return 5

    def closed(self) -> None:
        os.close(self.number)

    def read(self, size: int) -> bytes:
        return os.read(self.number, size)

    def write(self, data: bytes) -> int:
        return os.write(self.number, data)


class NullFile(File):
    """Takes everything, gives nothing."""

    def events(self) -> int:
        return 5

    def read(self, size: int) -> bytes:
        return b""

    def write(self, data: bytes) -> int:
        return len(data)
