"""The loop: the client's one background thread, which waits for frames and timers.

The loop never runs user code. A caller that waits for an answer borrows the channel that the answer
comes on, and reads the answer on its own thread: the loop's thread, which would have to be woken
and then wake the caller, costs a short call a fifth of its time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from skyward import kernel
from skyward.functions import LOOK_SECONDS
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.link.incoming import NotConnected

LENT_SECONDS = 0.5
"""How long a caller reads a channel at most; a call that takes longer need not be read so fast."""
LONGEST_SECONDS = 86400.0
"""How long the loop waits at most for its next timer: pollers refuse more than some weeks."""

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


class Awaited(Protocol):
    """What a thread waits for that has borrowed a channel."""

    done: bool


class Borrower:
    """Waits on a caller's thread for the bytes of a channel, or until another thread ends that."""

    __slots__ = ("_poll", "_waker", "_woken", "descriptor")

    def __init__(self) -> None:
        # Sockets: one that is closed is never written to, while a pipe's number may be another's.
        self._woken, self._waker = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self.descriptor = -1

    def wait(self) -> None:
        """Wait until there are bytes, or for `wake`; may return without either."""
        self._poll.register(self.descriptor, select.POLLIN)
        while not (found := self._poll.poll(1e3 * LOOK_SECONDS)):
            pass
        for ready, _ in found:
            if ready == self._woken.fileno():
                self._woken.recv(4096)
            elif ready != self.descriptor:
                # It has stayed, since a Ctrl-C had ended an earlier wait.
                self._poll.unregister(ready)
        self._poll.unregister(self.descriptor)

    def wake(self) -> None:
        """End the wait, now or when it begins."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close the sockets; another thread may be about to wake this one."""
        self._woken.close()
        self._waker.close()


