"""Plain lines, for logs and pipes; and almost nothing, on request."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from skyward.context import Output

BAR_SECONDS = 10.0
"""A progress bar in a log is one line every so often, not one per update."""


def write_line(stream: TextIO, line: str) -> None:
    """Write a line whatever characters the stream has."""
    try:
        stream.write(line + "\n")
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


class Quiet:
    """Shows what tasks print, and nothing of its own but warnings."""

    def begin(self, title: str, nodes: int) -> None:
        """Nothing."""

    def phase(self, node: int, phase: str, seconds: float) -> None:
        """Nothing."""

    def ready(self, text: str) -> None:
        """Nothing."""

    def line(self, label: str, line: Output) -> None:
        """A line of a task, labelled."""
        write_line(sys.stderr if line.stream == "stderr" else sys.stdout, f"[{label}] {line}")

    def bar(self, label: str, state: Output) -> None:
        """Nothing: its last state arrives as a line."""

    def note(self, text: str) -> None:
        """A warning."""
        self._say(text)

    def end(self, summary: str) -> None:
        """Nothing."""

    def _say(self, text: str) -> None:
        write_line(sys.stderr, f"skyward: {text}")


class Plain(Quiet):
    """One line an event."""

    def __init__(self) -> None:
        self._bars: dict[str, float] = {}

    def begin(self, title: str, nodes: int) -> None:
        """Say what is being started."""
        self._say(title)

    def phase(self, node: int, phase: str, seconds: float) -> None:
        """Say where each node is."""
        self._say(f"node {node}: {phase} ({seconds:.1f} s)")

    def ready(self, text: str) -> None:
        """Say that it can be used."""
        self._say(text)

    def bar(self, label: str, state: Output) -> None:
        """Now and then, the state of a progress bar."""
        now = time.monotonic()
        key = f"{label} {state.stream} {state.task}"
        if now - self._bars.setdefault(key, now) >= BAR_SECONDS and state.strip():
            self._bars[key] = now
            self.line(label, state)

    def end(self, summary: str) -> None:
        """The summary."""
        if summary:
            self._say(summary)
