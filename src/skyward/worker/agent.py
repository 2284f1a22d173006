"""The agent: one process on each node; it starts and watches executors for its clients."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from skyward import context, kernel
from skyward.errors import PluginError, ProtocolError, SkywardError
from skyward.wire import messages
from skyward.wire.channel import Channel, ServiceConnection
from skyward.wire.handshake import PEER, Credentials, connect, my_versions, node_name
from skyward.wire.listener import Listener
from skyward.wire.messages import (
    CloseDevice,
    Detach,
    Hello,
    Keep,
    Kill,
    Measure,
    Members,
    Message,
    NodeEnded,
    OpenDevice,
    Ping,
    Prepare,
    Prepared,
    Shutdown,
    Topology,
)
from skyward.worker import detached, fork_server, hooks
from skyward.worker.config import AgentConfig
from skyward.worker.jobs import Jobs
from skyward.worker.kept_values import NamedValues
from skyward.worker.notices import Notices
from skyward.worker.services import ServedNode, Services, shown
from skyward.worker.tenants import PoolLease, Tenant, Tenants

LOOK_SECONDS = 0.25
HEAD = 0
USE_LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 60.0
"""How long a node that cannot reach node 0 waits for it, beyond its own idle time."""
_PROBLEMS = (OSError, EOFError, SkywardError)


class Agent:
    """Supervises one node for its clients; in most pools, there is one."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._began = time.monotonic()
        self._ending = False
        # Only the main thread starts processes: the kernel ends a child with its parent *thread*.
        self._starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tenants = Tenants(config, self._starts)
        self._jobs = Jobs(config, self._tenants.log.changes)
        self._hooks = hooks.Entered(self._jobs)
        self._entering = threading.Lock()
        self._entered: bytes | None = None
        """The plugins' hooks that were entered for the node."""
        self._values = NamedValues(config.folder, self._tenants.node_devices)
        self._notices = Notices(config.notice, self._tenants.tell)
        self._use = PoolUse(config, self._tenants)
        self._services = Services(
            ServedNode(config, self._tenants, self._jobs, PoolLease(), self._values)
        )
        credentials = Credentials(*config.credentials) if config.credentials else None
        where = config.place("agent.sock", for_peers=True)
        self._listener = Listener(
            where, config.pool, credentials, self._accept, versions=my_versions()
        )

    @property
    def endpoint(self) -> str:
        """Where the client connects."""
        return self._listener.endpoint

    def serve(self) -> None:
        """Start the executors, and watch over them until the node ends."""
        if not self._config.hooks_first:
            self._tenants.first.start()
        self._notices.start()
        while not self._ending:
            with contextlib.suppress(queue.Empty):
                start = self._starts.get(timeout=LOOK_SECONDS)
                if start is not None and not self._ending:
                    start()
            ttl = self._config.ttl
            if ttl is not None and time.monotonic() - self._began > ttl:
                # Whatever runs, and whatever the clients say.
                self.end()
            working = self._working
            over = self._tenants.look(working=working)
            if self._tenants.keeps:
                over = self._use.note(working=working, over=over, limit=self._tenants.idle_limit)
            if over:
                self.end()
        self._close()

    @property
    def _working(self) -> bool:
        """Whether the node works for somebody who is no client of it."""
        return self._jobs.working or self._services.used

    def end(self) -> None:
        """Make `serve` kill the executors and return; safe in a signal handler."""
        self._ending = True
        self._tenants.stop_restarting()
        self._starts.put(None)

    # The clients.

    def _accept(self, channel: Channel, hello: Hello) -> None:
        if hello.role != "control":
            with contextlib.closing(channel):
                self._services.serve(channel, hello.role)
            return
        try:
            tenant = self._tenants.enter(hello.client, hello.pid)
        except ProtocolError:
            channel.close()
            return
        try:
            tenant.connect(channel)
            while True:
                frame = channel.receive()
                tenant.hear(channel)
                self._handle(tenant, messages.decode(frame.kind, frame.meta))
        except (EOFError, OSError, ProtocolError):
            tenant.disconnect(channel)

    def _handle(self, tenant: Tenant, message: Message) -> None:
        match message:
            case Ping():
                tenant.tell(message)
            case Kill():
                tenant.executors.kill(message.worker, message.slot, message.pid, message.reason)
            case Topology():
                if not 0 <= message.worker < self._config.workers:
                    raise ProtocolError(f"worker {message.worker} is not on this node")
                tenant.executors.compute_pool[message.worker] = message.compute_pool
                self._tenants.compute_pool[message.worker] = message.compute_pool
            case Prepare():
                # On a thread of its own: commands may take minutes, and the client sends pings.
                threading.Thread(target=self._prepare, args=(tenant, message), daemon=True).start()
            case Measure():
                # Likewise: a GPU's driver may take seconds to wake up.
                threading.Thread(
                    target=self._measure, args=(tenant, message.number), daemon=True
                ).start()
            case OpenDevice():
                self._starts.put(functools.partial(tenant.devices.open, message))
            case CloseDevice():
                tenant.devices.close(message.number)
            case Keep():
                self._tenants.keep(message.idle)
            case Members():
                self._tenants.note_members(message)
            case Detach():
                self._tenants.leave(tenant, message.group)
            case Shutdown():
                who = tenant.identity
                by = shown({**who, "since": tenant.since}) if who else "another client"
                self._tenants.tell(NodeEnded(by), but=tenant)
                self.end()
            case _:
                raise ProtocolError(f"a client does not send {type(message).__name__} here")

    def _prepare(self, tenant: Tenant, prepare: Prepare) -> None:
        """Enter the plugins' hooks, then start the executors with the environment of the hooks.

        The hooks are entered for the node, once: other clients of it find them entered.
        """
        info = context.InstanceInfo.from_json(tenant.executors.compute_pool[0])
        problem = ""
        with self._entering:
            if self._entered != prepare.hooks:
                try:
                    self._hooks.enter(prepare.hooks, info)
                    self._entered = prepare.hooks
                except PluginError as failure:
                    problem = str(failure)
        tenant.tell(Prepared(problem))
        if not problem and self._config.hooks_first:
            tenant.start()

    def _measure(self, tenant: Tenant, number: int) -> None:
        tenant.tell(self._tenants.log.usage(number))

    def _close(self) -> None:
        self._listener.close()
        self._use.close()
        self._services.close()
        self._notices.close()
        self._tenants.close()
        fork_server.end()
        self._values.close()
        self._services.end()
        try:
            self._hooks.leave()
        except Exception:
            traceback.print_exc()


