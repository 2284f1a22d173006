"""Services: what a node's agent does besides its tasks, on connections of their own.

A service is a module of this folder with a function `serve`, which answers on one channel until the
other end leaves. The agent imports the module when somebody asks for the service. If the module has
a function `end`, the agent calls it before it ends itself.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from skyward.errors import ProtocolError
from skyward.wire.asking import next_question
from skyward.wire.channel import Channel
from skyward.wire.identity import PEER
from skyward.wire.messages import Reply
from skyward.worker.config import AgentConfig
from skyward.worker.kept_calls import KeptCalls
from skyward.worker.kept_jobs import KeptJobs
from skyward.worker.lease import PoolLease
from skyward.worker.residents import DeviceChild
from skyward.worker.supervision import ExecutorProcess
from skyward.worker.tenants import Tenants
from skyward.worker.values import NamedValues

SERVICE = "service-"
FOR_CLIENTS = frozenset(
    {
        "about",
        "activity",
        "calls",
        "clients",
        "copying",
        "exec",
        "files",
        "forward",
        "jobs",
        "output",
        "page",
        "stacks",
        "usage",
        "values",
    }
)
"""The services for the pool's clients alone."""
USES = frozenset({"copying", "exec", "files", "jobs", "output", "use"})
"""The services whose open connections count as use of the node."""
FOR_NODES = frozenset({"idle", "state", "use"})
"""The services that processes of the pool's nodes may ask, too."""


@dataclass(frozen=True, slots=True)
class ServedNode:
    """What a service may use of its node."""

    config: AgentConfig
    tenants: Tenants
    """What the agent has for each of its clients."""
    jobs: KeptJobs
    on_main_thread: Callable[[Callable[[], None]], None]
    """Has the agent's main thread call a function: only that thread may start processes."""
    lease: PoolLease
    """Who may change the pool; of the head's agent."""
    values: NamedValues
    """What clients keep on the node by name."""
    calls: KeptCalls
    """The calls by name; of the head's agent."""
    runners: KeptJobs
    """The processes that run these calls."""

    @property
    def executors(self) -> list[ExecutorProcess]:
        """The executors of all clients, as they are now."""
        return [each for tenant in self.tenants.there for each in tenant.executors.all()]

    @property
    def devices(self) -> list[DeviceChild]:
        """The device processes, as they are now, also those without a client."""
        return self.tenants.residents.all()


class ServiceModule(Protocol):
    """A module with a service."""

    def serve(self, node: ServedNode, channel: Channel) -> None:
        """Answer until the other end leaves."""


class Services:
    """The connections to the services of one node."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node
        self._channels: dict[Channel, str] = {}
        """The open connections, and the services that they are for."""
        self._asked: dict[str, ServiceModule] = {}
        self._lock = threading.Lock()
        self._closed = False

    def serve(self, channel: Channel, role: str) -> None:
        """Answer on a channel until the other end leaves; the role names the service."""
        if SERVICE not in role:
            # Nothing that an agent knows: the connection ends.
            return
        asked_by_node = role.startswith(f"{PEER}-")
        name = role.removeprefix(f"{PEER}-").removeprefix(SERVICE)
        allowed = FOR_NODES if asked_by_node else FOR_CLIENTS | FOR_NODES
        try:
            if name not in allowed:
                next_question(channel)
                channel.send(Reply(problem=f"the agent has no service {name!r}"))
                return
            with self._lock:
                if self._closed:
                    return
                self._channels[channel] = name
            module: ServiceModule = importlib.import_module(f"{__name__}.{name}")
            self._asked[name] = module
            module.serve(self._node, channel)
        except (EOFError, OSError, ProtocolError):
            # The other end has left, or does not speak as a client does.
            pass
        finally:
            with self._lock:
                self._channels.pop(channel, None)

    @property
    def used(self) -> bool:
        """Whether somebody runs a command, copies files or follows output."""
        with self._lock:
            return not USES.isdisjoint(self._channels.values())

    def close(self) -> None:
        """End all connections and jobs."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.abort()
        self._node.jobs.close()
        self._node.calls.close()

    def end(self) -> None:
        """End what services have on this node, after its processes."""
        for module in list(self._asked.values()):
            if (end := getattr(module, "end", None)) is not None:
                end()
