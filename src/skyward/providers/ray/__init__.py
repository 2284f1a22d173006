"""Ray: nodes as bundles of a Ray cluster, from inside it or from a laptop through its jobs API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from skyward import checks
from skyward.errors import ConfigurationError, PoolError, PoolStartError, UnreachableError
from skyward.providers import (
    Capabilities,
    Machine,
    Order,
    Remains,
    Request,
    gathered,
    owner,
)
from skyward.providers.allocation import SharedAllocation
from skyward.providers.piped import Kept
from skyward.providers.ray import programs, records
from skyward.providers.ray.driver import ANNOUNCED, FAILED, LONGEST_LINE, Streams, bridge
from skyward.providers.ray.programs import (
    METADATA,
    ChildProgram,
    DriverProgram,
    JobProgram,
    JobsApi,
)
from skyward.providers.ray.records import DriverAddress, Record
from skyward.wire.handshake import CLIENT, KEPT_LIFETIME, Authority

__all__ = ["Ray"]

_ADDRESS = re.compile(r"auto|local|https?://[^\s/]+(?:/\S*)?|[^\s/:]+:\d+")
_STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_DRIVER = "driver"
Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"]
LOOK_SECONDS = 0.15
"""How often the client asks for the driver's log until the driver listens."""
STATE_SECONDS = 1.0
"""How often it asks meanwhile whether the driver still runs."""
CONNECT_SECONDS = 3.0
PING_SECONDS = 5.0
AGAIN_SECONDS = 1.0
"""How long after a failed connection the next one is tried."""
END_SECONDS = 15.0
"""How long the driver may take to end in order."""
LISTED_SECONDS = 10.0
"""How long `find` waits for an existing driver to say which nodes it has."""
LOST_SECONDS = 2.0
"""How long a machine's end may take to be known after a connection to it failed."""