class PoolUse:
    """What one node of a kept pool tells node 0, and knows of it.

    Such a node does not end while another node of its pool is in use. Node 0 is where nodes learn
    of each other: a node in use holds a connection to its agent, which counts as use of node 0, and
    an idle node asks it for how long it has been idle before it ends.
    """

    def __init__(self, config: AgentConfig, tenants: Tenants) -> None:
        self._config, self._tenants = config, tenants
        self._working = False
        self._idle_limit = 0.0
        self._held: ServiceConnection | None = None
        self._silent_since: float | None = None
        self._may_end = False
        self._woken = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def note(self, *, working: bool, over: bool, limit: float) -> bool:
        """Note what the node does; whether it may end now, since no node of the pool is in use.

        `over` says that nobody has used this node for more than `limit` seconds.
        """
        if self._config.node == HEAD or not limit or not self._endpoints():
            return over
        if working != self._working:
            self._working = working
            self._woken.set()
        self._idle_limit = limit if over else 0.0
        if not over:
            self._may_end, self._silent_since = False, None
        if (working or over) and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="skyward-use", daemon=True)
            self._thread.start()
        return over and self._may_end

    def _endpoints(self) -> list[str]:
        """Where node 0 is; nowhere if the nodes of the pool cannot reach each other."""
        return context.InstanceInfo.from_json(self._tenants.compute_pool[0]).state.split()

    def _run(self) -> None:
        # Not on the agent's main thread: to connect may take seconds.
        while not self._closed:
            self._hold() if self._working else self._release()
            if limit := self._idle_limit:
                self._ask(limit)
            self._woken.wait(USE_LOOK_SECONDS)
            self._woken.clear()
        self._release()

    def _hold(self) -> None:
        """Have a connection that keeps node 0, and so all nodes, from ending."""
        try:
            if self._held is None:
                self._held = self._connected("use")
            self._held.ask("stay")
        except _PROBLEMS:
            # Once more in the next round.
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.close()

    def _ask(self, limit: float) -> None:
        try:
            with self._connected("idle") as head:
                idle = float(head.ask("idle"))
        except _PROBLEMS:
            now = time.monotonic()
            self._silent_since = now if self._silent_since is None else self._silent_since
            # It has ended, in most cases for idleness, too.
            self._may_end = now - self._silent_since > min(limit, PATIENCE_SECONDS)
        else:
            self._silent_since = None
            self._may_end = idle > limit

    def _connected(self, service: str) -> ServiceConnection:
        pool = self._config.pool
        hello = Hello(pool, f"{PEER}-service-{service}", pid=os.getpid())
        credentials = Credentials(*self._config.credentials) if self._config.credentials else None
        problem: Exception = ConnectionError(f"node {HEAD} is nowhere")
        for endpoint in self._endpoints():
            is_network = endpoint.startswith("tcp:")
            if is_network and credentials is None:
                continue
            try:
                proof = credentials if is_network else None
                channel, _ = connect(endpoint, hello, proof, node_name(pool, HEAD))
            except _PROBLEMS as failure:
                problem = failure
            else:
                return ServiceConnection(channel)
        raise problem

    def close(self) -> None:
        """Tell node 0 nothing any more."""
        self._closed = True
        self._woken.set()


