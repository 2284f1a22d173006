"""A line: a connection on which any thread asks, and one of those that wait reads the answers.

Two threads that wake each other for every answer would take twice the processor time. A thread of
the line's own reads only where a thread that reads could be interrupted, or where somebody must
read while nobody waits.
"""

from __future__ import annotations

import math
import os
import queue
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from skyward.errors import SkywardError
from skyward.wire import messages
from skyward.wire.channel import RECEIVE_SIZE, Bytes, Channel, whole_of
from skyward.wire.frames import Frame
from skyward.wire.messages import End, Failure, Item, Message, Reply, Result

SLICE_SECONDS = 0.5
"""A waiting thread looks up so often: only then can its task be interrupted."""

_TIME = struct.Struct("ll")
"""How the kernel takes seconds and microseconds."""


class LineRequest:
    """What a thread has asked for, and its answers."""

    __slots__ = ("_told", "answers", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: deque[tuple[Any, bytearray]] = deque()
        """The answers that nobody has looked at yet, with their bodies."""
        self._told: queue.SimpleQueue[None] | None = None
        """None until a thread waits while another one reads."""

    def give(self, answer: Any, body: bytearray) -> None:
        """Note an answer."""
        self.answers.append((answer, body))
        if self._told is not None:
            self._told.put(None)

    def wake(self) -> None:
        """Have the waiting thread look around: it may have to read the answers now."""
        if self._told is not None:
            self._told.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for an answer, or to be woken; in slices, so that a task can be interrupted.

        The first time it does not wait: who would have woken this thread could not before.
        """
        if self._told is None:
            self._told = queue.SimpleQueue()
            return
        while not self.answers:
            try:
                self._told.get(timeout=min(SLICE_SECONDS, max(0.0, seconds)))
                return
            except queue.Empty:
                seconds -= SLICE_SECONDS
                if seconds <= 0:
                    return


def wait_readable(poll: select.poll, seconds: float) -> bool:
    """Wait until there is something to read; a task may be interrupted here."""
    return bool(poll.poll(1000 * seconds))


def arrive(
    counts: list[int], receive: Callable[[memoryview], int], rooms: tuple[memoryview]
) -> None:
    """Wait for bytes, and note how many have come; a task may be interrupted here.

    One step for the interpreter: no interrupt between the call and noting its count.
    """
    counts.extend(map(receive, rooms))


def limit(end: socket.socket, option: int, seconds: float) -> None:
    """Have the kernel end a read or a write that takes so long, with a `BlockingIOError`."""
    end.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), int(seconds % 1 * 1e6)))


class Line:
    """A connection to another process; any thread asks, and one at a time reads."""

    def __init__(self, channel: Channel, *, threaded: bool) -> None:
        """`threaded` has a thread of its own read; otherwise, one of those that wait does."""
        self.channel = channel
        self.lost = ""
        """Why the line is of no more use; empty if it is."""
        self.asked: dict[int, LineRequest] = {}
        """What may still be answered, by its number; whoever has asked removes it."""
        self.heard = False
        """Whether something has come since `idle` was called last."""
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        """Held by the thread that reads."""
        self._reader: threading.Thread | None = None
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._counts: list[int] = []
        """How many bytes have come that nobody has looked at: nothing, or one number."""
        self._rooms = (memoryview(bytearray(RECEIVE_SIZE)),)
        """Where they are: not in a thread's own room, which its next channel uses, too."""
        self._receive: Callable[[memoryview], int] | None = None
        """Reads from a plain socket."""
        channel.set_blocking(False)
        if channel.shares_memory:
            end = channel.detach()[1]
            # The kernel's own limit instead of Python's, with which each call would be two.
            end.settimeout(None)
            limit(end, socket.SO_RCVTIMEO, SLICE_SECONDS)
            self._receive = end.recv_into
        _lines.add(self)
        if threaded:
            self.start_reader()

    def ask(self, request: LineRequest, message: Message, body: Sequence[Bytes] = ()) -> bool:
        """Send a message that is to be answered; False if it cannot have arrived."""
        # In this order: who loses the line notes that first, and then wakes what is asked.
        self.asked[request.number] = request
        try:
            if not self.lost:
                self.channel.send(message, body)
                return True
        except OSError as problem:
            # Perhaps in the middle of a frame: nothing can follow.
            self.lose(f"the connection to it was lost ({problem})")
        self.asked.pop(request.number, None)
        return False

    def wait(self, request: LineRequest, seconds: float = math.inf) -> None:
        """Wait for an answer, for so long at most; it may end before that, and without one."""
        if self._reader is not None or not self._reading.acquire(blocking=False):
            # Not for longer: the thread that is to read next may have been interrupted.
            request.wait(min(seconds, SLICE_SECONDS))
            return
        try:
            while not (request.answers or self.lost or self._reader):
                if not self._read_some(seconds) or seconds != math.inf:
                    return
        finally:
            self._reading.release()
            if self.lost:
                self._close_lost()
            if len(self.asked) > 1:
                self._pass_on(request)

    def _pass_on(self, request: LineRequest) -> None:
        """Have another waiting thread read, if there is one."""
        following = next((e for e in self.asked.copy().values() if e is not request), None)
        if following is not None:
            following.wake()

    def start_reader(self) -> None:
        """Have a thread of its own read from now on."""
        with self._lock:
            if self._reader is None and not self.lost:
                self._reader = threading.Thread(target=self._read, name="skyward-line", daemon=True)
                self._reader.start()

    def _read(self) -> None:
        with self._reading:
            while not self.lost:
                self._read_some(math.inf)
        self._close_lost()

    def _read_some(self, seconds: float) -> bool:
        """Wait for answers, for a slice at most, and hand them out; whether something has come."""
        counts = self._counts
        try:
            if self._receive is None:
                if not wait_readable(self._poll, min(seconds, SLICE_SECONDS)):
                    self.idle()
                    return False
                frames = self.channel.poll()
            else:
                if not counts:
                    if seconds < SLICE_SECONDS and not wait_readable(self._poll, seconds):
                        return False
                    arrive(counts, self._receive, self._rooms)
                count = counts.pop()
                if not count:
                    raise EOFError("the other end closed the connection")
                frames = self.channel.cut(self._rooms[0][:count])
            self.heard = True
            while frames:
                for frame in frames:
                    self._take(frame)
                # After a large body, there may be bytes in OpenSSL that no poll sees.
                frames = self.channel.poll() if frames[-1].body is None else []
        except BlockingIOError:
            self.idle()
            return False
        except (EOFError, OSError, SkywardError) as problem:
            self.lose(f"the connection to it was lost ({problem})")
        return True

    def _take(self, frame: Frame) -> None:
        message = messages.decode(frame.kind, frame.meta)
        body = frame.body
        if body is None:
            body = self._large(frame)
        if isinstance(message, Reply):
            request = self.asked.get(message.number)
        elif isinstance(message, Result | Failure | Item | End):
            request = self.asked.get(message.task)
        else:
            # A `Credit`: the other end waits for one.
            return
        if request is not None:
            request.give(message, body)

    def _large(self, frame: Frame) -> bytearray:
        """Read a large body, however long that takes."""
        end = self.channel.detach()[1]
        self.channel.set_blocking(True)
        if self._receive is not None:
            limit(end, socket.SO_RCVTIMEO, 0)
        try:
            return whole_of(self.channel, frame)
        finally:
            self.channel.set_blocking(False)
            if self._receive is not None:
                limit(end, socket.SO_RCVTIMEO, SLICE_SECONDS)

    def idle(self) -> None:
        """Note that nothing has come for a slice of time."""

    def check(self) -> None:
        """Notice that the other end has left, if nothing is asked: nobody reads then."""
        if self.asked or self.lost or not self._reading.acquire(blocking=False):
            return
        try:
            self._read_some(0.0)
        finally:
            self._reading.release()
            self._close_lost()

    def lose(self, why: str) -> None:
        """Use the line no more, and tell so whoever waits."""
        with self._lock:
            if self.lost:
                return
            self.lost = why
        self.channel.abort()
        for request in self.asked.copy().values():
            request.wake()
        self._close_lost()

    def _close_lost(self) -> None:
        """Close the connection, unless a thread reads: that one does it when it looks up."""
        if self.lost and self._reading.acquire(blocking=False):
            try:
                self.channel.close()
            finally:
                self._reading.release()

    def close(self, why: str = "it was closed") -> None:
        """End the line; what still waits is told so."""
        self.lose(why)
        reader = self._reader
        if reader is not None and threading.current_thread() is not reader:
            reader.join()
        # A thread that reads looks up when the connection ends, and lets go.
        with self._reading:
            self.channel.close()

    def forked(self) -> None:
        """Be of no use in a process that was forked from the one that has the connection."""
        self.lost = "it belongs to the process that this one was forked from"
        self._lock, self._reading, self._reader = threading.Lock(), threading.Lock(), None
        for end in {*self.channel.detach()}:
            # No more than that: the connection itself is the other process's.
            end.close()


_lines: weakref.WeakSet[Line] = weakref.WeakSet()


def _forked() -> None:
    for line in list(_lines):
        line.forked()


os.register_at_fork(after_in_child=_forked)
