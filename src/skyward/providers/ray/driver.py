"""The driver: the program in a Ray cluster that gets a pool's nodes from Ray, and keeps them.

Ray's own Python runs this file, as a job or beside the client, so it needs the standard library and
Ray alone. Nodes are asked for over one connection: lines of JSON, in TLS 1.3. Nodes that are asked
for together are the bundles of one placement group. In each bundle, an actor starts a keeper, and
listens for the client, who connects by itself, or through this process.

Ray's Python may be older than the client's: 3.9 is enough for this file.

The driver ends, and Ray removes all that it made, when it is told to, and when no client has been
connected for a while and no process of a node runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LEASE_SECONDS = 30.0
"""How long the driver stays without a client, if nothing runs on its nodes."""
LOOK_SECONDS, BUSY_LOOK_SECONDS = 0.5, 0.05
"""How often the driver looks at its actors, and how often while nodes are pending."""
SLOW_SECONDS = 3.0
"""After how long the client hears that an actor is being started."""
TRIES, AGAIN_SECONDS = 5, 2.0
"""How often an actor is started again that ends at once, and after how long."""
LONGEST_LINE = 1 << 20
CHUNK = 1 << 18
ANNOUNCED = "skyward driver "
"""What the line begins with by which the driver says where it listens."""
FAILED = "skyward failed "


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

# Connections: TLS 1.3 with the pool's certificates.


def context(authority: str, identity: str, *, server: bool) -> ssl.SSLContext:
    """TLS that accepts the pool's client, or the pool's actors, and nobody else."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    # One certificate is known to both ends: it says more than a host's name.
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authority)
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        path = os.path.join(folder, "identity.pem")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write(identity)
        made.load_cert_chain(path)
    return made


def listening(port: int) -> socket.socket:
    """A socket that listens at one port of every address, of IPv4 and IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


# TLS cannot end one direction alone: each piece of bytes has its length before it, and an empty one
# ends its direction.


async def read_piece(reader: asyncio.StreamReader) -> bytes:
    """The next piece; raises at the end of the connection."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    if length > CHUNK:
        raise ConnectionError(f"a piece of {length} bytes")
    return await reader.readexactly(length)


async def write_piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write a piece of at most `CHUNK` bytes."""
    writer.write(len(data).to_bytes(4, "big"))
    writer.write(data)
    await writer.drain()


async def bridge(far: Streams, near: Streams) -> None:
    """Copy between a connection's pieces and a socket, until both directions have ended.

    If one of the two breaks, the other is closed as well.
    """
    ended = asyncio.Event()

    async def inwards() -> None:
        while data := await read_piece(far[0]):
            near[1].write(data)
            await near[1].drain()
        near[1].write_eof()
        ended.set()
        # Whether the other end is still there is seen by reading alone.
        await far[0].read(1)

    async def outwards() -> None:
        while data := await near[0].read(CHUNK):
            await write_piece(far[1], data)
        await write_piece(far[1], b"")
        await ended.wait()

    copying = [asyncio.ensure_future(inwards()), asyncio.ensure_future(outwards())]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in copying:
            each.cancel()
        far[1].close()
        near[1].close()
        for done in await asyncio.gather(*copying, return_exceptions=True):
            if isinstance(done, Exception) and not isinstance(done, (OSError, EOFError)):
                raise done


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one end closes."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


# What resources are called.


def amount(name: str, value: float) -> str:
    """A number of a resource, for people."""
    if name == "memory" or name == "object_store_memory":
        return f"{value / 2**30:.3g} GiB"
    return f"{value:g}"


def shown(bundle: dict[str, float]) -> str:
    """A bundle for people: "2 CPU and 1 GPU"."""
    parts = [
        name.partition(":")[2]
        if name.startswith("accelerator_type")
        else f"{amount(name, n)} {name}"
        for name, n in bundle.items()
    ]
    return " and ".join(parts)


def listed(nodes: list[dict[str, float]], bundle: dict[str, float]) -> str:
    """What the nodes of a cluster have of what a bundle needs, equal nodes together."""
    kinds: dict[str, int] = {}
    for each in nodes:
        names = [name for name in ("CPU", "GPU", *bundle) if name in each]
        names += [name for name in each if name.startswith("accelerator_type")]
        kind = shown({name: each[name] for name in names}) or "nothing of it"
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{count} x ({kind})" for kind, count in kinds.items()) or "nothing"


def fits(bundle: dict[str, float], node: dict[str, float]) -> int:
    """How often a bundle fits into a node that is empty."""
    return min(int(node.get(name, 0) // value) for name, value in bundle.items() if value)


# What the cluster has.


def alive(ray: Any) -> list[dict[str, float]]:
    """The resources of each node of the cluster."""
    return [each["Resources"] for each in ray.nodes() if each["Alive"]]


def knows(nodes: list[dict[str, float]], model: str) -> bool:
    """Whether a node of the cluster says that it has GPUs of a model."""
    return any(f"accelerator_type:{model}" in each for each in nodes)


def typed(bundle: dict[str, float], model: str, nodes: list[dict[str, float]]) -> dict[str, float]:
    """The bundle with the GPU's model, if the cluster knows the models of its GPUs."""
    untyped = any(
        each.get("GPU") and not any(name.startswith("accelerator_type") for name in each)
        for each in nodes
    )
    if not model or (untyped and not knows(nodes, model)):
        return bundle
    return {**bundle, f"accelerator_type:{model}": 0.001}


