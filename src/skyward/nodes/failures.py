"""Failures of a start: which may pass by themselves, and how users see them."""

from __future__ import annotations

import asyncio
import concurrent.futures
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from skyward.errors import (
    ConfigurationError,
    HostKeyError,
    ImageError,
    LoginError,
    PluginError,
    UnavailableError,
    VersionMismatchError,
)

E = TypeVar("E", bound=BaseException)

_OURS = (
    str(Path(__file__).parents[1]),
    str(Path(asyncio.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
)


_LASTING = (
    ConfigurationError,
    HostKeyError,
    ImageError,
    LoginError,
    PluginError,
    VersionMismatchError,
)


def may_pass(failure: BaseException) -> bool:
    """Whether a start that failed so may succeed later, though the user changes nothing."""
    if isinstance(failure, UnavailableError):
        return failure.passing
    return not isinstance(failure, _LASTING)


def shown_from_outside(failure: E) -> E:
    """Drop the frames of skyward and asyncio from an error and its causes.

    The message says what happened; the place in a thread of the pool does not help the user. The
    frames of other people's providers stay, because they show where the provider failed.
    """
    failure.__traceback__ = None
    seen: set[int] = {id(failure)}
    cause = failure.__cause__ or failure.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        cause.__traceback__ = _outside(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return failure


def _outside(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames
