"""Forward: carries bytes between a client and a port of this node's loopback.

The first question is "connect". Then "bytes" come from the client, and replies with bytes go back;
one without bytes is the end of its direction.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Annotated

import msgspec

from skyward.errors import ProtocolError
from skyward.wire.asking import next_part
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker.services import ServedNode

CONNECT_SECONDS = 5.0
_PIECE = 64 << 10


class ForwardRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Where the bytes go: a port of the loopback."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


def serve(node: ServedNode, channel: Channel) -> None:
    """Carry the bytes of one connection until the client leaves."""
    question, _ = next_part(channel)
    try:
        if question.what != "connect":
            raise ValueError(f"this service does not answer {question.what!r}; ask 'connect'")
        port = msgspec.convert(question.arguments, ForwardRequest).port
        end = socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS)
    except ValueError as problem:
        channel.send(Reply(problem=str(problem)))
        return
    except OSError as problem:
        channel.send(Reply(problem=f"nothing answers at port {port} of the node: {problem}"))
        return
    end.settimeout(None)
    channel.send(Reply(more=True))
    back = threading.Thread(
        target=_carry_back, args=(end, channel), name="skyward-forward", daemon=True
    )
    back.start()
    try:
        _carry_there(channel, end)
    finally:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        back.join()
        end.close()


def _carry_there(channel: Channel, end: socket.socket) -> None:
    while True:
        part, body = next_part(channel)
        if part.what != "bytes":
            raise ProtocolError(f"a client does not send {part.what!r} to a forwarded port")
        # The server may read no more; its answer still goes back.
        with contextlib.suppress(OSError):
            if body:
                end.sendall(body)
            else:
                end.shutdown(socket.SHUT_WR)


def _carry_back(end: socket.socket, channel: Channel) -> None:
    # The client has left, or the server: the other thread notices the first, too.
    with contextlib.suppress(OSError):
        data = b""
        with contextlib.suppress(ConnectionError):
            while data := end.recv(_PIECE):
                channel.send(Reply(more=True), (data,))
        channel.send(Reply())
