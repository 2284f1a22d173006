"""Prompts: where the person of a client types: a terminal, a notebook's cell, or a pipe."""

from __future__ import annotations

import builtins
import contextlib
import os
import select
import stat
import sys
import termios
import types
from collections.abc import Callable
from typing import Any, Protocol

from skyward.errors import DebuggerError

CTRL_C = b"\x03"
LINE, INTERRUPT, END, WOKEN = "line", "interrupt", "end", "woken"

Typed = tuple[str, str]
"""What happened, one of the four words above, and the line."""


class Prompt(Protocol):
    """A place to type; one thread uses it, from `open_prompt` to `close`."""

    def write(self, text: str) -> None:
        """Show text; a line may be unfinished."""

    def wait(self, wake: int, *, asking: bool) -> Typed:
        """Wait until the person types, if that is asked for, or until `wake` can be read."""

    def close(self) -> None:
        """Leave the place as it was found."""


class TerminalPrompt:
    """A terminal, on which Ctrl-C is something that the person types and no signal.

    The signal would interrupt the main thread, which waits for the call that is being debugged.
    The kernel ends a line at the character that is set for that, as it does at a newline.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ahead = b""
        self._before = termios.tcgetattr(descriptor)
        changed: list[Any] = termios.tcgetattr(descriptor)
        changed[3] |= termios.ICANON | termios.ECHO
        characters = list(changed[6])
        characters[termios.VINTR] = b"\x00"
        characters[termios.VEOL] = CTRL_C
        changed[6] = characters
        termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        self._shown_on = _terminal_of(sys.stdout) or descriptor

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._shown_on, data) :]

    def wait(self, wake: int, *, asking: bool) -> Typed:
        while True:
            if asking and (line := self._taken()) is not None:
                return LINE, line
            if wake in _readable(self._descriptor, wake):
                return WOKEN, ""
            data = os.read(self._descriptor, 4096)
            if not data:
                return END, ""
            if CTRL_C in data:
                self._ahead = b""
                self.write("\n")
                return INTERRUPT, ""
            # A line that nobody has asked for yet is kept: people type ahead.
            self._ahead += data

    def _taken(self) -> str | None:
        line, newline, rest = self._ahead.partition(b"\n")
        if not newline:
            return None
        self._ahead = rest
        return line.decode("utf-8", "replace")

    def close(self) -> None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)


class AskingPrompt:
    """A place that is asked with a function for every line, which nothing else can end."""

    def __init__(self, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._shown = ""

    def write(self, text: str) -> None:
        self._shown += text
        whole, newline, self._shown = self._shown.rpartition("\n")
        if newline:
            print(whole, flush=True)

    def wait(self, wake: int, *, asking: bool) -> Typed:
        if not asking:
            _readable(wake)
            return WOKEN, ""
        prompt, self._shown = self._shown, ""
        try:
            return LINE, self._ask(prompt)
        except EOFError:
            return END, ""
        except KeyboardInterrupt:
            return INTERRUPT, ""
        except Exception as problem:
            raise DebuggerError(
                f"the debugger cannot ask for a line here: {problem}; run the code where a person "
                "can type, such as a terminal"
            ) from problem

    def close(self) -> None:
        if self._shown:
            print(self._shown, flush=True)


def open_prompt(*, pipe: bool = True) -> Prompt:
    """The place where this process's person types; `DebuggerError` if there is none.

    With `pipe`, input may also come from a pipe or a file.
    """
    if not isinstance(builtins.input, types.BuiltinFunctionType):
        # A notebook's kernel has put its own function there, which asks in the page.
        return AskingPrompt(builtins.input)
    terminal = _terminal_of(sys.stdin)
    if terminal is not None:
        return TerminalPrompt(terminal)
    piped = False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        piped = not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    if piped and pipe:
        return AskingPrompt(_read_line)
    typed = ", or set SKYWARD_DEBUGGER=1 to have its input read" if piped else ""
    raise DebuggerError(
        "breakpoint() needs a place to type, and the process that made the call has no terminal; "
        f"start it in one{typed}, or take the breakpoint out"
    )


def _readable(*descriptors: int) -> set[int]:
    """Wait until one can be read; a program may have more of them than `select.select` takes."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}


def _terminal_of(stream: Any) -> int | None:
    try:
        descriptor: int = stream.fileno()
        return descriptor if os.isatty(descriptor) else None
    except (OSError, ValueError, AttributeError):
        return None


def _read_line(prompt: str) -> str:
    """The next line of a pipe or file, shown after the prompt, as a terminal would show it."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    print(prompt + line, end="", flush=True)
    return line.removesuffix("\n")
