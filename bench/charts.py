"""Charts of rows: SVG without a script, as wide as its place, for light and dark pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from report import Row

UNITS = {
    "ns": 1e-9,
    "µs": 1e-6,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "B": 1.0,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GB/s": 1e9,
    "/s": 1.0,
    "a second": 1.0,
    "x": 1.0,
    "% of a core": 1.0,
    "round trips": 1.0,
    "questions": 1.0,
}
_FIGURE = re.compile(r"([\d,.]+) ?([^\d\s].*)")
_LABEL, _LINE, _GAP = 19, 24, 14
"""Heights, in pixels: a line of a label, a bar with its space, the space after a group."""
_CHARACTERS = 52
"""What fits beside each other on a phone."""
STYLE = """<style>
svg { color: #24292f; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { color: #e6e8ee; } }
text { fill: currentColor; } .label, .value { font-weight: 600; } .name { font-size: 12px; }
.ours { fill: #5c6bc0; fill-opacity: 0.5; } .missed { fill: #ff9100; fill-opacity: 0.5; }
.theirs { fill: #8a8f9c; fill-opacity: 0.3; }
.limit { fill: none; stroke: #8a8f9c; stroke-dasharray: 3 3; }
</style>
"""
"""For a picture that stands alone; on the site, docs/site.css says the same."""


def quantity(text: str) -> float | None:
    """The number that a figure stands for, in its base unit; None for words."""
    found = _FIGURE.fullmatch(text)
    if found is None or found[2] not in UNITS:
        return None
    return float(found[1].replace(",", "")) * UNITS[found[2]]


def chart(title: str, rows: Iterable[Row]) -> str | None:
    """A chart of the rows that compare quantities; None if none does.

    Rows that follow each other with the same figure of ours are one group of bars.
    """
    drawn: list[str] = []
    top = 0
    for (what, ours), group in groupby(rows, key=lambda row: (row.what, row.ours)):
        bars = list(_bars(ours, list(group)))
        if len(bars) < 2:
            continue
        for words in textwrap.wrap(what.replace("`", ""), _CHARACTERS):
            drawn.append(f'<text class="label" x="0" y="{top + 14}">{escape(words)}</text>')
            top += _LABEL
        longest = max(value for _, value, _, _ in bars)
        for kind, value, shown, name in bars:
            width = f"{max(100 * value / longest, 0.5):.1f}%"
            drawn.append(
                f'<rect class="{kind}" x="0" y="{top}" width="{width}" height="20" rx="3"/>'
                f'<text class="value" x="6" y="{top + 14}">{escape(shown)}</text>'
                f'<text class="name" x="92" y="{top + 14}">{escape(name)}</text>'
            )
            top += _LINE
        top += _GAP
    if not drawn:
        return None
    # No viewBox: the bars are parts of the width, and the letters keep their size on a phone.
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{top}" role="img" '
        f'aria-label="{escape(title)}">\n{STYLE}' + "\n".join(drawn) + "\n</svg>\n"
    )


def _bars(ours: str, group: Sequence[Row]) -> Iterator[tuple[str, float, str, str]]:
    """The class, length, figure and name of each bar of a group, ours first."""
    mine = quantity(ours)
    if mine is None:
        return
    missed = [row.bar for row in group if row.met is False]
    words = f"skyward; misses {', '.join(missed)}" if missed else "skyward"
    yield "missed" if missed else "ours", mine, ours, words
    for row in group:
        theirs = quantity(row.theirs)
        if theirs is not None:
            yield "theirs", theirs, row.theirs, row.against
        comparison, _, limit = row.bar.partition(" ")
        at = quantity(limit)
        if at is not None and not limit.endswith("x"):
            limit = limit.replace(" a second", " /s")
            yield "limit", at, limit, f"the bar: {comparison} {limit}"
