"""The link to a pool's driver: nodes are asked for and given back, and the driver tells of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from skyward.errors import PoolError, PoolStartError, UnreachableError
from skyward.providers import Order
from skyward.providers.ray import records
from skyward.providers.ray.door import DriverDoor, announcement
from skyward.providers.ray.programs import DriverProgram
from skyward.providers.ray.records import Record
from skyward.providers.together import GATHER_SECONDS, gather
from skyward.wire.identity import CLIENT, KEPT_LIFETIME, Authority

PING_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""How long after a failed connection the next one is tried."""
END_SECONDS = 15.0
"""How long the driver may take to end in order."""

Told = Callable[[str], None]


@dataclass(frozen=True)
class Ask:
    """What is asked of Ray for each node."""

    bundle: dict[str, float]
    strategy: str
    accelerator: str = ""
    """The model of the GPUs, which the cluster may know."""
    keeps_threads: bool = False


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


@dataclass(eq=False)
class _WantedNode:
    """A node that is to have a machine."""

    tell: Told
    ready: asyncio.Future[NodeReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    asked: bool = False
    """Whether the driver was asked for it."""
    together: frozenset[int] = frozenset()
    """The nodes that are ordered at the same time, this one among them."""
    place: NodeReport = field(default_factory=NodeReport)

    def fail(self, problem: BaseException) -> None:
        if not self.ready.done():
            self.ready.set_exception(problem)
            self.ready.exception()  # Nobody may be waiting for it any more.


class DriverLink:
    """The nodes of one pool, as one event loop sees them."""

    def __init__(
        self,
        pool: str,
        cluster: str,
        program: Callable[[str], DriverProgram],
        *,
        settings: dict[str, Any],
        record: Record | None = None,
        forget: Callable[[DriverLink], None] = lambda _: None,
    ) -> None:
        """With a record, the driver exists; `forget` is called when everything was removed.

        `program` makes the driver's program from its id, which is empty for a new one.
        """
        self._pool, self._cluster, self._new_program = pool, cluster, program
        self._settings, self._forget = settings, forget
        self._record = record
        self._program = program(record.program if record is not None else "")
        self.loop = asyncio.get_running_loop()
        self._wanted: dict[int, _WantedNode] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._listed = asyncio.Event()
        """Set when the driver has told of all nodes that it has."""
        self._ended = ""
        """Why the driver does not run any more."""
        self._removing: asyncio.Task[None] | None = None
        self._door: DriverDoor | None = None
        """How the driver, and keepers, are reached."""
        self._ask: Ask | None = None
        self.closed = False

    # Nodes.

    async def get(self, order: Order, ask: Ask, seconds: float) -> NodeReport:
        """A machine for a node; raises with the reason if there is none."""
        node, self._ask = order.node, ask
        wanted = self._wanted[node] = _WantedNode(order.tell, together=order.together)
        self._changed.set()
        if self._work is None or self._work.done():
            self._work = self.loop.create_task(self._serve())
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(wanted.ready)
        except TimeoutError:
            await self._give_up(node)
            raise PoolStartError(
                f"node {node}: Ray did not have it within {seconds:.0f} s: "
                f"{wanted.place.reason or 'it did not say why'}; wait longer with "
                "sky.Ray(timeout=...), or ask for less"
            ) from None
        except asyncio.CancelledError:
            if self._wanted.get(node) is wanted and self._record is None:
                self._wanted.pop(node)
                if not self._wanted:
                    await self._close()
            raise
        except Exception:
            await self._give_up(node)
            raise

    def _is_complete(self) -> bool:
        """Whether all nodes have been ordered that are to come together, in one placement group."""
        return all(each.together <= self._wanted.keys() for each in self._wanted.values())

    async def _give_up(self, node: int) -> None:
        with contextlib.suppress(PoolError):
            await self.release(node)

    @property
    def nodes(self) -> list[int]:
        """The nodes that were asked for and not given back."""
        return sorted(self._wanted)

    def place(self, node: int) -> NodeReport:
        """What the driver told last of a node."""
        return self._wanted[node].place if node in self._wanted else NodeReport()

    def has(self, node: int, place: NodeReport) -> bool:
        """Whether the machine at a place is there, and serves a node."""
        found = self.place(node)
        return not self._ended and found.state == "ready" and found.where == place.where

    def assume(self, nodes: list[int]) -> None:
        """Take these nodes as asked for, unless the driver has told which ones it has."""
        if not self._listed.is_set():
            for node in nodes:
                self._wanted.setdefault(node, _WantedNode(lambda _: None, asked=True))

    @property
    def connected(self) -> bool:
        """Whether the driver is connected now."""
        return self._writer is not None

    async def why_over(self) -> str:
        """Why the driver does not run; empty if it does. Raises if nobody knows."""
        return self._ended or await asyncio.to_thread(self._program.why_over)

    async def listed(self, seconds: float) -> list[int]:
        """The nodes that an existing driver has; raises if it cannot be asked."""
        if self._work is None:
            self._work = self.loop.create_task(self._serve())
        waiting = self.loop.create_task(self._listed.wait())
        try:
            await asyncio.wait(
                {waiting, self._work}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self._listed.is_set():
            raise UnreachableError(self._ended or "the driver of the pool is out of reach")
        return self.nodes

    # The end.

    async def release(self, node: int, place: NodeReport | None = None) -> None:
        """Give a node back; with the last one, end the driver and remove all.

        With a place, only if no other machine serves the node by now.
        """
        if place is not None and place.port and place.where != self.place(node).where:
            return
        wanted = self._wanted.pop(node, None)
        if wanted is not None and not wanted.ready.done():
            wanted.ready.cancel()
        # The other nodes of the pool may be given back as well.
        await asyncio.sleep(GATHER_SECONDS)
        if not self._wanted:
            if self._removing is None:
                self._removing = self.loop.create_task(self._remove())
            await asyncio.shield(self._removing)
        elif wanted is not None and wanted.asked:
            self._send({"do": "release", "nodes": [node]})
            self._write_record()

    async def _remove(self) -> None:
        """End the driver, wait for that, and forget the pool."""
        if self._record is None:
            await self._close()
            return
        connected = self.connected
        try:
            self._send({"do": "end"})
            if connected and self._work is not None:
                await asyncio.wait({self._work}, timeout=END_SECONDS)
            await self._cancel_work()
            if self._program.id:
                await asyncio.to_thread(self._end_program, not connected)
        finally:
            await self._close()
        records.remove(self._pool)

    def _end_program(self, stop: bool) -> None:
        """Wait until the program has ended; stop it now, or if it does not end by itself."""
        began, stopped = time.monotonic(), False
        while not self._program.why_over():
            passed = time.monotonic() - began
            if not stopped and (stop or passed > END_SECONDS / 3):
                self._program.stop()
                stopped = True
            if passed > 3 * END_SECONDS:
                raise PoolError(f"{self._program.id} does not end; look at the Ray cluster")
            time.sleep(0.1)
        self._program.forget()

    async def _cancel_work(self) -> None:
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})

    async def _close(self) -> None:
        self.closed = True
        self._forget(self)
        await self._cancel_work()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_record(self) -> None:
        if self._record is not None and not self.closed:
            self._record.nodes = self.nodes
            records.write(self._pool, self._record)

    # The driver.

    async def _serve(self) -> None:
        """Start the driver, and stay connected to it; whatever fails, the nodes hear of it."""
        try:
            await gather(self._is_complete)
            if self._ended:
                await self._begin_again()
            if self._record is None:
                await self._start()
            while not self.closed:
                await self._talk(await self._connect())
                if not self.closed and (why := await self._why_over_now()):
                    self._ended = why
                    break
        except Exception as problem:
            self._ended = self._ended or str(problem)
            self._fail(problem)
        else:
            self._fail(PoolStartError(f"Ray({self._cluster!r}): {self._ended or 'it has ended'}"))

    def _fail(self, problem: BaseException) -> None:
        for wanted in self._wanted.values():
            wanted.fail(problem)
        self._changed.set()

    async def _why_over_now(self) -> str:
        with contextlib.suppress(PoolError):
            return await asyncio.to_thread(self._program.why_over)
        return ""

    async def _begin_again(self) -> None:
        """Forget a driver that has ended before its time."""
        with contextlib.suppress(PoolError):
            await asyncio.to_thread(self._program.forget)
        self._program = self._new_program("")
        self._record, self._door, self._ended = None, None, ""
        self._listed.clear()

    async def _start(self) -> None:
        """Start the program, and wait until it says where it listens."""
        # A pool may stay for long.
        authority = Authority(self._pool, lifetime=KEPT_LIFETIME)
        mine = authority.issue(CLIENT)
        self._record = Record(
            mine.authority,
            mine.certificate,
            mine.key,
            nodes=self.nodes,
            pid=os.getpid(),
            name=str(self._settings.get("name", "")),
        )
        given = {**self._settings, "pool": self._pool, "authority": mine.authority}
        self._tell("starting a driver in the Ray cluster")
        starting = self.loop.create_task(asyncio.to_thread(self._program.start, self._pool, given))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting})
            raise
        self._record.program = self._program.id
        self._write_record()

    async def _connect(self) -> asyncio.StreamReader:
        """A connection to the driver, tried at all its addresses until the driver ends."""
        assert self._record is not None
        if self._record.driver is None:
            self._record.driver = await announcement(self._program, self._cluster)
            self._write_record()
        door = self._known_door()
        told = False
        while True:
            try:
                reader, self._writer = await door.connect()
                return reader
            except (OSError, TimeoutError) as problem:
                last = problem
            if why := await self._why_over_now():
                self._ended = why
                raise UnreachableError(f"Ray({self._cluster!r}): {why}")
            if not self._listed.is_set():
                raise door.unreachable(last)
            if not told:
                told = True
                self._tell("the driver in the Ray cluster is out of reach; trying again")
            await asyncio.sleep(AGAIN_SECONDS)

    def _known_door(self) -> DriverDoor:
        """How a driver is reached that has said where it listens."""
        if self._door is None:
            assert self._record is not None
            self._door = DriverDoor(self._cluster, self._record)
        return self._door

    async def _talk(self, reader: asyncio.StreamReader) -> None:
        """Ask for nodes, and take what the driver tells, until the connection ends."""
        self._send({"do": "list"})
        listening = self.loop.create_task(self._listen(reader))
        try:
            while not listening.done():
                self._changed.clear()
                if self._listed.is_set():
                    self._ask_for_missing()
                changing = self.loop.create_task(self._changed.wait())
                await asyncio.wait(
                    {listening, changing},
                    timeout=PING_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                changing.cancel()
                self._send({"do": "ping"})
        finally:
            listening.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await listening
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        told: set[int] = set()
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                place = msgspec.json.decode(line, type=NodeReport)
                if place.state == "listed":
                    self._lost_unless(told)
                    self._listed.set()
                    self._changed.set()
                else:
                    told.add(place.node)
                    self._take(place)

    def _lost_unless(self, told: set[int]) -> None:
        """Ask again for nodes that the driver does not know, since the connection was lost."""
        for node, wanted in self._wanted.items():
            if wanted.asked and node not in told:
                wanted.asked = wanted.ready.done()
                wanted.place = NodeReport(node, "gone", "the driver has not heard of it")

    def _take(self, place: NodeReport) -> None:
        if not self._listed.is_set() and place.node not in self._wanted:
            # Another process made it.
            self._wanted[place.node] = _WantedNode(lambda _: None, asked=True)
        wanted = self._wanted.get(place.node)
        if wanted is None or not wanted.asked:
            return
        if place.reason and place.reason != wanted.place.reason and place.state == "pending":
            wanted.tell(place.reason)
        wanted.place = place
        if place.state == "ready" and not wanted.ready.done():
            wanted.ready.set_result(place)
        elif place.state in ("refused", "gone"):
            wanted.fail(PoolStartError(f"node {place.node}: {place.reason}"))

    def _ask_for_missing(self) -> None:
        missing = [node for node in self.nodes if not self._wanted[node].asked]
        if missing and self._ask is not None:
            ask = {
                "bundle": self._ask.bundle,
                "strategy": self._ask.strategy,
                "accelerator": self._ask.accelerator,
                "keeps_threads": self._ask.keeps_threads,
            }
            self._send({"do": "make", "nodes": missing, **ask})
            for node in missing:
                self._wanted[node].asked = True
            self._write_record()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _tell(self, what: str) -> None:
        for wanted in self._wanted.values():
            if not wanted.ready.done():
                wanted.tell(what)

    # Keepers.

    async def reach(
        self, node: int, place: NodeReport, asked: dict[str, Any], *, relayed: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the keeper of a node, which begins with what is asked of it."""
        door = self._known_door()
        if relayed:
            reader, writer = await door.again()
            writer.write(json.dumps({"do": "relay", "node": node}).encode() + b"\n")
        else:
            reader, writer = await door.open(place.address, place.port)
        writer.write(json.dumps(asked).encode() + b"\n")
        return reader, writer
