"""Pdb for a task: Python's debugger, with its input and output on the client's terminal."""

from __future__ import annotations

import linecache
import pdb  # noqa: T100
import sys
import types
from typing import Any

from skyward.worker.debuggers import OURS, DebuggerConsole


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
