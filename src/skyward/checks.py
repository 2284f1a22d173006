"""Argument checks: each refuses with the call, the value and the next step in its message."""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, SupportsFloat, SupportsIndex

from skyward.errors import ConfigurationError

# Greedy up to the last "@" before the path, so that a password with an "@" in it is hidden whole.
_CREDENTIALS = re.compile(r"://[^/\s'\"]+@")


_options: Mapping[str, str] = {}
"""The options of the command line that runs, by the names of the arguments they stand for."""


@contextlib.contextmanager
def naming_options(options: Mapping[str, str]) -> Iterator[None]:
    """Have messages name options of the command line in place of Python's arguments."""
    global _options
    before, _options = _options, options
    try:
        yield
    finally:
        _options = before


def argument(name: str, *value: object, python: str = "") -> str:
    """An argument as the user gives it: `host='::'` in Python, `--host ::` on the command line.

    `python` is the form for Python's users, if it is not a keyword argument.

    >>> argument("host", "::"), argument("token"), argument("insecure", True)
    ("host='::'", 'token=...', 'insecure=True')
    """
    option = _options.get(name)
    if option is not None:
        return " ".join([option, *(str(each) for each in value if each is not True)])
    return python or (f"{name}={value[0]!r}" if value else f"{name}=...")


def store(value: object, **normalised: object) -> None:
    """Set fields of a frozen value while it is being made."""
    for name, content in normalised.items():
        object.__setattr__(value, name, content)


def shown(value: Any) -> str:
    """Render a value as the call that makes it, with any credentials in its URLs hidden.

    Arguments that have their defaults are left out.
    """
    given = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
    usual = {each.name: _default(each) for each in fields(value)}
    return _call(value, {name: each for name, each in given.items() if each != usual[name]})


def _default(argument: Field[Any]) -> object:
    """The default of a dataclass's field; `MISSING` if it has none."""
    if argument.default_factory is not MISSING:
        return argument.default_factory()
    return argument.default


def _call(value: object, given: Mapping[str, object]) -> str:
    arguments = ", ".join(f"{name}={content!r}" for name, content in given.items())
    return f"{type(value).__name__}({without_credentials(arguments)})"


def without_credentials(text: str) -> str:
    """The text with the user and password of every URL hidden."""
    return _CREDENTIALS.sub("://***@", text)


def refused(value: object, given: Mapping[str, object], problem: str) -> ConfigurationError:
    """The error for a call with these arguments."""
    return ConfigurationError(f"{_call(value, given)}: {without_credentials(problem)}")


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
        # A str has its own conversion to float, but "30" is as likely a slip as a request.
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


def above_zero(call: str, name: str, content: object) -> None:
    """A number above 0 in the call of a function, or None."""
    is_number = isinstance(content, int | float) and not isinstance(content, bool)
    if content is not None and not (is_number and 0 < float(str(content)) < math.inf):
        raise ConfigurationError(f"{call}({name}={content!r}): give a number above 0")


def flag(value: object, name: str, content: object) -> bool:
    """True or False."""
    if not isinstance(content, bool):
        raise refused(value, {name: content}, f"{name} must be True or False, not {kind(content)}")
    return content


def kind(content: object) -> str:
    """How people call the type of a value."""
    return "None" if content is None else type(content).__name__
