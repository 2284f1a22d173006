"""Preparing workers: plugins' hooks are entered before a worker gets its first task.

The workers of a distributed plugin are prepared together, as one group. A process joins a group
once: when a member is lost, or the pool's size changes, the others are replaced as they become
idle, and the new ones form a new group.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from skyward import checks
from skyward.errors import PluginError, SerializationError
from skyward.plugins.plugin import Cluster, Plugin
from skyward.pool.lane import Lane
from skyward.pool.loop import Loop
from skyward.pool.node import Node
from skyward.wire.messages import Prepare
from skyward.worker import hooks
from skyward.worker.hooks import Hooks

STUCK_SECONDS = 8.0
"""How long the others of a broadcast have to fail by themselves once one of them was lost."""
IDLE_LOOK_SECONDS = 0.02
ATTEMPTS = 3
"""How often workers are prepared that fail at it, before their node counts as lost."""


@dataclass(frozen=True, slots=True)
class Preparations:
    """What plugins do on nodes and in worker processes, encoded to be sent.

    The bytes may carry a plugin's token, so they are shown nowhere.
    """

    for_nodes: bytes = field(repr=False)
    for_processes: bytes = field(repr=False)
    together: bool
    """Whether no worker is of use without the others."""

    @classmethod
    def of(cls, plugins: tuple[Plugin, ...], cluster: Cluster) -> Preparations:
        """Of these plugins; raises `PluginError` for one that cannot be sent."""
        on_nodes = [Hooks(p.name, p.around_app, commands=_commands(p, cluster)) for p in plugins]
        in_processes = [Hooks(p.name, p.around_process, p.decorate) for p in plugins]
        together = any(plugin.distributed for plugin in plugins)
        return cls(_encoded(on_nodes), _encoded(in_processes), together)

    def __bool__(self) -> bool:
        return bool(self.for_nodes or self.for_processes)


class Preparer:
    """Decides when which worker is told to prepare."""

    def __init__(
        self,
        preparations: Preparations,
        loop: Loop,
        *,
        members: Callable[[], list[tuple[Node, Lane | None]]],
        compute_pool: Callable[[Node, int], str],
        meet_at: Callable[[int], None],
        drain: Callable[[Lane], None],
        ready: Callable[[Node, Lane], None],
        failed: Callable[[Node, PluginError], None],
    ) -> None:
        self._loop = loop
        self._members, self._compute_pool, self._meet_at = members, compute_pool, meet_at
        self._drain, self._ready, self._failed = drain, ready, failed
        self.together = preparations.together
        self._for_nodes = preparations.for_nodes
        self._for_processes = preparations.for_processes
        self._attempts = 0
        """How often workers were prepared since all of them were ready."""
        self._lock = threading.RLock()

    # Nodes.

    def node_up(self, node: Node) -> None:
        """An agent is connected."""
        if self._for_nodes:
            node.tell(Prepare("", self._for_nodes))
        else:
            node.prepared = True

    def node_prepared(self, node: Node, problem: str) -> None:
        """An agent has entered its hooks, or not."""
        if problem:
            self._failed(node, PluginError(f"node {node.index}: {problem}"))
            return
        node.prepared = True
        for lane in list(node.lanes.values()):
            self.lane_up(node, lane)

    # Workers.

    def lane_up(self, node: Node, lane: Lane) -> None:
        """An executor is connected, or its node is prepared now."""
        if not node.prepared:
            return
        if not self._for_processes:
            self._usable(node, lane)
        elif not self.together:
            self._tell(node, lane)
        else:
            self._group()

    def lane_prepared(self, node: Node, lane: Lane, problem: str) -> None:
        """An executor has entered its hooks, or not."""
        if not problem:
            self._usable(node, lane)
            return
        failure = PluginError(f"{lane.where}: {problem}")
        with self._lock:
            if not self.together:
                self._attempts += 1
            hopeless = self._attempts >= ATTEMPTS or node.state == "starting"
        if hopeless:
            self._failed(node, failure)
        else:
            lane.kill(str(failure))

    def _usable(self, node: Node, lane: Lane) -> None:
        with self._lock:
            if lane.prepared or lane.lost:
                return
            lane.prepared = True
            if all(member is not None and member.prepared for _, member in self._members()):
                self._attempts = 0
        self._ready(node, lane)

    def _tell(self, node: Node, lane: Lane) -> None:
        with self._lock:
            if lane.joined:
                return
            lane.joined = True
        lane.tell(Prepare(self._compute_pool(node, lane.worker), self._for_processes))

    # Groups.

    def _group(self) -> None:
        """Form a group if every worker is there and none belongs to an earlier one."""
        with self._lock:
            members = self._members()
            if any(lane is None or not node.prepared for node, lane in members):
                return
            if any(lane is not None and lane.joined for _, lane in members):
                self.regroup()
                return
            lanes = [(node, lane) for node, lane in members if lane is not None]
            self._attempts += 1
            self._meet_at(lanes[0][1].port)
            for node, lane in lanes:
                self._tell(node, lane)

    def lane_lost(self, node: Node, lane: Lane, reason: str) -> None:
        """A worker is gone; if it was a member of a group, that group is over."""
        if lane.joined and not lane.prepared and not lane.replaced:
            self.lane_prepared(node, lane, f"its process ended in a plugin's hook: {reason}")
        if self.together and lane.joined:
            self.regroup(lost=True)

    def regroup(self, *, lost: bool = False) -> None:
        """Replace every member of the group, each when it is idle.

        With `lost`, a member is gone: those in a broadcast with it are not waited for long.
        """
        if not self.together:
            return
        for node, lane in self._members():
            if lane is None or not lane.joined:
                continue
            with self._lock:
                already, lane.replaced = lane.replaced, True
            if not already:
                self._drain(lane)
                self._replace_when_idle(node, lane)
            for task in lane.started() if lost else ():
                # Its next collective call fails, unless nothing tells it that a peer is gone.
                if task.worker is not None:
                    self._loop.later(STUCK_SECONDS, functools.partial(_end, lane, task.id))

    def _replace_when_idle(self, node: Node, lane: Lane) -> None:
        if lane.lost:
            return
        if lane.tasks:
            self._loop.later(IDLE_LOOK_SECONDS, lambda: self._replace_when_idle(node, lane))
            return
        node.kill(lane, "the group of workers is made anew")


def _end(lane: Lane, task_id: int) -> None:
    if task_id in lane.tasks and not lane.lost:
        lane.kill("another worker of its group was lost, and it did not notice")


def _commands(plugin: Plugin, cluster: Cluster) -> tuple[str, ...]:
    if plugin.bootstrap is None:
        return ()
    try:
        commands = plugin.bootstrap(cluster)
        return checks.texts(plugin, "bootstrap", commands)
    except Exception as problem:
        raise PluginError(
            f"plugin {plugin.name!r}: its bootstrap failed: {type(problem).__name__}: {problem}"
        ) from problem


def _encoded(given: list[Hooks]) -> bytes:
    useful = [h for h in given if h.around is not None or h.decorate is not None or h.commands]
    for each in useful:
        try:
            hooks.encode([each])
        except SerializationError as problem:
            raise PluginError(f"plugin {each.plugin!r} cannot be sent: {problem}") from problem
    return hooks.encode(useful) if useful else b""
