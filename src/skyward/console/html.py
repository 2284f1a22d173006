"""HTML: what notebooks show, escaped, with colours that suit light and dark pages.

Styles are attributes of elements, since notebooks that are not trusted lose their style sheets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

FONT = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5"
MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"
# Half-transparent, so that they are readable on white and on black.
_LINE = "1px solid rgba(128,128,128,.35)"
_TRACK = "rgba(128,128,128,.25)"
COLOURS = {"good": "#2e9e5b", "bad": "#d9534f", "busy": "#3b82f6", "idle": "#8a8f98"}


def block(*parts: str) -> str:
    """Parts below each other."""
    return f'<div style="{FONT};padding:2px 8px">{"".join(parts)}</div>'


def line(*parts: str) -> str:
    """Parts in one line."""
    return f"<div>{' '.join(parts)}</div>"


def plain(text: str) -> str:
    """Text as it is."""
    return escape(text)


def strong(text: str) -> str:
    """Text that stands out."""
    return f"<b>{escape(text)}</b>"


def muted(text: str) -> str:
    """Text that stands back."""
    return f'<span style="opacity:.65">{escape(text)}</span>'


def code(text: str) -> str:
    """Text in letters of one width."""
    return f'<span style="{MONO};white-space:pre-wrap">{escape(text)}</span>'


def mark(kind: str, text: str) -> str:
    """A word with a coloured dot, or a sign in that colour if the word is a sign."""
    colour = COLOURS[kind]
    if len(text) == 1:
        return f'<span style="color:{colour};font-weight:bold">{escape(text)}</span>'
    dot = f'<span style="color:{colour}">●</span>'
    return f'<span style="white-space:nowrap">{dot} {escape(text)}</span>'


def bar(fraction: float, text: str = "", *, width: int = 160, kind: str = "busy") -> str:
    """A bar that is filled to a fraction, and words after it."""
    filled = round(100 * min(1.0, max(0.0, fraction)), 1)
    inner = f"width:{filled:g}%;height:100%;background:{COLOURS[kind]};border-radius:4px"
    outer = (
        f"display:inline-block;vertical-align:middle;width:{width}px;height:8px;"
        f"background:{_TRACK};border-radius:4px;overflow:hidden"
    )
    drawn = f'<span style="{outer}"><span style="display:block;{inner}"></span></span>'
    return f"{drawn} {muted(text)}" if text else drawn


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells that are HTML already, under headings that are not."""
    cell = "text-align:left;padding:2px 14px 2px 0;vertical-align:top;background:none"
    head = "".join(
        f'<th style="{cell};font-weight:600;opacity:.65;border-bottom:{_LINE}">{escape(name)}</th>'
        for name in headings
    )
    top = f'<tr style="background:none">{head}</tr>' if headings else ""
    body = "".join(
        '<tr style="background:none">'
        + "".join(f'<td style="{cell}">{each}</td>' for each in row)
        + "</tr>"
        for row in rows
    )
    style = f"{FONT};border-collapse:collapse;border:none;margin:2px 0"
    return f'<table style="{style}">{top}{body}</table>'
