"""The courier: runs our scripts on a machine, reads their reports, and sends files there."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Sequence

from skyward.errors import ImageError
from skyward.providers import Machine

_MARK = "@sky "
_KEPT_LINES = 400
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DOWNLOADING = re.compile(r"\s*Downloading (\S+ \([\d.]+ ?[KMG]i?B\))")
"""What uv says of files that take a while."""
_RECEIVE = (
    'umask 077; mkdir -p "${1%/*}" && cat >"$1.$$" && '
    '[ "$(wc -c <"$1.$$")" -eq "$2" ] && chmod "$3" "$1.$$" && mv -f "$1.$$" "$1"'
)
_RECEIVE_PRESSED = _RECEIVE.replace("cat >", "gzip -dc >")


class Report:
    """The facts that a script reports, and apart from them what else was printed."""

    def __init__(self, phase: Callable[[str], None]) -> None:
        self.facts: dict[str, str] = {}
        self.missing: set[str] = set()
        self.cards: list[str] = []
        self.phase = ""
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        """The lines that were printed in the present phase."""
        self.code = 0
        self._told_phase = phase
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, last: bool = False) -> None:
        """Read the next piece of output."""
        *lines, self._rest = (self._rest + self._decoder.decode(data, last)).split("\n")
        if last and self._rest:
            lines.append(self._rest)
        for line in lines:
            self._take(line.rpartition("\r")[2] if "\r" in line.rstrip("\r") else line.rstrip("\r"))

    def _take(self, line: str) -> None:
        before, mark, told = line.partition(_MARK)
        if not mark or before.strip():
            if line.strip():
                self.lines.append(_CONTROL.sub("", line))
                if large := _DOWNLOADING.match(line):
                    self._told_phase(f"{self.phase}: {large[1]}")
            return
        name, _, value = told.partition(" ")
        if name == "phase":
            self.phase = value
            self.lines.clear()
            self._told_phase(value)
        elif name == "missing":
            self.missing.add(value)
        elif name == "card":
            self.cards.append(value)
        else:
            self.facts[name] = value


async def run_script(machine: Machine, script: bytes, phase: Callable[[str], None]) -> Report:
    """Run a script there; it is sent as input, so that no list of processes shows it."""
    report = Report(phase)
    report.code = await machine.run(["sh", "-s"], input=script, output=report.feed)
    report.feed(b"", last=True)
    return report


async def deliver(
    machine: Machine, path: str, data: bytes, *, size: int | None = None, mode: str = "600"
) -> None:
    """Write a file there, whole or not at all; `size` is that of `data` when it is unpacked."""
    said: list[bytes] = []
    command: Sequence[str] = [
        "sh",
        "-c",
        _RECEIVE if size is None else _RECEIVE_PRESSED,
        "sh",
        path,
        str(len(data) if size is None else size),
        mode,
    ]
    if await machine.run(command, input=data, output=said.append):
        words = b"".join(said).decode(errors="replace").strip()[-2000:]
        raise ImageError(
            f"node {machine.node}: {path} could not be written on the machine; check its disk space"
            + (f"; it said:\n{words}" if words else "")
        )
