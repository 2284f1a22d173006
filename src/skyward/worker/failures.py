"""Failure reports: an exception as it can travel, in words and, where possible, as itself."""

from __future__ import annotations

import os
import traceback

from skyward.errors import RemoteError
from skyward.wire import objects

CHAIN_DEPTH = 8
"""How many causes of an exception travel with it."""


def type_name(problem: BaseException) -> str:
    """The exception's type as a traceback names it."""
    kind = type(problem)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def text(problem: BaseException) -> str:
    """Its message; an exception may even fail at that."""
    try:
        return str(problem)
    except Exception as worse:
        return f"<its str() failed: {type(worse).__name__}>"


def frames(problem: BaseException) -> list[tuple[str, int, str, str]]:
    """The traceback below our own frames."""
    here = os.path.dirname(os.path.dirname(__file__))
    found = traceback.extract_tb(problem.__traceback__)
    while found and found[0].filename.startswith(here):
        found.pop(0)
    return [(f.filename, f.lineno or 0, f.name, f.line or "") for f in found[:200]]


def portable(
    problem: Exception, depth: int, made: dict[int, objects.PortableException] | None = None
) -> objects.PortableException:
    """The exception with those it came from, as far as `CHAIN_DEPTH` allows from this depth."""
    made = {} if made is None else made
    chain = {}
    if depth < CHAIN_DEPTH:
        for link in ("__cause__", "__context__"):
            other = getattr(problem, link)
            if isinstance(other, Exception):
                # `raise x from y` makes y both; each level would double the work.
                if id(other) not in made:
                    made[id(other)] = portable(_travelling(other), depth + 1, made)
                chain[link] = made[id(other)]
    return objects.PortableException(problem, chain, problem.__suppress_context__)


def _travelling(problem: Exception) -> Exception:
    """The exception, or words in its place if it would not survive: it is not the main one."""
    try:
        encoded = objects.encode(problem)
        objects.decode(b"".join(encoded.pieces), encoded.buffers, encoded.storages)
        return problem
    except Exception:
        name = type(problem).__qualname__
        words = RemoteError(f"{name}: {text(problem)}", type_name=name)
        words.__cause__, words.__context__ = problem.__cause__, problem.__context__
        words.__suppress_context__ = problem.__suppress_context__
        return words
