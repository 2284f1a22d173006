"""The driver: the program in a Ray cluster that gets a pool's nodes from Ray, and keeps them.

Ray's own Python runs this file, as a job or beside the client, so it needs the standard library and
Ray alone. Nodes are asked for over one connection: lines of JSON, in TLS 1.3. Nodes that are asked
for together are the bundles of one placement group. In each bundle, an actor starts a keeper, to
which the client then connects by itself, or through this process.

Ray's Python may be older than the client's: 3.9 is enough for this file and the keeper's.

The driver ends, and Ray removes all that it made, when it is told to, and when no client has been
connected for a while and no process of a node runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from skyward.providers.ray import keeper, site

LEASE_SECONDS = 30.0
"""How long the driver stays without a client, if nothing runs on its nodes."""
LOOK_SECONDS, BUSY_LOOK_SECONDS = 0.5, 0.05
"""How often the driver looks at its actors, and how often while nodes are pending."""
SLOW_SECONDS = 3.0
"""After how long the client hears that an actor is being started."""
TRIES, AGAIN_SECONDS = 5, 2.0
"""How often an actor is started again that ends at once, and after how long."""
LONGEST_LINE = 1 << 20
ANNOUNCED = "skyward driver "
"""What the line begins with by which the driver says where it listens."""
FAILED = "skyward failed "


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
        """Where its keeper is."""
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
        tls = keeper.context(self.given["authority"], self.identity, server=True)
        server = await asyncio.start_server(
            self.answer,
            sock=keeper.listening(int(self.given["port"])),
            ssl=tls,
            limit=LONGEST_LINE,
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.over.set)
        loop.add_signal_handler(signal.SIGINT, self.over.set)
        where = {
            "addresses": [self.ray.util.get_node_ip_address()],
            "port": server.sockets[0].getsockname()[1],
            "certificate": site.certificate_of(self.identity),
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
        """Serve a client, or copy a connection to a keeper."""
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
                # Of a pool that stays, nobody gives a lost machine back: its actor has its bundle.
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
        """Copy bytes between the client and a keeper that the client cannot reach."""
        told = self.nodes[number].told
        tls = keeper.context(site.certificate_of(self.identity), self.identity, server=False)
        there, back = await asyncio.open_connection(told["address"], told["port"], ssl=tls)
        tasks = [
            asyncio.ensure_future(copy(reader, back)),
            asyncio.ensure_future(copy(there, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The client ends a connection only when it needs nothing more; a keeper has said all.
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
        there = site.alive(self.ray)
        if not self.autoscales or site.knows(there, asked["accelerator"]):
            asked["bundle"] = site.typed(asked["bundle"], asked["accelerator"], there)
        wanted = [NodeBundle(int(each), asked) for each in asked["nodes"]]
        for node in wanted:
            self.nodes.pop(node.number, None)
        waiting = [node for node in wanted if not self.reuse(node)]
        refusal = site.impossible(len(waiting), asked["bundle"], asked["strategy"], there)
        if waiting and refusal and not self.autoscales:
            for node in waiting:
                node.state, node.reason = "refused", refusal
                self.nodes[node.number] = node
            self.changed.set()
            return
        # Bundles of one group cannot be given back one by one: nodes that are added have their own.
        together = [waiting] if not self.groups else [[node] for node in waiting]
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
        label = f"ray-{self.given['pool']}-{node.number}.{os.getpid()}.{self.machines}"
        self.machines += 1
        kept = {
            "program": self.given["keeper"],
            "label": label,
            "node_folder": f"sky.{self.given['pool']}.{node.number}",
            "authority": self.given["authority"] + site.certificate_of(self.identity),
            "identity": self.identity,
            "keeps_threads": node.asked["keeps_threads"],
        }
        node.actor = self.ray.remote(MachineActor).options(**options).remote()
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
                grows = "; the cluster may grow" if self.autoscales else ""
                node.reason = site.waiting(self.ray, node.asked["bundle"]) + grows
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
    """The actor in a bundle: it starts the keeper, and holds the pipe that keeps it."""

    def start(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Start the keeper, with the environment that Ray has given this actor."""
        ray = importlib.import_module("ray")
        dropped = ("RAY_", "PYTHON", "SKYWARD_RAY")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        if not kept["keeps_threads"]:
            # Ray sets it to the number of the bundle's CPUs, though nobody asked for so few.
            environment.pop("OMP_NUM_THREADS", None)
        code = (
            "import json,sys;given=json.loads(sys.stdin.buffer.readline());"
            "made={'__name__':'skyward_keeper'};exec(given['program'],made);made['main'](given)"
        )
        self.kept = kept
        self.process: Any = None
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code, kept["label"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        given = {**kept, "environment": environment}
        self.process.stdin.write(json.dumps(given).encode() + b"\n")
        said = self.process.stdout.readline()
        self.process.wait()
        if not said:
            raise RuntimeError(f"no keeper starts on {socket.gethostname()}; see Ray's logs")
        self.told = json.loads(said)
        return {
            "address": ray.util.get_node_ip_address(),
            "port": self.told["port"],
            "hostname": socket.gethostname(),
        }

    def keeper(self) -> dict[str, Any]:
        """What the keeper's program defines."""
        made: dict[str, Any] = {"__name__": "skyward_keeper"}
        exec(self.kept["program"], made)
        return made

    def is_busy(self) -> bool:
        """Whether a process of the machine runs."""
        return bool(self.keeper()["marked"](self.kept["label"]))

    def watch(self) -> str:
        """Wait for the keeper's end; if it was killed, clear up after it."""
        self.process.stdout.read()
        clear = self.keeper()["clear"]
        clear(self.kept["label"], self.told["folder"], self.kept["node_folder"])
        return "its keeper has ended"

    def end(self) -> None:
        """Have the keeper end, and wait for it."""
        self.process.stdin.close()
        self.process.stdout.read()


def said(problem: BaseException) -> str:
    """What a failure says, in a line; of a failure in an actor, what happened there."""
    problem = getattr(problem, "cause", None) or problem
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    # After the actor's names and numbers, Ray says why it has ended.
    why = [line for line in lines if line.startswith("The actor is dead because")]
    return why[0] if why else f"{type(problem).__name__}: {lines[0] if lines else ''}".rstrip(": ")


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until one end closes."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()


def main(given: dict[str, Any]) -> None:
    """Connect to the cluster, and serve the pool."""
    site.follow_authentication()
    try:
        ray: Any = importlib.import_module("ray")
        ray.init(
            address=given["address"],
            namespace=given["namespace"],
            log_to_driver=False,
            configure_logging=False,
        )
        if given.get("autoscales") is None:
            given["autoscales"] = site.grows(ray)
        identity = site.new_identity()
    except Exception as problem:
        print(FAILED + json.dumps(f"{type(problem).__name__}: {problem}"), flush=True)
        raise

    async def serve() -> None:
        await Driver(given, ray, identity).serve()

    asyncio.run(serve())
    ray.shutdown()
