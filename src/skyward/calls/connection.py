"""A connection: the client's channel to one executor; one thread at a time sends on it."""

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
    """Sends messages to one executor, and reads the payloads that it sends."""

    __slots__ = ("_mapped", "_reconnected", "channel", "closed", "lock")

    def __init__(self, channel: Channel, on_release: Callable[[], None]) -> None:
        """`on_release` is called, also from finalizers, when `flush_releases` has work."""
        self.channel = channel
        self.closed = False
        self.lock = threading.RLock()
        """Held by the thread that sends a task, and the definitions that go before it."""
        self._mapped = Mapped(on_release)
        self._reconnected = 0.0

    def tell(self, message: Message) -> None:
        """Send a small message; if the executor is gone, only its watcher reports that."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def when_free(self, action: Callable[[], None]) -> None:
        """Run an action with the lock held: now, or on another thread after a long transfer.

        A transfer may last as long as an outage of the network. The loop's thread must not wait for
        it: that thread reads the counts that the transfer waits for.
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
        """Run an action with the lock held, on a thread of its own."""

        def locked() -> None:
            with self.lock:
                action()

        threading.Thread(target=locked, name="skyward-lane", daemon=True).start()

    def reconnected(self) -> None:
        """Note that the channel has a new connection."""
        self._reconnected = time.monotonic()

    def connected_for(self, seconds: float) -> bool:
        """Whether the executor has been within reach for so many seconds without a gap."""
        return self.channel.connected and time.monotonic() - self._reconnected >= seconds

    def take(self, frame: Frame, payload: Payload) -> Pieces:
        """Read a received payload; its shared memory is mapped."""
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
        """Tell the executor which of its segments this process maps no more."""
        released = []
        while self._mapped.released:
            released.append(self._mapped.released.popleft())
        if released:
            self.tell(Released(released))

    def close(self) -> None:
        """Close the channel; received values stay valid."""
        self.closed = True
        self.channel.close()
        self._mapped.close()


def _nowhere(ref: Buffer) -> memoryview:
    raise ProtocolError("a buffer that is nowhere")
