"""Tenants: what an agent has for each of its clients, and the clients that come and go.

A tenant has a control connection, executors and device processes. The node of an ordinary pool has
one tenant, and ends with it. The node of a kept pool keeps the tenant of a client that
leaves, for the next client: its executors are warm, and have entered the plugins' hooks. Device
processes end with their client, unless they hold values: those are kept for any client of the node.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from skyward.errors import ProtocolError
from skyward.wire.channel import Channel
from skyward.wire.messages import Members, Message
from skyward.worker.config import STALLED_SECONDS, AgentConfig
from skyward.worker.devices import DeviceProcesses, NodeDevices
from skyward.worker.node_log import NodeLog, Visits
from skyward.worker.supervision import ExecutorProcess, ExecutorProcesses

CHOSEN_SECONDS = 30.0
"""How long a client may take from choosing a tenant to connecting."""
KEEP_SECONDS = 10.0
"""How long a second client waits for the first one's word that the pool is kept.

The second one may have heard of the node before the node has heard that word.
"""

Starts = queue.SimpleQueue[Callable[[], None] | None]
"""The queue of functions that the agent's main thread calls."""


class Tenant:
    """What the agent has for one client."""

    def __init__(
        self,
        name: str,
        config: AgentConfig,
        starts: Starts,
        log: NodeLog,
        node_devices: NodeDevices,
    ) -> None:
        self.name = name
        self.identity: dict[str, str] = {}
        """Who the client is, if the agent was told."""
        self.pid = 0
        """The number of the client's process; 0 if it has not connected yet."""
        self.since = time.time()
        self.kept = False
        """Whether the client has left, and the next one may take its place."""
        self.started = False
        """Whether the executors have been started."""
        self.heard = time.monotonic()
        self.visits = Visits()
        """The clients that have used the executors."""

        def ended(executor: ExecutorProcess) -> None:
            log.add(executor, self.visits)

        self.executors = ExecutorProcesses(config, self.tell, starts, ended, log.changes)
        self.devices = DeviceProcesses(config, self.tell, starts, node_devices)
        self._starts = starts
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._unheard: list[Message] = []
        """What the client was told since it has sent nothing on its connection.

        It may have given the connection up before it was made, and is told anew on its next one.
        """
        self._has_sent = False
        """Whether the client has sent something on its connection."""
        self._cut_off = False
        """Whether a connection has ended that cannot come back."""
        self._group, self._members = "", frozenset[int]()

    @property
    def away(self) -> bool:
        """Whether the client has no connection now."""
        channel = self._channel
        return channel is None or not channel.connected

    @property
    def cut_off(self) -> bool:
        """Whether the client's process must have ended: its connection within the host has."""
        return self._cut_off and self._channel is None

    def start(self) -> None:
        """Have the executors started, once."""
        if not self.started:
            self.started = True
            self._starts.put(self.executors.start_all)

    def connect(self, channel: Channel) -> None:
        """Take the client's connection; an older one is closed."""
        channel.on_change(self._changed)
        with self._lock:
            old, self._channel = self._channel, channel
            self.heard = time.monotonic()
            self._has_sent = False
            for message in self._unheard:
                channel.send(message)
        if old is not None:
            old.close()

    def hear(self, channel: Channel) -> None:
        """Note that the client has sent something on this connection."""
        self.heard = time.monotonic()
        if not self._has_sent:
            with self._lock:
                if self._channel is channel:
                    self._has_sent = True
                    self._unheard.clear()

    def _changed(self, connected: bool) -> None:
        if connected:
            self.heard = time.monotonic()

    def disconnect(self, channel: Channel) -> None:
        """Note that a connection has ended."""
        channel.close()
        with self._lock:
            if self._channel is channel:
                self._channel = None
                self._cut_off = not channel.resumes

    def tell(self, message: Message) -> None:
        """Send to the client, now or when it connects; nobody is told while there is none."""
        with self._lock:
            if self.kept:
                return
            channel = self._channel
            if channel is None or not self._has_sent:
                self._unheard.append(message)
            if channel is None:
                return
        with contextlib.suppress(OSError):
            channel.send(message)

    def keep(self, group: str) -> None:
        """Keep the executors for the next client; they have entered the hooks of that name."""
        self._group = group
        self._members = frozenset(each.process.pid for each in self.executors.all())
        self.devices.close_all()
        with self._lock:
            self.kept = True
            channel, self._channel, self._unheard = self._channel, None, []
        if channel is not None:
            channel.close()

    def take_over(self) -> None:
        """Be there for a new client: tell it of the executors when it connects."""

        def welcome() -> None:
            with self._lock:
                self.kept, self._cut_off = False, False
                self.heard, self.since = time.monotonic(), time.time()

        self.executors.announce_again(self._group, self._members, welcome)

    def close(self) -> None:
        """End the executors and devices, and the connection."""
        self.executors.stop_restarting()
        self.devices.close_all()
        self.executors.close()
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.close()


