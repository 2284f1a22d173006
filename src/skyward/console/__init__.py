"""What a person sees while a pool works: progress, the nodes' output, a summary."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any, Protocol

from skyward import context
from skyward.console.plain import client_bars
from skyward.context import Listener, Output, asking_cell, kernel_shell

STUCK_SECONDS = 5.0
"""After so long without showing anything, `drain` and `close` stop waiting for the console."""

_of_pools: set[Console] = set()
"""The consoles of the pools of this process; where there are several, each names its pool."""
_on_terminal: set[Console] = set()
"""The consoles that draw on this process's terminal."""


class Face(Protocol):
    """How events are shown; called on the console's own thread only."""

    def begin(self, title: str, nodes: int) -> None: ...
    def phase(self, node: int, phase: str, seconds: float, pool: str = "") -> None:
        """`pool` is the name of the node's pool where several pools run."""

    def ready(self, text: str) -> None: ...
    def line(self, label: str, line: Output) -> None: ...
    def bar(self, label: str, state: Output) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, summary: str) -> None: ...
    def redraw(self, *, at_once: bool = False) -> float | None:
        """Draw what was put off, if it is due; returns the seconds to wait for the rest."""


class Console:
    """Takes events from any thread and shows them in order on one of its own.

    A slow terminal, or a listener of the user's, must not hold up the pool's I/O.
    In a notebook, output appears under the cell that asked for it: `shell` is IPython's.
    """

    def __init__(
        self, face: Face, *, several_workers: bool, shell: Any = None, pool: str = ""
    ) -> None:
        """`pool` is the name of the pool; empty if the console is no pool's."""
        self._face, self._pool = face, pool
        if pool:
            _of_pools.add(self)
        self.shell = shell
        """IPython's shell, in a notebook."""
        self._several_workers = several_workers
        self._events: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._started = time.monotonic()
        self._shown = 0
        self._said = ""
        self._failed_listener: Listener | None = None
        """The listener whose failure was reported last."""
        self._held_for: tuple[int, int] | None = None
        """The worker whose task is in a debugger: only its output is shown meanwhile."""
        self._held: list[tuple[Any, ...]] = []
        self._thread = threading.Thread(target=self._run, name="skyward-console", daemon=True)
        self._thread.start()

    def cell(self) -> Context | None:
        """The cell that asks for something now, for `output`; None outside of notebooks."""
        return None if self.shell is None else asking_cell(self.shell)

    def begin(self, title: str, nodes: int) -> None:
        """Nodes are about to start."""
        self._events.put(("begin", (self.cell(), title, nodes)))

    def phase(self, node: int, phase: str) -> None:
        """A node entered a phase."""
        seconds = time.monotonic() - self._started
        self._events.put(("phase", (node, phase, seconds)))

    def ready(self, text: str) -> None:
        """The pool can be used."""
        self._events.put(("ready", (text,)))

    def note(self, text: str) -> None:
        """Show a warning or a remark as one line."""
        self._events.put(("note", (text,)))

    def output(
        self,
        text: str,
        stream: str,
        node: int,
        worker: int,
        task: str,
        transient: bool,
        cell: Context | None = None,
    ) -> None:
        """Lines a task wrote, or one state of its progress bar, for the cell of the call."""
        self._events.put(("output", (cell, text, stream, node, worker, task, transient)))

    def own_line(self, text: str, transient: bool) -> None:
        """A line on what this process does itself, or one state of its progress bar."""
        self._events.put(("own_line", (self.cell(), text, transient)))

    def hold(self, node: int, worker: int) -> None:
        """Show the output of one worker alone, and no progress bars, until `release`."""
        self._events.put(("hold", (node, worker)))

    def release(self) -> None:
        """Show everything again, first what was held back."""
        self._events.put(("release", ()))

    def drain(self) -> None:
        """Wait until everything so far has been shown."""
        shown = threading.Event()
        self._events.put(("drain", (shown,)))
        self._while_moving(shown.wait)

    def close(self, summary: str) -> None:
        """Show the summary, if there is one, and end."""
        self._events.put(("end", (summary,)))
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._while_moving(self._ended)
        _on_terminal.discard(self)
        _of_pools.discard(self)

    def _while_moving(self, wait: Callable[[float], bool]) -> None:
        """Wait, but not for a stopped terminal, nor for a listener that waits for this thread."""
        before = -1
        while not wait(STUCK_SECONDS) and self._shown != before:
            before = self._shown

    def _ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait: float | None = None
        while True:
            try:
                event = self._events.get(timeout=wait)
            except queue.Empty:
                event = ("redraw", ())
            if event is None:
                return
            kind, details = event
            wait = None
            self._shown += 1
            try:
                self._show(kind, details)
                if self._events.empty():
                    wait = self._face.redraw()
            except Exception as problem:
                # A closed terminal; reported once, if stderr works.
                if repr(problem) != self._said:
                    self._said = repr(problem)
                    text = f"skyward: output could not be shown: {problem!r}"
                    with contextlib.suppress(OSError, ValueError):
                        print(text, file=sys.__stderr__)

    def _show(self, kind: str, details: Any) -> None:
        match kind:
            case "phase":
                with self._above_bars():
                    node, phase, seconds = details
                    self._face.phase(node, phase, seconds, self._shown_pool)
            case "drain":
                try:
                    self._face.redraw(at_once=True)
                finally:
                    details[0].set()
            case "begin":
                with self._above_bars():
                    _in(details[0], self._face.begin, *details[1:])
            case "output" if self._held_for is not None and (
                details[6] or details[3:5] != self._held_for
            ):
                if not details[6]:
                    self._held.append(details)
            case "output":
                _in(details[0], self._show_output, *details[1:])
            case "own_line":
                cell, text, transient = details
                shown = self._face.bar if transient else self._face.line
                with self._above_bars():
                    _in(cell, shown, "client", Output(text, "stderr", 0, 0, ""))
            case "hold":
                self._held_for = details
                # A bar that is redrawn would write over what the person types.
                self._face.end("")
            case "release":
                self._held_for = None
                held, self._held = self._held, []
                for cell, *each in held:
                    _in(cell, self._show_output, *each)
            case _:
                with self._above_bars():
                    getattr(self._face, kind)(*details)

    @property
    def _shown_pool(self) -> str:
        """The name of the pool, if it is not the only one."""
        return self._pool if len(_of_pools) > 1 else ""

    def _above_bars(self) -> contextlib.AbstractContextManager[None]:
        """Take the bars that the user's program draws away, and draw them again below."""
        tqdm = client_bars() if self.shell is None else None
        if tqdm is None:
            return contextlib.nullcontext()
        above: contextlib.AbstractContextManager[None] = tqdm.external_write_mode()
        return above

    def _show_output(
        self, text: str, stream: str, node: int, worker: int, task: str, transient: bool
    ) -> None:
        place = f"{node}.{worker}" if self._several_workers else f"{node}"
        label = f"{self._shown_pool} node {place}".lstrip()
        lines = [text] if transient else text.removesuffix("\n").split("\n")
        # A listener may take its time, and the bars must not wait for it.
        with contextlib.nullcontext() if context.pool_listeners else self._above_bars():
            for line in lines:
                self._shown += 1
                output = Output(line, stream, node, worker, task)
                if context.pool_listeners:
                    if not transient:
                        self._tell(context.pool_listeners[-1], label, output)
                elif transient:
                    self._face.bar(label, output)
                else:
                    self._face.line(label, output)

    def _tell(self, listener: Listener, label: str, line: Output) -> None:
        """Give a line to the user's listener; show the line if the listener fails."""
        try:
            listener(line)
        except BaseException as problem:  # also SystemExit, which would end this thread
            with _unrouted():
                if listener != self._failed_listener:
                    self._failed_listener = listener
                    self._face.note(
                        f"redirect_output: the callback failed at {str(line)!r}: {problem!r}"
                        f"{_place(problem)}; lines that the callback does not take are shown, and "
                        "further failures are not reported"
                    )
                self._face.line(label, line)


