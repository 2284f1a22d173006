"""Jobs: tasks whose arguments are complete; they wait for their turn, then run."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyward.objects import encoding
from skyward.objects.payloads import Pieces
from skyward.wire.messages import Places, Run
from skyward.worker.streams import InputStream, OutputStream

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Job:
    """A task that can run."""

    run: Run
    pieces: Pieces
    inputs: list[InputStream]
    output: OutputStream | None = None
    """None until the function has returned a generator."""
    cancelled: bool = False
    thread: int = 0
    """The thread that runs the task."""
    waits: int = 0
    """How often the task, on all its threads, waits now for tasks that it has started."""
    wake: Callable[[], object] | None = None
    """Ends the wait of the thread that runs the task, if that waits for tasks."""
    woken: bool = False
    """Whether that wait must end with an interrupt."""
    opened: list[tuple[torch.UntypedStorage, bytes]] = field(default_factory=list)
    """The device's storages among the arguments, if the result stays: it may have them, too."""
    places: queue.SimpleQueue[Places | None] | None = None
    """If the result stays: the client's answer to `Room`, or None if the task was cancelled."""


def with_streams(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[InputStream]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with input streams in place of the references to them."""

    def filled(value: Any) -> Any:
        return inputs[value.index] if isinstance(value, encoding.StreamRef) else value

    return tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()}


def drained(items: Any) -> Any:
    """An async generator as a plain one."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(items.aclose())
        loop.close()
