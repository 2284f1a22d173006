"""Spares: connections to keepers that are opened before the commands that will use them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from skyward.errors import PoolError

AT_ONCE, STEP_SECONDS = 32, 0.25
"""How many steps may be starting at the same time, and how long one counts as starting.

All of them ask the one controller, and nothing says when it has answered.
"""
Connect = Callable[[str, str], Coroutine[Any, Any, socket.socket]]


class Spares:
    """One connection for each of the first two commands of every node.

    The first command prepares the node, the second starts its agent. Each would wait for a step of
    Slurm's and for a Python to start.
    """

    def __init__(self, connect: Connect) -> None:
        """`connect` connects to the keeper of a job on a host."""
        self._connect = connect
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._opening: dict[tuple[str, str], asyncio.Task[socket.socket]] = {}
        self._first: set[asyncio.Task[socket.socket]] = set()

    def prepare(self, job: str, hosts: Sequence[str]) -> None:
        """Begin to connect to keepers that will be asked for something soon."""
        for host in hosts:
            self._first.add(self._open(job, host))

    def _open(self, job: str, host: str) -> asyncio.Task[socket.socket]:
        opening = asyncio.get_running_loop().create_task(self._connected(job, host))
        self._opening[job, host] = opening
        return opening

    async def _connected(self, job: str, host: str) -> socket.socket:
        await self._limit.acquire()
        try:
            return await self._connect(job, host)
        finally:
            asyncio.get_running_loop().call_later(STEP_SECONDS, self._limit.release)

    async def take(self, job: str, host: str) -> socket.socket | None:
        """A connection to a keeper; None if there is none ahead."""
        spare = self._opening.pop((job, host), None)
        if spare is None:
            return None
        if spare in self._first:
            self._first.discard(spare)
            self._open(job, host)
        try:
            return await asyncio.shield(spare)
        except asyncio.CancelledError:
            spare.add_done_callback(_close)
            raise
        except (OSError, PoolError):
            return None

    def close(self, job: str) -> None:
        """Close the connections to a job's keepers that nobody took."""
        for key in [each for each in self._opening if each[0] == job]:
            spare = self._opening.pop(key)
            self._first.discard(spare)
            spare.add_done_callback(_close)


def _close(opening: asyncio.Task[socket.socket]) -> None:
    with contextlib.suppress(OSError, PoolError, asyncio.CancelledError):
        opening.result().close()
