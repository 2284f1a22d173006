"""Values: objects that clients keep on a node by name, to find them again after attaching."""

from __future__ import annotations

from typing import Any

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.services import ServedNode
from skyward.worker.values import ValueFile


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer until the client leaves; what it has begun and not finished is discarded.

    A value that the client has found stays as it is until then.
    """
    begun: set[int] = set()
    found: list[ValueFile] = []
    values = node.values

    def begin(_: dict[str, Any]) -> tuple[int, str]:
        number, path = values.begin()
        begun.add(number)
        return number, path

    def finish(asked: dict[str, Any]) -> int:
        begun.discard(asked["number"])
        return values.finish(
            asked["number"],
            asked["name"],
            asked["kind"],
            asked["pid"],
            asked["numbers"],
            asked["bytes"],
        )

    def find(asked: dict[str, Any]) -> dict[str, Any] | None:
        value = values.hold(asked["name"])
        if value is None:
            return None
        found.append(value)
        values.want(value)
        pid = value.tensors.process.process.pid if value.tensors is not None else 0
        described = value.described(asked["name"])
        return described | {"path": value.path, "size": value.size, "pid": pid}

    try:
        answer(
            channel,
            {
                "begin": begin,
                "finish": finish,
                "find": find,
                "list": lambda _: [each.described(name) for name, each in values.all().items()],
                "forget": lambda asked: values.forget(asked["name"]),
            },
        )
    finally:
        for number in begun:
            values.give_up(number)
        for value in found:
            values.release(value)
