"""Closing: what a `with` block closes when it is left, also despite a Ctrl-C."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self


class Closing:
    """The end of a `with` block calls `close`, also after a failure."""

    def close(self) -> None:
        """End what this has, for good; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def close_despite_interrupts(close: Callable[[], None], hurry: Callable[[], None]) -> None:
    """Close completely; a Ctrl-C meanwhile calls `hurry`, and is raised after closing.

    What `close` raises is raised here.
    """
    if threading.current_thread() is not threading.main_thread():
        close()
        return
    # A Ctrl-C interrupts only the main thread, so another thread closes. The main thread waits with
    # a queue: an interrupt can leave an event locked, or make `join` take the thread for dead.
    ended: list[BaseException | None] = []
    news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def close_and_tell() -> None:
        problem = None
        try:
            close()
        except BaseException as raised:
            problem = raised
        ended.append(problem)
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
    if ended[0] is not None:
        raise ended[0]


@contextlib.contextmanager
def not_instead_of(problem: BaseException | None) -> Iterator[None]:
    """Close after a block; what fails meanwhile is a note of the block's own exception."""
    try:
        yield
    except Exception as failure:
        if problem is None:
            raise
        problem.add_note(f"Closing failed as well: {type(failure).__name__}: {failure}")


def shut(end: Any) -> None:
    """Make reads and writes of all threads on a connection end; its owner must still close it."""
    with contextlib.suppress(OSError):
        if isinstance(end, socket.socket):
            # The method of the plain socket: the one of a TLS socket would wait for the peer.
            socket.socket.shutdown(end, socket.SHUT_RDWR)
        else:
            end.shutdown(socket.SHUT_RDWR)
