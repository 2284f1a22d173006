"""Events of a compute, given to its `on_events`: its own life, and what functions log."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import skyward as sky
from skyward.errors import ConfigurationError

RETURN_SECONDS = 0.1
"""How long the thread of a function that has returned may take to end."""

logger = logging.getLogger("skytorch")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a compute.

    `reason` is "Starting", "Pending", "Ready", "Failed", "Suspended" or "Deleted" for the compute's
    own life, and "Logged" for what a function gave to `log_event`. "Pending" says what a pod waits
    for, in the words of Kubernetes. `type` is "Warning" for "Failed" and for a pod that something
    keeps from starting, and "Normal" for all others, as in an event of Kubernetes.
    """

    reason: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)
    compute: str = ""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""
    type: Literal["Normal", "Warning"] = "Normal"

    @property
    def timestamp(self) -> datetime:
        """When it happened, in UTC."""
        return datetime.fromtimestamp(self.time, UTC)

    # An event of Kubernetes, which may happen several times, has these two.
    first_timestamp = last_timestamp = timestamp

    def __str__(self) -> str:
        details = "".join(f", {name}={value!r}" for name, value in self.details.items())
        return f"{self.compute}: {self.reason}: {self.message}{details}"


OnEvents = Callable[[Event], object]

sink: contextvars.ContextVar[OnEvents | None] = contextvars.ContextVar("sky_events", default=None)
"""The listener for what is logged in this context."""
_shipped_sink: OnEvents | None = None
"""The same for a whole process that runs a shipped function, with all its threads."""


def log_event(event: Event | str, /, **details: Any) -> None:
    """Give a text to the `on_events` of the compute this runs on or for; without one, to the log.

    Given an `Event`, it writes the event to the log "skytorch", at the level that the event's type
    has there, so that `log_event` can itself be an `on_events`.

    >>> log_event("epoch done", epoch=3, loss=0.12)
    """
    if isinstance(event, Event):
        if details:
            raise ConfigurationError(
                f"log_event({event.reason!r} event, {next(iter(details))}=...): an Event has its "
                "details already; give a text to add some"
            )
        level = logging.WARNING if event.type == "Warning" else logging.INFO
        logger.log(level, "%s", event)
        return
    if not isinstance(event, str) or not event:
        raise ConfigurationError(f"log_event({event!r}): give a text, such as 'epoch done'")
    said = Event("Logged", event, details)
    listener = sink.get() or _shipped_sink
    if listener is None:
        logger.info("%s", said)
    else:
        listener(said)


@dataclass(slots=True)
class Returned:
    """The last item of a `Reporting` function's stream: its result."""

    value: Any


@dataclass(slots=True)
class Printed:
    """Text that a `Reporting` function wrote to "stdout" or "stderr", newline included."""

    stream: str
    text: str


Item = Event | Printed | Returned


class Reporting:
    """A function that streams the events it logs, the lines it prints if asked, then its result.

    The stream is sent from the main thread, so the function runs on another. A class, so that it
    travels by name.
    """

    def __init__(self, function: Callable[..., Any], *, printed: bool = False) -> None:
        functools.update_wrapper(self, function)
        self._function, self._printed = function, printed

    @property
    def __sky_constant__(self) -> tuple[Any, ...]:
        return (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Item]:
        global _shipped_sink
        items: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
        _shipped_sink = items.put

        def printed(line: sky.Output) -> None:
            items.put(Printed(line.stream, f"{line}\n"))

        def run() -> None:
            try:
                with sky.redirect_output(printed) if self._printed else contextlib.nullcontext():
                    value = self._function(*args, **kwargs)
                    if inspect.iscoroutine(value):
                        value = asyncio.run(value)
                items.put(Returned(value))
            except BaseException as problem:
                # The main thread waits for it, whatever it is, and raises it.
                items.put(problem)

        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(run,), name="skytorch", daemon=True
        )
        thread.start()
        try:
            while True:
                item = items.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Returned):
                    return
        finally:
            _shipped_sink = None
            _end(thread)


def _end(thread: threading.Thread) -> None:
    """Interrupt the function if it still runs; the pool ends a process that ignores it."""
    thread.join(RETURN_SECONDS)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        thread.join()
