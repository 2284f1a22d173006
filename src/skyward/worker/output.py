"""Output capture: the output of a task, from Python or C, is cut into lines and sent at once.

Numbers that tasks log are sent a few times a second, and before the result.

File descriptors 1 and 2 are pipes that this process both fills and drains. The agent holds their
read ends, too, so the last output of a process that dies is not lost.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from skyward import context
from skyward.context import Route, RoutedStream
from skyward.wire.messages import Logged
from skyward.worker.places import ReadyTask

PIPE_SIZE = 1 << 20
BAR_SECONDS = 0.1
PIECE = 256 << 10
"""A longer line is sent in pieces of about so many characters, which the client joins."""
LOG_SECONDS = 0.25
"""What tasks log within so many seconds is sent together."""
ROWS_WAITING = 10_000
VALUES_WAITING = 100_000
"""How many logged rows, and values of them, may wait; a task does not wait for more to be sent."""
VALUES_SENT = 5_000
"""A message has no more rows when it has so many values. With the longest names it has 5 MB, of
the 16 that a message may have."""

Emit = Callable[[int, str, str, bool], None]
"""task, stream, text, transient"""

current_task: ContextVar[int] = ContextVar("skyward_task", default=0)


class LineCutter:
    """Cuts a byte stream into whole lines and, at most ten times a second, progress-bar states.

    Of a line longer than `PIECE`, it returns pieces: the time per byte must not grow with the line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._is_long = False
        """Whether a piece of the last line was returned already."""
        self._last_bar = 0.0
        self.unfinished = False
        """Whether there is text, or part of a character, without a newline at its end."""

    def feed(self, data: bytes) -> tuple[str, str]:
        """Lines with their newlines, and the bar state to show now; each may be empty.

        If the lines do not end with a newline, a later call returns the rest of the last one.
        """
        text = self._rest + self._decoder.decode(data)
        lines, newline, self._rest = text.rpartition("\n")
        if newline:
            first, *others = lines.split("\n")
            # A bar does not begin with so much text: what was sent of a long line stays.
            first = first.removesuffix("\r") if self._is_long else _visible(first)
            lines = "\n".join([first, *map(_visible, others)]) + "\n"
            self._is_long = False
        bar = ""
        if "\r" in self._rest and not self._is_long:
            done, _, ahead = self._rest.rpartition("\r")
            state = ahead or _visible(done)
            now = time.monotonic()
            if state and now - self._last_bar >= BAR_SECONDS:
                self._last_bar, bar = now, state
            self._rest = state if not ahead else "\r" + ahead
            if not ahead:
                self._rest += "\r"
        if len(self._rest) > PIECE:
            lines += self._rest if self._is_long else _visible(self._rest)
            self._rest, self._is_long = "", True
        self.unfinished = bool(self._is_long or self._rest or self._decoder.getstate()[0])
        return lines, bar

    def finish(self) -> str:
        """The text after the last newline, as a line of its own or as the end of a long one."""
        text = self._rest + self._decoder.decode(b"", True)
        self._decoder.reset()
        is_long, self._is_long = self._is_long, False
        self._rest = ""
        self.unfinished = False
        if is_long:
            return text + "\n"
        rest = _visible(text)
        if "\r" in text and not rest.strip():
            return ""  # a progress bar that has erased itself
        return rest + "\n" if rest else ""


def _visible(line: str) -> str:
    """What a terminal would show of a line with carriage returns in it."""
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""


def _emit_rest(emit: Emit, task: int, name: str, cutter: LineCutter) -> None:
    rest = cutter.finish()
    # An empty transient state removes the last state of a progress bar that has erased itself.
    emit(task, name, rest, not rest)


class ProcessCapture:
    """Captures everything a process writes, for an executor that runs one task at a time."""

    def __init__(self, read_ends: tuple[int, int], emit: Emit) -> None:
        self._emit = emit
        self._reads = dict(zip(("stdout", "stderr"), read_ends, strict=True))
        self._cutters = {name: LineCutter() for name in self._reads}
        self._lock = threading.RLock()
        self._task = 0
        self._threads: ThreadCapture | None = None
        """Says which task writes, once several may run at a time."""
        self._muted: frozenset[str] = frozenset()
        self._flush = ctypes.CDLL(None).fflush
        self._pipes = {"stdout": os.dup(1), "stderr": os.dup(2)}
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self._waiting = select.poll()
        for end in read_ends:
            self._waiting.register(end, select.POLLIN)
            os.set_blocking(end, False)
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = open(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, TaskStream(name, raw.write, raw.flush, number))
        context.install_capture(self)
        threading.Thread(target=self._drain_forever, name="skyward-output", daemon=True).start()

    def share(self) -> None:
        """From now on, have the context say which task writes: others run while one waits."""
        if self._threads is None:
            self._send_all()
            self._threads = ThreadCapture(self, self._emit)

    def begin(self, task: int) -> None:
        """Label output with this task from now on."""
        with self._lock:
            self._task = task

    def end(self) -> None:
        """Send everything that the task has written, so that it arrives before the result."""
        self._send_all(ends=True)

    def flush(self) -> None:
        """Send everything that the task has written so far, also lines that it has not finished."""
        self._send_all()

    def _send_all(self, *, ends: bool = False) -> None:
        if self._threads is not None:
            self._threads.flush()
        self._flush(None)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                # The task has replaced the stream with one of its own.
                continue
        with self._lock:
            if self._waiting.poll(0):
                for name in self._reads:
                    self._drain(name)
            for name, cutter in self._cutters.items():
                if cutter.unfinished:
                    _emit_rest(self._emit, self._task, name, cutter)
            if ends:
                self._task = 0

    def reroute(self, route: Route) -> None:
        """Mute streams at their descriptors, so that C code and subprocesses are muted too."""
        for name, number in (("stdout", 1), ("stderr", 2)):
            muted = name in route.muted
            if muted == (name in self._muted):
                continue
            getattr(sys, name).flush()
            self._flush(None)
            os.dup2(self._nowhere if muted else self._pipes[name], number)
        self._muted = route.muted

    def unmute(self) -> None:
        """Let the descriptors write again: several tasks share them from now on."""
        if self._muted:
            self.reroute(Route())

    def _drain_forever(self) -> None:
        poll = select.poll()
        names = {end: name for name, end in self._reads.items()}
        for end in names:
            poll.register(end, select.POLLIN)
        while True:
            for end, _ in poll.poll():
                with self._lock:
                    self._drain(names[end])

    def _drain(self, name: str) -> None:
        while True:
            try:
                data = os.read(self._reads[name], 65536)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                return
            lines, bar = self._cutters[name].feed(data)
            if lines:
                self._emit(self._task, name, lines, False)
            if bar:
                self._emit(self._task, name, bar, True)


