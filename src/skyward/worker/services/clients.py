"""Clients: who is attached to a kept pool, and who may change it; the head node is asked."""

from __future__ import annotations

import time
from typing import Any

from skyward.errors import PoolError
from skyward.wire.messages import NodeEnded
from skyward.worker.jobs import LIVE, RUNNER
from skyward.worker.services import Caller, ServedNode, answers


@answers("clients")
def choose(caller: Caller, identity: dict[str, str]) -> str:
    """A name for a new client."""
    return caller.node.tenants.choose(identity)


@answers("clients")
def who(caller: Caller) -> dict[str, Any]:
    """Who uses the pool, and for how long nobody has."""
    node = caller.node
    return {
        "clients": _clients(node),
        "calls": [
            {"name": call.id, "by": call.by}
            for call in node.jobs.all(("call",))
            if call.state in LIVE
        ],
        "idle": node.tenants.idle_seconds,
        "kept": node.tenants.keeps,
    }


def _clients(node: ServedNode) -> list[dict[str, Any]]:
    """The clients that are people's: the calls by name stand for the one that runs them."""
    runner = f"job {RUNNER}-"
    return [
        each for each in node.tenants.described() if not each.get("command", "").startswith(runner)
    ]


@answers("clients")
def ending(caller: Caller, identity: dict[str, Any]) -> None:
    """Tell the clients that the node will be ended, and by whom: they shall not start it again."""
    caller.node.tenants.tell(NodeEnded(shown({**identity, "since": time.time()})))


@answers("clients")
def lock(caller: Caller, identity: dict[str, Any], client: str, force: bool) -> None:
    """Take the lease until the caller leaves.

    Without `force`, only if nobody but the asking client is attached.
    """
    node, channel = caller.node, caller.channel
    holder = node.lease.take(channel, {**identity, "since": time.time()}, force=force)
    if holder is not None:
        raise PoolError(f"{shown(holder)} is changing it")
    caller.leaving.callback(node.lease.give_back, channel)
    others = [each for each in _clients(node) if each["client"] != client]
    if others and not force:
        node.lease.give_back(channel)
        raise PoolError(f"in use by {', '.join(shown(each) for each in others)}")


@answers("clients")
def start(caller: Caller, node: int) -> dict[str, Any]:
    """Let one client at a time start a node that several have lost."""
    lease = caller.node.lease
    caller.leaving.callback(lease.give_back, caller.channel)
    granted, facts = lease.begin_start(caller.channel, node)
    return {"granted": granted, "facts": facts}


@answers("clients")
def started(caller: Caller, node: int, facts: Any) -> None:
    """Note the facts of a node that the caller has started."""
    caller.node.lease.end_start(caller.channel, node, facts)


def shown(identity: dict[str, Any]) -> str:
    """A client, for people: "ann@laptop, process 4711 (python train.py), since 14:03"."""
    where = f"{identity.get('user', '?')}@{identity.get('host', '?')}"
    since = time.strftime("%H:%M", time.localtime(float(identity.get("since", 0.0))))
    command = f" ({identity['command']})" if identity.get("command") else ""
    return f"{where}, process {identity.get('pid', '?')}{command}, since {since}"
