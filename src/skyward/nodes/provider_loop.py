"""The event loop for the coroutines of providers: one thread of this process, for all pools."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from skyward.staff import Staff

T = TypeVar("T")

MOST_THREADS = 32
"""How many blocking calls of providers run at once."""

_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin to run a coroutine on the providers' loop; the future can cancel it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(Staff("skyward-provider", MOST_THREADS))
            threading.Thread(
                target=_loop.run_forever, name="skyward-providers", daemon=True
            ).start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


def _forget() -> None:
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
