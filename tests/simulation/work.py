"""What the simulated workers run, and the ledger that says what was run.

The functions travel by value, as those of a user's script; the ledger is found in `sys`, which all
simulated processes share.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from .linear import SHORT, TIMED_OUT, Operation

LEASE_SECONDS = 10.0
Step = tuple[str, str, str, tuple[Any, ...]]
"""What a task does with a shared object: its kind and name, the operation, the arguments."""


@dataclass
class Holding:
    """A time in which a task held a lock."""

    name: str
    epoch: str
    token: int
    since: float
    until: float = inf
    """When the task began to let the lock go; it held the lock until then if that succeeds."""
    released: bool = False
    refused: float = inf
    """When the task was told that it does not hold the lock any more."""


class Ledger:
    """What has run."""

    def __init__(self) -> None:
        self.began: Counter[int] = Counter()
        """How often each call has begun to run."""
        self.finished: Counter[int] = Counter()
        self.written: dict[int, list[str]] = {}
        """The lines that the last try of each call has printed."""
        self.shared: dict[tuple[str, str], list[Operation]] = {}
        """The operations on each shared object, by its kind and name."""
        self.holdings: list[Holding] = []


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


def stubborn(number: int, seconds: float) -> tuple[int, int]:
    """Go on for so long, whoever cancels it."""
    import contextlib
    import time

    book = ledger()
    book.began[number] += 1
    book.written[number] = []
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(BaseException):
            time.sleep(left)
    book.finished[number] += 1
    return number, 0


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


def use(number: int, steps: Sequence[Step]) -> tuple[int, int]:
    """Use shared objects, and write down what each operation returned, and when."""
    import queue
    import threading
    import time

    import skyward as sky

    book = ledger()
    book.began[number] += 1
    book.written[number] = []
    handles: dict[tuple[str, str], Any] = {}
    for kind, name, what, given in steps:
        if (kind, name) not in handles:
            made: dict[str, Any] = {
                "short": lambda name: sky.queue(name, SHORT),
                "lock": lambda name: sky.lock(name, lease=LEASE_SECONDS),
                "barrier": lambda name: sky.barrier(name, int(name.rpartition("-")[2])),
            }
            handles[kind, name] = made.get(kind, getattr(sky, kind, None))(name)
        handle = handles[kind, name]
        seen = Operation(what, given, time.monotonic(), handle._epoch)
        book.shared.setdefault((kind, name), []).append(seen)
        try:
            if kind == "lock":
                hold(handle, *given)
            elif what in ("get", "put", "wait") and kind != "dict":
                seen.result = getattr(handle, what)(*given, timeout=5.0)
            else:
                seen.result = getattr(handle, what)(*given)
        except sky.errors.StateLostError:
            continue
        except threading.BrokenBarrierError:
            seen.result = "broken"
        except TimeoutError:
            seen.result = TIMED_OUT
        except queue.Empty:
            seen.result = "empty"
        except queue.Full:
            seen.result = "full"
        seen.epoch, seen.ended = handle._epoch, time.monotonic()
    book.finished[number] += 1
    return number, len(steps)


def hold(lock: Any, seconds: float) -> None:
    """Hold a lock for so long, and write down when that was."""
    import time

    import skyward as sky

    lock.acquire(timeout=60.0)
    held = Holding(lock.name, lock._epoch, lock.token, time.monotonic())
    ledger().holdings.append(held)
    time.sleep(seconds)
    held.until = time.monotonic()
    try:
        lock.release()
    except sky.errors.StateLostError as problem:
        if "is not held any more" in str(problem):
            held.refused = time.monotonic()
        raise
    held.released = True


def nested(number: int, seconds: float) -> tuple[int, int]:
    """Have another worker, or this one, do the work."""
    import skyward as sky

    found: tuple[int, int] = sky.function(work)(number, seconds, 1) >> sky
    return found
