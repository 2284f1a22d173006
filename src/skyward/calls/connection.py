"""A connection: the client's channel to one executor, on which one thread sends at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from skyward.errors import ProtocolError
from skyward.objects import memory, payloads
from skyward.objects.blobs import Mapped
from skyward.objects.payloads import Pieces
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.messages import SEGMENT, STREAMED, Buffer, Message, Payload, Released


class Connection:
    """Sends messages to one executor, and reads what it sends."""

    __slots__ = ("_mapped", "_reconnected", "channel", "closed", "lock")

    def __init__(self, channel: Channel, on_release: Callable[[], None]) -> None:
        """`on_release` is called, also from finalizers, when `flush_releases` has work."""
        self.channel = channel
        self.closed = False
        self.lock = threading.RLock()
        """Held by the thread that sends a task with all that goes before the task."""
        self._mapped = Mapped(on_release)
        self._reconnected = 0.0

    def tell(self, message: Message) -> None:
        """Send a small message; if the executor is gone, its watcher learns that anyway."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def when_free(self, action: Callable[[], None]) -> None:
        """Do something with the lock held: now, or on another thread once a long transfer is over.

        A transfer over a network may last for as long as the network is gone, and the loop's thread
        must go on meanwhile: it is the one that hears how far the transfer has come.
        """
        if self.channel.shares_memory:
            with self.lock:
                action()
            return
        held: list[bool] = []
        try:
            # One step for the interpreter: no Ctrl-C between taking the lock and noting it.
            held.extend(map(self.lock.acquire, (False,)))
            if held[0]:
                action()
        finally:
            if held and held[0]:
                self.lock.release()
        if not held[0]:
            self.on_own_thread(action)

    def on_own_thread(self, action: Callable[[], None]) -> None:
        """Do something with the lock held, on a thread made for it."""

        def locked() -> None:
            with self.lock:
                action()

        threading.Thread(target=locked, name="skyward-lane", daemon=True).start()

    def reconnected(self) -> None:
        """Note that the channel has made itself a new connection."""
        self._reconnected = time.monotonic()

    def connected_for(self, seconds: float) -> bool:
        """Whether the executor has been within reach for so long, without a gap."""
        return self.channel.connected and time.monotonic() - self._reconnected >= seconds

    def take(self, frame: Frame, payload: Payload) -> Pieces:
        """Read a received payload, mapping what is in shared memory."""
        if not payload.buffers and frame.body is not None and not frame.descriptors:
            return payloads.unpack(payload, frame.body, _nowhere)
        payloads.check(frame, payload)
        for (segment, size), descriptor in zip(payload.segments, frame.descriptors, strict=True):
            self._mapped.add(segment, size, descriptor)
        places = [memory.fresh(ref.length) for ref in payload.buffers if ref.where == STREAMED]
        body = payloads.read_body(self.channel, frame, payload, places)
        arrived = iter(places)

        def find(ref: Buffer) -> memoryview:
            if ref.where == SEGMENT:
                return self._mapped.view(ref.segment, ref.offset, ref.length)
            if ref.where != STREAMED:
                raise ProtocolError("an executor refers to a blob instead of sending it")
            return next(arrived)

        pieces = payloads.unpack(payload, body, find)
        for segment, _ in payload.segments:
            self._mapped.drop(segment)
        return pieces

    def flush_releases(self) -> None:
        """Tell the executor which of its segments nothing here maps any more."""
        released = []
        while self._mapped.released:
            released.append(self._mapped.released.popleft())
        if released:
            self.tell(Released(released))

    def close(self) -> None:
        """Close the channel; what was received from it stays valid."""
        self.closed = True
        self.channel.close()
        self._mapped.close()


def _nowhere(ref: Buffer) -> memoryview:
    raise ProtocolError("a buffer that is nowhere")
