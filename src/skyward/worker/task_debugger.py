"""Pdb for a task: Python's debugger, with its input and output on the client's terminal."""

from __future__ import annotations

import linecache
import pdb  # noqa: T100
import queue
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from skyward.errors import DebuggerError
from skyward.wire.messages import DebuggerHears, DebuggerSays, Message
from skyward.worker.failures import OURS
from skyward.worker.places import ReadyTask

SOURCE_SECONDS = 5.0
"""How long a debugger waits for the source of a file that only the client has."""


class DebuggerConsole:
    """The terminal of one task's debugger, as a file: the client shows what is written to it."""

    encoding = "utf-8"

    def __init__(
        self,
        task: ReadyTask,
        send: Callable[[Message], None],
        hurry: Callable[[], None],
        flush_output: Callable[[], None],
    ) -> None:
        self._task, self._number = task, task.run.task
        self._send, self._hurry, self._flush_output = send, hurry, flush_output
        self._text: list[str] = []
        self._sources: queue.SimpleQueue[DebuggerHears] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[DebuggerHears | None] = queue.SimpleQueue()
        self._open = False
        self.waiting = False
        """Whether the debugger waits for a line."""

    def open(self) -> None:
        """Have the client take a place in line for its terminal, unless it has one."""
        if not self._open:
            self._open = True
            self._send(DebuggerSays(self._number, "opened", ""))

    def close(self) -> None:
        """Give the terminal back."""
        if self._open:
            self._open = False
            self._flush_output()
            self._send(DebuggerSays(self._number, "closed", self._taken()))

    def hear(self, message: DebuggerHears | None) -> None:
        """Take what the client says; None if the task is cancelled."""
        if message is not None and message.event == "source":
            self._sources.put(message)
            return
        # Before the debugger wakes up: a Ctrl-C right after a line is for what the line starts.
        self.waiting = False
        self._heard.put(message)

    def source_of(self, file: str) -> str:
        """The source of a file of the client; empty if it has none, or does not answer."""
        self._send(DebuggerSays(self._number, "source", file))
        self._hurry()
        deadline = time.monotonic() + SOURCE_SECONDS
        while True:
            try:
                answer = self._sources.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return ""
            # An answer that came too late is of a file that was asked for before.
            if answer.file == file:
                return answer.text

    def write(self, text: str) -> int:
        self._text.append(text)
        return len(text)

    def flush(self) -> None:
        """Nothing: text is sent with the question for the next line."""

    def readline(self, size: int = -1) -> str:
        """The next line that the person types; empty at the end of the person's input."""
        # What the task itself has printed comes first.
        self._flush_output()
        self.waiting = True
        self._send(DebuggerSays(self._number, "asks", self._taken()))
        self._hurry()
        heard = self._heard.get()
        if heard is None or self._task.cancelled:
            return ""
        match heard.event:
            case "line":
                return heard.text + "\n"
            case "interrupt":
                raise KeyboardInterrupt
            case "refused":
                raise DebuggerError(heard.text)
            case _:
                return ""

    def _taken(self) -> str:
        text, self._text = "".join(self._text), []
        return text


class TaskDebugger(pdb.Pdb):
    """Stops in the user's code and never in Skyward's; has the terminal from stop to `continue`."""

    def __init__(self, console: DebuggerConsole) -> None:
        # Without handlers of its own for SIGINT: that cancels tasks.
        super().__init__(stdin=console, stdout=console, nosigint=True)  # type: ignore[arg-type]
        self._console = console
        self._outermost: types.FrameType | None = None
        """The user's outermost frame: steps stop inside it, not in what Skyward itself calls."""
        self._sources: set[str] = set()
        """The files whose source the client was asked for."""
        self._leaves = False
        """Whether the last command lets the task run on, so that others may have the terminal."""

    def stop_at(self, frame: types.FrameType, header: str) -> None:
        """Stop at the next line of a frame."""
        if header:
            self.message(header)
        self._outermost = _outermost(frame)
        self.set_trace(frame)

    def look_at(self, trace: types.TracebackType, header: str = "") -> None:
        """Have the person look at the frames of a failure."""
        if header:
            self.message(header)
        self.reset()
        self.interaction(None, trace)
        self._console.close()

    def end(self) -> None:
        """Stop nowhere any more, and refer to no frame of the task."""
        sys.settrace(None)
        self.clear_all_breaks()
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back
        self._outermost = None
        self.reset()
        self.forget()
        for file in self._sources:
            # The person may change the file before the next task.
            linecache.cache.pop(file, None)

    def interaction(self, frame: types.FrameType | None, *args: Any) -> None:
        self._console.open()
        self._outermost = _outermost(frame)
        self._leaves = False
        super().interaction(frame, *args)
        if self._leaves:
            self._console.close()

    def set_continue(self) -> None:
        self._leaves = True
        super().set_continue()

    def set_quit(self) -> None:
        self._leaves = True
        super().set_quit()

    def stop_here(self, frame: types.FrameType) -> bool:
        return super().stop_here(frame) and _outermost(frame) is self._outermost

    def get_stack(
        self, f: types.FrameType | None, t: types.TracebackType | None
    ) -> tuple[list[tuple[types.FrameType, int]], int]:
        """The stack without Skyward's frames and those below them."""
        stack, index = super().get_stack(f, t)
        ours = [number for number, (frame, _) in enumerate(stack) if _is_ours(frame)]
        first = ours[-1] + 1 if ours and ours[-1] < index else 0
        for frame, _ in stack[first:]:
            self._find_source(frame)
        return stack[first:], index - first

    def _find_source(self, frame: types.FrameType) -> None:
        """Have the source of a script, module or cell that is not on this node."""
        file = frame.f_code.co_filename
        if file in self._sources or linecache.getlines(file, frame.f_globals):
            return
        self._sources.add(file)
        if source := self._console.source_of(file):
            # Without a time of change, so that nobody looks for the file on this node.
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)


def _outermost(frame: types.FrameType | None) -> types.FrameType | None:
    """The outermost frame that Skyward's code has not come between; None for Skyward's own."""
    found = None
    while frame is not None and not _is_ours(frame):
        found, frame = frame, frame.f_back
    return found


def _is_ours(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)
