"""Clients: who is attached to a pool that stays, and who may change it; the head node is asked."""

from __future__ import annotations

import time
from typing import Any

from skyward.errors import PoolError
from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.wire.messages import NodeEnded
from skyward.worker.services import ServedNode
from skyward.worker.services.calls import RUNNER


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer until the client leaves; then it no longer has the lease."""
    try:
        answer(
            channel,
            {
                "choose": lambda asked: node.tenants.choose(asked["identity"]),
                "who": lambda _: _who(node),
                "ending": lambda asked: _ending(node, asked["identity"]),
                "lock": lambda asked: _lock(node, channel, asked),
                "start": lambda asked: _start(node, channel, int(asked["node"])),
                "started": lambda asked: node.lease.end_start(
                    channel, int(asked["node"]), asked["facts"]
                ),
            },
        )
    finally:
        node.lease.give_back(channel)


def _who(node: ServedNode) -> dict[str, Any]:
    tenants = node.tenants
    return {
        "clients": _clients(node),
        "calls": [{"name": call.id, "by": call.by} for call in node.calls.live],
        "idle": tenants.idle_seconds,
        "kept": tenants.keeps,
    }


def _clients(node: ServedNode) -> list[dict[str, Any]]:
    """The clients that are people's: the calls by name stand for the one that runs them."""
    runner = f"job {RUNNER}-"
    return [
        each for each in node.tenants.described() if not each.get("command", "").startswith(runner)
    ]


def _ending(node: ServedNode, identity: dict[str, Any]) -> None:
    """Tell the clients that the node will be ended, and by whom: they shall not start it again."""
    node.tenants.tell(NodeEnded(shown({**identity, "since": time.time()})))


def _lock(node: ServedNode, channel: Channel, asked: dict[str, Any]) -> None:
    """Take the lease; without `force`, only if nobody but the asking client is attached."""
    identity = {**asked["identity"], "since": time.time()}
    holder = node.lease.take(channel, identity, force=bool(asked["force"]))
    if holder is not None:
        raise PoolError(f"{shown(holder)} is changing it")
    others = [each for each in _clients(node) if each["client"] != asked["client"]]
    if others and not asked["force"]:
        node.lease.give_back(channel)
        raise PoolError(f"in use by {', '.join(shown(each) for each in others)}")


def _start(node: ServedNode, channel: Channel, index: int) -> dict[str, Any]:
    """Let one client at a time start a node that several have lost."""
    granted, facts = node.lease.begin_start(channel, index)
    return {"granted": granted, "facts": facts}


def shown(identity: dict[str, Any]) -> str:
    """A client, for people: "ann@laptop, process 4711 (python train.py), since 14:03"."""
    where = f"{identity.get('user', '?')}@{identity.get('host', '?')}"
    since = time.strftime("%H:%M", time.localtime(float(identity.get("since", 0.0))))
    command = f" ({identity['command']})" if identity.get("command") else ""
    return f"{where}, process {identity.get('pid', '?')}{command}, since {since}"