class ThreadCapture:
    """Captures output per task where tasks run on threads; output of C code has no task."""

    def __init__(self, process: ProcessCapture, emit: Emit) -> None:
        """`process` captures what C code and other processes write."""
        self._process = process
        self._emit = emit
        self._cutters: dict[tuple[int, str], LineCutter] = {}
        self._lock = threading.Lock()
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name)
            setattr(sys, name, TaskStream(name, self._writer(name, stream), stream.flush, number))
        context.install_capture(self)

    def _writer(self, name: str, behind: Any) -> Callable[[str], int]:
        def write(text: str) -> int:
            task = current_task.get()
            if not task:
                return int(behind.write(text))
            with self._lock:
                cutter = self._cutters.setdefault((task, name), LineCutter())
                lines, bar = cutter.feed(text.encode("utf-8", "replace"))
            if lines:
                self._emit(task, name, lines, False)
            if bar:
                self._emit(task, name, bar, True)
            return len(text)

        return write

    def begin(self, task: int) -> None:
        """Do nothing: the context says which task writes."""

    def end(self) -> None:
        """Send the current task's unfinished lines."""
        self.flush()

    def flush(self) -> None:
        """Send the current task's unfinished lines."""
        for name in ("stdout", "stderr"):
            with self._lock:
                cutter = self._cutters.pop((current_task.get(), name), None)
            if cutter is not None and cutter.unfinished:
                _emit_rest(self._emit, current_task.get(), name, cutter)

    def reroute(self, route: Route) -> None:
        """Mute nothing: each write looks at its own context."""
        self._process.unmute()


class NumberLog:
    """Sends what tasks log, from a thread of its own: a task never waits for the client."""

    def __init__(
        self, asking_task: Callable[[], ReadyTask | None], send: Callable[[Logged], None]
    ) -> None:
        """`asking_task` finds the task that has started a thread."""
        self._asking_task, self._send = asking_task, send
        self.rows: list[tuple[int, int | None, dict[str, float]]] = []
        """What has not been sent yet."""
        self._values = self._left_out = 0
        self._lock = threading.Lock()
        """Held for a moment only: tasks take it."""
        self._sending = threading.Lock()
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, values: dict[str, float], step: int | None) -> None:
        """Keep what the current task has logged until it is sent."""
        task = current_task.get()
        if not task and (asking := self._asking_task()) is not None:
            task = asking.run.task
        with self._lock:
            if len(self.rows) >= ROWS_WAITING or self._values >= VALUES_WAITING:
                self._left_out += 1
                return
            self.rows.append((task, step, values))
            self._values += len(values)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="skyward-log", daemon=True)
                self._thread.start()
        if not self._woken.is_set():
            self._woken.set()

    def flush(self) -> None:
        """Send what waits."""
        with self._sending:
            with self._lock:
                rows, self.rows = self.rows, []
                left_out, self._left_out = self._left_out, 0
                self._values = 0
            begin = count = 0
            for end, (_, _, values) in enumerate(rows, 1):
                count += len(values)
                if count >= VALUES_SENT or end == len(rows):
                    self._send(Logged(rows[begin:end], left_out))
                    begin, count, left_out = end, 0, 0

    def _run(self) -> None:
        while self._woken.wait():
            self._woken.clear()
            time.sleep(LOG_SECONDS)
            self.flush()


class TaskStream(RoutedStream):
    """sys.stdout or sys.stderr of an executor."""

    def __init__(
        self, name: str, write: Callable[[str], int], flush: Callable[[], None], number: int
    ) -> None:
        super().__init__(name)
        self._write = write
        self._flush = flush
        self._number = number
        self._written = False

    def reconfigure(self, **_: Any) -> None:
        """Do nothing: the client always gets UTF-8, line by line."""

    def pass_on(self, text: str) -> int:
        self._written = True
        return self._write(text)

    def flush(self) -> None:
        if self._written:
            self._written = False
            self._flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._number
