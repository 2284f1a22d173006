"""A cell on a node: runs there, and returns what it shows and what it assigns."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
}


@dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell gave on one worker."""

    shown: dict[str, str]
    """Its last expression as a notebook shows it, by MIME type; the value itself stays there."""
    values: dict[str, Any]
    """The names that were asked for."""


def cell_call(cell: types.FunctionType, wanted: tuple[str, ...], run: str) -> Callable[[], Any]:
    """A function that runs a cell on a worker; `run` tells this run from others.

    Without it, a worker that has run the same cell before would use that run's objects again.
    """

    def call() -> CellResult:
        return _run(cell, wanted, run)

    return call


def _run(cell: types.FunctionType, wanted: tuple[str, ...], run: str) -> CellResult:
    # Workers on threads share one function; each run assigns names of its own.
    space = dict(cell.__globals__)
    value = types.FunctionType(cell.__code__, space, cell.__name__)()
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    missing = [name for name in wanted if name not in space]
    if missing:
        raise NameError(
            f"-o {','.join(wanted)}: the cell has not assigned {', '.join(missing)}",
            name=missing[0],
        )
    return CellResult(shown(value), {name: space[name] for name in wanted})


def shown(value: Any) -> dict[str, str]:
    """A value as a notebook shows it; empty for None."""
    if value is None:
        return {}
    bundle = {"text/plain": repr(value)}
    for kind, method in _METHODS.items():
        describe = getattr(type(value), method, None)
        if describe is None:
            continue
        try:
            content = describe(value)
        except Exception:
            # A notebook, too, shows a value as text if its richer form fails.
            continue
        if isinstance(content, bytes):
            bundle[kind] = base64.b64encode(content).decode()
        elif isinstance(content, str):
            bundle[kind] = content
    if hasattr(value, "savefig"):
        drawn = io.BytesIO()
        value.savefig(drawn, format="png", bbox_inches="tight")
        bundle["image/png"] = base64.b64encode(drawn.getvalue()).decode()
    return bundle
