"""Output: what tasks on the node have written, and what they write while the client follows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from skyward.wire.asking import next_part
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply, Size
from skyward.worker.services import ServedNode
from skyward.worker.services.jobs import wait_or_leave
from skyward.worker.task_output import FOLDER, TaskLine, TaskOutputReader

_BATCH = 200
"""How many entries one reply has, at most."""


class OutputRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The last lines, or all that are kept; with `follow`, also what comes."""

    tail: Size | None = None
    follow: bool = False


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer one question: the lines in parts, oldest first."""
    question, _ = next_part(channel)
    try:
        if question.what != "show":
            raise ValueError(f"this service does not answer {question.what!r}")
        request = msgspec.convert(question.arguments, OutputRequest)
    except ValueError as problem:
        channel.send(Reply(problem=str(problem)))
        return
    reader = TaskOutputReader(Path(node.config.folder, FOLDER), request.tail)
    while True:
        _send(channel, reader.next_lines())
        if not request.follow:
            channel.send(Reply([]))
            return
        wait_or_leave(channel)


def _send(channel: Channel, lines: list[TaskLine]) -> None:
    for begin in range(0, len(lines), _BATCH):
        batch = [msgspec.to_builtins(each) for each in lines[begin : begin + _BATCH]]
        channel.send(Reply(batch, more=True))
