"""The console of a task's debugger: a file whose other end is the client's terminal."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable

from skyward.errors import DebuggerError
from skyward.wire.messages import DebuggerHears, DebuggerSays, Message
from skyward.worker.places import ReadyTask

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Where Skyward's own code is, which debuggers do not show."""
SOURCE_SECONDS = 5.0
"""How long a debugger waits for the source of a file that only the client has."""


class DebuggerConsole:
    """The terminal of one task's debugger, as a file: the client shows what is written to it."""

    encoding = "utf-8"

    def __init__(
        self,
        job: ReadyTask,
        send: Callable[[Message], None],
        hurry: Callable[[], None],
        flush_output: Callable[[], None],
    ) -> None:
        self._job, self._task = job, job.run.task
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
            self._send(DebuggerSays(self._task, "opened", ""))

    def close(self) -> None:
        """Give the terminal back."""
        if self._open:
            self._open = False
            self._flush_output()
            self._send(DebuggerSays(self._task, "closed", self._taken()))

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
        self._send(DebuggerSays(self._task, "source", file))
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
        self._send(DebuggerSays(self._task, "asks", self._taken()))
        self._hurry()
        heard = self._heard.get()
        if heard is None or self._job.cancelled:
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
