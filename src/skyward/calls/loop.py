"""The loop: the client's one background thread, which waits for frames and timers.

The loop never runs user code.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from skyward import kernel
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.link.incoming import NotConnected

OnFrame = Callable[[Frame], None]
OnLost = Callable[[BaseException], None]


class Timer:
    """An action to run at a given time, unless it is cancelled first."""

    __slots__ = ("action", "due")

    def __init__(self, due: float, action: Callable[[], None]) -> None:
        self.due = due
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Do not run the action."""
        self.action = None


class Loop:
    """Waits on every channel of a pool; a frame with a large body is read on its own thread."""

    def __init__(self) -> None:
        self._selector = kernel.selector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._stopped = False
        self._forgotten: set[Channel] = set()
        """Channels that nobody watches any more, and that are not closed yet."""
        self._after_round: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="skyward-io", daemon=True)
        self._thread.start()

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run an action on the loop's thread."""
        self._calls.append(action)
        if threading.current_thread() is not self._thread:
            self._wake()

    def after_each_round(self, action: Callable[[], None]) -> None:
        """Run an action on the loop's thread after every round of frames and timers."""
        self._after_round = action

    def later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run an action on the loop's thread after so many seconds."""
        timer = Timer(time.monotonic() + seconds, action)
        self.call_soon(lambda: heapq.heappush(self._timers, (timer.due, next(self._count), timer)))
        return timer

    def watch(self, channel: Channel, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Pass a channel's frames to `on_frame` from now on, in order."""
        channel.set_blocking(False)
        self.call_soon(lambda: self._register(channel, on_frame, on_lost))

    def _register(self, channel: Channel, on_frame: OnFrame, on_lost: OnLost) -> None:
        again = _bound(self._register, channel, on_frame, on_lost)
        if not channel.ready(lambda: self.call_soon(again)):
            return
        if channel.ended:
            self._lose(channel, on_lost, _why_ended(channel))
            return
        self._selector.register(channel, selectors.EVENT_READ, (channel, on_frame, on_lost))
        # No selector reports bytes that were read with the handshake or with a large body.
        self._deliver(channel, on_frame, on_lost, channel.buffered)

    def forget(self, channel: Channel) -> None:
        """Stop watching a channel, and close it."""

        def stop() -> None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(channel)
            channel.close()
            self._forgotten.discard(channel)

        self._forgotten.add(channel)
        self.call_soon(stop)
        if self._stopped:
            channel.close()

    def stop(self) -> None:
        """End the thread; the owners of the channels close them."""
        self._stopped = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for channel in list(self._forgotten):
            channel.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        # Other threads may still call `_wake`, after other files have got these descriptors.
        self._wake_read = self._wake_write = -1

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while not self._stopped:
            timeout = None
            if self._timers:
                timeout = max(0.0, self._timers[0][0] - time.monotonic())
            for key, _ in self._selector.select(0 if self._calls else timeout):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    continue
                channel, on_frame, on_lost = key.data
                self._deliver(channel, on_frame, on_lost, channel.poll)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.action is not None:
                    self._guard(timer.action)
            for _ in range(len(self._calls)):
                self._guard(self._calls.popleft())
            self._guard(self._after_round)

    def _deliver(
        self,
        channel: Channel,
        on_frame: OnFrame,
        on_lost: OnLost,
        read: Callable[[], list[Frame]],
    ) -> None:
        try:
            for frame in read():
                if frame.body is None and frame.body_length:
                    self._take_large(channel, frame, on_frame, on_lost)
                    return
                on_frame(frame)
        except NotConnected:
            self._selector.unregister(channel)
            self._register(channel, on_frame, on_lost)
        except (EOFError, OSError) as problem:
            self._lose(channel, on_lost, problem)
        except Exception as problem:
            traceback.print_exc(file=sys.stderr)
            self._lose(channel, on_lost, problem)

    def _take_large(
        self, channel: Channel, frame: Frame, on_frame: OnFrame, on_lost: OnLost
    ) -> None:
        self._selector.unregister(channel)

        def take() -> None:
            try:
                channel.set_blocking(True)
                on_frame(frame)
                channel.set_blocking(False)
            except Exception as problem:
                if not isinstance(problem, (EOFError, OSError)):
                    traceback.print_exc(file=sys.stderr)
                self.call_soon(_bound(self._lose, channel, on_lost, problem))
                return
            self.call_soon(lambda: self._register(channel, on_frame, on_lost))

        threading.Thread(target=take, name="skyward-transfer", daemon=True).start()

    def _lose(self, channel: Channel, on_lost: OnLost, problem: BaseException) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()
        self._guard(lambda: on_lost(problem))

    @staticmethod
    def _guard(action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # An error in Skyward itself is shown, and does not stop the pool.
            traceback.print_exc(file=sys.stderr)


def _why_ended(channel: Channel) -> BaseException:
    """The exception that says why a channel has ended; reading from the channel raises it."""
    try:
        channel.poll()
    except (EOFError, OSError) as problem:
        return problem
    return EOFError("the channel is closed")


def _bound(action: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: action(*args)
