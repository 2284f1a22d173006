"""The link to a pool's driver: nodes are asked for and given back, and the driver tells of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyward.errors import PoolError, PoolStartError, UnreachableError
from skyward.providers import Order, Request
from skyward.providers.allocation import SharedAllocation
from skyward.providers.ray import records
from skyward.providers.ray.door import DriverDoor, announcement
from skyward.providers.ray.jobs_api import JobsApi
from skyward.providers.ray.machine import NodeReport, RayMachine
from skyward.providers.ray.programs import DriverProgram
from skyward.providers.ray.records import Record
from skyward.wire.identity import CLIENT, KEPT_LIFETIME, Authority

PING_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""How long after a failed connection the next one is tried."""
END_SECONDS = 15.0
"""How long the driver may take to end in order."""
LISTED_SECONDS = 10.0
"""How long `find` waits for an existing driver to say which nodes it has."""


@dataclass(frozen=True)
class Ask:
    """What is asked of Ray for each node."""

    bundle: dict[str, float]
    strategy: str
    accelerator: str = ""
    """The model of the GPUs, which the cluster may know."""
    keeps_threads: bool = False


@dataclass(frozen=True)
class RaySettings:
    """Where the cluster is, and what a driver and its nodes are to be."""

    cluster: str
    headers: Mapping[str, str] | None
    program: Callable[[str, str], DriverProgram]
    """Makes a driver's program, of a pool; its id is empty for a new one."""
    given: Mapping[str, Any]
    """What a new driver has to know."""
    ask: Callable[[Request], Ask]
    python: str | None
    direct: bool
    timeout: float


