"""A client of a thousand nodes: what it does and keeps for each of them does not grow with them."""

from __future__ import annotations

import socket
import tracemalloc
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward import context
from skyward.nodes.briefing import Briefing
from skyward.nodes.node import Node
from skyward.nodes.roster import Roster
from skyward.wire.channel import Channel
from skyward.wire.connecting import context_for
from skyward.wire.identity import CLIENT, Authority
from skyward.wire.messages import Message, Ping

NODES = 1000
KIB = 1 << 10


class Told:
    """An agent's connection, which keeps what it is sent."""

    connected = True

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def roster_of(count: int) -> tuple[Roster, list[Told]]:
    """Nodes with different addresses, and what their agents are told."""
    roster, told = Roster(), [Told() for _ in range(count)]
    nodes = []
    for index, control in enumerate(told):
        host: Any = SimpleNamespace(
            address=f"10.0.{index // 250}.{index % 250}",
            hostname=f"host{index}",
            accelerators=0,
            accelerator=None,
        )
        node = Node(index, host, roster.lock)
        node.connect(control)  # type: ignore[arg-type]
        nodes.append(node)
    roster.add(nodes)
    return roster, told


def briefing_of(roster: Roster) -> Briefing:
    spec: Any = SimpleNamespace(worker=sky.Worker(), options=sky.Options())
    return Briefing("pool", spec, None, roster, clustered=True)


def test_the_list_of_peers_is_made_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    roster, told = roster_of(NODES)
    made = []
    compress = zlib.compress
    monkeypatch.setattr(context.zlib, "compress", lambda data: made.append(1) or compress(data))
    briefing_of(roster).tell_all()
    assert len(made) == 1
    texts = [each.compute_pool for agent in told for each in agent.messages]  # type: ignore[attr-defined]
    assert len(texts) == NODES
    assert sum(map(len, texts)) < NODES * 10 * KIB
    last = context.InstanceInfo.from_json(texts[-1])
    assert (last.node, last.node_rank, len(last.peers)) == (999, 999, NODES)
    assert last.peers[-1] == sky.Peer(999, "10.0.3.249")


def test_all_connections_of_a_client_share_one_tls_context() -> None:
    credentials = Authority("pool").issue(CLIENT)
    contexts = {id(context_for(f"tcp:127.0.0.1:{port}", credentials)) for port in range(1, 50)}
    assert len(contexts) == 1


def test_an_idle_channel_keeps_hardly_any_memory() -> None:
    pairs = [socket.socketpair() for _ in range(100)]
    frame = Ping(1)
    Channel(pairs[0][0]).send(frame)
    Channel(pairs[0][1]).receive()
    tracemalloc.start()
    try:
        channels = [(Channel(one), Channel(other)) for one, other in pairs]
        for one, other in channels:
            one.send(frame)
            other.receive()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for one, other in channels:
            one.close()
            other.close()
    assert used < 200 * 8 * KIB
