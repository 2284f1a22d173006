"""Plain lines, for logs and pipes; or only what tasks print, with `console=False`."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from skyward.context import Output

MANY_NODES = 16
"""For more nodes, the start is shown in numbers, not node by node."""
BAR_SECONDS = 10.0
"""A progress bar in a log is one line every so often, not one per update."""


def write_line(stream: TextIO, line: str, *, flush: bool = True) -> None:
    """Write a line, with a replacement for characters that the stream cannot encode."""
    try:
        stream.write(line + "\n")
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    if flush:
        stream.flush()


def client_bars() -> Any:
    """tqdm's class, if the user's own program draws progress bars with it now; else None."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return tqdm if getattr(tqdm, "_instances", None) else None


class Quiet:
    """Shows what tasks print, and nothing of its own but warnings."""

    def begin(self, title: str, nodes: int) -> None:
        """Nothing."""

    def phase(self, node: int, phase: str, seconds: float, pool: str = "") -> None:
        """Nothing."""

    def ready(self, text: str) -> None:
        """Nothing."""

    def line(self, label: str, line: Output) -> None:
        """A line of a task, labelled."""
        write_line(sys.stderr if line.stream == "stderr" else sys.stdout, f"[{label}] {line}")

    def bar(self, label: str, state: Output) -> None:
        """Nothing: the last state of a bar arrives as a line."""

    def note(self, text: str) -> None:
        """A warning."""
        self._say(text)

    def end(self, summary: str) -> None:
        """Nothing."""

    def redraw(self, *, at_once: bool = False) -> float | None:
        """Nothing: every line is written at once."""
        return None

    def _say(self, text: str) -> None:
        write_line(sys.stderr, f"skyward: {text}")


class Plain(Quiet):
    """Writes one line per event."""

    def __init__(self) -> None:
        self._bars: dict[str, float] = {}
        self._nodes = 0
        self._ready: set[int] = set()

    def begin(self, title: str, nodes: int) -> None:
        """Say what is being started."""
        self._nodes = nodes
        self._say(title)

    def phase(self, node: int, phase: str, seconds: float, pool: str = "") -> None:
        """Say which phase a node has entered; of many nodes, how many tenths are ready."""
        if self._nodes <= MANY_NODES or phase in ("failed", "lost"):
            self._say(f"{f'{pool} node'.lstrip()} {node}: {phase} ({seconds:.1f} s)")
        if phase != "ready":
            self._ready.discard(node)
            return
        self._ready.add(node)
        count = len(self._ready)
        if self._nodes > MANY_NODES and count * 10 // self._nodes > (count - 1) * 10 // self._nodes:
            self._say(f"{count} of {self._nodes} nodes ready ({seconds:.1f} s)")

    def ready(self, text: str) -> None:
        """Say that the pool can be used."""
        self._say(text)

    def bar(self, label: str, state: Output) -> None:
        """Write the state of a progress bar, at most one line per interval."""
        now = time.monotonic()
        key = f"{label} {state.stream} {state.task}"
        if now - self._bars.setdefault(key, now) >= BAR_SECONDS and state.strip():
            self._bars[key] = now
            self.line(label, state)

    def end(self, summary: str) -> None:
        """The summary."""
        if summary:
            self._say(summary)