@dataclass(frozen=True)
class Ray:
    """Nodes in a Ray cluster: each is a bundle of a placement group with our agent in it.

    `address` is the dashboard's, "http://head:8265", and then no Ray is needed here; or, inside the
    cluster, "auto" or "host:port", as for `ray.init`. Left out, it is `RAY_API_SERVER_ADDRESS`,
    `RAY_ADDRESS`, or "auto". With `spread`, nodes go to different machines as far as there are
    enough; without, to as few as possible; or name a strategy of placement groups, such as
    "STRICT_SPREAD". `resources` are custom resources that each node needs besides the accelerators,
    the `vcpus` (1 if left out) and the `memory_gb` of the `Compute`.

    `python` names an interpreter on the machines that has skyward and all that is needed. `port` is
    the one port at which the driver listens, to forward it beside the dashboard's. `headers` go
    with requests to the dashboard; so do `RAY_JOB_HEADERS` and `RAY_AUTH_TOKEN`.

    >>> with sky.Compute(sky.Ray("http://head:8265"), nodes=2) as compute: ...
    """

    address: str | None = None
    _: KW_ONLY
    spread: bool | Strategy = True
    resources: Mapping[str, float] | None = None
    namespace: str | None = None
    python: str | None = None
    port: int | None = None
    headers: Mapping[str, str] | None = None
    direct: bool = True
    """Whether to try the nodes' own addresses before connections go through the driver."""
    autoscales: bool | None = None
    """Whether the cluster adds nodes by itself; if left out, the cluster is asked."""
    timeout: float = 1800.0
    """How many seconds a node may be pending."""

    name = "ray"
    capabilities = Capabilities(answers=True, collects=True, holds_keys=True, mounts_folders=False)

    def __post_init__(self) -> None:
        variables = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        usual = next((os.environ[each] for each in variables if os.environ.get(each)), "auto")
        address = usual if self.address is None else checks.text(self, "address", self.address)
        if not _ADDRESS.fullmatch(address):
            hint = "; ray:// is Ray's own client, which cannot start agents" * ("ray://" in address)
            raise checks.refused(
                self,
                {"address": address},
                f"give 'http://head:8265', 'auto' or 'head:6379'{hint}",
            )
        if self.spread not in (True, False, *_STRATEGIES):
            raise checks.refused(
                self, {"spread": self.spread}, f"choose True, False or {', '.join(_STRATEGIES)}"
            )
        for what in ("namespace", "python"):
            if (value := getattr(self, what)) is not None:
                checks.text(self, what, value)
        for what in ("resources", "headers"):
            if (value := getattr(self, what)) is not None and not isinstance(value, Mapping):
                raise checks.refused(self, {what: value}, f"not a mapping: {checks.kind(value)}")
        for resource, amount in (self.resources or {}).items():
            if resource in ("CPU", "GPU", "memory") or not isinstance(amount, (int, float)):
                raise checks.refused(
                    self,
                    {"resources": self.resources},
                    f"{resource!r}: {amount!r}; name custom resources with numbers, and write "
                    "Compute(vcpus=, memory_gb=, accelerator=) for the others",
                )
        if self.port is not None:
            port = checks.whole(self, "port", self.port, at_least=1)
            if port >= 1 << 16:
                raise checks.refused(self, {"port": port}, "write a port from 1 to 65535")
        if self.autoscales is not None:
            checks.flag(self, "autoscales", self.autoscales)
        checks.store(
            self,
            address=address,
            direct=checks.flag(self, "direct", self.direct),
            timeout=checks.seconds(self, "timeout", self.timeout),
        )

    def __repr__(self) -> str:
        return checks.shown(self)

    def __hash__(self) -> int:
        return hash((self.address, self.spread, self.namespace, self.python, self.port))

    @property
    def _cluster(self) -> str:
        assert self.address is not None
        return self.address

    @property
    def _strategy(self) -> str:
        if isinstance(self.spread, str):
            return self.spread
        return "SPREAD" if self.spread else "PACK"

    async def ping(self) -> str:
        """Ask the dashboard its version, or connect to the cluster's head."""
        if "://" in self._cluster:
            api = JobsApi(self._cluster, self.headers)
            version = await asyncio.to_thread(api.version)
            return f"Ray {version} at {api.address}"
        host, _, port = (await asyncio.to_thread(_head, self._cluster)).rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError as problem:
            raise UnreachableError(
                f"Ray({self._cluster!r}): nobody answers at {host}:{port}: {problem}; start the "
                "cluster, or give its dashboard's address, as in 'http://head:8265'"
            ) from problem
        writer.close()
        return f"the head of a cluster at {host}:{port}"

    def check(self, request: Request) -> None:
        """Refuse nothing: only the cluster knows."""

    def describe(self) -> Mapping[str, Any]:
        """Where the cluster is; `headers` may hold secrets, and `sky down` reads the variables."""
        return {
            "address": self.address,
            "spread": self.spread,
            "resources": None if self.resources is None else dict(self.resources),
            "namespace": self.namespace,
            "python": self.python,
            "port": self.port,
            "direct": self.direct,
            "autoscales": self.autoscales,
            "timeout": self.timeout,
        }

    def price(self, request: Request) -> float | None:
        """None: what a cluster's machines cost is unknown."""
        return None

    def allocate(self, pool: str) -> RayAllocation:
        """The bundles that the pool's driver has."""
        return RayAllocation(self, pool)

    def _program(self, pool: str, id: str = "") -> DriverProgram:
        if "://" in self._cluster:
            return JobProgram(JobsApi(self._cluster, self.headers), id)
        return ChildProgram(self._cluster, pool, id)

    def _ask(self, request: Request) -> dict[str, Any]:
        """What the driver is to ask Ray for, for each node."""
        bundle: dict[str, float] = {"CPU": request.vcpus or 1}
        if request.accelerator is not None:
            bundle["GPU"] = request.accelerator.count
        if request.memory_gb is not None:
            bundle["memory"] = int(request.memory_gb * 1e9)
        bundle.update(self.resources or {})
        return {
            "bundle": bundle,
            "strategy": self._strategy,
            # The model of the GPUs, which the cluster may know.
            "accelerator": "" if request.accelerator is None else request.accelerator.name,
            "keeps_threads": request.vcpus is not None,
        }

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        return f"ray at {self._cluster}"

    async def remains(self) -> Sequence[Remains]:
        """The drivers of all pools; those beside a client are known on its machine alone.

        A driver that ends takes its placement groups and actors with it.
        """
        if "://" in self._cluster:
            return await asyncio.to_thread(self._jobs_left)
        if ":" not in self._cluster and not records.pools():
            # Without a cluster there is nobody to ask, and "nothing" would be no answer.
            await asyncio.to_thread(_head, self._cluster)
        return await asyncio.to_thread(self._processes_left)

    def _jobs_left(self) -> list[Remains]:
        """The drivers that are jobs of the cluster, whoever submitted them."""
        jobs = JobsApi(self._cluster, self.headers).jobs_of_pools()
        return gathered(Remains.labelled(about, METADATA, f"job {job}") for job, about in jobs)

    def _processes_left(self) -> list[Remains]:
        """The drivers that are processes of this machine."""
        found = []
        for pool in records.pools():
            record = records.read(pool)
            # A job's name is one word; a process is known by its number and its start.
            if record is None or len(record.program.split()) != 2:
                continue
            if self._program(pool, record.program).why_over():
                continue
            process = record.program.split()[0]
            resources = (f"process {process}",)
            found.append(Remains(pool, record.name, owner(), record.pid, resources))
        return found

    def export_keys(self, pool: str) -> Mapping[str, str]:
        """The keys to talk to the pool's driver, which has to be a job of the cluster."""
        if "://" not in self._cluster:
            raise PoolError(
                f"Ray({self._cluster!r}): the driver of this pool is a process of this machine, so "
                "no other machine can use the pool; make it with the address of the cluster's "
                "dashboard, as in sky.Ray('http://head:8265')"
            )
        if (record := records.read(pool)) is None:
            raise PoolError(
                "the keys to the driver of this pool are not on this machine; export its record on "
                "the machine that made it"
            )
        return {_DRIVER: records.encode(record)}

    def import_keys(self, pool: str, keys: Mapping[str, str]) -> None:
        """Write the keys to the pool's driver down."""
        if _DRIVER in keys:
            records.write(pool, records.decode(keys[_DRIVER]))


