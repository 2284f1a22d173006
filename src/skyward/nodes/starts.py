"""Starts: of the clients of a pool that stays, one starts a lost node, wherever they are.

An agent that is left decides which: the first of the nodes that a client can reach. If there is
none, a client knows only of those on its own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from skyward.errors import SkywardError
from skyward.nodes.contact import connecting
from skyward.nodes.keeping import KeptNode
from skyward.nodes.node import Node
from skyward.nodes.roster import Roster
from skyward.wire.asking import ServiceConnection

LOOK_SECONDS = 0.2
ANSWER_SECONDS = 10.0
"""How long an agent may take to answer; after that, the next node's agent is asked."""
LONGEST_SECONDS = 1800.0
"""How long another client may take to start a node: it may wait in a queue for the machine."""


class StartLease:
    """The right to start one node, and what others have told of its last start."""

    def __init__(self, node: int, connection: ServiceConnection | None, facts: Any) -> None:
        self._node, self._connection = node, connection
        self.last: KeptNode | None = msgspec.convert(facts, KeptNode) if facts else None
        """The node as the client has told that started it last; None if none did."""

    async def tell(self, facts: KeptNode | None) -> None:
        """Tell those who wait what the node is now."""
        if self._connection is None or facts is None:
            return
        # If the agent is lost, too, its node is started next, and so are those who asked it.
        with contextlib.suppress(SkywardError, OSError, EOFError):
            told = msgspec.to_builtins(facts)
            await _asked(self._connection, "started", node=self._node, facts=told)


class Starts:
    """Takes the leases of a pool's nodes, on the providers' loop."""

    def __init__(self, roster: Roster, open: Callable[[int, str], ServiceConnection]) -> None:
        """`open` opens a connection to a service of a node."""
        self._roster, self._open = roster, open

    @contextlib.asynccontextmanager
    async def lease(self, node: Node) -> AsyncIterator[StartLease]:
        """Be the only client that starts a node, as far as an agent is left to say so."""
        async with contextlib.AsyncExitStack() as held:
            deadline = time.monotonic() + LONGEST_SECONDS
            silent: set[int] = set()
            while True:
                found = await self._granted(node, held, deadline, silent)
                if found is not None:
                    break
            yield found

    async def _granted(
        self, node: Node, held: contextlib.AsyncExitStack, deadline: float, silent: set[int]
    ) -> StartLease | None:
        """Wait for the lease; None if the agent that was asked is gone, or one more is silent."""
        others = [each for each in self._roster.nodes if each is not node and each.is_connected]
        others = [each for each in others if each.index not in silent]
        if not others or node.state != "starting" or time.monotonic() > deadline:
            return StartLease(node.index, None, None)
        try:
            connection = await self._connected(others[0].index)
            held.callback(_close, connection)
            while True:
                told = await _asked(connection, "start", node=node.index)
                waits = node.state == "starting" and time.monotonic() < deadline
                if told["granted"] or not waits:
                    return StartLease(node.index, connection, told["facts"])
                await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            silent.add(others[0].index)
            return None
        except (SkywardError, OSError, EOFError):
            await asyncio.sleep(LOOK_SECONDS)
            return None

    async def _connected(self, index: int) -> ServiceConnection:
        opening = connecting.submit(self._open, index, "clients")
        try:
            return await asyncio.wait_for(asyncio.wrap_future(opening), ANSWER_SECONDS)
        except TimeoutError:
            opening.add_done_callback(_close_late)
            raise


async def _asked(connection: ServiceConnection, what: str, **arguments: Any) -> Any:
    asked = connecting.submit(connection.ask, what, **arguments)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(asked), ANSWER_SECONDS)
    except TimeoutError:
        # Frees the thread that waits for the answer.
        connection.channel.abort()
        raise


def _close_late(opening: Future[ServiceConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        _close(opening.result())


def _close(connection: ServiceConnection) -> None:
    with contextlib.suppress(OSError):
        connection.close()