@contextlib.contextmanager
def _unrouted() -> Iterator[None]:
    """Show the block's output: a cell's context may say that a listener gets it."""
    token = context.route.set(context.Route())
    try:
        yield
    finally:
        context.route.reset(token)


def _place(problem: BaseException) -> str:
    """Where an error was raised, for a message."""
    frames = traceback.extract_tb(problem.__traceback__)[1:]
    return f", in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _in(cell: Context | None, action: Callable[..., None], *details: Any) -> None:
    if cell is None:
        action(*details)
    else:
        cell.run(action, *details)


def console_for(wanted: bool | None, *, several_workers: bool, pool: str = "") -> Console:
    """The console that fits a notebook, a terminal or a log; quiet on request."""
    face: Face
    shell = kernel_shell()
    if wanted is False:
        from skyward.console.plain import Quiet

        face = Quiet()
    elif shell is not None:
        from skyward.console.notebook import Notebook

        face = Notebook(shell)
    elif sys.stderr is not None and sys.stderr.isatty():
        from skyward.console.terminal import Terminal

        console = Console(Terminal(), several_workers=several_workers, pool=pool)
        _on_terminal.add(console)
        return console
    else:
        from skyward.console.plain import Plain

        face = Plain()
    return Console(face, several_workers=several_workers, shell=shell, pool=pool)


def terminal_in_use() -> bool:
    """Whether a pool draws on the terminal; two that do so garble each other's lines."""
    return bool(_on_terminal)
