"""Record a terminal session from a real run: an asciicast, and a drawing of it as SVG.

Runs each command in a pseudo-terminal, as a person would, and writes `first-steps.cast` (asciicast
v2, for `asciinema play`) and `first-steps.svg` beside this file. Needs nothing but this project's
own environment.

    .venv/bin/python docs/images/record_terminal.py
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = ("sky doctor", "sky demo")
NAME = Path(__file__).with_name("first-steps")
WIDTH, HEIGHT = 100, 30
LONGEST_PAUSE = 1.0
"""Seconds; a pause that was longer is not worth watching."""
Event = tuple[float, str]


def main() -> None:
    events: list[Event] = []
    now = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            events.append((now, f"\x1b[1;32m$\x1b[0m {command}\r\n"))
            for passed, text in run(command, folder):
                now += min(passed, LONGEST_PAUSE)
                events.append((now, text))
            now += 0.5
    write_cast(events)
    write_svg("".join(text for _, text in events))


def run(command: str, folder: str) -> list[Event]:
    """What a command writes to its terminal, each piece with the time since the one before it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env=os.environ | {"PATH": path, "TERM": "xterm-256color", "HOME": folder},
        start_new_session=True,
    )
    os.close(theirs)
    pieces: list[Event] = []
    last = time.monotonic()
    try:
        while True:
            select.select([ours], [], [])
            data = os.read(ours, 1 << 16)
            if not data:
                break
            # Whatever path this machine has is of no interest.
            text = data.decode(errors="replace").replace(str(Path(sys.prefix)), "~/venv")
            text = re.sub(r"(Linux \d+\.\d+)\S*", r"\1", text)
            text = re.sub(r"\S*/src/skyward", "~/venv/lib/python3/site-packages/skyward", text)
            pieces.append((time.monotonic() - last, text.replace(folder, "~")))
            last = time.monotonic()
    except OSError:
        pass  # How a terminal of Linux says that nobody writes any more.
    finally:
        os.close(ours)
        process.wait()
    return pieces


def write_cast(events: list[Event]) -> None:
    """Write the session as asciinema's version 2: a header, then one line for each piece."""
    header = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "The first steps"}
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in events)]
    NAME.with_suffix(".cast").write_text("\n".join(lines) + "\n")


def write_svg(text: str) -> None:
    """Draw what the terminal shows at the end."""
    console = Console(width=WIDTH, record=True, file=io.StringIO(), force_terminal=True)
    for line in shown(text):
        console.print(Text.from_ansi(line))
    drawing = console.export_svg(title="Skyward")
    # The drawing names a font of a CDN; the reader's own is as good.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    NAME.with_suffix(".svg").write_text(drawing)


def shown(text: str) -> list[str]:
    """The lines that stay: what a display draws over, line by line, is left out."""
    lines: list[str] = [""]
    at = 0
    for piece in re.split(r"(\r?\n|\r|\x1b\[\d*[A-Za-ln-z]|\x1b\[\?25[hl])", text):
        if piece in ("\n", "\r\n"):
            at += 1
            if at == len(lines):
                lines.append("")
        elif piece == "\r":
            continue
        elif move := re.fullmatch(r"\x1b\[(\d*)A", piece):
            at = max(0, at - int(move[1] or 1))
        elif re.fullmatch(r"\x1b\[\d*K", piece):
            lines[at] = ""
        elif not piece.startswith("\x1b[") or piece.endswith("m") or "m" in piece:
            lines[at] += piece
    return lines


if __name__ == "__main__":
    main()
