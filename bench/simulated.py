"""Simulated nodes: agents and executors of a thousand machines in one helper process.

They have real sockets and speak the wire protocol with TLS, and they do no work: an executor
answers each task at once, or after the seconds that the task's name says. Between executors nothing
moves but the news that a buffer has arrived. `Simulation` is the provider, in the client's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from skyward.calls.loop import Loop
from skyward.objects import encoding, payloads
from skyward.providers import Allocation, Capabilities, Machine, Order, Request
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame, FrameDecoder
from skyward.wire.handshake import Credentials, my_versions
from skyward.wire.link.link import Link
from skyward.wire.link.pair import Pair
from skyward.wire.messages import (
    KNOWN,
    STREAMED,
    Define,
    ExecutorUp,
    Fetch,
    Hello,
    Missing,
    Payload,
    Ping,
    Result,
    Run,
    Shutdown,
    Welcome,
)
from skyward.worker.config import AgentConfig

DELAYED = "wait_"
"""A task whose name begins so is answered after as many seconds as its name ends with."""


def address_of(node: int) -> str:
    """An address of the loopback that no other node has."""
    return f"127.9.{node // 250}.{node % 250 + 1}"


# The client's side.


@dataclass(frozen=True)
class Simulation:
    """A provider of simulated machines, which live in the process behind the socket `path`."""

    path: str

    name = "simulation"
    capabilities = Capabilities()

    def check(self, request: Request) -> None:
        """Any request is fine."""

    def describe(self) -> dict[str, str]:
        """The arguments."""
        return {"path": self.path}

    def price(self, request: Request) -> float | None:
        """They cost nothing."""
        return 0.0

    def allocate(self, pool: str) -> Allocation[Any]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> SimulatedMachine:
        """Make a machine, which is nothing yet."""
        return SimulatedMachine(self, order.node)

    async def find(self, pool: str) -> list[SimulatedMachine]:
        """The machines there are."""
        return [SimulatedMachine(self, node) for node in await self.ask(do="list")]

    async def ask(self, **request: Any) -> Any:
        """Ask the helper process."""
        reader, writer = await asyncio.open_unix_connection(self.path, limit=1 << 24)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            return json.loads(await reader.readline())
        finally:
            writer.close()

    def tell(self, **request: Any) -> Any:
        """Ask the helper process, and wait."""
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(self.path)
            end.sendall(json.dumps(request).encode() + b"\n")
            with end.makefile() as lines:
                return json.loads(lines.readline())


class SimulatedMachine(Machine):
    """A machine that exists in the helper process once its agent is started."""

    python = "/usr/bin/python3"

    def __init__(self, provider: Simulation, node: int) -> None:
        self._provider = provider
        self.node = node
        self.id = f"simulated-{node}"
        self.address = self.direct = address_of(node)

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Answer the scripts of the bootstrap, and start an agent."""
        said = output or (lambda data: None)
        if "skyward.worker.agent" in command:
            config = msgspec.json.decode(input, type=AgentConfig)
            config.address = self.address
            told = await self._provider.ask(do="start", config=msgspec.to_builtins(config))
            said(json.dumps(told).encode() + b"\n")
        elif b"tell removed yes" in input:
            await self._provider.ask(do="remove", nodes=[self.node])
            said(b"@sky removed yes\n")
        else:
            facts = {
                "hostname": f"simulated{self.node}",
                "cache": "/var/cache/skyward",
                "platform": "Linux x86_64 gnu",
                "python": self.python,
                "folder": f"/tmp/sky.simulated.{self.node}",
                "prepared": "yes",
            }
            said("".join(f"@sky {name} {fact}\n" for name, fact in facts.items()).encode())
        return 0

    async def dial(self, endpoint: str) -> socket.socket:
        """There is a network."""
        raise ConnectionRefusedError(f"{endpoint}: use the network")

    async def alive(self) -> bool:
        """Whether it was not killed."""
        return self.node in await self._provider.ask(do="list")

    async def destroy(self) -> None:
        """Remove it."""
        await self._provider.ask(do="remove", nodes=[self.node])