class RayAllocation(SharedAllocation[RayMachine]):
    """The nodes of one pool, which its driver in the cluster has for it."""

    def __init__(self, pool: str, settings: RaySettings) -> None:
        super().__init__(pool)
        self.timeout = settings.timeout
        self._settings, self._cluster = settings, settings.cluster
        self._record: Record | None = None
        self._program = self._settings.program(self.pool, "")
        self._places: dict[int, NodeReport] = {}
        """What the driver told last of each node."""
        self._asked: set[int] = set()
        """The nodes that the driver was asked for."""
        self._writer: asyncio.StreamWriter | None = None
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._listed = asyncio.Event()
        """Set when the driver has told of all nodes that it has."""
        self._ended = ""
        """Why the driver does not run any more."""
        self._door: DriverDoor | None = None
        """How the driver, and keepers, are reached."""

    # Nodes.

    async def ask(self, nodes: Sequence[int]) -> None:
        """Have the driver ask Ray for bundles, in one placement group."""
        for node in nodes:
            self._asked.discard(node)
            self._places.pop(node, None)
        self._changed.set()
        self._begin_work()

    def _begin_work(self) -> None:
        if self._work is None or self._work.done():
            self._work = self.start(self._serve())

    def late(self, order: Order, seconds: float) -> PoolStartError:
        """What Ray says of a node that it does not have."""
        return PoolStartError(
            f"node {order.node}: Ray did not have it within {seconds:.0f} s: "
            f"{self.place(order.node).reason or 'it did not say why'}; wait longer with "
            "sky.Ray(timeout=...), or ask for less"
        )

    def place(self, node: int) -> NodeReport:
        """What the driver told last of a node."""
        return self._places.get(node, NodeReport())

    def has(self, node: int, place: NodeReport) -> bool:
        """Whether the machine at a place is there, and serves a node."""
        found = self.place(node)
        return not self._ended and found.state == "ready" and found.where == place.where

    @property
    def connected(self) -> bool:
        """Whether the driver is connected now."""
        return self._writer is not None

    async def why_over(self) -> str:
        """Why the driver does not run; empty if it does. Raises if nobody knows."""
        return self._ended or await asyncio.to_thread(self._program.why_over)

    async def find(self) -> list[RayMachine]:
        """The nodes that the pool's driver has, also one that another process has started."""
        if self._record is None and not self.wanted:
            await self._find_driver()
        return [self._machine(node) for node in self.nodes]

    def _machine(self, node: int) -> RayMachine:
        settings = self._settings
        return RayMachine(self, node, self.place(node), settings.python, direct=settings.direct)

    async def _find_driver(self) -> None:
        """Connect to the driver that the pool's record names, or know the one of the cluster."""
        if not await self._read_record():
            await self._find_without_keys()
            return
        assert self._record is not None
        self._begin_work()
        assert self._work is not None
        waiting = asyncio.ensure_future(self._listed.wait())
        try:
            await asyncio.wait(
                {waiting, self._work}, timeout=LISTED_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not self._listed.is_set():
            self.others.update(self._record.nodes or [0])

    async def _read_record(self) -> bool:
        """Whether the pool has a driver by its record; one that has ended is forgotten."""
        record = records.read(self.pool)
        if record is None or not record.program:
            return False
        program = self._settings.program(self.pool, record.program)
        if await asyncio.to_thread(program.why_over):
            with contextlib.suppress(PoolError):
                await asyncio.to_thread(program.forget)
            records.remove(self.pool)
            return False
        self._record, self._program = record, program
        return True

    async def _find_without_keys(self) -> None:
        """Know the pool's job, to end it: its keys are on another machine."""
        if "://" not in self._cluster:
            return
        api = JobsApi(self._cluster, self._settings.headers)
        if jobs := await asyncio.to_thread(api.jobs_of, self.pool):
            self._record = records.Record("", "", "", program=jobs[0])
            self._program = self._settings.program(self.pool, jobs[0])
            self.others.add(0)

    # The end.

    async def end(self, node: int, place: NodeReport) -> None:
        """Give a node back, unless another machine serves it by now."""
        if not place.port or place.where == self.place(node).where:
            await self.release(node)

    async def shrink(self, gone: Sequence[int]) -> None:
        """Have the driver give these nodes back."""
        if asked := [node for node in gone if node in self._asked]:
            self._asked.difference_update(asked)
            self._send({"do": "release", "nodes": asked})
        self._write_record()

    async def remove(self) -> None:
        """End the driver, wait for that, and forget the pool."""
        if self._record is None:
            await self._cancel_work()
            return
        connected = self.connected
        self._send({"do": "end"})
        if connected and self._work is not None:
            await asyncio.wait({self._work}, timeout=END_SECONDS)
        await self._cancel_work()
        if self._program.id:
            await asyncio.to_thread(self._end_program, not connected)
        records.remove(self.pool)
        self._forget_driver()
        self._ended = "its driver was told to end"

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

    def _forget_driver(self) -> None:
        self._program = self._settings.program(self.pool, "")
        self._record, self._door, self._ended = None, None, ""
        self._listed.clear()
        self._asked.clear()
        self._places.clear()

    async def close(self) -> None:
        """End the connection to the driver."""
        await super().close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_record(self) -> None:
        if self._record is not None and self._record.key:
            self._record.nodes = self.nodes
            records.write(self.pool, self._record)

    # The driver.

    @property
    def _called(self) -> str:
        """The name that the user gave the pool."""
        return next((wanted.order.name for wanted in self.wanted.values()), "")

    async def _serve(self) -> None:
        """Start the driver, and stay connected to it; whatever fails, the nodes hear of it."""
        try:
            if self._ended:
                await self._begin_again()
            if self._record is None and not await self._read_record():
                await self._start()
            while not self.closed:
                await self._talk(await self._connect())
                if not self.closed and (why := await self._why_over_now()):
                    self._ended = why
                    break
        except Exception as problem:
            self._ended = self._ended or str(problem)
            self.refuse(self.wanted, problem)
        else:
            why = self._ended or "it has ended"
            self.refuse(self.wanted, PoolStartError(f"Ray({self._cluster!r}): {why}"))

    async def _why_over_now(self) -> str:
        with contextlib.suppress(PoolError):
            return await asyncio.to_thread(self._program.why_over)
        return ""

    async def _begin_again(self) -> None:
        """Forget a driver that has ended before its time."""
        with contextlib.suppress(PoolError):
            await asyncio.to_thread(self._program.forget)
        self._forget_driver()

    async def _start(self) -> None:
        """Start the program, and wait until it says where it listens."""
        # A pool may stay for long.
        authority = Authority(self.pool, lifetime=KEPT_LIFETIME)
        mine = authority.issue(CLIENT)
        self._record = Record(
            mine.authority,
            mine.certificate,
            mine.key,
            nodes=self.nodes,
            pid=os.getpid(),
            name=self._called,
        )
        given = {
            **self._settings.given,
            "name": self._called,
            "pool": self.pool,
            "authority": mine.authority,
        }
        self.tell("starting a driver in the Ray cluster")
        starting = asyncio.ensure_future(asyncio.to_thread(self._program.start, self.pool, given))
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
                self.tell("the driver in the Ray cluster is out of reach; trying again")
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
        listening = asyncio.ensure_future(self._listen(reader))
        try:
            while not listening.done():
                self._changed.clear()
                if self._listed.is_set():
                    self._ask_for_missing()
                changing = asyncio.ensure_future(self._changed.wait())
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
        for node in self._asked - told:
            if node in self.waiting:
                self._asked.discard(node)
            self._places[node] = NodeReport(node, "gone", "the driver has not heard of it")

    def _take(self, place: NodeReport) -> None:
        node = place.node
        if not self._listed.is_set() and node not in self.wanted:
            # Another process made it.
            self.others.add(node)
            self._asked.add(node)
        if node not in self._asked:
            return
        before, self._places[node] = self.place(node), place
        if node not in self.waiting:
            return
        if place.reason and place.reason != before.reason and place.state == "pending":
            self.wanted[node].order.tell(place.reason)
        if place.state == "ready":
            self.give(node, self._machine(node))
        elif place.state in ("refused", "gone"):
            self.refuse([node], PoolStartError(f"node {node}: {place.reason}"))

    def _ask_for_missing(self) -> None:
        missing = [node for node, wanted in self.wanted.items() if wanted.asked]
        missing = sorted(set(missing) - self._asked)
        if not missing:
            return
        ask = self._settings.ask(self.wanted[missing[0]].order.request)
        self._send({"do": "make", "nodes": missing, **dataclasses.asdict(ask)})
        self._asked.update(missing)
        self._write_record()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

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
