"""An executor's connection to its client, which gets the results and the output."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from skyward.objects import encoding
from skyward.objects.encoding import Encoded
from skyward.wire.channel import Channel
from skyward.wire.messages import Message, Written
from skyward.worker.inbox import Inbox
from skyward.worker.outbox import Outbox, Sendable
from skyward.worker.output import PIECE


class ClientConnection:
    """Sends messages, values and output to the client, once it is connected."""

    def __init__(self, inbox: Inbox, outbox: Outbox) -> None:
        self._inbox, self.outbox = inbox, outbox
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._connected = threading.Event()

    @property
    def channel(self) -> Channel:
        """The channel to the client; only after the client has connected."""
        assert self._channel is not None
        return self._channel

    def connect(self, channel: Channel) -> bool:
        """Take the client's channel; False if there is a channel already."""
        with self._lock:
            if self._channel is not None:
                return False
            self._channel = channel
        # A result that was sent must arrive even if the next task ends this process.
        channel.be_patient()
        self._connected.set()
        return True

    def wait(self) -> None:
        """Wait until the client is connected."""
        self._connected.wait()

    def send(self, message: Message, sendable: Sendable | None = None) -> None:
        """Send a message, with a packed value if it has one."""
        _, body, segments = sendable or (None, [], [])
        descriptors = [segment.descriptor for segment in segments] if segments else ()
        channel = self._channel
        assert channel is not None
        try:
            self._inbox.send_releases(channel)
            channel.send(message, body, descriptors)
        except OSError:
            # The client is gone; the reader notices that, too.
            pass
        if segments:
            self.outbox.sent(segments)

    def pack(self, value: Any, what: str = "the value") -> Sendable:
        """A value, laid out for sending; `what` names it in errors."""
        channel = self._channel
        assert channel is not None
        return self.outbox.pack(encoding.encode(value, what=what), channel.shares_memory)

    def lay_out(self, encoded: Encoded) -> Sendable:
        """An encoded value, laid out for sending."""
        return self.outbox.pack(encoded, self.channel.shares_memory)

    def emit(self, task: int, stream: str, text: str, transient: bool, name: str) -> None:
        """Send what a task has written; `name` is that of a task that the client does not know."""
        # The next state of a bar replaces this one, so that it need not be whole.
        whole = text[:PIECE] if transient else text
        for at in range(0, len(whole) or 1, PIECE):
            self.tell(Written(task, stream, whole[at : at + PIECE], transient, name))

    def tell(self, message: Message) -> None:
        """Send what the client need not answer, if there is a client."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send(message)
                # While the client is cut off, a task may print only as much as the link keeps.
                channel.wait_for_room()