@contextlib.contextmanager
def simulation() -> Iterator[Simulation]:
    """A provider, and the helper process while the block runs."""
    with tempfile.TemporaryDirectory(prefix="sky-scale-") as folder:
        path = str(Path(folder, "helper.sock"))
        with subprocess.Popen(
            [sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as helper:
            assert helper.stdin is not None
            assert helper.stdout is not None
            try:
                helper.stdout.readline()
                yield Simulation(path)
            finally:
                # The helper ends when its standard input does, also if this process is killed.
                helper.stdin.close()


# The helper process.


class Executor:
    """A simulated executor: it holds buffers, and answers tasks."""

    def __init__(self, world: World, node: int) -> None:
        self._world = world
        self.node = node
        self.lost = False
        self.channel: Channel | None = None
        self.depth: dict[bytes, int] = {}
        """For each buffer that is here, over how many executors it came."""
        self.served: dict[bytes, int] = {}
        """For each buffer, to how many executors it was passed on."""
        self._coming: set[bytes] = set()
        self._waiting: dict[bytes, list[Executor]] = {}
        self._pending: list[Run] = []

    def read(self, channel: Channel, frame: Frame) -> None:
        """Take a frame from the client."""
        message = messages.decode(frame.kind, frame.meta)
        self.channel = channel
        if frame.body is None and frame.body_length:
            channel.read_body(frame, [memoryview(bytearray(frame.body_length))])
        match message:
            case Run() | Define():
                # A large frame is read on a thread of its own; the rest is for the loop's thread.
                self._world.loop.call_soon(lambda: self._take(message))
            case Fetch():
                self._fetch(message)

    def _take(self, message: Run | Define) -> None:
        for buffer in message.payload.buffers:
            if buffer.where == STREAMED and buffer.digest:
                self.arrive(buffer.digest, 0)
        if isinstance(message, Run):
            self._pending.append(message)
            self._answer()

    def _fetch(self, fetch: Fetch) -> None:
        source = self._world.executors.get(fetch.endpoint)
        for digest, _ in fetch.blobs:
            if digest not in self.depth:
                self._coming.add(digest)
                if source is None or not source.give(digest, self):
                    self._world.loop.call_soon(lambda digest=digest: self.miss(digest))

    def give(self, digest: bytes, asking: Executor) -> bool:
        """Pass a buffer on, now or when it has come; False if this executor is gone."""
        if self.lost:
            return False
        self.served[digest] = self.served.get(digest, 0) + 1
        if digest in self.depth:
            self._world.loop.call_soon(lambda: asking.arrive(digest, self.depth[digest] + 1))
        else:
            self._waiting.setdefault(digest, []).append(asking)
        return True

    def arrive(self, digest: bytes, depth: int) -> None:
        """Note that a buffer is here, and pass it on to those who wait for it."""
        self._coming.discard(digest)
        self.depth[digest] = depth
        for asking in self._waiting.pop(digest, ()):
            self._world.loop.call_soon(lambda asking=asking: asking.arrive(digest, depth + 1))
        self._answer()

    def miss(self, digest: bytes) -> None:
        """Note that a buffer does not come from where it should."""
        self._coming.discard(digest)
        self._answer()

    def end(self) -> None:
        """Be gone; who waits for a buffer from here does not get it."""
        self.lost = True
        for digest, waiting in self._waiting.items():
            for asking in waiting:
                self._world.loop.call_soon(lambda each=asking, name=digest: each.miss(name))

    def _answer(self) -> None:
        channel = self.channel
        while self._pending and channel is not None and not self.lost:
            run = self._pending[0]
            named = {each.digest for each in run.payload.buffers if each.where in (KNOWN, STREAMED)}
            if named & self._coming:
                return
            self._pending.pop(0)
            if missing := [digest for digest in named if digest not in self.depth]:
                channel.send(Missing(run.task, missing, [], False))
                continue
            _, is_delayed, seconds = run.name.rpartition(DELAYED)
            if is_delayed:
                self._world.loop.later(int(seconds), lambda run=run: self._result(run))
            else:
                self._result(run)

    def _result(self, run: Run) -> None:
        if self.channel is not None and not self.lost:
            payload, body = self._world.answer
            with contextlib.suppress(OSError):
                self.channel.send(Result(run.task, 1e-5, payload), body)


@dataclass
class Node:
    """A simulated node: its listening sockets, its executor and its connections."""

    config: AgentConfig
    context: ssl.SSLContext
    executor: Executor
    agent_end: socket.socket
    executor_end: socket.socket
    halves: dict[tuple[str, int, str], socket.socket] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        """Where the executor listens."""
        return f"tcp:{self.config.address}:{self.executor_end.getsockname()[1]}"


class World:
    """All simulated nodes."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.nodes: dict[int, Node] = {}
        self.executors: dict[str, Executor] = {}
        self._selector = selectors.DefaultSelector()
        self._versions = my_versions()
        packed = payloads.pack(encoding.encode(None), None)
        self.answer: tuple[Payload, list[Any]] = (packed.payload, packed.body)

    def serve(self, path: str) -> None:
        """Answer the provider, and greet the client's connections, until standard input ends."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.bind(path)
            asked.listen(4096)
            self._watch(asked, lambda: self._command(asked.accept()[0]))
            self._watch(sys.stdin, sys.exit)
            print("ready", flush=True)
            while True:
                for key, _ in self._selector.select():
                    with contextlib.suppress(OSError, EOFError, ssl.SSLWantReadError):
                        key.data()

    def _watch(self, end: Any, action: Callable[[], object]) -> None:
        self._selector.register(end, selectors.EVENT_READ, action)

    def _command(self, end: socket.socket) -> None:
        with end, end.makefile("rw") as lines:
            request = json.loads(lines.readline())
            answer = getattr(self, f"do_{request.pop('do')}")(**request)
            lines.write(json.dumps(answer) + "\n")

    # What the provider asks.

    def do_start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Start the agent of a node."""
        made = msgspec.convert(config, AgentConfig)
        assert made.credentials is not None
        ends = [socket.create_server((made.address, 0), backlog=16) for _ in range(2)]
        context = Credentials(*made.credentials).context(server=True)
        node = Node(made, context, Executor(self, made.node), *ends)
        self.nodes[made.node] = node
        self.executors[node.endpoint] = node.executor
        for end in ends:
            end.setblocking(False)
            self._watch(end, lambda end=end: self._accept(node, end))
        port = ends[0].getsockname()[1]
        return {"endpoint": f"tcp:{made.address}:{port}", "pid": os.getpid()}

    def do_list(self) -> list[int]:
        """The nodes there are."""
        return list(self.nodes)

    def do_remove(self, nodes: list[int]) -> int:
        """End nodes at once, as a power failure would, but for the ends of their connections."""
        found = [self.nodes.pop(index) for index in nodes if index in self.nodes]
        for node in found:
            node.executor.end()
            del self.executors[node.endpoint]
            for end in (node.agent_end, node.executor_end):
                self._selector.unregister(end)
                end.close()
            for channel in node.channels:
                self.loop.forget(channel)
        return len(found)

    def do_relayed(self) -> dict[str, float]:
        """How deep the last buffer went down, and how often one executor passed it on at most."""
        executors = [node.executor for node in self.nodes.values()]
        depths = [max(each.depth.values(), default=0) for each in executors]
        served = [max(each.served.values(), default=0) for each in executors]
        for each in executors:
            each.served.clear()
            each.depth.clear()
        return {"depth": max(depths), "served": max(served), "roots": depths.count(0)}

    def do_spent(self) -> float:
        """Seconds of processor time so far."""
        return time.process_time()

    # Greeting, as a listener does.

    def _accept(self, node: Node, listening: socket.socket) -> None:
        end, _ = listening.accept()
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secure = node.context.wrap_socket(end, server_side=True, do_handshake_on_connect=False)
        decoder = FrameDecoder()
        self._watch(secure, lambda: self._greet(node, secure, decoder))

    def _greet(self, node: Node, end: ssl.SSLSocket, decoder: FrameDecoder) -> None:
        try:
            end.do_handshake()
            data = end.recv(1 << 16)
            if not data:
                raise EOFError
            decoder.feed(data)
        except ssl.SSLWantReadError:
            return
        except (OSError, EOFError):
            self._selector.unregister(end)
            end.close()
            return
        frame = decoder.next()
        if frame is None:
            return
        self._selector.unregister(end)
        hello = messages.decode_as(Hello, frame.kind, frame.meta)
        link = node.links.get(hello.session)
        received = 0 if link is None else link.connections.suspend(hello.attempt)
        Channel(end).send(Welcome(self._versions, os.getpid(), "", received or 0))
        end.setblocking(True)
        self._pair(node, end, hello)

    def _pair(self, node: Node, end: ssl.SSLSocket, hello: Hello) -> None:
        opposite = "send" if hello.direction == "receive" else "receive"
        other = node.halves.pop((hello.session, hello.attempt, opposite), None)
        if other is None:
            node.halves[hello.session, hello.attempt, hello.direction] = end
            return
        sender, receiver = (end, other) if hello.direction == "receive" else (other, end)
        pair = Pair(sender, receiver, hello.received, hello.attempt)
        link = node.links.get(hello.session)
        if link is not None:
            link.install(pair, hello.attempt)
            return
        link = node.links[hello.session] = Link(pair, attempt=hello.attempt)
        channel = Channel.over(link)
        node.channels.append(channel)
        if hello.role == "data":
            take = node.executor.read
        else:
            channel.send(ExecutorUp(0, 0, os.getpid(), node.endpoint))
            take = functools.partial(self._control, node.config.node)
        self.loop.watch(
            channel, lambda frame: take(channel, frame), lambda problem: channel.close()
        )

    def _control(self, node: int, channel: Channel, frame: Frame) -> None:
        match message := messages.decode(frame.kind, frame.meta):
            case Ping():
                channel.send(message)
            case Shutdown():
                self.do_remove([node])


if __name__ == "__main__":
    threading.stack_size(256 << 10)
    World().serve(sys.argv[1])