def impossible(
    count: int, bundle: dict[str, float], strategy: str, nodes: list[dict[str, float]]
) -> str:
    """Why a cluster of these nodes can never have so many bundles; empty if it may."""
    room = [fits(bundle, each) for each in nodes]
    most = {
        "STRICT_SPREAD": sum(1 for each in room if each),
        "STRICT_PACK": max(room, default=0),
    }
    if most.get(strategy, sum(room)) >= count:
        return ""
    where = {"STRICT_SPREAD": ", each on a node of its own", "STRICT_PACK": ", all on one node"}
    return (
        f"the Ray cluster can never have {count} x {shown(bundle)}{where.get(strategy, '')}; it "
        f"does not grow by itself, and its nodes have {listed(nodes, bundle)}; ask for less, or "
        "add nodes"
    )


def waiting(ray: Any, bundle: dict[str, float]) -> str:
    """What a placement group waits for, in terms of the cluster's resources."""
    has, free = ray.cluster_resources(), ray.available_resources()
    parts = []
    for name in bundle:
        if not name.startswith("accelerator_type"):
            there = amount(name, has.get(name, 0))
            parts.append(f"{amount(name, free.get(name, 0))} of {there} {name} free")
    return f"waiting for Ray to reserve {shown(bundle)}: {', '.join(parts)}"


# Who the driver is.


def new_identity() -> str:
    """A key and a certificate of its own, in PEM; the key leaves this cluster never."""
    if program := shutil.which("openssl"):
        made = subprocess.run(
            [
                *(program, "req", "-x509", "-nodes", "-days", "400", "-subj", "/CN=skyward-driver"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
                *("-keyout", "-", "-out", "-"),
            ],
            capture_output=True,
            text=True,
        )
        if made.returncode == 0 and "PRIVATE KEY" in made.stdout:
            return made.stdout
    return identity_without_openssl()


def identity_without_openssl() -> str:
    """The same, with the package cryptography, which most of Ray's environments have."""
    import datetime

    try:
        x509: Any = importlib.import_module("cryptography.x509")
        hazmat = "cryptography.hazmat.primitives"
        ec: Any = importlib.import_module(f"{hazmat}.asymmetric.ec")
        hashes: Any = importlib.import_module(f"{hazmat}.hashes")
        serialization: Any = importlib.import_module(f"{hazmat}.serialization")
    except ImportError:
        raise RuntimeError(
            f"neither the program openssl nor the package cryptography is on "
            f"{socket.gethostname()}; install one of them there"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyward-driver")])
    now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=400))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return str(plain.decode() + certificate.public_bytes(pem).decode())


def certificate_of(identity: str) -> str:
    """The certificate in a PEM text that has the key, too."""
    found = re.search(
        r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", identity, re.DOTALL
    )
    assert found is not None
    return found[0]


# The cluster.


def grows(ray: Any) -> bool:
    """Whether the cluster adds nodes by itself: its autoscaler knows kinds of nodes to add.

    Without an autoscaler, Ray reports every node as a kind of its own, called node_ and its id.
    """
    kinds: set[str] = set()
    with contextlib.suppress(Exception):
        kv = importlib.import_module("ray.experimental.internal_kv")
        told = json.loads(kv._internal_kv_get("__autoscaling_status") or "{}")
        report = told.get("autoscaler_report") or {}
        kinds = {*(report.get("active_nodes") or {})}
        kinds |= set((report.get("node_type_mapping") or {}).values())
    if not kinds:
        with contextlib.suppress(Exception):
            sdk = importlib.import_module("ray.autoscaler.v2.sdk")
            status = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
            there = [*status.active_nodes, *status.idle_nodes, *status.pending_nodes]
            kinds = {each.ray_node_type_name for each in there}
    return any(not re.fullmatch(r"node_[0-9a-f]{20,}", kind) for kind in kinds)


