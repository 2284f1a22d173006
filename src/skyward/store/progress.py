"""Progress: how far a save or a load has come, for a bar or the user's own function."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from skyward.console import terminal_in_use
from skyward.console.transfers import TransferBar, TransferPanel
from skyward.context import kernel_shell


class Progress(Protocol):
    """The progress of one save or load; any thread may call its methods."""

    def begin(self, total: int) -> None:
        """Begin a save or load of this many bytes; called again when a save starts over."""

    def advance(self, count: int) -> None:
        """Note that this many bytes were written or read."""

    def reused(self, count: int) -> None:
        """Note that the store already has this many bytes."""

    def done(self) -> None:
        """End: the save or load has succeeded or failed."""


Watch = Callable[[str], Progress]
"""Makes the progress of one save or load, given its title, such as `saving mnist`."""


class _Unwatched:
    def begin(self, total: int) -> None: ...
    def advance(self, count: int) -> None: ...
    def reused(self, count: int) -> None: ...
    def done(self) -> None: ...


UNWATCHED: Progress = _Unwatched()


@contextlib.contextmanager
def watched(wanted: bool | Watch, title: str) -> Iterator[Progress]:
    """Show the progress of the block as a bar if there is a terminal or a notebook."""
    progress = UNWATCHED
    if callable(wanted):
        progress = wanted(title)
    elif wanted and os.environ.get("SKYWARD_PROGRESS") != "0":
        shell = kernel_shell()
        if shell is not None:
            progress = TransferPanel(title, shell)
        elif _on_a_terminal():
            progress = TransferBar(title)
    try:
        yield progress
    finally:
        progress.done()


def _on_a_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not terminal_in_use()
