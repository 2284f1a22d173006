"""The table of results: rows, bars, and how both are shown to a person."""

from __future__ import annotations

import argparse
import json
import operator
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from measure import Sample, say

COLUMNS = ("measurement", "skyward", "against", "figure", "ratio", "bar", "met", "p10 to p90")
S = TypeVar("S")

COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Row:
    """One line of the table, already in words; `met` is None where there is no bar."""

    what: str
    ours: str
    against: str = ""
    theirs: str = ""
    ratio: str = ""
    bar: str = ""
    met: bool | None = None
    spread: str = ""
    failed: bool = False

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        return {True: "yes", False: "NO", None: ""}[self.met]

    def cells(self) -> tuple[str, ...]:
        return (
            self.what,
            self.ours,
            self.against,
            self.theirs,
            self.ratio,
            self.bar,
            self.verdict,
            self.spread,
        )


def compared(what: str, ours: Sample, against: str, theirs: Sample, bar: str = "") -> Row:
    """A row judged by the ratio of our median to theirs; the bar reads like "<= 1.2x"."""
    ratio = ours.median / theirs.median
    return Row(
        what,
        figure(ours.median, ours.unit),
        against,
        figure(theirs.median, theirs.unit),
        f"{ratio:.2f}x",
        bar,
        _met(ratio, bar.removesuffix("x")),
        " / ".join(filter(None, map(_spread, (ours, theirs)))),
    )


def absolute(what: str, ours: Sample, bar: str = "", limit: float | None = None) -> Row:
    """A row judged by the figure itself: `bar` is shown, `limit` is it in the sample's unit."""
    met = None
    if limit is not None:
        met = _met(ours.median, f"{bar.split()[0]} {limit}")
    return Row(what, figure(ours.median, ours.unit), bar=bar, met=met, spread=_spread(ours))


def claim(what: str, outcome: str, bar: str, met: bool) -> Row:
    """A row that states a fact rather than a quantity."""
    return Row(what, outcome, bar=bar, met=met)


def absent(what: str, against: str, reason: str, ours: Sample | None = None) -> Row:
    """A row whose peer could not be run, with the reason."""
    shown = figure(ours.median, ours.unit) if ours else ""
    return Row(what, shown, against, f"not installed: {reason}")


def figure(value: float, unit: str) -> str:
    """A number as a person reads it."""
    match unit:
        case "s" if value < 1e-6:
            return f"{value * 1e9:.0f} ns"
        case "s" if value < 1e-3:
            return f"{value * 1e6:.3g} µs"
        case "s" if value < 1:
            return f"{value * 1e3:.3g} ms"
        case "s":
            return f"{value:.2f} s"
        case "B/s":
            return f"{value / 1e9:.2f} GB/s"
        case "B":
            return f"{value / 2**20:,.1f} MiB" if value >= 2**20 else f"{value:,.0f} B"
        case "tasks/s":
            return f"{value:,.0f} /s" if value >= 100 else f"{value:.3g} /s"
        case _:
            return f"{value:.2f}{unit}"


def _met(value: float, bar: str) -> bool | None:
    if not bar:
        return None
    comparison, limit = bar.split()
    return bool(COMPARISONS[comparison](value, float(limit)))


def _spread(sample: Sample) -> str:
    if len(sample.values) < 2:
        return ""
    return f"{figure(sample.low, sample.unit)}–{figure(sample.high, sample.unit)}"


def text_table(rows: Iterable[Row]) -> str:
    """The table for a terminal."""
    lines = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown_table(rows: Iterable[Row]) -> str:
    """The same table for a page."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows]))


def load(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())]


def run_suite(
    title: str, measurements: Sequence[Callable[[S], Sequence[Row]]], *, full: S, quick: S
) -> None:
    """The command line of one suite: take its measurements, then print or save the rows.

    A measurement that raises becomes a row of its own, and the others still run.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--quick", action="store_true", help="small and few: a smoke test")
    parser.add_argument("--match", default="", help="only measurements whose name contains this")
    parser.add_argument("--rows", type=Path, help="write the rows here as JSON, print nothing")
    options = parser.parse_args()

    rows: list[Row] = []
    for measurement in measurements:
        name = measurement.__name__.replace("_", " ")
        if options.match not in name:
            continue
        start = time.perf_counter()
        try:
            rows.extend(measurement(quick if options.quick else full))
        except Exception as error:
            traceback.print_exc()
            message = str(error).splitlines()[0] if str(error) else ""
            rows.append(Row(name, f"{type(error).__name__}: {message}", failed=True))
        say(f"  {name}: {time.perf_counter() - start:.1f} s")
    if options.rows:
        save(rows, options.rows)
    else:
        print(text_table(rows))
    sys.exit(1 if any(row.failed for row in rows) else 0)
