"""Debuggers of tasks, on the client: one at a time has the person's terminal."""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from skyward.calls.lane import Lane, Timeouts
from skyward.calls.task import Task
from skyward.console import Console
from skyward.console.prompts import END, INTERRUPT, LINE, Prompt, open_prompt
from skyward.errors import DebuggerError
from skyward.staff import Staff
from skyward.wire.messages import (
    AT_BREAKPOINTS,
    AT_FAILURES,
    KEEPING_FRAMES,
    NEVER,
    DebuggerHears,
    DebuggerSays,
)

VARIABLE = "SKYWARD_DEBUGGER"
# Every call asks for the variable, and `os.environ.get` takes as long as four functions.
ENVIRONMENT: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
DEBUG_KEY: Any = VARIABLE if ENVIRONMENT is os.environ else os.environ.encodekey(VARIABLE)
ON_FAILURES = "failures"
"""The value with which a task that fails opens a debugger by itself."""
SOURCE_MAX = 1 << 20
"""How many characters of source a debugger gets; longer files are generated."""
PATIENCE = 3
"""After so many Ctrl-C without an answer, the debugger gives up, and Ctrl-C cancels the call."""


def debug_mode() -> int:
    """When the tasks of this process's calls open a debugger, as the environment says."""
    wanted = os.environ.get(VARIABLE) if DEBUG_KEY in ENVIRONMENT else None
    if not wanted:
        return AT_BREAKPOINTS
    if wanted == "0":
        return NEVER
    return AT_FAILURES if wanted == ON_FAILURES else KEEPING_FRAMES


def source_of(file: str) -> str:
    """The source of a module or cell of this process; empty if there is none.

    No other file: a node need not see what is on this machine besides the code that it runs.
    """
    cached = linecache.cache.get(file)
    is_cell = cached is not None and len(cached) > 1 and cached[1] is None
    if not is_cell:
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        if file not in files:
            return ""
    text = "".join(linecache.getlines(file))
    return text if len(text) <= SOURCE_MAX else ""


_readers = Staff("skyward-sources", most=2)
"""The threads that read source: a disk may be slow, and the loop's thread serves all calls."""


def _tell_source(lane: Lane, says: DebuggerSays, *, allowed: bool) -> None:
    text = source_of(says.text) if allowed else ""
    lane.tell(DebuggerHears(says.task, "source", text, says.text))


@dataclass(slots=True, eq=False)
class DebuggerSession:
    """A task's debugger, from its place in line to its end."""

    lane: Lane
    task_id: int
    name: str
    cell: Context | None
    """The cell of a notebook that the task's call is in; None outside of notebooks."""
    reads_pipe: bool
    """Whether input may come from a pipe: without the variable, nobody has promised any."""
    said: deque[DebuggerSays] = field(default_factory=deque)
    complete: bool = False
    """Whether the debugger has said everything; the next one of its task has a place of its own."""
    over: bool = False
    """Whether the person is to see no more of it."""

    @property
    def where(self) -> str:
        """The task and its place, in words."""
        return f"{self.name} on {self.lane.where}"


