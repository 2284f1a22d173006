"""Asking: questions and answers between a service of an agent and whoever connects to it."""

from __future__ import annotations

from typing import Any

from skyward.closing import Closing
from skyward.errors import PoolError, ProtocolError
from skyward.wire import messages
from skyward.wire.channel import Bytes, Channel
from skyward.wire.frames import INLINE_BODY, Frame
from skyward.wire.messages import Question, Reply

PART = INLINE_BODY // 2
"""How many bytes the body of a question or a reply has, at most, if bytes come in parts."""


class ServiceConnection(Closing):
    """The asking end of a connection to a service; one thread at a time asks."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        """For services that take turns in other ways than question and answer."""

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to a question; `PoolError` if the service refuses or fails.

        >>> connection.ask("facts")["pid"]
        """
        self.channel.send(Question(what, arguments))
        return self.next_reply().value

    def next_reply(self) -> Reply:
        """Wait for the next reply; `PoolError` if it tells of a failure."""
        frame = self.channel.receive()
        reply = messages.decode_as(Reply, frame.kind, frame.meta)
        if reply.problem:
            raise PoolError(reply.problem)
        return reply

    def send(self, what: str, body: Bytes = b"", **arguments: Any) -> None:
        """Send a question, or a part of one, without waiting for an answer."""
        self.channel.send(Question(what, arguments), (body,) if body else ())

    def next_part(self) -> tuple[Reply, bytearray]:
        """The next reply, with its body; `PoolError` if it tells of a failure."""
        frame = self.channel.receive()
        reply = messages.decode_as(Reply, frame.kind, frame.meta)
        if reply.problem:
            raise PoolError(reply.problem)
        return reply, part_of(frame)

    def close(self) -> None:
        """End the connection."""
        self.channel.close()


def next_part(channel: Channel) -> tuple[Question, bytearray]:
    """Wait for the next question or the next part of one, with its body."""
    frame = channel.receive()
    return messages.decode_as(Question, frame.kind, frame.meta), part_of(frame)


def part_of(frame: Frame) -> bytearray:
    """The body of a frame whose sender sends bytes in parts."""
    if frame.body is None:
        raise ProtocolError(
            f"a service was sent {frame.body_length} bytes at once; bytes come in parts of at most "
            f"{PART} bytes"
        )
    return frame.body


def whole_of(channel: Channel, frame: Frame) -> bytearray:
    """The body of a frame, however long it is."""
    if frame.body is not None:
        return frame.body
    body = bytearray(frame.body_length)
    channel.read_body(frame, [memoryview(body)])
    return body
