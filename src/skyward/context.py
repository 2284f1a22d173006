"""The context of a function: its place in the pool, and where its output goes.

In a notebook, output goes under the cell that asked for something.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import functools
import inspect
import io
import json
import os
import socket
import sys
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextvars import Context, ContextVar, copy_context
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, cast

from skyward.errors import ConfigurationError

VARIABLE = "COMPUTE_POOL"
POOL_VARIABLE = "SKYWARD_POOL"
"""Names the pool that a process runs on, in the environment of scripts on its nodes."""
PACKED_PEERS = 64
"""For more peers, the variable holds a compressed list: each node of a pool gets the whole list,
and Linux takes no variable of more than 128 KiB."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of the pool, with the address at which other nodes reach it."""

    node: int
    address: str


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """Where in the pool this process runs."""

    node: int = 0
    worker: int = 0
    total_nodes: int = 1
    workers_per_node: int = 1
    head_addr: str = "127.0.0.1"
    head_port: int = 0
    accelerators: int = 0
    accelerator: str | None = None
    peers: tuple[Peer, ...] = (Peer(0, "127.0.0.1"),)
    job_id: str = "local"
    hostname: str = ""
    place: int | None = None
    """This node's rank among the present nodes; None if it is the same as `node`.

    The two differ while a node with a lower number is missing.
    """
    state: str = ""
    """Where processes of this node reach the pool's shared state; empty if they cannot."""

    @property
    def total_workers(self) -> int:
        """Workers in the whole pool."""
        return self.total_nodes * self.workers_per_node

    @property
    def node_rank(self) -> int:
        """This node's rank among the present nodes."""
        return self.node if self.place is None else self.place

    @property
    def global_worker_index(self) -> int:
        """This worker's rank in the whole pool."""
        return self.node_rank * self.workers_per_node + self.worker

    @property
    def is_head(self) -> bool:
        """Whether this is the first worker of the first node."""
        return self.global_worker_index == 0

    @property
    def total_accelerators(self) -> int:
        """Accelerators in the whole pool; all nodes have the same number."""
        return self.accelerators * self.total_nodes

    def to_json(self) -> str:
        """The value of the `COMPUTE_POOL` variable."""
        peers: list[dict[str, Any]] | str = [asdict(peer) for peer in self.peers[:PACKED_PEERS]]
        if len(self.peers) > PACKED_PEERS:
            peers = _packed(self.peers)
        return json.dumps({**asdict(replace(self, peers=())), "peers": peers})

    @classmethod
    def from_json(cls, text: str) -> InstanceInfo:
        """Read the `COMPUTE_POOL` variable's value."""
        try:
            fields = json.loads(text)
            peers = fields["peers"]
            if isinstance(peers, str):
                fields["peers"] = _unpacked(peers)
            else:
                fields["peers"] = tuple(Peer(**peer) for peer in peers)
            return cls(**fields)
        except (ValueError, TypeError, KeyError, zlib.error) as problem:
            raise ConfigurationError(
                f"the {VARIABLE} variable does not describe a pool: {text[:80]!r} ({problem}); "
                "unset it to run outside of a pool"
            ) from None


_last_packed: tuple[tuple[Peer, ...], str] = ((), "")
"""The list that was packed last: a client tells all its nodes of the same peers."""


def _packed(peers: tuple[Peer, ...]) -> str:
    global _last_packed
    known, packed = _last_packed
    if known is not peers:
        plain = json.dumps([(peer.node, peer.address) for peer in peers]).encode()
        packed = base64.b64encode(zlib.compress(plain)).decode()
        _last_packed = peers, packed
    return packed


def _unpacked(packed: str) -> tuple[Peer, ...]:
    plain = zlib.decompress(base64.b64decode(packed, validate=True))
    return tuple(Peer(node, address) for node, address in json.loads(plain))


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> InstanceInfo:
    return InstanceInfo.from_json(text)


def instance_info() -> InstanceInfo:
    """This process's place in the pool; outside of one, a single local node."""
    text = os.environ.get(VARIABLE)
    return _parsed(text) if text else InstanceInfo(hostname=socket.gethostname())


class Output(str):
    """A line that a task wrote, with its stream, node and task."""

    stream: str
    node: int
    worker: int
    task: str

    def __new__(
        cls, text: str, stream: str = "stdout", node: int = 0, worker: int = 0, task: str = ""
    ) -> Output:
        self = super().__new__(cls, text)
        self.stream, self.node, self.worker, self.task = stream, node, worker, task
        return self


