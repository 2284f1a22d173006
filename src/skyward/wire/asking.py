"""Asking: questions and answers between a service of an agent and whoever connects to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        return reply, _body(frame)

    def close(self) -> None:
        """End the connection."""
        self.channel.close()


def next_question(channel: Channel) -> Question:
    """Wait for the next question; the answering end of a connection calls this."""
    frame = channel.receive()
    return messages.decode_as(Question, frame.kind, frame.meta)


def next_part(channel: Channel) -> tuple[Question, bytearray]:
    """Wait for the next question or the next part of one, with its body."""
    frame = channel.receive()
    return messages.decode_as(Question, frame.kind, frame.meta), _body(frame)


def _body(frame: Frame) -> bytearray:
    if frame.body is None:
        raise ProtocolError(
            f"a service was sent {frame.body_length} bytes at once; bytes come in parts of at most "
            f"{PART} bytes"
        )
    return frame.body


def answer(channel: Channel, answers: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Answer questions, each with the function of its name, until the other end leaves."""
    while True:
        request = next_question(channel)
        found = answers.get(request.what)
        if found is None:
            channel.send(Reply(problem=f"this service does not answer {request.what!r}"))
            continue
        try:
            reply = Reply(found(request.arguments))
        except Exception as problem:
            reply = Reply(problem=f"{type(problem).__name__}: {problem}")
        channel.send(reply)
