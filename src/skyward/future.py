"""A future: what `>` returns, for threads and for event loops."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Future(concurrent.futures.Future[T]):
    """A `concurrent.futures.Future` that can be awaited too; cancelling it cancels the remote work.

    >>> future = train(x) > compute
    >>> future.result()
    """

    def __init__(self) -> None:
        super().__init__()
        self._stop: Callable[[], None] | None = None
        self._is_running: Callable[[], bool] | None = None

    def _bind(self, stop: Callable[[], None], is_running: Callable[[], bool]) -> None:
        self._stop, self._is_running = stop, is_running

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def running(self) -> bool:
        """Whether a worker has the call and it is not done."""
        return not self.done() and self._is_running is not None and self._is_running()

    def cancel(self) -> bool:
        """Cancel the call, also when it runs already."""
        cancelled = super().cancel()
        stop, self._stop = self._stop, None
        if cancelled and stop is not None:
            # Threads in `wait` and `as_completed` learn of the cancellation only by this call.
            self.set_running_or_notify_cancel()
            stop()
        return cancelled
