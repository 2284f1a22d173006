"""Values: objects that clients keep on a node by name, to find them again after attaching."""

from __future__ import annotations

from typing import Any

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.services import ServedNode


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer until the client leaves; what it has begun and not finished is discarded."""
    begun: set[int] = set()
    values = node.values

    def begin(_: dict[str, Any]) -> tuple[int, str]:
        number, path = values.begin()
        begun.add(number)
        return number, path

    def finish(asked: dict[str, Any]) -> int:
        begun.discard(asked["number"])
        return values.finish(asked["number"], asked["name"], asked["kind"])

    try:
        answer(
            channel,
            {
                "begin": begin,
                "finish": finish,
                "find": lambda asked: _found(node, asked["name"]),
                "names": lambda _: sorted(values.all()),
                "forget": lambda asked: values.forget(asked["name"]),
            },
        )
    finally:
        for number in begun:
            values.give_up(number)


def _found(node: ServedNode, name: str) -> dict[str, Any] | None:
    value = node.values.find(name)
    return None if value is None else {"path": value.path, "size": value.size, "kind": value.kind}
