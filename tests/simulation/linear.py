"""Whether what many have seen of one shared object is what it shows when used one after another.

The search of Wing and Gong: of the operations that may have been first, each is tried as the first,
then what may have been the next. An operation whose answer nobody got may have happened, or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

UNKNOWN: Any = ...
"""The result of an operation that was not answered."""
TIMED_OUT, EMPTY, FULL = "timed out", "empty", "full"
BLOCKED: Any = NotImplemented
"""What a model returns of an operation that would wait."""
SHORT = 2
"""How many items a short queue has room for."""
MOST_OPEN = 8
"""A history with more unanswered operations says too little, and takes too long."""
MOST_STATES = 100_000


@dataclass(slots=True)
class Operation:
    """One operation on one object, as its caller has seen it."""

    what: str
    given: tuple[Any, ...]
    began: float
    epoch: str = ""
    """Names the owner that was asked; empty if no owner is known."""
    ended: float = inf
    result: Any = UNKNOWN

    def __str__(self) -> str:
        given = ", ".join(map(repr, self.given))
        return (
            f"{self.began - 1000:.6f} to {self.ended - 1000:.6f}: "
            f"{self.what}({given}) = {self.result!r}"
        )


Model = Callable[[Any, str, tuple[Any, ...]], tuple[Any, Any]]
"""From a state, an operation and what it is given to the next state and the result."""


def _dict(state: Any, what: str, given: tuple[Any, ...]) -> tuple[Any, Any]:
    values = dict(state or ())
    result: Any = None
    if what == "__setitem__":
        values[given[0]] = given[1]
    elif what == "pop":
        result = values.pop(*given)
    elif what == "setdefault":
        result = values.setdefault(*given)
    elif what == "get":
        result = values.get(*given)
    elif what == "compare_and_set":
        result = given[0] in values and values[given[0]] == given[1]
        if result:
            values[given[0]] = given[2]
    else:
        result = len(values)
    return tuple(values.items()), result


def _set(state: Any, what: str, given: tuple[Any, ...]) -> tuple[Any, Any]:
    elements = frozenset(state or ())
    if what == "add_new":
        return elements | {*given}, given[0] not in elements
    if what == "discard":
        return elements - {*given}, None
    if what == "__contains__":
        return elements, given[0] in elements
    return elements, len(elements)


def _counter(state: Any, what: str, given: tuple[Any, ...]) -> tuple[Any, Any]:
    value = state or 0
    if what == "add":
        return value + given[0], value + given[0]
    if what == "compare_and_set":
        fits = value == given[0]
        return (given[1] if fits else value), fits
    return value, value


def _queue(state: Any, what: str, given: tuple[Any, ...], room: float = inf) -> tuple[Any, Any]:
    items = tuple(state or ())
    if what in ("put", "put_nowait"):
        if len(items) < room:
            return (*items, given[0]), None
        return items, (FULL if what == "put_nowait" else BLOCKED)
    if items:
        return items[1:], items[0]
    return items, (EMPTY if what == "get_nowait" else BLOCKED)


def _event(state: Any, what: str, given: tuple[Any, ...]) -> tuple[Any, Any]:
    is_set = bool(state)
    if what in ("set", "clear"):
        return what == "set", None
    if what == "wait":
        return is_set, (True if is_set else BLOCKED)
    return is_set, is_set


MODELS: dict[str, Model] = {
    "dict": _dict,
    "set": _set,
    "counter": _counter,
    "queue": _queue,
    "short": partial(_queue, room=SHORT),
    "event": _event,
}


def is_linear(kind: str, history: Iterable[Operation]) -> bool | None:
    """Whether the operations have an order in which one after another gives their results.

    None if the search would take too long.
    """
    model = MODELS[kind]
    # What has waited in vain has changed nothing, and says nothing.
    done = sorted(
        (each for each in history if each.result != TIMED_OUT), key=lambda each: each.began
    )
    if sum(each.result is UNKNOWN for each in done) > MOST_OPEN:
        return None
    answered = sum(1 << at for at, each in enumerate(done) if each.result is not UNKNOWN)
    seen: set[tuple[int, Any]] = set()
    left: list[tuple[int, Any]] = [(0, None)]
    while left:
        taken, state = left.pop()
        if taken & answered == answered:
            return True
        if len(seen) > MOST_STATES:
            return None
        # What began after another one had ended comes after it.
        open_ones = [at for at in range(len(done)) if not taken >> at & 1]
        first_end = min(done[at].ended for at in open_ones)
        for at in open_ones:
            each = done[at]
            if each.began > first_end:
                break
            following: Any = None
            result: Any = None
            if each.what != "delete":
                following, result = model(state, each.what, each.given)
            if result is BLOCKED or (each.result is not UNKNOWN and result != each.result):
                continue
            reached = (taken | 1 << at, following)
            if reached not in seen:
                seen.add(reached)
                left.append(reached)
    return False