def _head(cluster: str) -> str:
    """The address of a cluster's head; "auto" is what Ray has written down on this machine."""
    if ":" in cluster:
        return cluster
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    try:
        return (folder / "ray_current_cluster").read_text().strip()
    except OSError:
        raise ConfigurationError(
            "Ray(): no cluster runs on this machine; set RAY_API_SERVER_ADDRESS to the address of "
            "a dashboard, as in 'http://head:8265'"
        ) from None


# Machines.

_bridges: set[asyncio.Task[None]] = set()
"""What copies between connections to machines and the sockets that were given out."""


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
        """Where its actor listens."""
        return self.address, self.port


class RayMachine(Kept, Machine):
    """A bundle of the cluster as the machine of one node, with a keeper that runs its commands."""

    may_be_here = True
    # A program that ends before it has read all of its input breaks the connection, and what it
    # has written last may be lost.
    reads_rest = True

    def __init__(self, bundles: RayAllocation, node: int) -> None:
        self._bundles = bundles
        self._place = place = bundles.place(node)
        self.id = f"ray://{bundles.pool}/{node}"
        self.node, self.python = node, bundles.provider.python
        self.address = place.address
        self.direct = place.address if bundles.provider.direct and place.address else None
        self._relayed = False
        """Whether the actor can only be reached through the driver."""
        self._destroyed = False

    def __repr__(self) -> str:
        return f"RayMachine({self.id!r})"

    async def _connection(self, endpoint: str) -> Streams:
        """A connection to the machine's actor: direct if that works, else through the driver."""
        if not self._place.port or self._destroyed:
            raise UnreachableError(f"node {self.node} has no machine in the Ray cluster")
        problem: Exception | None = None
        for relayed in (self._relayed, True) if not self._relayed else (True,):
            try:
                found = await self._bundles.reach(self.node, self._place, endpoint, relayed=relayed)
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
            reason = self._bundles.place(self.node).reason
            return await self._bundles.why_over() or reason or "it has ended"
        return "it has ended"

    # Commands and connections.

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in the keeper's folder."""
        try:
            return await super().pipe(command)
        except OSError as problem:
            raise UnreachableError(await self.why_lost()) from problem

    async def why_lost(self) -> str:
        """How the machine has ended, if it has."""
        if not self._destroyed:
            await self._until_gone()
        return await self._why_unreachable("the connection was lost")

    async def _until_gone(self) -> None:
        """Give the driver time to say that the machine has ended, if it has."""
        deadline = asyncio.get_running_loop().time() + LOST_SECONDS
        while not await self._is_gone() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.1)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through the machine's actor, which copies what comes to the socket."""
        reader, writer = await self._connection(endpoint)
        try:
            answer = await reader.readline()
            if not answer.endswith(b"\n"):
                raise ConnectionResetError(f"{endpoint} on {self.id}: the connection ended")
            if refusal := answer.decode(errors="replace").strip():
                number, _, words = refusal.partition(" ")
                raise OSError(int(number), f"{endpoint} on {self.id}: {words}")
            mine, given = socket.socketpair()
            mine.setblocking(False)
            try:
                near = await asyncio.open_unix_connection(sock=mine)
            except BaseException:
                given.close()
                mine.close()
                raise
        except BaseException:
            writer.close()
            raise
        bridging = asyncio.ensure_future(bridge((reader, writer), near))
        _bridges.add(bridging)
        bridging.add_done_callback(_bridges.discard)
        return given

    # Its end.

    async def alive(self) -> bool:
        """Whether Ray still has the machine."""
        if self._destroyed or not self._bundles.has(self.node, self._place):
            return False
        if self._bundles.connected:
            return True
        if await self._bundles.why_over():
            return False
        raise UnreachableError("the driver in the Ray cluster is out of reach")

    async def destroy(self) -> None:
        """End the machine, and with the pool's last one the driver and all that it made."""
        if not self._destroyed:
            await self._bundles.end(self.node, self._place)
            self._destroyed = True


