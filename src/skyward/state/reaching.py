"""Which shared state a name belongs to: that of a pool, or that of this process alone."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol, runtime_checkable

from skyward import context, functions
from skyward.errors import ConfigurationError, StateLostError
from skyward.state.link import LocalLink, RemoteLink, StateLink
from skyward.wire.channel import Channel
from skyward.wire.connecting import connect_peer
from skyward.wire.identity import PEER, Credentials, node_name
from skyward.wire.messages import Hello

OWNER = 0
"""The node whose agent has the state."""
COMING_SECONDS = 20.0
"""How long a task waits for an owner that has not started yet."""


@runtime_checkable
class StateTarget(Protocol):
    """What has shared state: a `Compute`."""

    def state_link(self) -> StateLink:
        """The way to its state."""


class WorkerState:
    """The way from a process of a node to the state of its pool."""

    def __init__(self) -> None:
        self.credentials: Credentials | None = None
        """What this process proves its identity with; None if it is no worker."""
        self.threaded = True
        """Whether threads run the tasks of this process."""
        self._lock = threading.Lock()
        self._where = ""
        """Where the owner is that the link leads to."""
        self._link: RemoteLink | None = None
        self._inherited: list[RemoteLink] = []
        """The links of the process that this one was forked from: not this one's to close."""

    def prepare(self, credentials: Credentials | None, *, threads: bool) -> None:
        """Set what this process proves its identity with, and whether threads run its tasks.

        A worker does so when it starts. On its main thread, tasks are never interrupted in code of
        ours that reads, so that it can read by itself.
        """
        self.credentials, self.threaded = credentials, threads

    def link(self) -> StateLink | None:
        """The link; None if this process belongs to no pool."""
        link = self._link
        if link is not None and link.alive:
            return link
        if context.VARIABLE not in os.environ:
            return None
        return self._follow()

    def _follow(self) -> StateLink:
        """Go to where the owner is now."""
        with self._lock:
            where = context.instance_info().state
            if self._link is None or where != self._where:
                old, self._where = self._link, where
                self._link = RemoteLink(self._dial, _who(), threaded=self.threaded, direct=True)
                if old is not None:
                    old.close()
            return self._link

    def _dial(self) -> Channel:
        info = _await_owner()
        hello = Hello(info.job_id, f"{PEER}-service-state", pid=os.getpid())
        try:
            return connect_peer(info.state, hello, self.credentials, node_name(info.job_id, OWNER))
        except OSError as problem:
            why = f" ({problem})" if str(problem) else ""
            raise StateLostError(f"node {OWNER}, which has it, does not answer{why}") from problem

    def forked(self) -> None:
        """Forget the connection of the parent process; the child makes its own."""
        if self._link is not None:
            self._inherited.append(self._link)
        self._lock = threading.Lock()
        self._link, self._where = None, ""


worker_state = WorkerState()
os.register_at_fork(after_in_child=worker_state.forked)
_local = LocalLink()


def link_for(on: Any) -> StateLink:
    """The way to the state of `on`, or of the current pool; that of this process if it has none."""
    if on is not None:
        if not isinstance(on, StateTarget):
            raise ConfigurationError(f"on={on!r} has no shared state; give a sky.Compute")
        return on.state_link()
    target: Any = functions.active_compute()
    if target is not None:
        link: StateLink = target.state_link()
        return link
    return worker_state.link() or _local


def _await_owner() -> context.InstanceInfo:
    """This process's place in the pool, once the owner of the state is known."""
    deadline = time.monotonic() + COMING_SECONDS
    while not (info := context.instance_info()).state:
        if not info.peers and info.node != OWNER:
            raise StateLostError(
                f"node {info.node} cannot reach node {OWNER}, which has it, because this pool has "
                "Options(cluster=False); use it from the client, or leave that option out"
            )
        if time.monotonic() > deadline:
            raise StateLostError(f"node {OWNER}, which has it, is not there")
        time.sleep(0.05)
    return info


def _who() -> str:
    info = context.instance_info()
    return f"worker {info.worker} of node {info.node} (process {os.getpid()})"


def worker_count(on: Any) -> int:
    """How many workers the pool has whose state `link_for` finds."""
    target: Any = on or functions.active_compute()
    if target is None:
        return context.instance_info().total_workers
    return int(target.worker_count())
