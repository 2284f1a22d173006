"""Output logs: the last bytes that a program has written, in a few files of a folder.

Positions count from the first byte ever written. Each file is named by the position of its first
byte, so a reader knows how much of the beginning is gone. One process writes, any may read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FILES = 8
"""How many files a log has, besides the one that grows."""
_DIGITS = 18
_LOOK = 64 << 10


class OutputLog:
    """The writing end: deletes the oldest file when the log has more bytes than it may keep."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep` is how many bytes the log keeps, at least."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._most = max(1, keep // _FILES)
        _, self._end = bounds(folder)
        self._start = self._end
        self._file = self._opened(self._end)

    def write(self, data: bytes) -> None:
        """Add bytes; after a line that fills its file, the next file begins."""
        while data:
            room = self._most - (self._end - self._start)
            cut = data.find(b"\n", max(0, room - 1)) + 1 or len(data)
            written = os.write(self._file, data[:cut])
            line_ends = data[written - 1 : written] == b"\n"
            data = data[written:]
            self._end += written
            grown = self._end - self._start
            # A line without an end must not fill the disk.
            if grown >= self._most and (line_ends or grown >= 2 * self._most):
                self._turn()

    def _turn(self) -> None:
        # In this order: without room for another file, the log goes on in this one.
        new = self._opened(self._end)
        os.close(self._file)
        self._start, self._file = self._end, new
        for _, path in _files(self._folder)[: -_FILES - 1]:
            path.unlink(missing_ok=True)

    def _opened(self, start: int) -> int:
        path = self._folder / f"{start:0{_DIGITS}}"
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def bounds(folder: Path) -> tuple[int, int]:
    """The position of the first byte that is kept, and the position after the last byte."""
    while True:
        files = _files(folder)
        if not files:
            return 0, 0
        start, last = files[-1]
        with contextlib.suppress(FileNotFoundError):
            return files[0][0], start + last.stat().st_size


def last_file(folder: Path) -> Path | None:
    """The file that grows; None if there is none yet."""
    files = _files(folder)
    return files[-1][1] if files else None


def only_file(folder: Path) -> Path:
    """The file of a log that is kept as a whole, for one who writes it by other means."""
    return folder / f"{0:0{_DIGITS}}"


def read(folder: Path, position: int, most: int) -> tuple[int, bytes]:
    """At most so many bytes from a position on, and the position at which they really begin.

    That is a later one if the bytes at the position are gone. No bytes: there are no more yet.
    """
    while True:
        files = _files(folder)
        try:
            for number, (start, path) in enumerate(files):
                following = files[number + 1][0] if number + 1 < len(files) else None
                if following is not None and following <= position:
                    continue
                with open(path, "rb") as file:
                    file.seek(max(0, position - start))
                    data = file.read(most)
                if data:
                    return max(position, start), data
        except FileNotFoundError:
            # The writer has deleted the oldest file meanwhile.
            continue
        return position, b""


def position_of_last(folder: Path, lines: int) -> int:
    """The position at which the last so many lines begin."""
    first, end = bounds(folder)
    if lines < 1:
        return end
    at, left = end, lines + 1
    while at > first and left > 0:
        begin = max(first, at - _LOOK)
        where, data = read(folder, begin, at - begin)
        if where != begin:
            return position_of_last(folder, lines)
        # A file may end before `at`; what comes after it is looked at in the next round.
        while len(data) < at - begin:
            _, more = read(folder, begin + len(data), at - begin - len(data))
            if not more:
                break
            data += more
        if at == end and not data.endswith(b"\n"):
            left -= 1
        cut = len(data)
        while left > 0 and (cut := data.rfind(b"\n", 0, cut)) >= 0:
            left -= 1
        if left <= 0:
            return begin + cut + 1 if cut >= 0 else begin
        at = begin
    return first


def _files(folder: Path) -> list[tuple[int, Path]]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(name), folder / name) for name in names if name.isdigit())