# The driver.


async def announcement(program: DriverProgram, cluster: str) -> DriverAddress:
    """Where the driver listens, from its log; raises with the reason if it does not run."""
    loop, asked = asyncio.get_running_loop(), 0.0
    while True:
        log = await asyncio.to_thread(program.log)
        for line in log.splitlines():
            if line.startswith(FAILED):
                raise programs.failure(json.loads(line[len(FAILED) :]), cluster)
            if line.startswith(ANNOUNCED):
                return msgspec.json.decode(line[len(ANNOUNCED) :], type=DriverAddress)
        if loop.time() > asked + STATE_SECONDS:
            asked = loop.time()
            if why := await asyncio.to_thread(program.why_over):
                last = log.strip().splitlines()[-3:]
                said = f"; it said:\n{chr(10).join(last)}" if last else ""
                raise PoolStartError(f"Ray({cluster!r}): {why}{said}")
        await asyncio.sleep(LOOK_SECONDS)


class DriverDoor:
    """Connects to a driver that has said where it listens, and to its actors."""

    def __init__(self, cluster: str, record: Record) -> None:
        assert record.driver is not None
        self._cluster, self._driver = cluster, record.driver
        # TLS with the driver that announced itself in the cluster, and with nobody else.
        self._tls: ssl.SSLContext = record.credentials.context(server=False)
        self._tls.check_hostname = False
        self._tls.load_verify_locations(cadata=record.driver.certificate)
        # The host of the dashboard comes first: its ports may be forwarded.
        named = urlsplit(cluster).hostname if "://" in cluster else "127.0.0.1"
        tried = [each for each in (named, *record.driver.addresses) if each]
        self._candidates = list(dict.fromkeys(tried))
        self._address = ""
        """The address at which the driver was reached."""

    async def connect(self) -> Streams:
        """A connection to the driver, at the first of its addresses that answers."""
        last: Exception = OSError("it has no address")
        for address in self._candidates:
            try:
                streams = await self.open(address, self._driver.port)
            except (OSError, TimeoutError) as problem:
                last = problem
                continue
            self._address = address
            return streams
        raise last

    async def again(self) -> Streams:
        """Another connection to the driver, where it was reached."""
        return await self.open(self._address, self._driver.port)

    async def open(self, address: str, port: int) -> Streams:
        """A connection to the driver or an actor."""
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(
                address, port, ssl=self._tls, server_hostname="skyward", limit=LONGEST_LINE
            )

    def unreachable(self, last: Exception) -> UnreachableError:
        """What to do about a driver that listens, but not for this machine."""
        where = " and ".join(f"{each}:{self._driver.port}" for each in self._candidates)
        return UnreachableError(
            f"Ray({self._cluster!r}): the driver runs in the cluster, but this machine cannot "
            f"connect to it at {where} ({last}); open the ports of the head node to this machine, "
            f"or have one forwarded beside the dashboard's: sky.Ray(..., port=8266), with "
            f"`ssh -L 8265:localhost:8265 -L 8266:localhost:8266 head`"
        )


