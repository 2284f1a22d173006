"""Freeing: lets go of device tensors on a thread of its own.

Freeing a tensor may wait for its device, and the pool's loop must not wait.
"""

from __future__ import annotations

import functools
import queue
import threading

_Held = list[object]


def free(held: _Held) -> None:
    """Drop what the list holds, soon; nothing else may hold it."""
    _waiting().put(held)


@functools.cache
def _waiting() -> queue.SimpleQueue[_Held]:
    # One thread for all: to start one for each call takes longer than the call has time for.
    waiting: queue.SimpleQueue[_Held] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(waiting,), name="skyward-free", daemon=True).start()
    return waiting


def _serve(waiting: queue.SimpleQueue[_Held]) -> None:
    while True:
        waiting.get().clear()
