"""Use of a whole pool: a node that stays does not end while another node of its pool is in use.

Node 0 is where nodes learn of each other: a node in use holds a connection to its agent, which
counts as use of node 0, and an idle node asks it for how long it has been idle before it ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from skyward import context
from skyward.errors import SkywardError
from skyward.wire.channel import ServiceConnection
from skyward.wire.handshake import PEER, Credentials, connect, node_name
from skyward.wire.messages import Hello
from skyward.worker.config import AgentConfig

HEAD = 0
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 60.0
"""How long a node that cannot reach node 0 waits for it, beyond its own idle time."""

_PROBLEMS = (OSError, EOFError, SkywardError)


class PoolUse:
    """What one node tells node 0, and knows of it."""

    def __init__(self, config: AgentConfig, topology: Callable[[], str]) -> None:
        """`topology` is the COMPUTE_POOL value of a worker of the node, as it is now."""
        self._config, self._topology = config, topology
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
        return context.InstanceInfo.from_json(self._topology()).state.split()

    def _run(self) -> None:
        # Not on the agent's main thread: to connect may take seconds.
        while not self._closed:
            self._hold() if self._working else self._release()
            if limit := self._idle_limit:
                self._ask(limit)
            self._woken.wait(LOOK_SECONDS)
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
