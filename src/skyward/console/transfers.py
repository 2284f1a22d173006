"""Transfers: a bar for a save or load that takes long, on a terminal or in a notebook."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from skyward.console import html, terminal_in_use
from skyward.console.measures import clock, of_size, size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

DELAY = 0.5
"""A transfer that takes no longer than this many seconds has no bar."""
PANEL_SECONDS = 0.2
"""How often a notebook's bar is drawn."""
_WIDEST = 40


class TransferBar:
    """The bar of one save or load, which is removed when the transfer is done."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._total = self._moved = self._reused = 0
        self._started = time.monotonic()
        self._timer: threading.Timer | None = None
        self._live: Live | None = None
        self._over = threading.Event()

    def begin(self, total: int) -> None:
        """Count from zero, and show the bar if the transfer is not over soon."""
        with self._lock:
            self._total, self._moved, self._reused = total, 0, 0
            self._started = time.monotonic()
            if self._timer is None:
                self._timer = threading.Timer(DELAY, self._show)
                self._timer.daemon = True
                self._timer.start()

    def advance(self, count: int) -> None:
        """Count bytes that were moved."""
        with self._lock:
            self._moved += count

    def reused(self, count: int) -> None:
        """Count bytes that were there already."""
        with self._lock:
            self._reused += count

    def done(self) -> None:
        """Remove the bar."""
        timer = self._timer
        if timer is None:
            return
        timer.cancel()
        self._over.set()
        # The timer may be about to draw.
        timer.join()
        self._hide()

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        if terminal_in_use():
            return
        # rich would replace the user's sys.stdout; the user's prints stay as they are.
        self._live = Live(
            get_renderable=self._drawn,
            console=Console(stderr=True, highlight=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=10,
        )
        self._live.start(refresh=True)

    def _drawn(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        with self._lock:
            total, moved, reused = self._total, self._moved, self._reused
            seconds = time.monotonic() - self._started
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        bar = ProgressBar(total=max(total, 1), completed=moved + reused, width=_WIDEST)
        row.add_row(self._title, bar, described(total, moved, reused, seconds))
        return row


class TransferPanel(TransferBar):
    """The bar of one save or load in a notebook, of which one line stays when it is done."""

    def __init__(self, title: str, shell: Any) -> None:
        # Only notebooks need it; it takes a moment to load.
        from skyward.console.notebook import Panel

        super().__init__(title)
        self._panel = Panel(shell)
        self._is_shown = False

    def _show(self) -> None:
        self._is_shown = True
        while not self._over.is_set():
            with self._lock:
                total, moved, reused = self._total, self._moved, self._reused
                seconds = time.monotonic() - self._started
            words = described(total, moved, reused, seconds)
            bar = html.bar((moved + reused) / max(total, 1), words)
            self._panel.show(html.block(html.plain(self._title), bar), f"{self._title}: {words}")
            self._over.wait(PANEL_SECONDS)

    def _hide(self) -> None:
        if self._is_shown:
            seconds = time.monotonic() - self._started
            done = min(self._moved + self._reused, self._total)
            words = f"{self._title}: {of_size(done, self._total)} in {clock(seconds)}"
            self._panel.show(html.block(html.muted(words)), words)


def described(total: int, moved: int, reused: int, seconds: float) -> str:
    """A transfer's bytes, rate, remaining time, and the bytes it need not move."""
    settled = min(moved + reused, total)
    parts = [of_size(settled, total)]
    if moved and seconds > 0:
        parts.append(f"{size(moved / seconds)}/s")
    if 0 < settled < total:
        parts.append(f"{clock((total - settled) * seconds / settled)} left")
    if reused:
        parts.append(f"{size(reused)} already stored")
    return ", ".join(parts)