class Loop:
    """Waits on every channel of a pool; a frame with a large body is read on its own thread."""

    def __init__(self) -> None:
        self._poller = kernel.poller()
        self._watched: dict[int, tuple[Channel, OnFrame, OnLost]] = {}
        """By descriptor, the channels that the poller knows."""
        self._descriptors: dict[Channel, int] = {}
        self.lent: dict[Channel, Awaited] = {}
        """The channels that callers read, each until something is done."""
        self._swept = 0.0
        """When all of them were taken back."""
        self._watching = threading.RLock()
        """For what is watched and lent, and for changes to the poller."""
        self._borrowers: list[Borrower] = []
        """Those that no caller uses."""
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, select.POLLIN)
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
        self._begin_watching(channel, on_frame, on_lost)
        # No poller reports bytes that were read with the handshake or with a large body.
        self._deliver(channel, on_frame, on_lost, channel.buffered)
        if channel.reads_ahead and channel in self._descriptors:
            self._deliver(channel, on_frame, on_lost, channel.poll)

    def _begin_watching(self, channel: Channel, on_frame: OnFrame, on_lost: OnLost) -> None:
        descriptor = channel.fileno()
        with self._watching:
            before = self._watched.get(descriptor)
            if before is not None:
                # That one was closed, and the poller has forgotten it.
                self._descriptors.pop(before[0], None)
                self.lent.pop(before[0], None)
            self._watched[descriptor] = channel, on_frame, on_lost
            self._descriptors[channel] = descriptor
            self._poller.register(descriptor, select.POLLIN)

    def _stop_watching(self, channel: Channel) -> None:
        with self._watching:
            self.lent.pop(channel, None)
            descriptor = self._descriptors.pop(channel, None)
            if descriptor is not None:
                del self._watched[descriptor]
                # The channel may be closed already, and the poller has forgotten it.
                with contextlib.suppress(OSError, KeyError, ValueError):
                    self._poller.unregister(descriptor)

    def borrow(self, channel: Channel, until: Awaited) -> Borrower | None:
        """Let the calling thread wait for a channel's bytes; None if it cannot be.

        It must call `give_back`, and if an exception keeps it from that, `until` must get done. It
        may read while it holds the channel's lock for reading, as long as `lent` has the channel.
        """
        with self._watching:
            descriptor = self._descriptors.get(channel, -1)
            known = descriptor >= 0 and channel not in self.lent and not channel.has_rest
            if not (known and channel.can_take_results and kernel.HAS_EPOLL):
                return None
            try:
                self._poller.modify(descriptor, 0)
            except (OSError, ValueError):
                # The channel is closed, or the loop has stopped.
                return None
            self.lent[channel] = until
            borrower = self._borrowers.pop() if self._borrowers else Borrower()
        borrower.descriptor = descriptor
        return borrower

    def give_back(self, channel: Channel, borrower: Borrower | None) -> None:
        """Have the loop's thread read a channel again; `borrower` is used no longer."""
        with self._watching:
            if borrower is not None and self._stopped:
                borrower.close()
            elif borrower is not None:
                self._borrowers.append(borrower)
            descriptor = self._descriptors.get(channel, -1)
            if channel in self.lent and descriptor >= 0:
                try:
                    self._poller.modify(descriptor, select.POLLIN)
                except (OSError, ValueError):
                    # It is closed, and somebody forgets it; or the loop has stopped.
                    self.lent.pop(channel, None)
                    return
            if channel.has_rest:
                # Also of one that was taken back before its borrower had looked.
                self.call_soon(_bound(self._read_rest, channel))
            # Last: a borrower that is interrupted before this is found by the next sweep.
            self.lent.pop(channel, None)

    def _read_rest(self, channel: Channel) -> None:
        """Read what a borrower has looked at and not taken: no poller reports that."""
        with self._watching:
            watched = self._watched.get(self._descriptors.get(channel, -1))
        if watched is not None and channel not in self.lent:
            self._deliver(*watched, channel.poll)

    def _take_back_unused(self, now: float) -> None:
        """Take the channels back whose borrowers were interrupted; now and then, all of them.

        A borrower that does not read, since it is in a handler of a signal, must not keep others
        from their answers. It notices that it has nothing to read any more, as it does at a loss.
        """
        is_due = now - self._swept > LENT_SECONDS
        self._swept = now if is_due else self._swept
        with self._watching:
            for channel in [each for each, until in self.lent.items() if is_due or until.done]:
                self.give_back(channel, None)

    def forget(self, channel: Channel) -> None:
        """Stop watching a channel, and close it."""

        def stop() -> None:
            self._stop_watching(channel)
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
        with self._watching:
            while self._borrowers:
                self._borrowers.pop().close()
            kernel.close_poller(self._poller)
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
            if self._calls:
                timeout = 0.0
            elif self._timers:
                left = min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_SECONDS)
                # The poller counts in milliseconds, and rounds up.
                timeout = left * kernel.POLL_SECOND
            for descriptor, _ in self._poller.poll(timeout):
                watched = self._watched.get(descriptor)
                if watched is not None:
                    self._deliver(*watched, watched[0].poll)
                elif descriptor == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.action is not None:
                    self._guard(timer.action)
            for _ in range(len(self._calls)):
                self._guard(self._calls.popleft())
            if self.lent:
                self._take_back_unused(now)
            self._guard(self._after_round)

    def _deliver(
        self,
        channel: Channel,
        on_frame: OnFrame,
        on_lost: OnLost,
        read: Callable[[], list[Frame]],
    ) -> None:
        try:
            with channel.reading:
                for frame in read():
                    if frame.body is None and frame.body_length:
                        self._take_large(channel, frame, on_frame, on_lost)
                        return
                    on_frame(frame)
        except NotConnected:
            self._stop_watching(channel)
            self._register(channel, on_frame, on_lost)
        except (EOFError, OSError) as problem:
            self._lose(channel, on_lost, problem)
        except Exception as problem:
            traceback.print_exc(file=sys.stderr)
            self._lose(channel, on_lost, problem)

    def _take_large(
        self, channel: Channel, frame: Frame, on_frame: OnFrame, on_lost: OnLost
    ) -> None:
        self._stop_watching(channel)

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
        self._stop_watching(channel)
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
    except NotConnected:
        # It is being closed now: it says so before its link ends.
        pass
    return EOFError("the channel is closed")


def _bound(action: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: action(*args)
