"""Debuggers: those of an executor's tasks, which a person uses on the client's terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyward.errors import DebuggerError
from skyward.wire.messages import (
    AT_BREAKPOINTS,
    AT_FAILURES,
    KEEPING_FRAMES,
    NEVER,
    POST_MORTEM,
    DebuggerHears,
    Message,
)
from skyward.worker.failures import OURS
from skyward.worker.output import current_task
from skyward.worker.places import ReadyTask

if TYPE_CHECKING:
    from skyward.worker.task_debugger import DebuggerConsole, TaskDebugger

_HOW = (
    "SKYWARD_DEBUGGER=0 in the environment of the script that made the call turns debuggers off; "
    "leave it out, and the breakpoint opens pdb in the script's terminal"
)


class Debuggers:
    """Gives a task that meets a breakpoint, or that fails, a debugger."""

    def __init__(
        self,
        task_of: Callable[[int], ReadyTask | None],
        send: Callable[[Message], None],
        hurry: Callable[[], None],
        flush_output: Callable[[], None],
        interrupt: Callable[[ReadyTask], None],
    ) -> None:
        """`task_of` finds a task that runs; for 0 the only one.

        `flush_output` sends everything that the task has written. `interrupt` raises a
        KeyboardInterrupt in a task.
        """
        self._task_of, self._send, self._hurry = task_of, send, hurry
        self._flush_output, self._interrupt = flush_output, interrupt
        self._consoles: dict[int, DebuggerConsole] = {}
        self._debuggers: dict[int, TaskDebugger] = {}
        self._failed: dict[int, types.TracebackType] = {}
        """The traceback of the last task, by thread, if it failed and somebody may want to look."""
        self.used = False
        """Whether a task has ever had a debugger or left its frames: if not, none has to end."""
        self._pid = os.getpid()
        sys.breakpointhook = self._on_breakpoint

    def hear(self, message: DebuggerHears) -> None:
        """Take what the client says to a task's debugger."""
        console, task = self._consoles.get(message.task), self._task_of(message.task)
        if console is None or task is None:
            return
        if message.event == "interrupt" and not console.waiting:
            self._interrupt(task)
        else:
            console.hear(message)

    def cancel(self, number: int) -> None:
        """Have a debugger end, because its task is cancelled."""
        console = self._consoles.get(number)
        if console is not None:
            console.hear(None)

    # On the thread that runs the task.

    def begin(self, task: ReadyTask) -> None:
        """Forget the failure of the task before, unless this one is about it."""
        if self._failed and task.run.debugged != POST_MORTEM:
            self._failed.pop(threading.get_ident(), None)

    def failed(self, task: ReadyTask, problem: BaseException) -> None:
        """Keep the frames of a task that has failed, and show them if that is wanted."""
        trace = problem.__traceback__
        mode = task.run.debugged
        if mode not in (KEEPING_FRAMES, AT_FAILURES) or not isinstance(problem, Exception):
            return
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
            trace = trace.tb_next
        if trace is None or task.cancelled:
            return
        self.used = True
        self._failed[threading.get_ident()] = trace
        if mode == AT_FAILURES and not self._debuggers.get(task.run.task):
            with contextlib.suppress(DebuggerError):
                # If the client has no terminal, the task's own failure is what counts.
                self._debugger(task).look_at(trace, f"{type(problem).__name__}: {problem}")

    def look_back(self, task: ReadyTask) -> None:
        """Open a debugger in the frames of the task that ran before, and has failed."""
        trace = self._failed.get(threading.get_ident())
        if trace is None:
            raise DebuggerError(
                "this worker keeps no failed task: its last one succeeded, or began before "
                "SKYWARD_DEBUGGER=1 was set; call sky.post_mortem() before the worker's next task"
            )
        self._debugger(task).look_at(trace)

    def end(self, task: ReadyTask) -> None:
        """End a task's debugger: it must neither stop in the next task nor keep this one's data."""
        debugger = self._debuggers.pop(task.run.task, None)
        console = self._consoles.get(task.run.task)
        if debugger is not None:
            debugger.end()
        if console is not None:
            console.close()
            del self._consoles[task.run.task]

    def _debugger(self, task: ReadyTask) -> TaskDebugger:
        debugger = self._debuggers.get(task.run.task)
        if debugger is None:
            # Imported here: few tasks need it, and it takes an executor 20 ms.
            from skyward.worker.task_debugger import DebuggerConsole, TaskDebugger

            self.used = True
            console = DebuggerConsole(task, self._send, self._hurry, self._flush_output)
            self._consoles[task.run.task] = console
            debugger = self._debuggers[task.run.task] = TaskDebugger(console)
        return debugger

    def _on_breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """What `breakpoint()` does in this process."""
        setting = os.environ.get("PYTHONBREAKPOINT", "")
        if setting == "0":
            return None
        # A forked process must not touch the lock on the tasks: nobody may be there to release it.
        is_here = os.getpid() == self._pid
        task = self._task_of(current_task.get()) if is_here else None
        mode = NEVER if task is None else task.run.debugged
        if setting and mode in (NEVER, AT_BREAKPOINTS):
            return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
        frame = sys._getframe(1)
        code = frame.f_code
        place = f"breakpoint() at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        if not is_here:
            raise DebuggerError(
                f"{place}: it is in a process that the task started, which the debugger cannot "
                "reach; call it in the task's own process, for example with num_workers=0"
            )
        if task is None:
            raise DebuggerError(f"{place}: no task runs on this thread, so nobody can be asked")
        if mode == NEVER:
            raise DebuggerError(f"{place}: {_HOW}")
        self._debugger(task).stop_at(frame, str(kwargs.get("header") or ""))
        return None
