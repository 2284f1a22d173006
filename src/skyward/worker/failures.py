"""Failure reports: an exception as the client gets it, as text and, if possible, as an object."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable

from skyward.errors import RemoteError
from skyward.objects import encoding
from skyward.objects.exceptions import PortableException
from skyward.wire.messages import Failure
from skyward.worker.outbox import Sendable

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Where Skyward's own code is, which users are not shown."""
CHAIN_DEPTH = 8
"""How many causes of an exception travel with it."""
TEXT_MAX = 1 << 20
"""How many characters of a message travel as text: a frame with a longer one would be refused."""
LINE_MAX = 500
"""How many characters of a source line are shown in a traceback."""


def report(
    problem: BaseException,
    task: int,
    ran: float,
    pack: Callable[[PortableException], Sendable],
    *,
    cancelled: bool,
) -> tuple[Failure, Sendable | None]:
    """The message for the client, and the exception itself if it can be sent."""
    sendable: Sendable | None = None
    unsent = ""
    if isinstance(problem, Exception) and not cancelled:
        # The exception with its causes; if that fails, alone; if that fails, only as text.
        for depth in (0, CHAIN_DEPTH):
            with contextlib.suppress(Exception):
                sendable = pack(portable(problem, depth))
                break
        else:
            unsent = _why_unsent(problem)
    payload = sendable[0] if sendable is not None else None
    words = type_name(problem), text(problem), frames(problem)
    return Failure(task, ran, *words, payload, cancelled, unsent), sendable


def _why_unsent(problem: Exception) -> str:
    """Which part of an exception cannot be sent."""
    try:
        encoding.encode(problem, what=f"the {type(problem).__qualname__}")
    except Exception as unsendable:
        # Without the advice, which is for arguments and results.
        return text(unsendable).rpartition("; ")[0] or text(unsendable)
    return "it cannot be encoded"


def type_name(problem: BaseException) -> str:
    """The exception's type as a traceback names it."""
    kind = type(problem)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def text(problem: BaseException) -> str:
    """The exception's message; even str() of an exception may fail."""
    try:
        words = str(problem)
    except Exception as worse:
        return f"<its str() failed: {type(worse).__name__}>"
    if len(words) <= TEXT_MAX:
        return words
    return f"{words[:TEXT_MAX]}... ({len(words)} characters)"


def frames(problem: BaseException) -> list[tuple[str, int, str, str]]:
    """The traceback below our own frames."""
    found = traceback.extract_tb(problem.__traceback__)
    while found and found[0].filename.startswith(OURS):
        found.pop(0)
    return [(f.filename, f.lineno or 0, f.name, (f.line or "")[:LINE_MAX]) for f in found[:200]]


def portable(
    problem: Exception, depth: int, made: dict[int, PortableException] | None = None
) -> PortableException:
    """The exception with its causes, down to `CHAIN_DEPTH`; `depth` is where the exception is."""
    made = {} if made is None else made
    chain = {}
    if depth < CHAIN_DEPTH:
        for link in ("__cause__", "__context__"):
            other = getattr(problem, link)
            if isinstance(other, Exception):
                # `raise x from y` makes y the cause and the context: without `made`, each level
                # would double the work.
                if id(other) not in made:
                    made[id(other)] = portable(_travelling(other), depth + 1, made)
                    if found := frames(other):
                        shown = (f'  File "{a}", line {b}, in {c}\n    {d}' for a, b, c, d in found)
                        made[id(other)].notes.append("\n".join(["remote traceback:", *shown]))
                chain[link] = made[id(other)]
    return PortableException.of(problem, chain)


def _travelling(problem: Exception) -> Exception:
    """A cause as it is, or as a `RemoteError` if it cannot be encoded."""
    try:
        encoded = encoding.encode(problem)
        encoding.decode(b"".join(encoded.pieces), encoded.buffers, encoded.storages)
        return problem
    except Exception:
        name = type(problem).__qualname__
        words = RemoteError(f"{name}: {text(problem)}", type_name=name)
        words.__cause__, words.__context__ = problem.__cause__, problem.__context__
        words.__suppress_context__ = problem.__suppress_context__
        return words
