"""A notebook: displays that change in place, and the tasks' lines under the cell of their call."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections import Counter
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from skyward.console import html
from skyward.console.plain import MANY_NODES, write_line
from skyward.context import Output, asking_cell, cell_id

REDRAW_SECONDS = 0.1
"""Displays change no more often than this; a browser needs longer to draw than we to write."""
FINISHED_BARS = 12
"""So many finished bars stay under a cell; of more, only the number."""
SETTLED = ("ready", "failed", "lost", "taken back")
COLOURS = (36, 35, 32, 33, 34, 31)
_BAR = re.compile(r"^(?P<name>.*?)\s*(?P<percent>\d+)%\|[^|]*\|\s*(?P<rest>.*)$")
_COUNT = re.compile(r"\d+it \[")


class Panel:
    """One display under a cell; showing it again replaces what it shows."""

    def __init__(self, shell: Any) -> None:
        """The display will be under the cell of the current context."""
        self._shell = shell
        self._cell: Context = asking_cell(shell)
        self._id = f"skyward-{uuid.uuid4().hex[:12]}"
        self._shown: tuple[str, str] | None = None

    def show(self, content: str, text: str) -> None:
        """Show HTML, and text where there is no HTML."""
        if (content, text) == self._shown:
            return
        update = self._shown is not None
        self._shown = content, text
        self._cell.run(
            self._shell.display_pub.publish,
            {"text/html": content, "text/plain": text},
            transient={"display_id": self._id},
            update=update,
        )


@dataclass(slots=True)
class _Bar:
    label: str
    key: str
    text: str
    done: bool = False


@dataclass(slots=True)
class _Bars:
    """The progress bars under one cell."""

    panel: Panel
    rows: list[_Bar] = field(default_factory=list)
    finished: int = 0
    """How many finished bars are shown as a number only."""
    drawn: float = 0.0
    stale: bool = False

    def running(self, key: str) -> _Bar | None:
        return next((row for row in self.rows if row.key == key and not row.done), None)

    def draw(self) -> None:
        self.drawn, self.stale = time.monotonic(), False
        done = [row for row in self.rows if row.done]
        for row in done[: max(0, len(done) - FINISHED_BARS)]:
            self.rows.remove(row)
            self.finished += 1
        rows = [(html.muted(row.label), *_drawn_bar(row)) for row in self.rows]
        texts = [f"[{row.label}] {row.text}" for row in self.rows]
        if self.finished:
            more = f"and {self.finished} finished before"
            rows.append(("", "", html.muted(more)))
            texts.append(more)
        self.panel.show(html.block(html.table((), rows)) if rows else "", "\n".join(texts))


def _drawn_bar(row: _Bar) -> tuple[str, str]:
    """A bar's name, and the bar; in columns, so that bars begin below each other."""
    found = _BAR.match(row.text)
    if found is None:
        return "", html.code(row.text)
    name, percent = found["name"].rstrip(": "), int(found["percent"])
    kind = "good" if percent >= 100 else "bad" if row.done else "busy"
    words = f"{percent}%  {found['rest']}"
    return html.plain(name), html.bar(percent / 100, words, kind=kind)


