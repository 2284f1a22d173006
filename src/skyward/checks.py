"""Argument checks: each refuses with the call, the value and the next step in its message."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, SupportsFloat, SupportsIndex

from skyward.errors import ConfigurationError

# Greedy up to the last "@" before the path, so that a password with an "@" in it is hidden whole.
_CREDENTIALS = re.compile(r"://[^/\s'\"]+@")


def store(value: object, **normalised: object) -> None:
    """Set fields of a frozen value while it is being made."""
    for name, content in normalised.items():
        object.__setattr__(value, name, content)


def shown(value: Any) -> str:
    """Render a value as the call that makes it, with any credentials in its URLs hidden."""
    return _call(value, {each.name: getattr(value, each.name) for each in fields(value)})


def _call(value: object, given: Mapping[str, object]) -> str:
    arguments = ", ".join(f"{name}={content!r}" for name, content in given.items())
    return f"{type(value).__name__}({_CREDENTIALS.sub('://***@', arguments)})"


def refused(value: object, given: Mapping[str, object], problem: str) -> ConfigurationError:
    """The error for a call with these arguments."""
    problem = _CREDENTIALS.sub("://***@", problem)
    return ConfigurationError(f"{_call(value, given)}: {problem}")


def text(value: object, name: str, content: object) -> str:
    """A non-empty, printable string."""
    given = {name: content}
    if not isinstance(content, str):
        raise refused(value, given, f"{name} must be a str, not {kind(content)}; pass a str")
    if not content.strip():
        raise refused(value, given, f"{name} is empty; give it a value or leave it out")
    if content != content.strip() or not content.isprintable():
        raise refused(
            value,
            given,
            f"{name} has whitespace around it or control characters in it; remove them",
        )
    return content


def texts(
    value: object,
    name: str,
    content: object,
    check: Callable[[object, str], None] | None = None,
) -> tuple[str, ...]:
    """A list of such strings, as a tuple; each may have a check of its own."""
    if isinstance(content, str):
        raise refused(
            value,
            {name: content},
            f"a bare string would be read letter by letter; write {name}=[{content!r}]",
        )
    if not isinstance(content, list | tuple):
        raise refused(
            value,
            {name: content},
            f"{name} must be a list of strings, not {kind(content)}; write {name}=[...]",
        )
    texts = tuple(text(value, f"{name}[{i}]", item) for i, item in enumerate(content))
    if check is not None:
        for each in texts:
            check(value, each)
    return texts


def whole(value: object, name: str, content: SupportsIndex, *, at_least: int) -> int:
    """A whole number, not below a bound."""
    given = {name: content}
    try:
        # numpy's integers count; `True` is an int to Python but never a number of nodes.
        number = None if isinstance(content, bool) else operator.index(content)
    except TypeError:
        number = None
    if number is None:
        raise refused(
            value,
            given,
            f"{name} must be a whole number, not {kind(content)}; write {name}={at_least} or more",
        )
    if number < at_least:
        raise refused(value, given, f"{name} must be at least {at_least}; raise it to that")
    return number


def seconds(value: object, name: str, content: SupportsFloat) -> float:
    """A positive, finite number of seconds."""
    given = {name: content}
    try:
        # A str has its own conversion to float, but "30" is as likely a slip as a wish.
        seconds = None if isinstance(content, bool | str) else float(content)
    except (TypeError, ValueError, OverflowError):
        seconds = None
    if seconds is None:
        raise refused(
            value, given, f"{name} must be a number of seconds, not {kind(content)}; write 30.0"
        )
    if not math.isfinite(seconds) or seconds <= 0:
        raise refused(
            value,
            given,
            f"{name} must be a positive, finite number of seconds; "
            "write a large one, such as 86400.0 for a day, to wait long",
        )
    return seconds


def flag(value: object, name: str, content: object) -> bool:
    """True or False."""
    if not isinstance(content, bool):
        raise refused(value, {name: content}, f"{name} must be True or False, not {kind(content)}")
    return content


def kind(content: object) -> str:
    """How people call the type of a value."""
    return "None" if content is None else type(content).__name__
