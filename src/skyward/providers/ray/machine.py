"""A bundle of a Ray cluster as a machine: its keeper runs commands and connects to sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from skyward.errors import UnreachableError
from skyward.providers import Machine
from skyward.providers.piped import Piped
from skyward.providers.ray.keeper import CHUNK, read_frame, write_frame

END_SECONDS = 2.0
"""How long a machine's end may take to be known after a connection to it failed."""

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_bridges: set[asyncio.Task[None]] = set()


class NodeReport(msgspec.Struct, frozen=True):
    """What the driver tells of a node."""

    node: int = -1
    state: str = ""
    reason: str = ""
    address: str = ""
    port: int = 0
    hostname: str = ""

    @property
    def where(self) -> tuple[str, int]:
        """Where its keeper listens."""
        return self.address, self.port


class DriverLink(Protocol):
    """What a node's machine needs of the pool's driver."""

    pool: str

    @property
    def connected(self) -> bool:
        """Whether the driver is connected now."""

    def place(self, node: int) -> NodeReport:
        """What the driver told last of a node."""

    def has(self, node: int, place: NodeReport) -> bool:
        """Whether the machine at a place is there, and serves a node."""

    async def why_over(self) -> str:
        """Why the driver does not run; empty if it does. Raises if nobody knows."""

    async def end(self, node: int, place: NodeReport) -> None:
        """Give a node back, unless another machine serves it by now."""

    async def reach(
        self, node: int, place: NodeReport, asked: dict[str, Any], *, relayed: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the keeper of a node, which begins with what is asked of it."""


class RayMachine(Piped, Machine):
    """The machine of one node."""

    may_be_here = True

    def __init__(
        self,
        link: DriverLink,
        node: int,
        place: NodeReport,
        python: str | None,
        *,
        direct: bool,
    ) -> None:
        self._link, self._place = link, place
        self.id = f"ray://{link.pool}/{node}"
        self.node, self.python = node, python
        self.address = place.address
        self.direct = place.address if direct and place.address else None
        self._relayed = False
        """Whether the keeper can only be reached through the driver."""
        self._destroyed = False

    def __repr__(self) -> str:
        return f"RayMachine({self.id!r})"

    async def _connection(self, asked: dict[str, Any]) -> _Streams:
        """A connection to the keeper: direct if that works, else through the driver."""
        if not self._place.port or self._destroyed:
            raise UnreachableError(f"node {self.node} has no machine in the Ray cluster")
        problem: Exception | None = None
        for relayed in (self._relayed, True) if not self._relayed else (True,):
            try:
                found = await self._link.reach(self.node, self._place, asked, relayed=relayed)
            except (OSError, TimeoutError) as failed:
                problem = problem or failed
                if await self._is_gone():
                    break
                continue
            self._relayed = relayed
            return found
        raise UnreachableError(await self._why_unreachable(problem)) from problem

    async def _why_unreachable(self, problem: object) -> str:
        if await self._is_gone():
            return f"node {self.node}: {await self._how_it_ended()}"
        return (
            f"node {self.node}: its keeper on {self._place.hostname} is not reached at "
            f"{self._place.address}:{self._place.port} ({problem}), and not through the driver"
        )

    async def _is_gone(self) -> bool:
        with contextlib.suppress(UnreachableError):
            return not await self.alive()
        return False

    async def _how_it_ended(self) -> str:
        with contextlib.suppress(UnreachableError):
            reason = self._link.place(self.node).reason
            return await self._link.why_over() or reason or "it has ended"
        return "it has ended"

    # Programs and connections.

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in the machine's folder, through its keeper."""
        try:
            return await self._bridged({"do": "run", "command": list(command)}, command[0])
        except ConnectionResetError as problem:
            raise UnreachableError(await self.why_lost()) from problem

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through the keeper, which copies what comes to the socket."""
        return await self._bridged({"do": "dial", "endpoint": endpoint}, endpoint)

    async def why_lost(self) -> str:
        """How the machine has ended, if it has."""
        if not self._destroyed:
            await self._until_gone()
        return await self._why_unreachable("the connection was lost")

    async def _until_gone(self) -> None:
        """Give the driver time to say that the machine has ended, if it has."""
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while not await self._is_gone() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.1)

    async def _bridged(self, asked: dict[str, Any], name: str) -> socket.socket:
        """A socket that leads to what is asked of the keeper."""
        reader, writer = await self._connection(asked)
        try:
            _, refusal = await read_frame(reader)
            if refusal:
                number, _, words = refusal.decode(errors="replace").partition(" ")
                raise OSError(int(number), f"{name} on {self.id}: {words}")
            mine, given = socket.socketpair()
            mine.setblocking(False)
            try:
                near = await asyncio.open_unix_connection(sock=mine)
            except BaseException:
                given.close()
                mine.close()
                raise
        except EOFError:
            writer.close()
            raise ConnectionResetError(f"{name} on {self.id}: the connection ended") from None
        except BaseException:
            writer.close()
            raise
        bridge = asyncio.ensure_future(_bridge((reader, writer), near))
        _bridges.add(bridge)
        bridge.add_done_callback(_bridges.discard)
        return given

    # Its end.

    async def alive(self) -> bool:
        """Whether Ray still has the machine."""
        if self._destroyed or not self._link.has(self.node, self._place):
            return False
        if self._link.connected:
            return True
        if await self._link.why_over():
            return False
        raise UnreachableError("the driver in the Ray cluster is out of reach")

    async def destroy(self) -> None:
        """End the machine, and with the pool's last one the driver and all that it made."""
        if not self._destroyed:
            await self._link.end(self.node, self._place)
            self._destroyed = True


async def _bridge(far: _Streams, near: _Streams) -> None:
    """Copy bytes between the keeper's frames and a socket, until both directions have ended."""

    async def inwards() -> None:
        while True:
            kind, data = await read_frame(far[0])
            if kind == b"e":
                near[1].write_eof()
                return
            near[1].write(data)
            await near[1].drain()

    async def outwards() -> None:
        while data := await near[0].read(CHUNK):
            write_frame(far[1], b"i", data)
            await far[1].drain()
        write_frame(far[1], b"e")
        await far[1].drain()

    try:
        # If one direction breaks, the other is over as well.
        await asyncio.gather(inwards(), outwards())
    except (OSError, EOFError):
        pass
    finally:
        far[1].close()
        near[1].close()
