"""Closing that a Ctrl-C cannot interrupt half-way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


def close_despite_interrupts(close: Callable[[], None], hurry: Callable[[], None]) -> None:
    """Close; a Ctrl-C on the way calls `hurry`, and is raised when all is closed."""
    if threading.current_thread() is not threading.main_thread():
        close()
        return
    # Ctrl-C strikes this thread only, so closing goes on undisturbed on another. It is waited
    # for with a queue: an interrupt can leave an event locked, or a joined thread for dead.
    ended: list[bool] = []
    news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def close_and_tell() -> None:
        try:
            close()
        finally:
            ended.append(True)
            news.put(None)

    threading.Thread(target=close_and_tell, name="skyward-close").start()
    interrupt: KeyboardInterrupt | None = None
    while not ended:
        try:
            if interrupt is not None:
                hurry()
            news.get()
        except KeyboardInterrupt as again:
            interrupt = again
    if interrupt is not None:
        raise interrupt
