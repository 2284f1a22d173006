"""The fleet: a pool's nodes, brought up, watched, replaced when lost, and taken down."""

from __future__ import annotations

import os
import threading
import time

from skyward.console import Console
from skyward.errors import (
    ConfigurationError,
    NodeLostError,
    PluginError,
    PoolClosedError,
    PoolStartError,
    ProtocolError,
    SkywardError,
)
from skyward.pool.briefing import Briefing
from skyward.pool.contact import Contacts, reach
from skyward.pool.devices import DeviceDesk
from skyward.pool.dispatch import Dispatcher
from skyward.pool.executors import Executors
from skyward.pool.host import DESTROY_SECONDS, RemoteHost
from skyward.pool.journal import Journal
from skyward.pool.lane import Lane
from skyward.pool.loop import Loop
from skyward.pool.node import PING_SECONDS, RETURN_SECONDS, Node, NodeView
from skyward.pool.preparing import Preparer
from skyward.pool.scaling import Scaler
from skyward.pool.spec import PoolSpec
from skyward.pool.task import Task
from skyward.providers import Host, Hosting, Order, crosses_a_network
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.identity import (
    CLIENT,
    GREETING_SECONDS,
    Authority,
    check_compatible,
    connect,
    direct,
    my_versions,
    node_name,
)
from skyward.wire.messages import (
    DeviceDown,
    DeviceUp,
    ExecutorDown,
    ExecutorUp,
    Hello,
    Message,
    Ping,
    Prepared,
    Shutdown,
    Written,
)

START_ATTEMPTS = 3
"""How often a node is started that is lost again and again."""
STEADY_SECONDS = 60.0
"""A node that has served this long is not held to its earlier losses."""
LEAVING = ("draining", "stopped")
"""The states of a node that nobody needs any more."""
READY_SECONDS = 120.0
PREPARE_SECONDS = 1800.0
"""How much longer installing an image, and plugins, may take: some download gigabytes."""


