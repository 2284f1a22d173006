"""Samples taken in interleaved rounds, so that drift of the machine hits every contender alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SETTLE_SECONDS = 0.02


@dataclass(frozen=True)
class Sample:
    """One figure per round, all in the same unit: "s", "B/s", "tasks/s", "B" or "x"."""

    values: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return self._percentile(0.1)

    @property
    def high(self) -> float:
        return self._percentile(0.9)

    def per(self, amount: float, unit: str) -> Sample:
        """The rate at which `amount` was handled in each round of a sample of seconds."""
        return Sample(tuple(amount / seconds for seconds in self.values), unit)

    def _percentile(self, fraction: float) -> float:
        ordered = sorted(self.values)
        position = fraction * (len(ordered) - 1)
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def interleave(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, warmups: int = 1
) -> dict[str, Sample]:
    """Let every contender measure itself once a round and return its seconds, by name.

    The order rotates from round to round: what one contender leaves running behind it (a
    daemon tidying up, a cold cache) then slows each of the others equally often.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmups, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(SETTLE_SECONDS)
            taken = contenders[name]()
            if number >= 0:
                seconds[name].append(taken)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes once."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def p50(work: Callable[[], object], calls: int) -> float:
    """The median seconds of single calls, made one after the other."""
    return statistics.median(timed(work) for _ in range(calls))


def say(message: str) -> None:
    """Progress, for the person waiting."""
    print(message, file=sys.stderr, flush=True)