def follow_authentication() -> None:
    """Have Ray authenticate as the raylet of this host does.

    Otherwise a program decides by whether the user has a token: if the cluster decided differently,
    the cluster's answers are refused, and its actors count as forgotten.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not (folder / "cmdline").read_bytes().split(b"\0")[0].endswith(b"/raylet"):
                continue
            found = re.search(rb"(?:^|\0)RAY_AUTH_MODE=([^\0]*)", (folder / "environ").read_bytes())
            os.environ.setdefault("RAY_AUTH_MODE", found[1].decode() if found else "disabled")
            return


# Nodes.


class NodeBundle:
    """A node that is to have a machine: a bundle of a placement group, and the actor in it."""

    def __init__(self, number: int, asked: dict[str, Any]) -> None:
        self.number, self.asked = number, asked
        self.group: Any = None
        self.bundle = 0
        self.actor: Any = None
        self.state = "pending"
        self.reason = ""
        self.told: dict[str, Any] = {}
        """Where its actor listens."""
        self.starting: Any = None
        self.watching: Any = None
        self.shown: dict[str, Any] = {}
        """What the clients were told last."""
        self.since = time.monotonic()
        self.tries = 0
        """How often its actor has ended before it started a keeper."""
        self.not_before = 0.0

    def described(self) -> dict[str, Any]:
        return {"node": self.number, "state": self.state, "reason": self.reason, **self.told}


class Driver:
    """The nodes of one pool."""

    def __init__(self, given: dict[str, Any], ray: Any, identity: str) -> None:
        self.given, self.ray, self.identity = given, ray, identity
        self.nodes: dict[int, NodeBundle] = {}
        self.groups: list[tuple[Any, int, dict[str, float]]] = []
        """Every placement group, with the number of its bundles and one of them."""
        self.clients: set[asyncio.StreamWriter] = set()
        self.heard = time.monotonic()
        self.over = asyncio.Event()
        self.changed = asyncio.Event()
        self.machines = 0
        self.made = 0
        """How many placement groups were made; no two may have the same name."""
        self.autoscales = bool(given.get("autoscales"))

    # Connections.

    async def serve(self) -> None:
        """Listen, say where, and go on until the end."""
        tls = context(self.given["authority"], self.identity, server=True)
        server = await asyncio.start_server(
            self.answer,
            sock=listening(int(self.given["port"])),
            ssl=tls,
            limit=LONGEST_LINE,
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.over.set)
        loop.add_signal_handler(signal.SIGINT, self.over.set)
        where = {
            "addresses": [self.ray.util.get_node_ip_address()],
            "port": server.sockets[0].getsockname()[1],
            "certificate": certificate_of(self.identity),
            "pid": os.getpid(),
            "ray": self.ray.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        }
        print(ANNOUNCED + json.dumps(where), flush=True)
        following = asyncio.ensure_future(self.follow())
        following.add_done_callback(lambda _: self.over.set())
        await self.over.wait()
        server.close()
        following.cancel()
        for client in self.clients:
            client.close()
        await loop.run_in_executor(None, self.remove_all)
        if not following.cancelled() and following.done():
            following.result()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client, or copy a connection to an actor."""
        try:
            asked = json.loads(await reader.readline())
            if asked["do"] == "relay":
                await self.relay(int(asked["node"]), reader, writer)
            else:
                await self.serve_client(asked, reader, writer)
        except (OSError, EOFError, ValueError, KeyError, asyncio.TimeoutError):  # noqa: UP041
            pass  # Whoever connected is gone, or is not our client.
        finally:
            self.clients.discard(writer)
            self.heard = time.monotonic()
            writer.close()

    async def serve_client(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.clients.add(writer)
        for node in self.nodes.values():
            self.tell(node, writer)
        writer.write(b'{"state": "listed"}\n')
        while True:
            self.heard = time.monotonic()
            if asked["do"] == "make":
                # Of a kept pool, nobody gives a lost machine back: its actor has its bundle.
                if former := [int(each) for each in asked["nodes"] if int(each) in self.nodes]:
                    await self.release(former)
                try:
                    self.make(asked)
                except Exception as problem:
                    for number in map(int, asked["nodes"]):
                        node = self.nodes.setdefault(number, NodeBundle(number, asked))
                        node.state, node.reason = "refused", said(problem)
            elif asked["do"] == "release":
                await self.release([int(each) for each in asked["nodes"]])
            elif asked["do"] == "end":
                self.over.set()
            line = await asyncio.wait_for(reader.readline(), LEASE_SECONDS)
            if not line:
                return
            asked = json.loads(line)

    async def relay(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy bytes between the client and an actor that the client cannot reach."""
        told = self.nodes[number].told
        tls = context(certificate_of(self.identity), self.identity, server=False)
        there, back = await asyncio.open_connection(told["address"], told["port"], ssl=tls)
        tasks = [
            asyncio.ensure_future(copy(reader, back)),
            asyncio.ensure_future(copy(there, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The client ends a connection only when it needs nothing more; an actor has said all.
            await writer.drain()
        finally:
            for task in tasks:
                task.cancel()
            back.close()

    def tell(self, node: NodeBundle, *writers: asyncio.StreamWriter) -> None:
        line = json.dumps(node.described()).encode() + b"\n"
        for writer in writers or tuple(self.clients):
            writer.write(line)

    # Nodes.

    def make(self, asked: dict[str, Any]) -> None:
        """Ask Ray for nodes: in bundles that are free, or else in a new placement group."""
        there = alive(self.ray)
        if not self.autoscales or knows(there, asked["accelerator"]):
            asked["bundle"] = typed(asked["bundle"], asked["accelerator"], there)
        wanted = [NodeBundle(int(each), asked) for each in asked["nodes"]]
        for node in wanted:
            self.nodes.pop(node.number, None)
        missing = [node for node in wanted if not self.reuse(node)]
        refusal = impossible(len(missing), asked["bundle"], asked["strategy"], there)
        if missing and refusal and not self.autoscales:
            for node in missing:
                node.state, node.reason = "refused", refusal
                self.nodes[node.number] = node
            self.changed.set()
            return
        # Bundles of one group cannot be given back one by one: nodes that are added have their own.
        together = [missing] if not self.groups else [[node] for node in missing]
        for nodes in filter(None, together):
            self.made += 1
            group = self.ray.util.placement_group(
                [asked["bundle"]] * len(nodes),
                strategy=asked["strategy"],
                name=f"skyward-{self.given['pool']}-{self.made}",
            )
            self.groups.append((group, len(nodes), asked["bundle"]))
            for bundle, node in enumerate(nodes):
                node.group, node.bundle = group, bundle
                # Only now, for another thread looks at those that are here.
                self.nodes[node.number] = node
        self.changed.set()

    def reuse(self, node: NodeBundle) -> bool:
        """Give a node a bundle that its last node has left."""
        taken = {(id(each.group), each.bundle) for each in self.nodes.values()}
        for group, count, bundle in self.groups:
            for index in range(count):
                if (id(group), index) not in taken and bundle == node.asked["bundle"]:
                    node.group, node.bundle = group, index
                    self.nodes[node.number] = node
                    return True
        return False

    def start(self, node: NodeBundle) -> None:
        """Start the actor of a node in its bundle, which Ray has reserved."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = dict(node.asked["bundle"])
        options = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "memory": bundle.pop("memory", None),
            "resources": bundle or None,
            "max_restarts": 0,
            "max_concurrency": 3,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                node.group, placement_group_bundle_index=node.bundle
            ),
        }
        pool, number = self.given["pool"], node.number
        # Ray sets that to the number of the bundle's CPUs, though nobody asked for so few.
        threads = [] if node.asked["keeps_threads"] else ["OMP_NUM_THREADS"]
        kept = {
            "name": f"sky.ray-{pool}-{number}.{os.getpid()}.{self.machines}",
            "pool": pool,
            "node": number,
            # Ray has given the bundle to others by then.
            "end": 0,
            "dropped": ["RAY_", "PYTHON", "SKYWARD_RAY", *threads],
        }
        self.machines += 1
        authority = self.given["authority"] + certificate_of(self.identity)
        actor = self.ray.remote(MachineActor).options(**options)
        node.actor = actor.remote(self.given["keeper"], authority, self.identity)
        node.starting = node.actor.start.remote(kept)
        node.since = time.monotonic()

    async def release(self, numbers: list[int]) -> None:
        """End the machines of nodes; their bundles stay with their group, or go with it."""
        ending = [self.nodes.pop(number) for number in numbers if number in self.nodes]
        await asyncio.get_running_loop().run_in_executor(None, self.end_machines, ending)
        for node in ending:
            node.state = "released"
            self.tell(node)

    def end_machines(self, nodes: list[NodeBundle]) -> None:
        """End actors, wait for that, and remove the groups that no node uses."""
        ends = []
        for node in nodes:
            if node.actor is not None:
                with contextlib.suppress(Exception):
                    ends.append(node.actor.end.remote())
        if ends:
            with contextlib.suppress(Exception):
                self.ray.wait(ends, num_returns=len(ends), timeout=5.0)
        for node in nodes:
            if node.actor is not None:
                with contextlib.suppress(Exception):
                    self.ray.kill(node.actor)
        used = {id(node.group) for node in self.nodes.values()}
        for kept in [each for each in self.groups if id(each[0]) not in used]:
            self.groups.remove(kept)
            with contextlib.suppress(Exception):
                self.ray.util.remove_placement_group(kept[0])

    def remove_all(self) -> None:
        """Leave nothing in the cluster."""
        ending = list(self.nodes.values())
        self.nodes.clear()
        self.end_machines(ending)

    # What becomes of them.

    async def follow(self) -> None:
        """Look at groups and actors until the end of the lease."""
        loop = asyncio.get_running_loop()
        while True:
            pending = any(node.state == "pending" for node in self.nodes.values())
            with contextlib.suppress(asyncio.TimeoutError):
                pause = BUSY_LOOK_SECONDS if pending else LOOK_SECONDS
                await asyncio.wait_for(self.changed.wait(), pause)
            self.changed.clear()
            for node in list(self.nodes.values()):
                await loop.run_in_executor(None, self.look, node)
                if self.nodes.get(node.number) is node:
                    self.tell_if_new(node)
            if not self.clients and time.monotonic() - self.heard > LEASE_SECONDS:
                busy = await loop.run_in_executor(None, self.is_busy)
                if not busy and not self.clients:
                    self.over.set()
                    return

    def tell_if_new(self, node: NodeBundle) -> None:
        if node.described() != node.shown:
            node.shown = node.described()
            self.tell(node)

    def look(self, node: NodeBundle) -> None:
        """Find out how far a node is; Ray is asked here, on another thread."""
        if node.state == "pending" and node.actor is None:
            if time.monotonic() < node.not_before:
                return
            if node.group.wait(0):
                self.start(node)
            else:
                hope = "; the cluster may grow" if self.autoscales else ""
                node.reason = waiting(self.ray, node.asked["bundle"]) + hope
        elif node.state in ("pending", "ready"):
            self.look_at_actor(node)

    def look_at_actor(self, node: NodeBundle) -> None:
        """See whether the actor has started its keeper, or has ended."""
        done, _ = self.ray.wait([node.watching or node.starting], timeout=0)
        try:
            if done and node.watching is None:
                node.told = self.ray.get(node.starting)
                node.state, node.reason = "ready", ""
                node.watching = node.actor.watch.remote()
            elif done:
                node.state, node.reason = "gone", str(self.ray.get(node.watching))
            elif node.watching is None and time.monotonic() - node.since > SLOW_SECONDS:
                node.reason = "its bundle is reserved, and Ray is starting an actor there"
        except Exception as problem:
            node.reason = said(problem)
            # For a moment, Ray takes the bundles of a node that it has lost for reserved.
            died = node.watching is None and isinstance(problem, self.ray.exceptions.ActorDiedError)
            if died and node.tries < TRIES:
                node.tries, node.not_before = node.tries + 1, time.monotonic() + AGAIN_SECONDS
                node.actor = None
                return
            node.state = "gone"
        if node.state == "gone":
            with contextlib.suppress(Exception):
                self.ray.kill(node.actor)

    def is_busy(self) -> bool:
        """Whether a process of a node still runs."""
        asked = [
            node.actor.is_busy.remote() for node in self.nodes.values() if node.state == "ready"
        ]
        answers, _ = (
            self.ray.wait(asked, num_returns=len(asked), timeout=10.0) if asked else ([], 0)
        )
        for each in answers:
            with contextlib.suppress(Exception):
                if self.ray.get(each):
                    return True
        return False