class RayAllocation(SharedAllocation[RayMachine]):
    """The nodes of one pool, which its driver in the cluster has for it."""

    def __init__(self, provider: Ray, pool: str) -> None:
        super().__init__(pool)
        self.timeout = provider.timeout
        self.provider, self._cluster = provider, provider._cluster
        self._record: Record | None = None
        self._program = provider._program(pool)
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
        """How the driver, and actors, are reached."""

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
        return [RayMachine(self, node) for node in self.nodes]

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
        program = self.provider._program(self.pool, record.program)
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
        api = JobsApi(self._cluster, self.provider.headers)
        if jobs := await asyncio.to_thread(api.jobs_of, self.pool):
            self._record = records.Record("", "", "", program=jobs[0])
            self._program = self.provider._program(self.pool, jobs[0])
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
        self._program = self.provider._program(self.pool)
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
            "namespace": self.provider.namespace,
            "port": self.provider.port or 0,
            "autoscales": self.provider.autoscales,
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
                try:
                    await asyncio.wait(
                        {listening, changing},
                        timeout=PING_SECONDS,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                finally:
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
            self.give(node, RayMachine(self, node))
        elif place.state in ("refused", "gone"):
            self.refuse([node], PoolStartError(f"node {node}: {place.reason}"))

    def _ask_for_missing(self) -> None:
        missing = [node for node, wanted in self.wanted.items() if wanted.asked]
        missing = sorted(set(missing) - self._asked)
        if not missing:
            return
        asked = self.provider._ask(self.wanted[missing[0]].order.request)
        self._send({"do": "make", "nodes": missing, **asked})
        self._asked.update(missing)
        self._write_record()

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    # Machines.

    async def reach(self, node: int, place: NodeReport, endpoint: str, *, relayed: bool) -> Streams:
        """A connection to the actor of a node, which leads it to an endpoint there."""
        door = self._known_door()
        if relayed:
            reader, writer = await door.again()
            writer.write(json.dumps({"do": "relay", "node": node}).encode() + b"\n")
        else:
            reader, writer = await door.open(place.address, place.port)
        writer.write(json.dumps({"endpoint": endpoint}).encode() + b"\n")
        return reader, writer
