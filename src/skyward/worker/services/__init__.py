"""Services: what a node's agent does besides its tasks, on connections of their own.

A service is a line of the table `SERVICES`, and functions that `answers` enters there: one for each
question, with the question's arguments as its own. One loop serves every connection: it checks the
arguments, calls the function, and sends what that returns, or why it failed. What services keep
between two connections is on the `ServedNode`.

The functions of small services are here; the agent imports the modules of the others when somebody
asks for them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import inspect
import os
import select
import socket
import threading
import time
import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from skyward.closing import Closing
from skyward.errors import PoolError, ProtocolError, SkywardError
from skyward.wire import messages
from skyward.wire.channel import Bytes, Channel, next_part, part_of, whole_of
from skyward.wire.handshake import PEER
from skyward.wire.messages import NodeEnded, Question, Reply, Size
from skyward.worker.changes import ChangeListener
from skyward.worker.config import AgentConfig
from skyward.worker.devices import DeviceChild
from skyward.worker.jobs import LIVE, RUNNER, Jobs
from skyward.worker.kept_values import NamedValues
from skyward.worker.process import ChildProcess
from skyward.worker.stacks import StackSource, described
from skyward.worker.supervision import ExecutorProcess
from skyward.worker.task_output import FOLDER, TaskOutputReader
from skyward.worker.tenants import PoolLease, Tenants

SERVICE = "service-"
LOOK_SECONDS = 0.1
"""How often a service that follows something looks at it."""
STACKS_AT_ONCE = 32
"""How many processes are asked for their stacks at the same time: each may take two seconds."""
LINES_AT_ONCE = 200
"""How many lines of tasks one reply has, at most."""
CONNECT_SECONDS = 5.0
"""How long a port of the loopback has to answer."""
_PIECE = 64 << 10

Own = TypeVar("Own", bound=Closing)
Function = TypeVar("Function", bound=Callable[..., Any])
Parts = Generator[tuple[Any, Sequence[Bytes]], None, Any]
"""An answer in parts, each a value and bytes; what the generator returns is the last reply."""


@dataclass(slots=True, eq=False)
class ServedNode:
    """What a service may use of its node."""

    config: AgentConfig
    tenants: Tenants
    """What the agent has for each of its clients."""
    jobs: Jobs
    """What goes on without a client."""
    lease: PoolLease
    """Who may change the pool; of the head's agent."""
    values: NamedValues
    """What clients keep on the node by name."""
    _own: dict[type[Closing], Closing] = field(init=False, default_factory=dict)
    _closed: bool = field(init=False, default=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    @property
    def executors(self) -> list[ExecutorProcess]:
        """The executors of all clients, as they are now."""
        return [each for tenant in self.tenants.there for each in tenant.executors.all()]

    @property
    def devices(self) -> list[DeviceChild]:
        """The device processes, as they are now, also those without a client."""
        return self.tenants.node_devices.all()

    def own(self, kind: type[Own]) -> Own:
        """What a service keeps on this node: made when it is first needed, closed with the node."""
        with self._lock:
            if self._closed:
                raise PoolError("the node is ending")
            found = self._own.get(kind)
            if found is None:
                found = self._own[kind] = kind()
            return typing.cast(Own, found)

    def close(self) -> None:
        """Close what services keep here."""
        with self._lock:
            self._closed = True
            own = list(self._own.values())
            self._own.clear()
        for each in own:
            each.close()


@dataclass(frozen=True, slots=True)
class Caller:
    """One who is connected to a service."""

    node: ServedNode
    channel: Channel
    leaving: contextlib.ExitStack
    """What is done when the caller leaves."""

    def next_part(self) -> tuple[Question, bytearray]:
        """Wait for the next part of a question, with its body."""
        return next_part(self.channel)

    def parts(self) -> Iterator[bytearray]:
        """The bytes that follow a question, up to a part without bytes."""
        while True:
            part, body = self.next_part()
            if part.what != "part":
                raise ProtocolError(f"a caller does not send {part.what!r} within a question")
            if not body:
                return
            yield body

    def reply(self, value: Any = None, *body: Bytes) -> None:
        """Send a part of the answer: more follows."""
        self.channel.send(Reply(value, more=True), body)

    def wait(self, seconds: float = LOOK_SECONDS, listener: ChangeListener | None = None) -> bool:
        """Wait for a moment, or for a change, and return whether there was one.

        `EOFError` if the caller has left, or says anything.
        """
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        if listener is not None:
            poll.register(listener.fileno(), select.POLLIN)
        found = poll.poll(seconds * 1000)
        if any(descriptor == self.channel.fileno() for descriptor, _ in found):
            self.channel.receive()
            raise ProtocolError("one who follows says nothing")
        return bool(found)

    def looks(self, seconds: float = LOOK_SECONDS) -> Iterator[None]:
        """Look at something on the node again and again: at each change, and after so long.

        `EOFError` if the caller has left, or says anything.
        """
        with contextlib.ExitStack() as held:
            listener = self.node.tenants.log.changes.listen()
            if listener is not None:
                held.enter_context(listener)
            while True:
                if listener is not None:
                    listener.clear()
                yield
                self.wait(seconds, listener)


class ServiceFunction:
    """A function of a service, and what it takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = list(inspect.signature(function).parameters.values())[1:]
        self.takes_body = any(each.name == "body" for each in self._parameters)
        """Whether the question brings bytes, however many."""

    @functools.cached_property
    def _arguments(self) -> type[msgspec.Struct]:
        hints = typing.get_type_hints(self._function, include_extras=True)
        fields: list[Any] = [
            (each.name, hints[each.name])
            if each.default is each.empty
            else (each.name, hints[each.name], each.default)
            for each in self._parameters
            if each.name != "body"
        ]
        made = msgspec.defstruct("Arguments", fields, forbid_unknown_fields=True)
        # Or msgspec ends the process if two threads are the first to read a struct that has others.
        msgspec.msgpack.Decoder(made)
        return made

    def __call__(self, caller: Caller, question: Question, body: bytearray) -> Any:
        """Answer a question; what it sends before the last reply is sent here."""
        told = msgspec.convert(question.arguments, self._arguments)
        arguments = {each: getattr(told, each) for each in told.__struct_fields__}
        if self.takes_body:
            arguments["body"] = body
        answer = self._function(caller, **arguments)
        if not isinstance(answer, Generator):
            return answer
        with contextlib.closing(answer):
            while True:
                try:
                    value, data = next(answer)
                except StopIteration as over:
                    return over.value
                caller.reply(value, *data)


@dataclass(frozen=True, slots=True)
class NodeService:
    """A line of the table: who may ask, and what."""

    module: str = ""
    """The module of this folder that has the functions; empty if that is this one."""
    for_nodes: bool = False
    """Whether processes of the pool's nodes may ask, and not its clients alone."""
    is_use: bool = False
    """Whether an open connection counts as use of the node."""
    functions: dict[str, ServiceFunction] = field(default_factory=dict)


SERVICES = {
    "about": NodeService(),
    "activity": NodeService("activity"),
    "clients": NodeService(),
    "exec": NodeService("exec", is_use=True),
    "files": NodeService("files", is_use=True),
    "forward": NodeService(),
    "idle": NodeService(for_nodes=True),
    "jobs": NodeService("jobs", is_use=True),
    "output": NodeService(is_use=True),
    "page": NodeService("page"),
    "stacks": NodeService(),
    "state": NodeService("state", for_nodes=True),
    "use": NodeService(for_nodes=True, is_use=True),
    "values": NodeService(),
}


def answers(service: str, what: str = "") -> Callable[[Function], Function]:
    """Enter a function in the table, for the question of its own name or another one.

    Its first parameter is the `Caller`, and the others are the question's arguments; one named
    `body` is the bytes that come with it. A generator answers in `Parts`.
    """

    def enter(function: Function) -> Function:
        SERVICES[service].functions[what or function.__name__] = ServiceFunction(function)
        return function

    return enter


class Services:
    """The connections to the services of one node."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node
        self._channels: dict[Channel, NodeService] = {}
        """The open connections, and the services that they are for."""
        self._lock = threading.Lock()
        self._closed = False

    def serve(self, channel: Channel, role: str) -> None:
        """Answer on a channel until the other end leaves; the role names the service."""
        if SERVICE not in role:
            # Nothing that an agent knows: the connection ends.
            return
        name = role.removeprefix(f"{PEER}-").removeprefix(SERVICE)
        service = SERVICES.get(name)
        if service is not None and role.startswith(PEER) and not service.for_nodes:
            service = None
        try:
            if service is None:
                next_part(channel)
                channel.send(Reply(problem=f"the agent has no service {name!r}"))
                return
            with self._lock:
                if self._closed:
                    return
                self._channels[channel] = service
            if service.module:
                importlib.import_module(f"{__name__}.{service.module}")
            with contextlib.ExitStack() as leaving:
                self._answer(service, Caller(self._node, channel, leaving))
        except (EOFError, OSError, ProtocolError):
            # The other end has left, or does not speak as a client does.
            pass
        finally:
            with self._lock:
                self._channels.pop(channel, None)

    def _answer(self, service: NodeService, caller: Caller) -> None:
        channel = caller.channel
        while True:
            frame = channel.receive()
            question = messages.decode_as(Question, frame.kind, frame.meta)
            function = service.functions.get(question.what)
            takes_any = function is not None and function.takes_body
            body = whole_of(channel, frame) if takes_any else part_of(frame)
            try:
                if function is None:
                    known = ", ".join(map(repr, sorted(service.functions)))
                    raise PoolError(f"this service does not answer {question.what!r}; ask {known}")
                reply = Reply(function(caller, question, body))
            except (ConnectionError, EOFError, ProtocolError):
                raise
            except Exception as problem:
                reply = Reply(problem=why(problem))
            channel.send(reply)

    @property
    def used(self) -> bool:
        """Whether somebody runs a command, copies files or follows output."""
        with self._lock:
            return any(service.is_use for service in self._channels.values())

    def close(self) -> None:
        """End all connections and jobs."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.abort()
        self._node.jobs.close()

    def end(self) -> None:
        """End what services have on this node, after its processes."""
        self._node.close()


def why(problem: Exception) -> str:
    """Why a service refuses or fails; of a file, with its path."""
    if isinstance(problem, OSError):
        where = problem.filename or ""
        told = {
            errno.ELOOP: "its links lead in a circle",
            errno.ENOSPC: f"no room on the disk: {problem.strerror}",
            errno.ENOENT: "there is no such file or folder",
        }.get(problem.errno or 0, problem.strerror or str(problem))
        return f"{where}: {told}" if where else told
    if isinstance(problem, SkywardError | ValueError):
        return str(problem)
    return f"{type(problem).__name__}: {problem}"


# The node itself.


@answers("about")
def facts(caller: Caller) -> dict[str, object]:
    """The facts of a node: its agent, its executors, its folder."""
    config = caller.node.config
    return {
        "pool": config.pool,
        "node": config.node,
        "pid": os.getpid(),
        "folder": config.folder,
        "time": time.time(),
        "executors": [
            {"worker": each.worker, "slot": each.slot, "pid": each.process.pid}
            for each in caller.node.executors
        ],
    }


@answers("use")
def stay(caller: Caller) -> None:
    """A node of the pool that is in use stays connected, so that node 0 does not end."""


@answers("idle")
def idle(caller: Caller) -> float:
    """For how many seconds nobody has used this node."""
    return caller.node.tenants.idle_seconds


@answers("stacks")
def stacks(caller: Caller) -> list[dict[str, object]]:
    """Where every thread of the node's executors and device processes is."""
    node = caller.node
    asked = [
        functools.partial(_look, "executor", each.worker, each.slot, each.process, each.stacks)
        for each in node.executors
        if each.announced and not each.process.ended
    ]
    asked += [
        functools.partial(_look, each.kind, -1, 0, each.process, each.stacks)
        for each in node.devices
        if each.announced
    ]
    if not asked:
        return []
    with ThreadPoolExecutor(min(STACKS_AT_ONCE, len(asked)), "skyward-stacks") as threads:
        return list(threads.map(lambda look: look(), asked))


def _look(
    kind: str, worker: int, slot: int, process: ChildProcess, source: StackSource
) -> dict[str, object]:
    place = {"kind": kind, "worker": worker, "slot": slot, "pid": process.pid}
    return place | described(source.look(process))


@answers("output")
def show(caller: Caller, tail: Size | None = None, follow: bool = False) -> Parts:
    """What tasks have written, oldest first: the last lines, or all; with `follow` what comes."""
    reader = TaskOutputReader(Path(caller.node.config.folder, FOLDER), tail)
    while True:
        lines = reader.next_lines()
        for start in range(0, len(lines), LINES_AT_ONCE):
            batch = lines[start : start + LINES_AT_ONCE]
            yield [msgspec.to_builtins(each) for each in batch], ()
        if not follow:
            return []
        caller.wait()


# Clients: who is attached to a kept pool, and who may change it; the head node is asked.


@answers("clients")
def choose(caller: Caller, identity: dict[str, str]) -> str:
    """A name for a new client."""
    return caller.node.tenants.choose(identity)


@answers("clients")
def who(caller: Caller) -> dict[str, Any]:
    """Who uses the pool, and for how long nobody has."""
    node = caller.node
    return {
        "clients": _clients(node),
        "calls": [
            {"name": call.id, "by": call.by}
            for call in node.jobs.all(("call",))
            if call.state in LIVE
        ],
        "idle": node.tenants.idle_seconds,
        "kept": node.tenants.keeps,
    }


def _clients(node: ServedNode) -> list[dict[str, Any]]:
    """The clients that are people's: the calls by name stand for the one that runs them."""
    runner = f"job {RUNNER}-"
    return [
        each for each in node.tenants.described() if not each.get("command", "").startswith(runner)
    ]


@answers("clients")
def ending(caller: Caller, identity: dict[str, Any]) -> None:
    """Tell the clients that the node will be ended, and by whom: they shall not start it again."""
    caller.node.tenants.tell(NodeEnded(shown({**identity, "since": time.time()})))


@answers("clients")
def lock(caller: Caller, identity: dict[str, Any], client: str, force: bool) -> None:
    """Take the lease until the caller leaves.

    Without `force`, only if nobody but the asking client is attached.
    """
    node, channel = caller.node, caller.channel
    holder = node.lease.take(channel, {**identity, "since": time.time()}, force=force)
    if holder is not None:
        raise PoolError(f"{shown(holder)} is changing it")
    caller.leaving.callback(node.lease.give_back, channel)
    others = [each for each in _clients(node) if each["client"] != client]
    if others and not force:
        node.lease.give_back(channel)
        raise PoolError(f"in use by {', '.join(shown(each) for each in others)}")


@answers("clients")
def start(caller: Caller, node: int) -> dict[str, Any]:
    """Let one client at a time start a node that several have lost."""
    lease = caller.node.lease
    caller.leaving.callback(lease.give_back, caller.channel)
    granted, facts = lease.begin_start(caller.channel, node)
    return {"granted": granted, "facts": facts}


@answers("clients")
def started(caller: Caller, node: int, facts: Any) -> None:
    """Note the facts of a node that the caller has started."""
    caller.node.lease.end_start(caller.channel, node, facts)


def shown(identity: dict[str, Any]) -> str:
    """A client, for people: "ann@laptop, process 4711 (python train.py), since 14:03"."""
    where = f"{identity.get('user', '?')}@{identity.get('host', '?')}"
    since = time.strftime("%H:%M", time.localtime(float(identity.get("since", 0.0))))
    command = f" ({identity['command']})" if identity.get("command") else ""
    return f"{where}, process {identity.get('pid', '?')}{command}, since {since}"


# Values: objects that clients keep on a node by name, to find them again after attaching.


@answers("values")
def begin(caller: Caller) -> tuple[int, str]:
    """A number and a path for a value; discarded when the caller leaves, unless it has a name."""
    number, path = caller.node.values.begin()
    caller.leaving.callback(caller.node.values.give_up, number)
    return number, path


@answers("values")
def finish(
    caller: Caller, number: int, name: str, kind: str, pid: int, numbers: list[int], bytes: int
) -> int:
    """Give a value its name; returns its size."""
    return caller.node.values.finish(number, name, kind, pid, numbers, bytes)


@answers("values")
def find(caller: Caller, name: str) -> dict[str, Any] | None:
    """Where the value of a name is; it stays as it is until the caller leaves."""
    values = caller.node.values
    value = values.hold(name)
    if value is None:
        return None
    caller.leaving.callback(values.release, value)
    values.want(value)
    pid = value.tensors.process.process.pid if value.tensors is not None else 0
    return value.described(name) | {"path": value.path, "size": value.size, "pid": pid}


@answers("values", "list")
def list_values(caller: Caller) -> list[dict[str, Any]]:
    """All values."""
    return [each.described(name) for name, each in caller.node.values.all().items()]


@answers("values")
def forget(caller: Caller, name: str) -> bool:
    """Discard the value of a name; whether there was one."""
    return caller.node.values.forget(name)


# Forward: bytes between a client and a port of this node's loopback.


@answers("forward")
def connect(caller: Caller, port: Annotated[int, msgspec.Meta(ge=1, le=65535)]) -> None:
    """Carry the bytes of one connection until the client leaves.

    Then "bytes" come from the client, and replies with bytes go back; one without bytes is the end
    of its direction.
    """
    try:
        end = socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS)
    except OSError as problem:
        raise PoolError(f"nothing answers at port {port} of the node: {problem}") from None
    end.settimeout(None)
    caller.reply()
    back = threading.Thread(
        target=_carry_back, args=(end, caller), name="skyward-forward", daemon=True
    )
    back.start()
    try:
        _carry_there(caller, end)
    finally:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        back.join()
        end.close()


def _carry_there(caller: Caller, end: socket.socket) -> None:
    while True:
        part, body = caller.next_part()
        if part.what != "bytes":
            raise ProtocolError(f"a client does not send {part.what!r} to a forwarded port")
        # The server may read no more; its answer still goes back.
        with contextlib.suppress(OSError):
            if body:
                end.sendall(body)
            else:
                end.shutdown(socket.SHUT_WR)


def _carry_back(end: socket.socket, caller: Caller) -> None:
    # The client has left, or the server: the other thread notices the first, too.
    with contextlib.suppress(OSError):
        data = b""
        with contextlib.suppress(ConnectionError):
            while data := end.recv(_PIECE):
                caller.reply(None, data)
        caller.channel.send(Reply())
