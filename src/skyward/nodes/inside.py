"""Inside: how a process on a node of a pool that stays reaches the other nodes.

It has no access to the pool's provider, and needs none: nodes listen for each other.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from skyward.context import POOL_VARIABLE
from skyward.errors import PoolStartError
from skyward.nodes.keeping import KeptNode, KeptPool, encode
from skyward.providers import Allocation, Capabilities, Machine, Order, Request
from skyward.wire.connecting import dial_here, direct

CONNECT_SECONDS = 10.0


def record_for_nodes(record: KeptPool) -> KeptPool | None:
    """The record for processes on the pool's nodes; None if they cannot reach each other."""
    if record.credentials is None:
        return None
    return msgspec.structs.replace(record, inside=True, arguments={})


def way_back(record: KeptPool) -> tuple[dict[str, str], dict[str, str]]:
    """The variables and private texts with which `sky.attach()` in a job finds the job's pool.

    On this machine, the job can read the record itself.
    """
    variables = {POOL_VARIABLE: record.name}
    theirs = record_for_nodes(record)
    if theirs is None:
        return variables, {}
    place = f"state/pools/{record.name}.json"
    return variables | {"SKYWARD_STATE": "{folder}/state"}, {place: encode(theirs).decode()}


class InsideProvider:
    """The nodes of a pool, as they are: none is made, and none is removed."""

    name = "inside"
    capabilities = Capabilities()

    def __init__(self, record: KeptPool) -> None:
        self._record = record

    def check(self, request: Request) -> None:
        """Nothing is asked for."""

    def describe(self) -> Mapping[str, Any]:
        """No arguments."""
        return {}

    def price(self, request: Request) -> float | None:
        """None: the pool's own provider knows."""
        return None

    def allocate(self, pool: str) -> Allocation[InsideMachine]:
        """The nodes that the record has."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> InsideMachine:
        """Refuse: only the pool's provider makes machines."""
        raise PoolStartError(
            f"node {order.node}: a script on the pool cannot start nodes, since it has no access "
            f"to the provider {self._record.provider}; do that from where the pool was made"
        )

    async def find(self, pool: str) -> Sequence[InsideMachine]:
        """The nodes that the record has."""
        return [InsideMachine(node, self._record.name) for node in self._record.nodes]


class InsideMachine(Machine):
    """A node of the pool, seen from another one, or from itself."""

    may_be_here = True

    def __init__(self, node: KeptNode, pool: str) -> None:
        self._pool = pool
        self.id, self.node, self.address = node.machine, node.index, node.address
        self.forwards_to = node.address

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Refuse: the node's agent runs commands."""
        raise PoolStartError(f"node {self.node} is not prepared from inside the pool")

    async def forward(self, endpoint: str) -> socket.socket:
        """Connect to where the node listens for other nodes."""
        return await asyncio.to_thread(direct, endpoint, CONNECT_SECONDS)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect to a socket of this very host."""
        if endpoint.startswith("unix:"):
            return dial_here(endpoint)
        return await self.forward(endpoint)

    async def alive(self) -> bool:
        """True: nobody here can know better."""
        return True

    async def destroy(self) -> None:
        """Refuse: the machine is the provider's."""
        raise PoolStartError(
            f"node {self.node}: a script on the pool cannot remove its machines; `sky down "
            f"{self._pool}` does, from where the pool was made"
        )
