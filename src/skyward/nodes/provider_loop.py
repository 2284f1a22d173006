"""The event loop for the coroutines of providers and nodes, one for all pools, and its threads."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from skyward.staff import Staff

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 32
"""How many blocking calls of providers run at once."""

connecting = Staff("skyward-connect", most=64)
"""The threads that make connections: each takes a few round trips."""

_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin to run a coroutine on the providers' loop; the future can cancel it."""
    try:
        loop = _running()
    except BaseException:
        work.close()  # else Python would warn that nobody has awaited it
        raise
    return asyncio.run_coroutine_threadsafe(work, loop)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do on such a thread what waits; whoever cancels this waits for the end of the work."""
    doing = asyncio.wrap_future(connecting.submit(work, *args, **kwargs))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


def _running() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            made: queue.SimpleQueue[asyncio.AbstractEventLoop | Exception] = queue.SimpleQueue()
            threading.Thread(
                target=_run, args=(made,), name="skyward-providers", daemon=True
            ).start()
            found = made.get()
            if isinstance(found, Exception):
                raise found
            _loop = found
        return _loop


def _run(made: queue.SimpleQueue[asyncio.AbstractEventLoop | Exception]) -> None:
    # Made on this thread: a Ctrl-C interrupts the main thread, and would leave half a loop.
    try:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(Staff("skyward-provider", MOST_THREADS))
    except Exception as problem:
        # Such as too many open files; whoever waits for the loop raises it.
        made.put(problem)
        return
    made.put(loop)
    loop.run_forever()


def _forget() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