class Notebook:
    """Shows a pool in a notebook: starting nodes and bars as displays, lines as output."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._title = ""
        self._panel: Panel | None = None
        """The display of nodes that start or change; None when nothing changes."""
        self._phases: dict[int, tuple[str, float]] = {}
        self._nodes = 0
        self._drawn = 0.0
        self._stale = False
        self._bars: dict[str, _Bars] = {}

    def begin(self, title: str, nodes: int) -> None:
        """Show a table of the nodes that start."""
        self._title, self._nodes = title, nodes
        self._panel = Panel(self._shell)
        self._draw()

    def phase(self, node: int, phase: str, seconds: float, pool: str = "") -> None:
        """Change a node's row; after the start, in a new display under the newest cell."""
        self._phases[node] = (phase, seconds)
        if self._panel is None:
            # Only the nodes that change now.
            self._phases = {node: (phase, seconds)}
            self._panel = Panel(self._shell)
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw()
        else:
            self._stale = True
        if not self._title and all(each in SETTLED for each, _ in self._phases.values()):
            self._draw()
            self._panel = None

    def ready(self, text: str) -> None:
        """Replace the table with one line."""
        self._finish("good", "✓", text)

    def line(self, label: str, line: Output) -> None:
        """A line of a task, labelled; the last state of a bar stays in its display instead."""
        bars = self._bars.get(cell_id(self._shell))
        row = bars.running(_key(label, line)) if bars is not None else None
        if bars is not None and row is not None:
            text = Text.from_ansi(str(line)).plain
            if _BAR.match(text) or _COUNT.search(text):
                row.text, row.done = text, True
                bars.draw()
                return
            bars.rows.remove(row)
            bars.stale = True
        stream = sys.stderr if line.stream == "stderr" else sys.stdout
        shown = f"[{label}]"
        if hasattr(stream, "parent_header"):
            shown = f"\x1b[{COLOURS[line.node % len(COLOURS)]}m{shown}\x1b[0m"
        write_line(stream, f"{shown} {line}", flush=False)

    def bar(self, label: str, state: Output) -> None:
        """A progress bar of a task; all bars of a cell share one display."""
        cell = cell_id(self._shell)
        bars = self._bars.get(cell)
        text = Text.from_ansi(str(state)).plain.strip()
        if bars is None:
            if not text:
                return
            self._forget_finished()
            bars = self._bars[cell] = _Bars(Panel(self._shell))
        key = _key(label, state)
        row = bars.running(key)
        if not text:
            if row is not None:
                bars.rows.remove(row)
        elif row is not None:
            row.text = text
        else:
            bars.rows.append(_Bar(label, key, text))
        bars.stale = True
        if time.monotonic() - bars.drawn >= REDRAW_SECONDS:
            bars.draw()

    def _forget_finished(self) -> None:
        """Forget the cells whose bars are all done; a new bar there would get a new display."""
        for cell, bars in list(self._bars.items()):
            if not bars.stale and all(row.done for row in bars.rows):
                del self._bars[cell]

    def note(self, text: str) -> None:
        """A warning, under the newest cell."""
        Panel(self._shell).show(
            html.block(html.mark("busy", "skyward"), html.plain(text)), f"skyward: {text}"
        )

    def end(self, summary: str) -> None:
        """The summary; if the pool did not start, the table stays as it was."""
        self.redraw(at_once=True)
        if self._panel is not None and self._title:
            self._finish(
                "bad", "✗", summary or self._title.replace(": starting", ": did not start")
            )
        elif summary:
            Panel(self._shell).show(html.block(html.muted(summary)), f"skyward: {summary}")

    def redraw(self, *, at_once: bool = False) -> float | None:
        """Draw what was put off, if it is due; returns the seconds to wait for the rest."""
        now = time.monotonic()
        waits = []
        if self._stale and self._panel is not None:
            waits.append(self._drawn + REDRAW_SECONDS - now)
            if at_once or waits[-1] <= 0:
                self._draw()
                waits.pop()
        for bars in self._bars.values():
            if bars.stale:
                waits.append(bars.drawn + REDRAW_SECONDS - now)
                if at_once or waits[-1] <= 0:
                    bars.draw()
                    waits.pop()
        return min(waits, default=None)

    def _finish(self, kind: str, sign: str, text: str) -> None:
        panel, self._panel = self._panel or Panel(self._shell), None
        rows = self._rows() if kind == "bad" else []
        self._title, self._phases, self._stale = "", {}, False
        first = html.line(html.mark(kind, sign), html.plain(text))
        panel.show(html.block(first, html.table((), rows) if rows else ""), f"{sign} {text}")

    def _draw(self) -> None:
        assert self._panel is not None
        self._drawn, self._stale = time.monotonic(), False
        rows = self._rows()
        head = html.line(html.mark("busy", "…"), html.plain(self._title)) if self._title else ""
        states = [f"node {node}: {phase}" for node, (phase, _) in sorted(self._phases.items())]
        words = [self._title] if self._title else []
        words += states if len(states) <= MANY_NODES else [f"{len(states)} nodes"]
        self._panel.show(html.block(head, html.table((), rows)), "\n".join(words))

    def _rows(self) -> list[tuple[str, ...]]:
        """A row for each node; of many nodes, a row for each phase."""
        if len(self._phases) > MANY_NODES:
            counts = Counter(phase for phase, _ in self._phases.values())
            whole = max(self._nodes, len(self._phases))
            return [
                (_state(phase), html.bar(count / whole, f"{count} of {whole} nodes"))
                for phase, count in counts.items()
            ]
        return [
            (html.plain(f"node {node}"), _state(phase), html.muted(f"{seconds:.1f} s"))
            for node, (phase, seconds) in sorted(self._phases.items())
        ]


def _state(phase: str) -> str:
    kinds = {"ready": "good", "failed": "bad", "lost": "bad"}
    return html.mark(kinds.get(phase, "busy"), phase)


def _key(label: str, output: Output) -> str:
    return f"{label} {output.stream} {output.task}"
