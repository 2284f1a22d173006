"""What the simulated workers run, and the ledger that says what was run.

The functions travel by value, as those of a user's script; the ledger is found in `sys`, which all
simulated processes share.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator


class Ledger:
    """What has run."""

    def __init__(self) -> None:
        self.began: Counter[int] = Counter()
        """How often each call has begun to run."""
        self.finished: Counter[int] = Counter()
        self.written: dict[int, list[str]] = {}
        """The lines that the last try of each call has printed."""
        self.changes: dict[str, list[tuple[float, float, int | None]]] = {}
        """Of each shared counter, when increments began and ended, and what they returned."""


def ledger() -> Ledger:
    """The one of this run."""
    found: Ledger = sys.__dict__.setdefault("simulated_ledger", None) or Ledger()
    sys.__dict__["simulated_ledger"] = found
    return found


def work(number: int, seconds: float, lines: int, payload: bytes = b"") -> tuple[int, int]:
    """Print, take some time, and return something that is of this call alone."""
    import time

    book = ledger()
    book.began[number] += 1
    mine = book.written[number] = []
    for line in range(lines):
        text = f"call {number} try {book.began[number]} line {line}"
        mine.append(text)
        print(text)
        if seconds:
            time.sleep(seconds / lines)
    if seconds and not lines:
        time.sleep(seconds)
    book.finished[number] += 1
    return number, len(payload)


def fail(number: int) -> None:
    """Raise an error of the user's own."""
    book = ledger()
    book.began[number] += 1
    raise ValueError(f"call {number} fails")


def stream(number: int, count: int, seconds: float) -> Iterator[tuple[int, int]]:
    """Yield numbers one after another."""
    import time

    book = ledger()
    book.began[number] += 1
    for each in range(count):
        if seconds:
            time.sleep(seconds)
        yield number, each
    book.finished[number] += 1


def rank(number: int) -> tuple[int, int]:
    """The number of a broadcast and the rank of the worker."""
    import skyward as sky

    book = ledger()
    book.began[number] += 1
    return number, sky.instance_info().global_worker_index


def add(name: str) -> int:
    """Add one to a shared counter, and write down when that was, and what it returned."""
    import time

    import skyward as sky

    mine = ledger().changes.setdefault(name, [])
    at = len(mine)
    began = time.monotonic()
    mine.append((began, float("inf"), None))
    found = int(sky.counter(name).increment(1))
    mine[at] = (began, time.monotonic(), found)
    return found


def nested(number: int, seconds: float) -> tuple[int, int]:
    """Have another worker, or this one, do the work."""
    import skyward as sky

    found: tuple[int, int] = sky.function(work)(number, seconds, 1) >> sky
    return found