def main() -> None:
    """Read the configuration, announce the endpoint, and serve.

    With `--detached`, the agent lives on when the process that started it ends.
    """
    gc.freeze()  # what was imported, for good
    gc.enable()
    apart = sys.argv[1:] == ["--detached"]
    told = sys.stdin.buffer.read() if apart else sys.stdin.buffer.readline()
    config = msgspec.json.decode(told, type=AgentConfig)
    if apart:
        detached.leave(Path(config.folder))
    os.chdir(config.working_directory)
    if apart:
        # Programs of the environment, such as compilers, are found by name.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        config.search_path += sys.path
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Who started the agent may ignore it: then nobody hears how a child has ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The agent has the image's environment too: plugins' hooks see it and may change it.
    if config.vcpus is not None:
        # More threads than processors stand in each other's way: 16 on 2 took eight times as long.
        threads = max(1, min(int(config.vcpus), kernel.processors()))
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not config.hooks_first:
        # Hooks change the agent, and what they change is inherited by what the agent starts.
        fork_server.begin("skyward.worker.executor")
    os.environ.update(config.env)
    agent = Agent(config)
    signal.signal(signal.SIGTERM, lambda *_: agent.end())
    announcement = msgspec.json.encode({"endpoint": agent.endpoint, "pid": os.getpid()})
    try:
        print(announcement.decode(), flush=True)
    except BrokenPipeError:
        # The client was killed meanwhile: nobody else knows of the folder.
        shutil.rmtree(config.folder, ignore_errors=True)
        raise
    if not apart:
        # The client reads the pipe only until the announcement.
        os.dup2(os.open(f"{config.folder}/agent.log", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    os.dup2(2, 1)
    agent.serve()
    # The client deletes the folder, too, unless it was killed.
    shutil.rmtree(config.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
