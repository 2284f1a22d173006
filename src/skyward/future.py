"""A future: what `>` returns, for threads and for event loops."""

from __future__ import annotations

import concurrent.futures
import contextlib
import uuid
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from skyward.console import html
from skyward.console.cells import kernel_shell
from skyward.objects import encoding
from skyward.objects.encoding import Encoded

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

WAKE_SECONDS = 0.2
"""How often a waiting notebook looks whether the user has interrupted it."""


class Future(concurrent.futures.Future[T]):
    """A `concurrent.futures.Future` that can be awaited too; cancelling it cancels the remote work.

    As an argument of another call, it stands for its result: the call begins when that is there.

    >>> future = train(x) > compute
    >>> future.result()
    >>> evaluate(future.as_argument()) > compute
    """

    __sky_handle__ = True
    fresh = True
    """Each call that has it as an argument gets an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._stop: Callable[[], None] | None = None
        self._is_running: Callable[[], bool] | None = None

    def _bind(self, stop: Callable[[], None], is_running: Callable[[], bool]) -> None:
        self._stop, self._is_running = stop, is_running

    def as_argument(self) -> T:
        """This future, which type checkers take for its result: for arguments of other calls."""
        return cast(T, self)

    @property
    def key(self) -> bytes:
        """What stands for the result in the arguments of a call."""
        key: bytes = self.__dict__.get("_key") or self.__dict__.setdefault(
            "_key", uuid.uuid4().bytes
        )
        return key

    @property
    def encoded(self) -> Encoded:
        """The result as it is sent; only when the future is done."""
        return encoding.encode(self.result(), own_modules=True, what="the result of a call")

    def __sky_open__(self) -> T:
        """The result: for a call that runs here."""
        return self.result()

    def __await__(self) -> Generator[Any, None, T]:
        # Only here: every executor would spend 15 ms of its start on it.
        import asyncio

        waiting = asyncio.wrap_future(self)
        if kernel_shell() is None:
            return waiting.__await__()
        return _awake(waiting).__await__()

    def _repr_html_(self) -> str:
        """What a notebook shows: whether the call waits, runs, is done or has failed."""
        more = ""
        if self.cancelled():
            kind, state = "idle", "cancelled"
        elif not self.done():
            kind, state = "busy", "running" if self.running() else "waiting"
        elif (problem := self.exception()) is not None:
            kind, state, more = "bad", "failed", f"{type(problem).__name__}: {problem}"
        else:
            kind, state, more = "good", "done", type(self.result()).__name__
        words = more if len(more) <= 200 else more[:197] + "..."
        return html.block(
            html.line(html.strong("future"), html.mark(kind, state), html.code(words))
        )

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


class ArrivalSignal:
    """Lets coroutines wait for what another thread brings."""

    def __init__(self) -> None:
        self._awaited: list[Future[None]] = []

    def tell(self, *_: object) -> None:
        """Have the waiting coroutines look again; on any thread."""
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            for each in awaited:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
                    each.set_result(None)

    async def until(self, is_there: Callable[[], bool]) -> None:
        """Let other coroutines run until something is there, which `tell` follows."""
        while not is_there():
            told: Future[None] = Future()
            self._awaited.append(told)
            if not is_there():
                await told


async def apart(action: Callable[[], None]) -> None:
    """Let other coroutines run while another thread does something that waits."""
    import asyncio

    await asyncio.to_thread(action)


async def _awake(waiting: asyncio.Future[T]) -> T:
    """Wait, and wake the event loop again and again.

    ipykernel notes an interrupt on another thread, and its event loop learns of that when it wakes.
    """
    import asyncio

    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=WAKE_SECONDS)
        return waiting.result()
    except asyncio.CancelledError:
        waiting.cancel()
        raise
