"""Measures: sizes and times as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = (("second", 60), ("minute", 60), ("hour", 24), ("day", 365))


def size(count: float) -> str:
    """Bytes, as `512 B` or `1.2 GiB`.

    >>> size(1_288_490_189)
    '1.2 GiB'
    """
    if count < 1024:
        return f"{int(count)} B"
    for unit in _UNITS:
        count /= 1024
        if count < 1000 or unit == _UNITS[-1]:
            break
    return f"{count:.1f} {unit}" if count < 99.95 else f"{count:.0f} {unit}"


def of_size(part: int, whole: int) -> str:
    """A part and its whole, with one unit where they share it: `3.1 of 4.0 GiB`."""
    first, second = size(part), size(whole)
    number, _, unit = first.partition(" ")
    return f"{number if second.endswith(f' {unit}') else first} of {second}"


def clock(seconds: float) -> str:
    """A duration, as `0:42` or `1:02:03`."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def duration(seconds: float) -> str:
    """A duration in one unit, as `42 s`, `12 min` or `2.5 h`.

    >>> duration(45), duration(750), duration(9000)
    ('45 s', '12 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def ago(moment: datetime) -> str:
    """How long ago something was, as `just now` or `3 hours ago`."""
    past = (datetime.now(UTC) - moment).total_seconds()
    if past < 10:
        return "just now"
    for name, most in _SPANS:
        if past < most or name == "day":
            break
        past /= most
    count = int(past)
    return f"{count} {name}{'s' if count != 1 else ''} ago"