class DebuggerDesk:
    """Gives the terminal to one debugger after the other; other threads tell it what they say."""

    def __init__(self, console: Console, timeouts: Timeouts) -> None:
        self._console, self._timeouts = console, timeouts
        self._lock = threading.Lock()
        self._sessions: list[DebuggerSession] = []
        """Those that have the terminal or wait for it, in line."""
        self._thread: threading.Thread | None = None
        self._wake: tuple[int, int] | None = None
        self._closed = False

    def heard(self, lane: Lane, task: Task | None, says: DebuggerSays) -> None:
        """Take what a task's debugger says; on the loop's thread."""
        if says.event == "source":
            # At once, also if the debugger waits for the terminal.
            with self._lock:
                debugged = self._session(lane, says.task) is not None
            _readers.run(lambda: _tell_source(lane, says, allowed=debugged))
            return
        with self._lock:
            session = self._session(lane, says.task)
            if session is None and (says.event != "opened" or self._closed):
                return
            if session is None:
                name, cell = ("?", None) if task is None else (task.name, task.cell)
                reads_pipe = task is None or task.debugged != AT_BREAKPOINTS
                session = DebuggerSession(lane, says.task, name, cell, reads_pipe)
                if self._sessions:
                    self._console.note(
                        f"{session.where} waits in line: {self._sessions[0].where} is in the "
                        "debugger"
                    )
                self._sessions.append(session)
                self._timeouts.hold()
                self._serve()
            session.said.append(says)
            session.complete = says.event == "closed"
            self._awaken()

    def lost(self, lane: Lane) -> None:
        """End the debuggers of an executor that is gone."""
        with self._lock:
            for session in self._sessions:
                session.over = session.over or session.lane is lane
            self._awaken()

    def close(self) -> None:
        """End all debuggers, and give the terminal back."""
        with self._lock:
            self._closed = True
            thread = self._thread
            for session in self._sessions:
                session.over = True
            self._awaken()
        if thread is not None and thread is not threading.current_thread():
            # One that waits for a notebook's page or for a pipe cannot be woken.
            thread.join(1.0)

    def _session(self, lane: Lane, task_id: int) -> DebuggerSession | None:
        for session in self._sessions:
            is_open = not (session.complete or session.over)
            if session.lane is lane and session.task_id == task_id and is_open:
                return session
        return None

    def _awaken(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):
                os.write(self._wake[1], b"\0")

    def _serve(self) -> None:
        """Have a thread that serves the sessions, until there are none."""
        if self._thread is None:
            self._wake = os.pipe()
            for end in self._wake:
                os.set_blocking(end, False)
            self._thread = threading.Thread(target=self._run, name="skyward-debugger", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while (session := self._first()) is not None:
                self._take_turn(session)
        finally:
            with self._lock:
                self._retire()
                if self._sessions and not self._closed:
                    # This thread was ended from outside: the others still wait for their turn.
                    self._serve()

    def _take_turn(self, session: DebuggerSession) -> None:
        try:
            self._console.hold(session.lane.node, session.lane.worker)
            if session.cell is None:
                self._attend(session)
            else:
                # A copy: the console shows output in the cell meanwhile.
                session.cell.copy().run(self._attend, session)
        except Exception as problem:
            # Whatever it is, the task must not wait for a debugger that nobody serves.
            text = f"the debugger failed in the client: {type(problem).__name__}: {problem}"
            self._tell(session, "refused", text)
        finally:
            self._console.release()
            self._timeouts.release()
            with self._lock:
                session.over = True
                self._sessions.remove(session)

    def _first(self) -> DebuggerSession | None:
        with self._lock:
            if self._sessions:
                return self._sessions[0]
            self._retire()
            return None

    def _retire(self) -> None:
        """Have no thread; the next session starts another one. With the lock."""
        if self._thread is threading.current_thread():
            self._thread = None
            wake, self._wake = self._wake, None
            for end in wake or ():
                os.close(end)

    def _attend(self, session: DebuggerSession) -> None:
        self._console.drain()
        try:
            prompt = open_prompt(pipe=session.reads_pipe)
        except DebuggerError as problem:
            self._tell(session, "refused", str(problem))
            return
        try:
            prompt.write(f"\n{session.where}: pdb (c continues, q ends the call, h helps)\n")
            self._converse(session, prompt)
        except DebuggerError as problem:
            self._tell(session, "refused", str(problem))
        except OSError:
            # The terminal is gone.
            self._tell(session, END)
        finally:
            prompt.close()

    def _converse(self, session: DebuggerSession, prompt: Prompt) -> None:
        asking, unanswered = False, 0
        wake = self._wake[0] if self._wake is not None else -1
        while not session.over:
            while session.said:
                says, unanswered = session.said.popleft(), 0
                # What the task has printed before.
                self._console.drain()
                prompt.write(says.text)
                asking = says.event == "asks"
                if says.event == "closed":
                    return
            event, text = prompt.wait(wake, asking=asking)
            if event in (LINE, END, INTERRUPT):
                unanswered += event == INTERRUPT and not asking
                asking = False
                self._tell(session, event, text)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            if unanswered >= PATIENCE:
                # Not the executor, or not the network, answers: now Ctrl-C cancels the call again.
                self._tell(session, END)
                prompt.close()
                os.kill(os.getpid(), signal.SIGINT)
                return

    @staticmethod
    def _tell(session: DebuggerSession, event: str, text: str = "") -> None:
        session.lane.tell(DebuggerHears(session.task_id, event, text))