class Tenants:
    """The tenants of one node."""

    def __init__(self, config: AgentConfig, starts: Starts) -> None:
        self._config, self._starts = config, starts
        self.log = NodeLog()
        self.node_devices = NodeDevices()
        """The device processes of all tenants, and those that are kept for the values they hold."""
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self.first = self._new(config.client)
        self.first.identity = dict(config.identity)
        self.first.visits.begin(config.client, self.first.identity)
        self._kept = threading.Event()
        self.idle_limit = 0.0
        """After how many seconds without a client the node ends; 0 if it does not."""
        self._idle_since: float | None = None
        self._looked = time.monotonic()
        self._named: dict[str, Tenant] = {config.client: self.first}
        self._chosen: dict[str, tuple[dict[str, str], float]] = {}
        self._closing: dict[threading.Thread, Tenant] = {}
        self.compute_pool = list(config.compute_pool)
        self.members: dict[int, dict[str, Any] | None] = {}
        """The nodes that came to the pool since this one began, and those that left, as None."""

    def _new(self, name: str) -> Tenant:
        return Tenant(name, self._config, self._starts, self.log, self.node_devices)

    @property
    def keeps(self) -> bool:
        """Whether the node is kept when its clients leave."""
        return self._kept.is_set()

    def keep(self, idle: float) -> None:
        """Stay when the clients leave, until the node was idle for so many seconds (0: always)."""
        with self._lock:
            self.idle_limit = idle
        self._kept.set()

    def note_members(self, message: Members) -> None:
        """Note nodes that have come, or left, for those who look at the pool."""
        try:
            came = {int(each["index"]): each for each in message.came}
        except (KeyError, TypeError, ValueError) as problem:
            raise ProtocolError(f"a client does not tell of nodes so: {problem!r}") from problem
        with self._lock:
            self.members = {**self.members, **dict.fromkeys(message.left), **came}
        self.log.changes.tell()

    @property
    def there(self) -> list[Tenant]:
        """All tenants."""
        with self._lock:
            return list(self._named.values())

    @property
    def executors(self) -> list[tuple[ExecutorProcess, Visits]]:
        """All executors, also those that are ended now, and whose they were when."""
        with self._lock:
            tenants = {*self._named.values(), *self._closing.values()}
        return [(each, tenant.visits) for tenant in tenants for each in tenant.executors.all()]

    def identities(self) -> dict[str, dict[str, str]]:
        """Who the clients are that there are and were, by name, as far as this node was told."""
        found = self.log.identities()
        for tenant in self.there:
            found |= tenant.visits.identities()
        return found

    @property
    def clients(self) -> list[Tenant]:
        """The tenants whose clients have not left."""
        return [tenant for tenant in self.there if not tenant.kept]

    # Clients come.

    def choose(self, identity: dict[str, str]) -> str:
        """A name for a new client's tenant, which no other client has had."""
        now = time.monotonic()
        with self._lock:
            self._chosen = {
                name: (who, at)
                for name, (who, at) in self._chosen.items()
                if now - at < CHOSEN_SECONDS
            }
            name = secrets.token_hex(8)
            self._chosen[name] = identity, now
        return name

    def enter(self, name: str, pid: int) -> Tenant:
        """The tenant of a client that connects, by its name and process number.

        A client that the node does not know gets the tenant that another one has left, or a new
        one, if the pool is kept.
        """
        if name and name not in self._named:
            self._kept.wait(KEEP_SECONDS)
        with self._lock:
            tenant = self._named.get(name)
            if tenant is None and not name:
                tenant = self.first
            if tenant is None:
                tenant = self._new_client(name)
            elif tenant.kept:
                tenant.take_over()
            elif tenant.pid not in (0, pid) and not tenant.away:
                raise ProtocolError("another client has this tenant")
            elif tenant.pid:
                # The client has given its connection up, and waits for all executors anew.
                tenant.executors.try_again()
            tenant.pid = pid
            if name in self._chosen:
                tenant.identity, _ = self._chosen.pop(name)
            tenant.visits.begin(tenant.name, tenant.identity)
        self.log.changes.tell()
        return tenant

    def _new_client(self, name: str) -> Tenant:
        if not self.keeps:
            raise ProtocolError("this pool has another client, and is not kept")
        left = [each for each in self._named.values() if each.kept]
        if left:
            tenant = left[-1]
            del self._named[tenant.name]
            self._named[name] = tenant
            tenant.name, tenant.identity = name, {}
            tenant.take_over()
            return tenant
        tenant = self._named[name] = self._new(name)
        tenant.executors.compute_pool[:] = self.compute_pool
        if not self._config.hooks_first:
            tenant.start()
        return tenant

    # Clients go.

    def leave(self, tenant: Tenant, group: str) -> None:
        """Keep the tenant of a client that leaves, unless another one waits already."""
        if not self.keeps:
            raise ProtocolError("this pool is not kept when its client leaves")
        with self._lock:
            others = [each for each in self._named.values() if each.kept and each is not tenant]
        tenant.keep(group)
        if others:
            self._end(tenant)
        self.log.changes.tell()

    def look(self, *, working: bool = False) -> bool:
        """End the tenants whose clients are gone; whether the whole node is to end.

        A node that is `working` on a job, or for somebody who is no client, is not idle.
        """
        now = time.monotonic()
        stood_still, self._looked = now - self._looked, now
        for tenant in self.there:
            if stood_still > STALLED_SECONDS:
                tenant.heard = min(now, tenant.heard + stood_still)
            tenant.executors.look()
            if not tenant.kept and self._is_gone(tenant, now):
                if not self.keeps:
                    return True
                self._end(tenant)
                self._have_one_kept()
        return self._is_idle(now, working)

    def _is_gone(self, tenant: Tenant, now: float) -> bool:
        if now - tenant.heard > self._config.orphan_timeout:
            return True
        if self.keeps:
            return tenant.cut_off
        pid = self._config.client_pid
        return bool(pid and tenant.away and not _is_alive(pid))

    def _is_idle(self, now: float, working: bool) -> bool:
        if not self.keeps or self.clients or working:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return bool(self.idle_limit) and now - self._idle_since > self.idle_limit

    @property
    def idle_seconds(self) -> float:
        """How long the node has had no client."""
        since = self._idle_since
        return 0.0 if since is None else time.monotonic() - since

    def _have_one_kept(self) -> None:
        """Have executors ready for the next client."""
        with self._lock:
            if any(each.kept for each in self._named.values()):
                return
            name = secrets.token_hex(8)
            tenant = self._named[name] = self._new(name)
            tenant.executors.compute_pool[:] = self.compute_pool
            tenant.kept = True
        tenant.start()

    def _end(self, tenant: Tenant) -> None:
        with self._lock:
            self._named = {n: each for n, each in self._named.items() if each is not tenant}
            self._closing = {each: of for each, of in self._closing.items() if each.is_alive()}
            # On a thread of its own: executors may take seconds to leave their hooks.
            closing = threading.Thread(target=tenant.close, name="skyward-tenant", daemon=True)
            self._closing[closing] = tenant
            closing.start()
        self.log.changes.tell()

    def stop_restarting(self) -> None:
        """Neither report nor replace executors that end from now on; safe in a signal handler."""
        # Without the lock, which the interrupted thread may hold.
        for tenant in list(self._named.values()):
            tenant.executors.stop_restarting()

    def close(self) -> None:
        """End all tenants, and wait until they have ended."""
        threads = [
            threading.Thread(target=each.close, name="skyward-tenant") for each in self.there
        ]
        for thread in threads:
            thread.start()
        for thread in [*threads, *self._closing]:
            thread.join()
        self.node_devices.close()
        self.log.close()

    def tell(self, message: Message, *, but: Tenant | None = None) -> None:
        """Send to all clients, but one."""
        for tenant in self.clients:
            if tenant is not but:
                tenant.tell(message)

    def described(self) -> list[dict[str, Any]]:
        """The clients as others see them."""
        return [
            {"client": each.name, **each.identity, "since": each.since, "away": each.away}
            for each in self.clients
        ]


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie has ended, and waits for its parent to notice."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class PoolLease:
    """The lock of a kept pool: at most one client changes it, ends it, or starts a node.

    The head's agent has it; each holder is one connection to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object | None = None
        self._holder: dict[str, Any] = {}
        self._starting: dict[int, object] = {}
        """The connections of the clients that start a node, by node."""
        self._started: dict[int, Any] = {}
        """What clients have told of the nodes that they have started."""

    def take(self, key: object, holder: dict[str, Any], *, force: bool) -> dict[str, Any] | None:
        """Take the lease for a connection; returns who has it if another connection does.

        With `force`, it is taken from the other connection.
        """
        with self._lock:
            if self._key is not None and self._key is not key and not force:
                return self._holder
            self._key, self._holder = key, holder
            return None

    def give_back(self, key: object) -> None:
        """Give the lease back, if this connection has it, and the nodes that it starts."""
        with self._lock:
            if self._key is key:
                self._key = None
            self._starting = {node: by for node, by in self._starting.items() if by is not key}

    def begin_start(self, key: object, node: int) -> tuple[bool, Any]:
        """Whether a connection may start a node now, and what is known of the last start of it."""
        with self._lock:
            mine = self._starting.setdefault(node, key) is key
            return mine, self._started.get(node)

    def end_start(self, key: object, node: int, facts: Any) -> None:
        """Note the facts of a node that a connection has started."""
        with self._lock:
            if self._starting.get(node) is key:
                self._started[node] = facts
                del self._starting[node]
