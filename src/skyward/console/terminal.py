"""A terminal: nodes coming up as a live table, coloured labels, bars that stay in place."""

from __future__ import annotations

import sys
import time
from collections import Counter

from rich.color import ColorSystem
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.style import Style
from rich.table import Table
from rich.text import Text

from skyward.console.plain import MANY_NODES, client_bars, write_line
from skyward.context import Output

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
REDRAW_SECONDS = 0.1
DONE = {"ready": "[green]✓[/]", "failed": "[red]✗[/]", "lost": "[red]✗[/]"}


def _is_taken(stream: object) -> bool:
    """Whether the user's program has a display of rich's, which writes lines above itself."""
    return hasattr(stream, "rich_proxied_file")


class Terminal:
    """Shows a pool on a terminal with rich."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._phases: dict[int, tuple[str, float]] = {}
        self._counts: Counter[str] = Counter()
        """How many nodes are in each phase, in the order in which the phases were first reached."""
        self._drawn = 0.0
        self._bars: dict[str, Text] = {}
        self._title = ""

    def begin(self, title: str, nodes: int) -> None:
        """Start the live table."""
        self._title = title
        self._show()

    def phase(self, node: int, phase: str, seconds: float, pool: str = "") -> None:
        """Update a node's row; after the start, write a line."""
        before, _ = self._phases.get(node, ("", 0.0))
        self._counts[before] -= 1
        self._counts[phase] += 1
        self._phases[node] = (phase, seconds)
        if self._live is None and (phase in DONE or not self._is_many):
            self._say(f"[dim]skyward[/] {escape(f'{pool} node'.lstrip())} {node}: {phase}")
        elif self._live is not None:
            self._show()

    @property
    def _is_many(self) -> bool:
        return len(self._phases) > MANY_NODES

    def ready(self, text: str) -> None:
        """Replace the table with one line."""
        self._hide()
        self._say(f"[green]✓[/] {escape(text)}")

    def line(self, label: str, line: Output) -> None:
        """A line of a task, labelled in the node's colour."""
        if self._bars.pop(f"{label} {line.stream}", None) is not None:
            self._show()
        stream = sys.stderr if line.stream == "stderr" else sys.stdout
        if not stream.isatty():
            write_line(stream, f"[{label}] {line}")
        elif self._live is None and ("\x1b" not in line or _is_taken(stream)):
            # rich takes 0.25 ms for this, and there may be 100,000 of them.
            write_line(stream, f"{self._tinted(label, line.node)} {line}")
        else:
            text = Text.assemble(self._label(label, line), Text.from_ansi(str(line)))
            plain = self._live is None and line.stream == "stdout"
            console = Console(file=sys.stdout, highlight=False) if plain else self._console
            console.print(text, soft_wrap=True)

    def bar(self, label: str, state: Output) -> None:
        """A progress bar, updated in place below the lines; an empty one goes away."""
        key = f"{label} {state.stream}"
        if state.strip():
            text = Text.from_ansi(str(state))
            self._bars[key] = Text.assemble(self._label(label, state), text)
        elif self._bars.pop(key, None) is None:
            return
        self._show()

    def note(self, text: str) -> None:
        """A warning."""
        self._say(f"[yellow]skyward[/] {escape(text)}")

    def end(self, summary: str) -> None:
        """The summary."""
        self._bars.clear()
        self._hide()
        if summary:
            self._say(f"[dim]{escape(summary)}[/]")

    def redraw(self, *, at_once: bool = False) -> float | None:
        """Nothing: rich draws by itself what was put off."""
        return None

    def _say(self, markup: str) -> None:
        if not _is_taken(sys.stderr):
            self._console.print(markup)
            return
        with self._console.capture() as said:
            self._console.print(markup)
        sys.stderr.write(said.get())

    def _tinted(self, label: str, node: int) -> str:
        plain = self._console.color_system is None or self._console.no_color
        style = Style.parse(COLOURS[node % len(COLOURS)])
        return style.render(f"[{label}]", color_system=None if plain else ColorSystem.STANDARD)

    @staticmethod
    def _label(label: str, output: Output) -> Text:
        return Text(f"[{label}] ", style=COLOURS[output.node % len(COLOURS)])

    def _show(self) -> None:
        # Two displays that are redrawn in place would tear each other: the user's own bars stay.
        others = client_bars() is not None or _is_taken(sys.stderr)
        if not (self._bars or self._title) or others:
            self._hide()
            return
        if self._title:
            view = Group(Spinner("dots", Text(self._title)), self._table())
        else:
            view = Group(*self._bars.values())
        if self._live is None:
            # rich would replace the user's sys.stdout; the user's prints stay as they are.
            self._live = Live(
                view,
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        # Drawing takes a millisecond, and many nodes have thousands of phases. What is not drawn
        # now is drawn by rich soon.
        now = time.monotonic()
        due = not self._is_many or now - self._drawn > REDRAW_SECONDS
        self._drawn = now if due else self._drawn
        self._live.update(view, refresh=due)

    def _table(self) -> Table:
        """A row for each node; of many nodes, a row for each phase."""
        table = Table.grid(padding=(0, 1))
        if self._is_many:
            for phase, count in self._counts.items():
                if phase and count:
                    table.add_row(DONE.get(phase, " "), f"{count} nodes", phase)
            return table
        for node, (phase, seconds) in sorted(self._phases.items()):
            done = DONE.get(phase, " ")
            table.add_row(done, f"node {node}", phase, f"[dim]{seconds:.1f} s[/]")
        return table

    def _hide(self) -> None:
        self._title = ""
        if self._live is not None:
            self._live.stop()
            self._live = None