Listener = Callable[[Output], object]
Stream = Literal["stdout", "stderr"]
Only = Literal["head"] | Callable[[InstanceInfo], bool]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call's output goes: some streams are muted, the others go to a listener, if any."""

    muted: frozenset[str] = frozenset()
    listener: Listener | None = None
    unfinished: dict[str, str] = field(default_factory=dict, compare=False)
    """For each stream, the unfinished line that the listener has not got yet."""
    outer: Route | None = None
    """The route for the listener's own output; without it, the listener would get its own lines."""


class Capture(Protocol):
    """A worker's output capture, which applies routes to C code and threads of the task too."""

    def reroute(self, route: Route) -> None: ...


route: ContextVar[Route] = ContextVar("skyward_route", default=Route())  # noqa: B039
inside: ContextVar[bool] = ContextVar("skyward_inside_a_call", default=False)
pool_listeners: list[Listener] = []
own_pool: Callable[[], Any] | None = None
"""Finds the pool that runs the tasks of this process; None outside of workers."""
_capture: Capture | None = None


def install_capture(capture: Capture) -> None:
    """Called once by a worker process when it takes over its output streams."""
    global _capture
    _capture = capture


@contextlib.contextmanager
def _routed(new: Route) -> Iterator[None]:
    token = route.set(new)
    try:
        with contextlib.ExitStack() as streams:
            if _capture is not None:
                _capture.reroute(new)
            else:
                streams.enter_context(_local_streams)
            try:
                yield
            finally:
                for stream in (sys.stdout, sys.stderr):
                    if isinstance(stream, RoutedStream):
                        stream.finish()
    finally:
        old = token.old_value
        route.reset(token)
        if _capture is not None:
            _capture.reroute(old if isinstance(old, Route) else Route())


class RoutedStream(io.TextIOBase):
    """A text stream that looks at the call's route before it writes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.buffer = _Bytes(self)
        """For code that writes bytes."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        now = route.get()
        if self.name in now.muted:
            return len(text)
        if now.listener is None:
            return self.pass_on(text)
        *lines, rest = (now.unfinished.get(self.name, "") + text).split("\n")
        now.unfinished[self.name] = rest
        for line in lines:
            self._tell(now, line)
        return len(text)

    def pass_on(self, text: str) -> int:
        """Write to the stream that this one replaces."""
        raise NotImplementedError

    def finish(self) -> None:
        """Give the listener the last, unfinished line; the listener is about to be removed."""
        now = route.get()
        rest = now.unfinished.pop(self.name, "")
        if rest:
            self._tell(now, rest)

    def _tell(self, now: Route, line: str) -> None:
        assert now.listener is not None
        info = instance_info()
        token = route.set(now.outer or Route())
        try:
            now.listener(Output(line, self.name, info.node, info.worker))
        finally:
            route.reset(token)

    def writable(self) -> bool:
        return True


class _Bytes(io.RawIOBase):
    def __init__(self, stream: RoutedStream) -> None:
        self._stream = stream
        # A character may be split between two writes.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(self._decoder.decode(bytes(data)))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


class _LocalStream(RoutedStream):
    """Takes the place of the process's own stream while output of this process is rerouted."""

    def __init__(self, name: str, behind: Any) -> None:
        super().__init__(name)
        self.behind = behind

    def pass_on(self, text: str) -> int:
        return int(self.behind.write(text))

    def flush(self) -> None:
        self.behind.flush()

    def isatty(self) -> bool:
        return bool(self.behind.isatty())

    def fileno(self) -> int:
        return int(self.behind.fileno())