class MachineActor:
    """The actor in a bundle: it holds the pipe that keeps the keeper, and listens for the client.

    No method may be a coroutine: Ray would run all of them on one event loop.
    """

    def __init__(self, program: str, authority: str, identity: str) -> None:
        self.program, self.authority, self.identity = program, authority, identity
        self.keeper: dict[str, Any] = {"__name__": "skyward_keeper"}
        """What the keeper's program defines."""
        exec(program, self.keeper)
        self.process: Any = None

    def start(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Start the keeper, with the environment that Ray has given this actor."""
        ray = importlib.import_module("ray")
        code = (
            "import json,sys;program,kept=json.loads(sys.stdin.buffer.readline());"
            "made={'__name__':'skyward_keeper'};exec(program,made);made['keep_for_actor'](kept)"
        )
        self.node_folder = f"sky.{kept['pool']}.{kept['node']}"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code, kept["name"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        self.process.stdin.write(json.dumps([self.program, kept]).encode() + b"\n")
        self.folder = self.process.stdout.readline().decode().strip()
        self.process.wait()
        if not self.folder:
            raise RuntimeError(f"no keeper starts on {socket.gethostname()}; see Ray's logs")
        return {
            "address": ray.util.get_node_ip_address(),
            "port": self.listen(),
            "hostname": socket.gethostname(),
        }

    def listen(self) -> int:
        """Lead the client's connections to sockets of this host, on a thread; gives the port."""
        sock, tls = listening(0), context(self.authority, self.identity, server=True)
        keeper = f"unix:{self.folder}/s"
        loop = asyncio.new_event_loop()
        self.server = loop.run_until_complete(
            asyncio.start_server(
                lambda reader, writer: lead(keeper, reader, writer),
                sock=sock,
                ssl=tls,
                limit=LONGEST_LINE,
            )
        )
        threading.Thread(target=loop.run_forever, daemon=True).start()
        return int(sock.getsockname()[1])

    def is_busy(self) -> bool:
        """Whether a process of the machine runs."""
        return bool(self.keeper["processes_of"](self.folder))

    def watch(self) -> str:
        """Wait for the keeper's end; if it was killed, clear up after it."""
        self.process.stdout.read()
        self.keeper["clear"](self.folder, self.node_folder)
        return "its keeper has ended"

    def end(self) -> None:
        """Have the keeper end, and wait for it."""
        self.process.stdin.close()
        self.process.stdout.read()


async def lead(keeper: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Lead a connection to the endpoint of this host that its first line names.

    The answer is a line, which is empty unless it says why there is nothing.
    """
    try:
        endpoint = json.loads(await reader.readline())["endpoint"]
        try:
            near = await connected(keeper if endpoint == "keeper" else endpoint)
        except OSError as problem:
            writer.write(f"{problem.errno or 0} {problem.strerror}\n".encode())
            await writer.drain()
            return
        writer.write(b"\n")
        await bridge((reader, writer), near)
    except (OSError, EOFError, ValueError, KeyError):
        pass  # Whoever connected is gone, or is not our client.
    finally:
        writer.close()


async def connected(endpoint: str) -> Streams:
    """A connection to a socket of this host."""
    family, _, place = endpoint.partition(":")
    if family == "unix":
        return await asyncio.open_unix_connection(place)
    host, _, port = place.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def said(problem: BaseException) -> str:
    """What a failure says, in a line; of a failure in an actor, what happened there."""
    problem = getattr(problem, "cause", None) or problem
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    # After the actor's names and numbers, Ray says why it has ended.
    why = [line for line in lines if line.startswith("The actor is dead because")]
    return why[0] if why else f"{type(problem).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def main(given: dict[str, Any]) -> None:
    """Connect to the cluster, and serve the pool."""
    follow_authentication()
    try:
        ray: Any = importlib.import_module("ray")
        ray.init(
            address=given["address"],
            namespace=given["namespace"],
            log_to_driver=False,
            configure_logging=False,
        )
        if given.get("autoscales") is None:
            given["autoscales"] = grows(ray)
        identity = new_identity()
    except Exception as problem:
        print(FAILED + json.dumps(f"{type(problem).__name__}: {problem}"), flush=True)
        raise

    async def serve() -> None:
        await Driver(given, ray, identity).serve()

    asyncio.run(serve())
    ray.shutdown()