class Fleet:
    """Owns the nodes of a pool."""

    def __init__(
        self, pool_id: str, spec: PoolSpec, loop: Loop, dispatcher: Dispatcher, console: Console
    ) -> None:
        self.nodes: list[Node] = []
        self.closed = False
        self._id = pool_id
        self._spec = spec
        self._loop = loop
        self._dispatcher = dispatcher
        self._console = console
        self._lock = threading.RLock()
        self._versions = my_versions()
        self._authority = Authority(pool_id) if crosses_a_network(spec.provider) else None
        self._credentials = self._authority.issue(CLIENT) if self._authority else None
        # Executors on one host share memory with the client; over a network they help each other.
        self._clustered = self._authority is not None and spec.options.cluster
        self._briefing = Briefing(
            pool_id, spec, self._authority, lambda: self.nodes, clustered=self._clustered
        )
        self._journal = Journal()
        self._is_remote = not isinstance(spec.provider, Hosting)
        self._resizing = threading.Lock()
        self._scaler = Scaler(spec.nodes, spec.options, dispatcher, self._scale_to)
        self._contacts = Contacts(loop, dispatcher, console, spec.options.orphan_timeout)
        self._executors = Executors(
            pool_id,
            spec.worker,
            loop,
            dispatcher,
            console,
            self._contacts,
            credentials=self._credentials,
            versions=self._versions,
            clustered=self._clustered,
            lock=self._lock,
            is_closed=lambda: self.closed,
            per_node=self._briefing.workers_on,
            fail=self._fail_node,
        )
        self._preparer = self._executors.preparer = Preparer(
            spec.preparations,
            loop,
            members=self._members,
            compute_pool=self._briefing.compute_pool,
            meet_at=self._briefing.meet_at,
            drain=dispatcher.drain,
            ready=self._executors.ready,
            failed=self._plugin_failed,
        )
        self._devices = DeviceDesk(
            self._tell_node, self._connect_device, spec.options.orphan_timeout
        )
        dispatcher.has_hope = self._has_hope
        dispatcher.why_hopeless = self._why_hopeless

    def start(self) -> None:
        """Bring all nodes up, in parallel; raises the first failure after taking all down."""
        self._open_journal()
        self._add_nodes(self._spec.nodes.desired)
        self._await_ready(self.nodes)
        if self._is_remote:
            # Only now it is known where they all are.
            self._briefing.tell_all()
        self._loop.later(PING_SECONDS, self._beat)

    def _open_journal(self) -> None:
        provider, wish = self._spec.provider, self._spec.wish
        if not isinstance(provider, Hosting):
            self._journal.open_pool(
                self._id, self._spec.name, provider.name, provider.describe(), provider.price(wish)
            )

    def _add_nodes(self, count: int) -> list[Node]:
        first = len(self.nodes)
        added = []
        for index in range(first, first + count):
            added.append(Node(index, self._host(index)))
        self.nodes.extend(added)
        for node in added:
            self._launch(node)
        return added

    def _host(self, index: int) -> Host:
        provider = self._spec.provider
        if isinstance(provider, Hosting):
            return provider.machine(index, self._id, self._spec.wish)
        return RemoteHost(
            provider,
            Order(self._id, index, self._spec.wish),
            self._journal,
            phase=lambda phase: self._console.phase(index, phase),
            note=self._console.note,
        )

    def _await_ready(self, nodes: list[Node]) -> None:
        slow = self._is_remote or self._spec.preparations
        seconds = READY_SECONDS + (PREPARE_SECONDS if slow else 0.0)
        deadline = time.monotonic() + seconds
        while True:
            for node in nodes:
                if node.failure is not None:
                    raise node.failure
            waiting = [node for node in nodes if not node.ready.is_set()]
            if not waiting:
                return
            if self.closed:
                raise PoolClosedError("this pool was closed while it started")
            if time.monotonic() > deadline:
                late = waiting[0].index
                raise PoolStartError(f"node {late} was not ready within {seconds:.0f} s")
            # In slices, so that Ctrl-C, and the failure of another, are noticed while waiting.
            waiting[0].ready.wait(0.1)

    def _launch(self, node: Node) -> None:
        """Begin to bring a node up; with the lock held once others may end it."""
        node.launch = threading.Thread(
            target=self._bring_up, args=(node,), name=f"skyward-node-{node.index}", daemon=True
        )
        node.launch.start()

    def _bring_up(self, node: Node) -> None:
        try:
            self._console.phase(node.index, "starting")
            node.starts += 1
            if isinstance(node.machine, RemoteHost):
                if node.ending is not None:
                    # The new machine has the name of the old one, which must have gone.
                    node.ending.join()
                node.machine.prepare()
            node.machine.start(self._briefing.agent_config(node, self._dispatcher.packer.cap))
            self._console.phase(node.index, "connecting")
            hello = Hello(self._id, "control", versions=self._versions, pid=os.getpid())
            control, welcome = reach(
                node.route(node.machine.endpoint),
                hello,
                self._credentials,
                node_name(self._id, node.index),
                node.dial,
                gone="its agent is gone",
            )
            node.control = control
            node.cut_off = False
            node.hear()
            self._contacts.watch_node(node, control)
            where = f"node {node.index}"
            for warning in check_compatible(self._versions, welcome.versions, where):
                self._console.note(warning)
            self._console.phase(node.index, "starting workers")
            self._preparer.node_up(node)
            self._loop.watch(
                control,
                lambda frame: self._on_control(node, frame),
                lambda problem: self._agent_lost(node, control, problem),
            )
        except Exception as problem:
            # Whatever a provider raises: nobody else would notice that the node never comes.
            if isinstance(problem, SkywardError):
                failure: Exception = problem
            elif isinstance(problem, (OSError, EOFError)):
                failure = PoolStartError(
                    f"node {node.index} cannot be reached: {problem}; see that its machine is up, "
                    "and that this one may connect to it"
                )
            else:
                failure = PoolStartError(f"node {node.index} did not start: {problem!r}")
                failure.__cause__ = problem
            out_of_reach = isinstance(problem, (OSError, EOFError))
            if not (out_of_reach and self._wait_for(node, failure)):
                self._fail_node(node, failure)

    def _wait_for(self, node: Node, failure: Exception) -> bool:
        """A node that was lost is out of reach: whether it is tried again later."""
        pause = node.pause_before_return()
        if pause is None or not isinstance(node.machine, RemoteHost):
            return False
        with self._lock:
            if self.closed or node.state in LEAVING:
                return False
            node.state = "lost"
            # Only starts that came so far as to be lost again are counted.
            node.starts -= 1
            if node.machine.made:
                node.end_machine()
        if not node.waited_for:
            node.waited_for = True
            self._console.note(
                f"node {node.index} is out of reach: {failure}; it is tried again for "
                f"{RETURN_SECONDS / 60:g} minutes"
            )
        self._console.phase(node.index, "out of reach")
        self._loop.later(pause, lambda: self._start_anew(node))
        return True

    def _fail_node(self, node: Node, failure: BaseException) -> None:
        with self._lock:
            is_missed = not self.closed and node.state not in LEAVING
            node.state = "lost"
        if node.lost_since is not None and is_missed:
            failure = PoolStartError(f"node {node.index} was lost and did not come back: {failure}")
            self._console.note(str(failure))
        node.failure = failure
        control, node.control = node.control, None
        if control is not None:
            self._loop.forget(control)
        node.machine.stop(0)
        self._console.phase(node.index, "failed")
        node.ready.set()
        self._dispatcher.fail_stranded()

    def resize(self, count: int) -> None:
        """Grow or shrink to that many nodes; what runs on a leaving node is finished first."""
        with self._resizing:
            have = len(self.nodes)
            if count > have:
                self._grow(count - have)
            elif count < have:
                self._retire(self.nodes[count:])
            if count != have:
                self._briefing.tell_all()

    def _grow(self, count: int) -> None:
        added = self._add_nodes(count)
        try:
            self._await_ready(added)
        except BaseException:
            with self._lock:
                self.nodes = [node for node in self.nodes if node not in added]
            for node in added:
                self._stop_node(node, 0)
            raise

    def _retire(self, leaving: list[Node]) -> None:
        with self._lock:
            lanes = [lane for node in leaving for lane in node.lanes.values()]
            for node in leaving:
                node.state = "draining"
        for lane in lanes:
            self._dispatcher.drain(lane)
        self._dispatcher.fail_stranded()
        while any(lane.tasks for lane in lanes if not lane.lost) and not self.closed:
            time.sleep(0.01)
        with self._lock:
            self.nodes = [node for node in self.nodes if node not in leaving]
        self._briefing.tell_all()
        self._preparer.regroup()
        for node in leaving:
            self._stop_node(node, 5.0)

    def _stop_node(self, node: Node, seconds: float) -> None:
        with self._lock:
            node.state = "stopped"
        node.tell(Shutdown())
        # One that is still starting, or cut off, was told nothing it could end by itself for.
        node.machine.stop(seconds if node.reachable else 0)
        if node.ending is not None:
            # The process may end with the pool, and would leave a lost machine half removed.
            node.ending.join(DESTROY_SECONDS)
        if node.launch is not None:
            node.launch.join(5.0)
        if node.control is not None:
            self._loop.forget(node.control)
        for lane in list(node.lanes.values()):
            self._loop.forget(lane.channel)
            self._dispatcher.lose(
                lane, lambda task: NodeLostError(f"{task.name} was on a node that was stopped")
            )

    def close(self, seconds: float) -> None:
        """End every node, in parallel."""
        with self._lock:
            self.closed = True
        self._devices.close("its pool was closed")
        enders = [
            threading.Thread(target=self._stop_node, args=(node, seconds)) for node in self.nodes
        ]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        if self._is_remote:
            self._journal.close_pool(self._id)

    def hurry(self) -> None:
        """End every machine now, however long others wait for it to end by itself."""
        for node in list(self.nodes):
            threading.Thread(target=node.machine.stop, args=(0,), daemon=True).start()

    # Torch devices.

    def device(self, node: int, kind: str) -> int:
        """The index of the sky device that stands for that kind on that node."""
        return self._devices.get(node, kind)

    def device_holder(self, index: int) -> tuple[int, int | None] | None:
        """The node of a sky device of this pool, and the worker if one alone sees its GPU."""
        found = self._devices.find(index)
        if found is None:
            return None
        node, kinds = found
        gpus = [int(kind[5:]) for kind in kinds if kind.startswith("cuda:")]
        alone = self._spec.worker.per_node == "accelerator" and gpus
        return node, gpus[0] if alone else None

    def _tell_node(self, index: int, message: Message) -> None:
        node = next((n for n in self.nodes if n.index == index and n.state == "ready"), None)
        if node is None:
            raise ConfigurationError(
                f"device(node={index}): the pool's nodes are {[n.index for n in self.nodes]}"
            )
        node.tell(message)

    def _connect_device(self, node: int, endpoint: str, role: str) -> Channel:
        hello = Hello(self._id, role, versions=self._versions, pid=os.getpid())
        found = next((each for each in self.nodes if each.index == node), None)
        dial = direct if found is None else found.dial
        place = endpoint if found is None else found.route(endpoint)
        name = node_name(self._id, node)
        channel, _ = connect(place, hello, self._credentials, name, GREETING_SECONDS, dial)
        return channel

    def _has_hope(self, task: Task) -> bool:
        """Whether a node that could run this task is there or may come."""
        if self._preparer.together and any(node.failure is not None for node in self.nodes):
            return False
        wanted = task.worker[0] if task.worker is not None else task.on
        return any(
            node.state in ("starting", "ready") or (node.state == "lost" and node.failure is None)
            for node in self.nodes
            if wanted is None or node.index == wanted
        )

    def _why_hopeless(self) -> str:
        failed = [node for node in self.nodes if node.failure is not None]
        if not self._preparer.together:
            return "; ".join(str(node.failure) for node in failed)
        return f"its workers are a group, and {failed[0].failure}" if failed else ""

    # The agents' frames.

    def _on_control(self, node: Node, frame: Frame) -> None:
        message = messages.decode(frame.kind, frame.meta)
        node.hear()
        match message:
            case Ping():
                pass
            case ExecutorUp():
                threading.Thread(
                    target=self._executors.up,
                    args=(node, message),
                    name="skyward-lane",
                    daemon=True,
                ).start()
            case ExecutorDown():
                self._executors.down(node, message)
            case Prepared():
                self._preparer.node_prepared(node, message.problem)
            case DeviceUp() | DeviceDown():
                self._devices.heard(message)
            case Written():
                self._console.output(
                    message.text, message.stream, node.index, 0, "", message.transient
                )
            case _:
                raise ProtocolError(f"an agent does not send {type(message).__name__}")

    # What plugins need to know, and how they fail.

    def _members(self) -> list[tuple[Node, Lane | None]]:
        """Every worker's node and executor, in rank order; none where it has not come yet."""
        with self._lock:
            return [
                (node, node.lanes.get((worker, 0)))
                for node in self.nodes
                for worker in range(self._briefing.workers_on(node))
            ]

    def _plugin_failed(self, node: Node, failure: PluginError) -> None:
        if node.state == "starting":
            self._fail_node(node, failure)
        else:
            self._console.note(str(failure))
            self._node_lost(node, str(failure))

    # Losing things.

    def _agent_lost(self, node: Node, control: Channel, problem: BaseException) -> None:
        """The control connection is over, and will not be made again."""
        if node.control is control:
            self._node_lost(node, str(problem) if control.resumes else "its agent is gone")

    def _node_lost(self, node: Node, reason: str) -> None:
        """A whole node is gone; its tasks are struck, and it is started anew."""
        with self._lock:
            if self.closed or node.state in ("lost", "stopped"):
                return
            before, node.state = node.state, "lost"
            lanes = list(node.lanes.values())
            node.lanes.clear()
            node.end_machine()
        self._console.phase(node.index, "lost")
        self._devices.node_lost(node.index, f"node {node.index} was lost: {reason}")
        control, node.control = node.control, None
        if control is not None:
            self._loop.forget(control)
        if before == "ready" and time.monotonic() - node.ready_since > STEADY_SECONDS:
            node.starts = 1
        first_start = before == "starting" and node.lost_since is None
        node.lost_since = node.lost_since or time.monotonic()
        if first_start or node.starts >= START_ATTEMPTS:
            node.failure = PoolStartError(f"node {node.index} was lost: {reason}")
        elif before != "draining":
            self._console.note(f"node {node.index} was lost: {reason}; it is started anew")
        advice = "call again, or have `retries` do that"
        if node.failure is not None and not first_start:
            advice = "it was lost too often to be started anew: enter a new Compute"
        for lane in lanes:
            self._loop.forget(lane.channel)
            self._dispatcher.lose(
                lane,
                lambda task: NodeLostError(
                    f"{task.name} lost node {node.index}: {reason}; {advice}"
                ),
            )
            self._preparer.lane_lost(node, lane, reason)
        # Not before: who sees it can rely on nothing being sent there any more.
        self._dispatcher.counts.nodes_lost += 1
        if node.failure is not None:
            node.ready.set()
            self._dispatcher.fail_stranded()
        elif before != "draining":
            self._start_anew(node)

    def _start_anew(self, node: Node) -> None:
        with self._lock:
            # Who ends the node now has seen the old machine only.
            if self.closed or node.state in LEAVING:
                return
            lost, node.machine = node.machine, self._host(node.index)
            if isinstance(node.machine, RemoteHost):
                node.machine.succeed(lost)
            node.prepared = False
            node.state = "starting"
            node.ready.clear()
            self._launch(node)

    # The regular beat: heartbeats, tasks stuck behind slow ones, scaling.

    def _beat(self) -> None:
        if self.closed:
            return
        self._loop.later(PING_SECONDS, self._beat)
        for node in list(self.nodes):
            if node.control is None:
                continue
            node.ping()
            reason = self._contacts.why_lost(node)
            if reason:
                self._node_lost(node, reason)
        self._dispatcher.recall_stuck()
        self._scaler.look(len(self.nodes))

    def _scale_to(self, count: int) -> None:
        try:
            self.resize(count)
            self._console.ready(f"{self._spec.name}: scaled to {count} nodes")
        except SkywardError as problem:
            self._console.note(f"scaling failed: {problem}")

    # Looking.

    def workers(self) -> list[tuple[int, int]]:
        """Every (node, worker), in rank order."""
        return [(n.index, w) for n in self.nodes for w in range(self._briefing.workers_on(n))]

    def slots(self) -> int:
        """Tasks the pool can run at once."""
        return max(1, len(self.workers()) * self._spec.worker.concurrency)

    def views(self) -> list[NodeView]:
        """The nodes as a user sees them."""
        with self._lock:
            return [
                NodeView(
                    node.index,
                    "reconnecting" if node.cut_off and node.state == "ready" else node.state,
                    node.machine.address,
                    node.machine.accelerator,
                    node.machine.accelerators,
                    tuple(t.name for lane in node.lanes.values() for t in lane.started()),
                )
                for node in self.nodes
            ]
