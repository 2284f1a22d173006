"""A standing: where a task is in its code, as its node's agent sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a task is."""

    text: str
    """The standing in words, for an error: what the task does, and its innermost frames."""
    place: str = ""
    """The innermost line of the user's code, such as "train.py:12 in step: loss.backward()"."""
    collective: str = ""
    """The collective operation that the task waits in, such as "all_reduce"."""