class _LocalStreams:
    """Replaces sys.stdout and sys.stderr by `_LocalStream`s while at least one route needs them."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.Lock()
        self._installed: list[_LocalStream] = []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            for name in ("stdout", "stderr"):
                behind = getattr(sys, name)
                # Somebody else may have replaced the stream since the first user came.
                if not isinstance(behind, _LocalStream):
                    stream = _LocalStream(name, behind)
                    self._installed.append(stream)
                    setattr(sys, name, stream)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for stream in reversed(self._installed):
                    if getattr(sys, stream.name) is stream:
                        setattr(sys, stream.name, stream.behind)
                self._installed.clear()


_local_streams = _LocalStreams()


def stdout(only: Only) -> Callable[[F], F]:
    """Let only some nodes print to stdout during the call.

    >>> @sky.function
    ... @sky.stdout(only="head")
    ... def train(): ...
    """
    return _only("stdout", only)


def stderr(only: Only) -> Callable[[F], F]:
    """Let only some nodes print to stderr during the call.

    >>> @sky.function
    ... @sky.stderr(only=lambda info: info.node < 2)
    ... def train(): ...
    """
    return _only("stderr", only)


def silent(function: F) -> F:
    """Print nothing, on any node, during the call.

    >>> @sky.function
    ... @sky.silent
    ... def train(): ...
    """
    return _muting(function, ("stdout", "stderr"), lambda info: False)


def _only(stream: Stream, only: Only) -> Callable[[F], F]:
    if only == "head":
        allowed: Callable[[InstanceInfo], bool] = is_head
    elif callable(only):
        allowed = only
    else:
        raise ConfigurationError(
            f"sky.{stream}(only={only!r}): give only='head' or a function of InstanceInfo, "
            "such as lambda info: info.node < 2"
        )
    return lambda function: _muting(function, (stream,), allowed)


def is_head(info: InstanceInfo) -> bool:
    """Whether a place in the pool is that of its first worker.

    >>> @sky.stdout(only=sky.is_head)
    ... def train(): ...
    """
    return info.is_head


def _muting(function: F, streams: tuple[str, ...], allowed: Callable[[InstanceInfo], bool]) -> F:
    rewrap = getattr(function, "with_body", None)
    if rewrap is not None:  # a sky.Function: the decorator goes around its body
        return cast(F, rewrap(_muting(function.body, streams, allowed)))  # type: ignore[attr-defined]

    return cast(F, _Muted(function, streams, allowed))


class _Muted:
    """A function whose calls print nothing to some streams; a class, so that it travels by name."""

    def __init__(
        self,
        function: Callable[..., Any],
        streams: tuple[str, ...],
        allowed: Callable[[InstanceInfo], bool],
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._streams, self._allowed = function, streams, allowed

    @property
    def __sky_constant__(self) -> tuple[Any, ...]:
        return self._function, self._allowed

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._quiet():
            value = self._function(*args, **kwargs)
        if inspect.isgenerator(value):
            return self._generate(value)
        if inspect.isasyncgen(value):
            return self._generate_async(value)
        return self._await(value) if inspect.iscoroutine(value) else value

    def _generate(self, items: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        # Only while the generator runs: between items the consumer may print.
        try:
            while True:
                with self._quiet():
                    try:
                        item = next(items)
                    except StopIteration as end:
                        return end.value
                yield item
        finally:
            with self._quiet():
                items.close()

    async def _generate_async(self, items: AsyncGenerator[Any, Any]) -> AsyncIterator[Any]:
        try:
            while True:
                with self._quiet():
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item
        finally:
            with self._quiet():
                await items.aclose()

    async def _await(self, value: Awaitable[Any]) -> Any:
        with self._quiet():
            return await value

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        if self._allowed(instance_info()):
            yield
            return
        old = route.get()
        with _routed(replace(old, muted=old.muted.union(self._streams))):
            yield


@contextlib.contextmanager
def redirect_output(callback: Listener) -> Iterator[None]:
    """Give output to a callback, line by line, instead of printing it.

    Inside a function, the callback gets the output of that call. On the client, it gets the output
    of the block itself, in the block's own thread or task, and the output that the pool forwards
    meanwhile, on the console's thread. The callback gets an `Output`: a `str` that also knows its
    stream, node and task. The callback's own output goes where output went before.

    If the callback fails for a line of the block itself, the error is raised where the line was
    printed. If it fails for a line that the pool forwards, the error is reported once, and the
    line is shown.

    >>> lines = []
    >>> with sky.redirect_output(lines.append):
    ...     print("here")
    ...     train() >> compute
    """
    if not callable(callback):
        raise ConfigurationError(f"redirect_output({callback!r}): give a function of one line")
    old = route.get()
    here = Route(old.muted, callback, outer=old)
    if _capture is not None or inside.get():
        with _routed(here):
            yield
        return
    pool_listeners.append(callback)
    try:
        with _routed(here):
            yield
    finally:
        pool_listeners.remove(callback)


def kernel_shell() -> Any:
    """IPython's shell, if this process is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    find = getattr(ipython, "get_ipython", None)
    shell = find() if find is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def asking_cell(shell: Any) -> Context:
    """A context in which output belongs to the cell that this thread runs.

    The kernel keeps the cell in context variables, which a thread of the user's does not inherit.
    There, output belongs to the cell that runs now.
    """
    context = copy_context()
    if threading.current_thread() is not threading.main_thread():
        # ipykernel has this from version 7 on; before, the newest cell gets the output.
        assign = getattr(shell, "set_thread_parent", None)
        if assign is not None:
            context.run(assign, shell.get_parent())
    return context


def cell_id(shell: Any) -> str:
    """What tells the cell of the current context from others."""
    header = getattr(shell.display_pub, "parent_header", None) or {}
    return str(header.get("msg_id", ""))
