"""The pool: owns nodes, lanes and tasks, and brings calls to results whatever happens between."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import sys
import threading
import time
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skyward.accelerators import Accelerator
from skyward.console import Console
from skyward.context import InstanceInfo, Peer
from skyward.errors import (
    ConfigurationError,
    NodeLostError,
    PoolClosedError,
    PoolStartError,
    ProtocolError,
    SkywardError,
    TaskCancelledError,
    TaskTimeoutError,
    WorkerDiedError,
)
from skyward.functions import Code, Handle, Pending
from skyward.pool.lane import Lane
from skyward.pool.loop import Loop
from skyward.pool.node import PING_SECONDS, Node, NodeView
from skyward.pool.scheduler import Scheduler
from skyward.pool.streams import Feeder, RemoteIterator
from skyward.pool.task import Definition, Failed, Parcel, Streaming, Task, Value, remote_failure
from skyward.providers import Provider, Wish
from skyward.spec import Nodes, Options, Worker
from skyward.wire import memory, messages, objects
from skyward.wire.blobs import BLOB_MIN, BlobStore, Mapped, Sources
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.identity import (
    Authority,
    check_compatible,
    connect,
    my_versions,
    node_name,
)
from skyward.wire.messages import (
    Cancel,
    Credit,
    End,
    Evicted,
    ExecutorDown,
    ExecutorUp,
    Failure,
    Hello,
    Item,
    Missing,
    Ping,
    Recall,
    Recalled,
    Released,
    Result,
    Shutdown,
    Topology,
    Written,
)
from skyward.wire.objects import Encoded
from skyward.worker.config import AgentConfig

CANCEL_GRACE = 1.0
"""Seconds a cancelled task has to end by itself before its process is killed."""
RECALL_SECONDS = 0.05
START_ATTEMPTS = 3
DEFINITIONS_MAX = 1024
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a pool is to be."""

    provider: Provider
    nodes: Nodes
    accelerator: Accelerator | None
    worker: Worker
    options: Options
    wish: Wish
    name: str


@dataclass(slots=True)
class Counts:
    """What a pool has done so far."""

    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    workers_died: int = 0
    nodes_lost: int = 0
    started: float = field(default_factory=time.monotonic)


class Pool:
    """A running set of nodes."""

    def __init__(self, spec: PoolSpec, console: Console) -> None:
        self.spec = spec
        self.id = uuid.uuid4().hex[:12]
        self.counts = Counts()
        self.nodes: list[Node] = []
        self._console = console
        self._lock = threading.RLock()
        self._scheduler: Scheduler[Task] = Scheduler()
        self._ids = itertools.count(1)
        self._definitions: OrderedDict[bytes, Definition] = OrderedDict()
        self._forgotten: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._dirty: set[Lane] = set()
        self._lanes: set[Lane] = set()
        self._releasing: deque[Lane] = deque()
        """Lanes whose executor can have memory back; appended to from finalizers."""
        self._versions = my_versions()
        cap = min(memory.machine_memory() // 8, 4 << 30)
        self._blob_cap = int(os.environ.get("SKYWARD_BLOB_CAP", cap))
        self.store = BlobStore(self._blob_cap, os.environ.get("SKYWARD_BLOB_DIR") or None)
        self._sources = Sources()
        self._authority = Authority(self.id) if spec.provider.encrypted else None
        self._credentials = self._authority.issue("client") if self._authority else None
        self._head_port = _free_port()
        self._results: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results_thread: threading.Thread | None = None
        self._busy_since = time.monotonic()
        self._idle_since = time.monotonic()
        self._scaling = False
        self.closed = False
        self._owner = os.getpid()
        self._loop = Loop()
        self._loop.between = self._between

    # Starting, growing, ending.

    def start(self) -> None:
        """Bring all nodes up, in parallel; raises the first failure after taking all down."""
        self._add_nodes(self.spec.nodes.desired)
        self._await_ready(self.nodes)
        self._loop.later(PING_SECONDS, self._beat)

    def _add_nodes(self, count: int) -> list[Node]:
        first = len(self.nodes)
        added = []
        for index in range(first, first + count):
            machine = self.spec.provider.machine(index, self.id, self.spec.wish)
            added.append(Node(index, machine))
        self.nodes.extend(added)
        for node in added:
            self._launch(node)
        return added

    def _await_ready(self, nodes: list[Node]) -> None:
        deadline = time.monotonic() + READY_SECONDS
        for node in nodes:
            # In slices, so that Ctrl-C is noticed while waiting.
            while not node.ready.wait(0.1):
                if time.monotonic() > deadline:
                    raise PoolStartError(
                        f"node {node.index} was not ready within {READY_SECONDS:.0f} s"
                    )
            if node.failure is not None:
                raise node.failure

    def _launch(self, node: Node) -> None:
        threading.Thread(
            target=self._bring_up, args=(node,), name=f"skyward-node-{node.index}", daemon=True
        ).start()

    def _bring_up(self, node: Node) -> None:
        try:
            self._console.phase(node.index, "starting")
            node.starts += 1
            node.machine.start(self._agent_config(node))
            self._console.phase(node.index, "connecting")
            hello = Hello(self.id, "control", versions=self._versions, pid=os.getpid())
            control, welcome = connect(
                node.machine.endpoint, hello, self._credentials, node_name(self.id, node.index)
            )
            node.control = control
            node.heard = time.monotonic()
            where = f"node {node.index}"
            for warning in check_compatible(self._versions, welcome.versions, where):
                self._console.note(warning)
            self._console.phase(node.index, "starting workers")
            self._loop.watch(
                control,
                lambda frame: self._on_control(node, frame),
                lambda problem: self._node_lost(node, "its agent is gone"),
            )
        except Exception as problem:
            # Whatever a provider raises: nobody else would notice that the node never comes.
            if isinstance(problem, SkywardError):
                failure: Exception = problem
            elif isinstance(problem, (OSError, EOFError)):
                failure = PoolStartError(f"node {node.index} cannot be reached: {problem}")
            else:
                failure = PoolStartError(f"node {node.index} did not start: {problem!r}")
                failure.__cause__ = problem
            self._fail_node(node, failure)

    def _fail_node(self, node: Node, failure: BaseException) -> None:
        node.state = "lost"
        node.failure = failure
        control, node.control = node.control, None
        if control is not None:
            self._loop.forget(control)
        node.machine.stop(0)
        self._console.phase(node.index, "failed")
        node.ready.set()
        self._fail_stranded()

    def _agent_config(self, node: Node) -> AgentConfig:
        worker = self.spec.worker
        per_node = self._workers_per_node(node)
        credentials = None
        if self._authority is not None:
            issued = self._authority.issue(node_name(self.id, node.index))
            credentials = (issued.authority, issued.certificate, issued.key)
        return AgentConfig(
            pool=self.id,
            node=node.index,
            address="",
            folder="",
            workers=per_node,
            slots=worker.concurrency,
            threads=worker.executor == "thread",
            compute_pool=[self._compute_pool(node, index) for index in range(per_node)],
            visible=[
                str(index) if worker.per_node == "accelerator" else "" for index in range(per_node)
            ],
            env=dict(self.spec.wish.image.env),
            search_path=[path or os.getcwd() for path in sys.path],
            working_directory=os.getcwd(),
            orphan_timeout=self.spec.options.orphan_timeout,
            client_pid=0,
            credentials=credentials,
            blob_cap=self._blob_cap,
        )

    def _workers_per_node(self, node: Node) -> int:
        per_node = self.spec.worker.per_node
        if per_node != "accelerator":
            return per_node
        if not node.machine.accelerators:
            raise ConfigurationError(
                f"Worker(per_node='accelerator'): node {node.index} has no accelerator; give a "
                "number of workers instead"
            )
        return node.machine.accelerators

    def _compute_pool(self, node: Node, worker: int) -> str:
        peers = tuple(Peer(n.index, n.machine.address) for n in self.nodes)
        return InstanceInfo(
            node=node.index,
            worker=worker,
            total_nodes=len(self.nodes),
            workers_per_node=self._workers_per_node(node),
            head_addr=self.nodes[0].machine.address if self.nodes else "127.0.0.1",
            head_port=self._head_port,
            accelerators=node.machine.accelerators,
            accelerator=node.machine.accelerator,
            peers=peers if self.spec.options.cluster else (),
            job_id=self.id,
            hostname=socket.gethostname(),
        ).to_json()

    def _tell_topology(self) -> None:
        for node in self.nodes:
            for worker in range(self._workers_per_node(node)):
                message = Topology(worker, self._compute_pool(node, worker))
                node.tell(message)
                for lane in list(node.lanes.values()):
                    if lane.worker == worker and not lane.lost:
                        lane.channel.send(message)

    def resize(self, count: int) -> None:
        """Grow or shrink to that many nodes; what runs on a leaving node is finished first."""
        self._check_open()
        with self._lock:
            have = len(self.nodes)
        if count > have:
            added = self._add_nodes(count - have)
            self._await_ready(added)
        elif count < have:
            self._retire(self.nodes[count:])
        if count != have:
            self._tell_topology()

    def _retire(self, leaving: list[Node]) -> None:
        with self._lock:
            for node in leaving:
                node.state = "draining"
                for lane in node.lanes.values():
                    if lane.open:
                        self._scheduler.remove(lane)
            busy = [lane for node in leaving for lane in node.lanes.values()]
        while any(lane.tasks for lane in busy if not lane.lost) and not self.closed:
            time.sleep(0.01)
        with self._lock:
            self.nodes = [node for node in self.nodes if node not in leaving]
        for node in leaving:
            self._stop_node(node, 5.0)

    def _stop_node(self, node: Node, seconds: float) -> None:
        node.state = "stopped"
        node.tell(Shutdown())
        node.machine.stop(seconds)
        if node.control is not None:
            self._loop.forget(node.control)
        for lane in list(node.lanes.values()):
            self._loop.forget(lane.channel)
            self._lanes.discard(lane)
            lane.close()

    def close(self, seconds: float = 5.0) -> None:
        """End everything; tasks not done are cancelled. Nothing is left behind."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            stranded = self._scheduler.forget_queue()
            stranded += [task for lane in self._lanes for task in lane.tasks.values()]
        for task in stranded:
            self._finish(
                task,
                Failed.because(PoolClosedError(f"the pool closed before {task.name} was done")),
            )
        enders = [
            threading.Thread(target=self._stop_node, args=(node, seconds)) for node in self.nodes
        ]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        self._loop.stop()
        for node in self.nodes:
            if node.control is not None:
                node.control.close()
        if self._results_thread is not None:
            self._results.put(None)
            if threading.current_thread() is not self._results_thread:
                self._results_thread.join()
        self.store.close()

    # Describing and sending tasks.

    def prepare(
        self,
        pending: Pending[Any],
        *,
        on: int | None = None,
        worker: tuple[int, int] | None = None,
        keep: bool,
        parcel: Parcel | None = None,
    ) -> Task:
        """Encode a call; `keep` copies what the caller may change before it is sent."""
        self._check_open()
        function = pending.function
        code = function.code()
        args, kwargs, inputs = self._split_streams(pending)
        if parcel is None:
            call = objects.Call(function.name, function.parameter_names, args, kwargs)
            parcel = self._parcel(objects.encode(call, own_modules=True), keep)
        handles = (*code.encoded.handles, *parcel.encoded.handles)
        timeout = function.timeout
        if timeout is None:
            timeout = self.spec.options.default_timeout
        return Task(
            next(self._ids),
            function.name,
            self._definition(code),
            parcel,
            [self._handle(handle) for handle in handles] if handles else [],
            inputs,
            on=on,
            worker=worker,
            timeout=timeout,
            retries=function.retries or self.spec.options.retries,
        )

    def _split_streams(
        self, pending: Pending[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Iterator[Any]]]:
        streamed = pending.function.streamed_parameters
        if not streamed:
            return pending.args, pending.kwargs, []
        inputs: list[Iterator[Any]] = []

        def swap(name: str, value: Any) -> Any:
            if name not in streamed or value is None:
                return value
            inputs.append(iter(value))
            return objects.StreamRef(len(inputs) - 1)

        names = pending.function.parameter_names
        args = tuple(
            swap(names[index] if index < len(names) else "", value)
            for index, value in enumerate(pending.args)
        )
        kwargs = {name: swap(name, value) for name, value in pending.kwargs.items()}
        return args, kwargs, inputs

    def _parcel(self, encoded: Encoded, keep: bool) -> Parcel:
        parcel = Parcel(encoded)
        large = [buffer for buffer in encoded.buffers if len(buffer) >= BLOB_MIN]
        if not large or not memory.can_share():
            return parcel
        if keep or not self.spec.provider.encrypted:
            parcel.blobs = self.store.place(large)
            parcel.digests = [blob.digest for blob in parcel.blobs]
            for digest in self._sources.replaced(large, parcel.digests):
                self.store.evict(digest)
            # The bytes are in shared memory now; the caller's own may change or go.
            offsets = iter(parcel.blobs)
            encoded.buffers = [
                next(offsets).view() if len(buffer) >= BLOB_MIN else buffer
                for buffer in encoded.buffers
            ]
        else:
            parcel.digests = memory.digests(large)
            stale = self._sources.replaced(large, parcel.digests)
            if stale:
                for lane in list(self._lanes):
                    lane.forget(digests=stale)
        if self.spec.provider.encrypted:
            parcel.large = large
        return parcel

    def _definition(self, code: Code) -> Definition:
        with self._lock:
            known = self._definitions.get(code.key)
            if known is not None:
                self._definitions.move_to_end(code.key)
                return known
        made = Definition(code.key, self._parcel(_copied(code.encoded), keep=True), False)
        with self._lock:
            self._definitions[code.key] = made
            if len(self._definitions) > DEFINITIONS_MAX:
                _, old = self._definitions.popitem(last=False)
                self._unpin(old.parcel)
        return made

    def _handle(self, handle: Handle[Any]) -> Definition:
        with self._lock:
            known = self._definitions.get(handle.key)
        if known is not None:
            return known
        made = Definition(handle.key, self._parcel(_copied(handle.encoded), keep=True), True)
        with self._lock:
            self._definitions[handle.key] = made
        weakref.finalize(handle, self._forgotten.put, handle.key).atexit = False
        return made

    def submit(self, task: Task) -> None:
        """Send a task to a free place, or queue it."""
        with self._lock:
            self._check_open()
            self.counts.submitted += 1
            lane = self._assign(task)
        if lane is not None:
            self._send(lane, task)

    def share(self, tasks: list[Task]) -> None:
        """Several tasks use one parcel: each counts as a holder of its blobs."""
        for task in tasks[1:]:
            if task.parcel is tasks[0].parcel:
                task.parcel = Parcel(
                    task.parcel.encoded,
                    list(task.parcel.blobs),
                    task.parcel.digests,
                    task.parcel.large,
                )
                for blob in task.parcel.blobs:
                    self.store.pin(blob.segment)

    def submit_all(self, tasks: list[Task]) -> None:
        """Submit tasks such that no other comes between them on any worker."""
        sends = []
        with self._lock:
            self._check_open()
            for task in tasks:
                self.counts.submitted += 1
                lane = self._assign(task)
                if lane is not None:
                    sends.append((lane, task))
        if len(sends) == 1 or not any(task.parcel.heavy for _, task in sends):
            for lane, task in sends:
                self._send(lane, task)
            return
        # Several large transfers share the way out; none waits for the others.
        senders = [threading.Thread(target=self._send, args=pair, daemon=True) for pair in sends]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    def _assign(self, task: Task) -> Lane | None:
        place = self._scheduler.pick(task)
        if place is None:
            if not self._can_ever_run(task):
                task.finish(Failed.because(self._nowhere_to_run(task)))
                return None
            task.waiting = True
            self._scheduler.queue(task)
            return None
        assert isinstance(place, Lane)
        self._scheduler.begin(place, task)
        task.lane = place
        return place

    def _can_ever_run(self, task: Task) -> bool:
        wanted = task.worker[0] if task.worker is not None else task.on
        return any(
            node.state not in ("lost", "stopped", "draining") or node.starts < START_ATTEMPTS
            for node in self.nodes
            if wanted is None or node.index == wanted
        )

    def _nowhere_to_run(self, task: Task) -> SkywardError:
        if task.on is not None and task.on >= len(self.nodes):
            return ConfigurationError(
                f"on={task.on}: the pool has nodes 0 to {len(self.nodes) - 1}"
            )
        return NodeLostError(f"{task.name} has nowhere to run: every node it could use is lost")

    def _send(self, lane: Lane, task: Task) -> None:
        if task.timeout is not None and task.timer is None and not task.done:
            task.timer = self._loop.later(task.timeout, lambda: self._time_out(task))
        if task.inputs:
            lane.feeders[task.id] = [
                Feeder(task, index, lane, source) for index, source in enumerate(task.inputs)
            ]
        try:
            lane.send(task)
        except OSError:
            # The executor is gone; losing the lane decides what becomes of its tasks.
            return
        except SkywardError as problem:
            with self._lock:
                self._scheduler.end(lane, task.id)
            self._finish(task, Failed.because(problem))

    # What comes back. On the loop's thread, or on a transfer thread for a large body.

    def _on_control(self, node: Node, frame: Frame) -> None:
        message = messages.decode(frame.kind, frame.meta)
        node.heard = time.monotonic()
        match message:
            case Ping():
                pass
            case ExecutorUp():
                threading.Thread(
                    target=self._open_lane, args=(node, message), name="skyward-lane", daemon=True
                ).start()
            case ExecutorDown():
                self._executor_down(node, message)
            case Written():
                self._console.output(
                    message.text, message.stream, node.index, 0, "", message.transient
                )
            case _:
                raise ProtocolError(f"an agent does not send {type(message).__name__}")

    def _open_lane(self, node: Node, up: ExecutorUp) -> None:
        hello = Hello(self.id, "data", versions=self._versions, pid=os.getpid())
        try:
            channel, _ = connect(
                up.endpoint, hello, self._credentials, node_name(self.id, node.index)
            )
        except (OSError, EOFError, SkywardError) as problem:
            if not self.closed and node.state == "starting":
                self._fail_node(
                    node, PoolStartError(f"node {node.index}: worker unreachable: {problem}")
                )
            return
        self._add_lane(node, up, channel)

    def _add_lane(self, node: Node, up: ExecutorUp, channel: Channel) -> None:
        worker = self.spec.worker
        capacity = worker.concurrency if worker.executor == "thread" else 1
        lane = Lane(
            node=node.index,
            worker=up.worker,
            slot=up.slot,
            capacity=capacity,
            window=capacity,
            pid=up.pid,
            channel=channel,
            store=self.store,
        )
        lane.mapped = Mapped(lambda: self._releasing.append(lane))
        with self._lock:
            if self.closed or node.state in ("lost", "stopped"):
                channel.close()
                return
            node.lanes[up.worker, up.slot] = lane
            self._lanes.add(lane)
            if node.state != "draining":
                self._scheduler.add(lane)
            self._dirty.add(lane)
        self._loop.watch(
            channel,
            lambda frame: self._on_data(lane, frame),
            lambda problem: self._lane_lost(node, lane),
        )
        expected = self._workers_per_node(node) * (
            1 if worker.executor == "thread" else worker.concurrency
        )
        if node.state == "starting" and len(node.lanes) == expected:
            node.state = "ready"
            node.ready.set()
            self._console.phase(node.index, "ready")

    def _on_data(self, lane: Lane, frame: Frame) -> None:
        message = messages.decode(frame.kind, frame.meta)
        match message:
            case Result():
                self._on_result(lane, frame, message)
            case Failure():
                self._on_failure(lane, frame, message)
            case Written():
                task = lane.tasks.get(message.task)
                if task is not None:
                    task.wrote = True
                name = task.name if task is not None else ""
                self._console.output(
                    message.text, message.stream, lane.node, lane.worker, name, message.transient
                )
            case Item():
                pieces = lane.take(frame, message.payload)
                task = lane.tasks.get(message.task)
                if task is not None and task.stream is not None:
                    task.stream.arrived(pieces)
            case End():
                self._on_end(lane, message)
            case Credit():
                for feeder in lane.feeders.get(message.task, [])[message.stream :][:1]:
                    feeder.grant(message.count)
            case Released():
                lane.let_go(message.segments)
            case Evicted():
                lane.evicted(message.digests)
            case Missing():
                task = lane.tasks.get(message.task)
                if task is not None:
                    sender = threading.Thread(
                        target=lane.resend, args=(task, message.digests, message.keys), daemon=True
                    )
                    sender.start()
            case Recalled():
                self._on_recalled(lane, message)
            case _:
                raise ProtocolError(f"an executor does not send {type(message).__name__}")

    def _on_result(self, lane: Lane, frame: Frame, result: Result) -> None:
        if result.payload is None:
            task = lane.tasks.get(result.task)
            if task is not None and not task.done:
                task.stream = RemoteIterator(task, lane, self._abandon)
                self._finish(task, Streaming(task.stream))
            return
        pieces = lane.take(frame, result.payload)
        task = self._leave(lane, result.task, result.ran)
        if task is not None:
            self._finish(task, Value(pieces, f"{task.name} on {lane.where}"))

    def _on_failure(self, lane: Lane, frame: Frame, failure: Failure) -> None:
        pieces = lane.take(frame, failure.payload) if failure.payload is not None else None
        task = self._leave(lane, failure.task, failure.ran)
        if task is None:
            return
        outcome = remote_failure(failure, pieces, task.name, lane.where)
        if task.stream is not None:
            task.stream.ended(outcome)
        self._finish(task, outcome)

    def _on_end(self, lane: Lane, end: End) -> None:
        task = self._leave(lane, end.task, 1.0)
        if task is not None and task.stream is not None:
            task.stream.ended(None)

    def _on_recalled(self, lane: Lane, recalled: Recalled) -> None:
        with self._lock:
            lane.recalling = False
            lane.average, lane.window = 1.0, lane.capacity
            for task_id in reversed(recalled.tasks):
                task = self._scheduler.end(lane, task_id)
                if task is not None and not task.done:
                    self._requeue(task)
        self._fill_everywhere()

    def _leave(self, lane: Lane, task_id: int, ran: float) -> Task | None:
        """A task is no longer on its lane, which can take another."""
        with self._lock:
            task = self._scheduler.end(lane, task_id)
            lane.note(ran)
            lane.last_result = time.monotonic()
            self._dirty.add(lane)
        for feeder in lane.feeders.pop(task_id, ()):
            feeder.stop()
        return task

    def _finish(self, task: Task, outcome: Any) -> None:
        first = task.finish(outcome)
        if not isinstance(outcome, Streaming):
            blobs, task.parcel.blobs = task.parcel.blobs, []
            for blob in blobs:
                self.store.unpin(blob.segment.id)
        if first:
            if task.cancelled:
                self.counts.cancelled += 1
            elif isinstance(outcome, Failed):
                self.counts.failed += 1
            else:
                self.counts.succeeded += 1

    def _unpin(self, parcel: Parcel) -> None:
        for blob in parcel.blobs:
            self.store.unpin(blob.segment.id)

    # Between rounds of the loop: refill lanes, pass on what was let go.

    def _between(self) -> None:
        if self._dirty:
            with self._lock:
                dirty, self._dirty = self._dirty, set()
            for lane in dirty:
                self._fill(lane)
        if self.store.retired:
            retired = []
            while self.store.retired:
                retired.append(self.store.retired.popleft())
            self.store.evicted.clear()
            for lane in list(self._lanes):
                lane.forget(segments=retired)
        if not self._forgotten.empty():
            self._forget_handles()
        while self._releasing:
            self._releasing.popleft().flush_releases()

    def _fill(self, lane: Lane) -> None:
        light: list[Task] = []
        while True:
            with self._lock:
                task = self._scheduler.next_for(lane)
                if task is None:
                    break
                task.waiting = False
                task.lane = lane
                self._scheduler.begin(lane, task)
            if task.inputs or task.timeout is not None or task.parcel.encoded.buffers:
                sender = threading.Thread if task.parcel.heavy else None
                if sender is not None:
                    sender(target=self._send, args=(lane, task), daemon=True).start()
                else:
                    self._send(lane, task)
            else:
                light.append(task)
        if light:
            try:
                lane.send_small(light)
            except OSError:
                return

    def _fill_everywhere(self) -> None:
        with self._lock:
            self._dirty.update(self._lanes)

    def _forget_handles(self) -> None:
        keys = []
        while not self._forgotten.empty():
            keys.append(self._forgotten.get())
        with self._lock:
            dropped = [self._definitions.pop(key, None) for key in keys]
        for lane in list(self._lanes):
            lane.forget(keys=keys)
        for definition in dropped:
            if definition is not None:
                self._unpin(definition.parcel)

    # Cancelling.

    def cancel(self, task: Task, problem: BaseException | None = None) -> None:
        """Give a task up: the caller is released at once, the remote work is stopped."""
        task.cancelled = problem is None
        reason = problem or TaskCancelledError(f"{task.name} was cancelled")
        with self._lock:
            task.waiting = False
            lane = task.lane
            on_lane = lane is not None and task.id in lane.tasks
        self._finish(task, Failed.because(reason))
        if task.stream is not None:
            task.stream.ended(Failed.because(reason))
        if on_lane and lane is not None:
            self._stop_remote(lane, task)

    def _stop_remote(self, lane: Lane, task: Task) -> None:
        try:
            lane.channel.send(Cancel(task.id))
        except OSError:
            return
        self._loop.later(CANCEL_GRACE, lambda: self._insist(lane, task))

    def _insist(self, lane: Lane, task: Task) -> None:
        """The grace is over: if the task still holds its place, its process has to go."""
        if task.id in lane.tasks and not lane.lost:
            node = self._node(lane.node)
            if node is not None:
                node.kill(
                    lane, f"{task.name} was cancelled and did not end within {CANCEL_GRACE} s"
                )

    def _abandon(self, task: Task) -> None:
        """The consumer of a stream wants no more of it."""
        lane = task.lane
        if lane is None or task.id not in lane.tasks or self.closed:
            return
        try:
            lane.channel.send(Credit(task.id, -1, -1))
        except OSError:
            return
        self._loop.later(CANCEL_GRACE, lambda: self._stop_if_there(lane, task))

    def _stop_if_there(self, lane: Lane, task: Task) -> None:
        if task.id in lane.tasks and not lane.lost:
            self._stop_remote(lane, task)

    def _time_out(self, task: Task) -> None:
        if task.done and task.stream is None:
            return
        lane = task.lane
        where = f" on {lane.where}" if lane is not None else ""
        self.cancel(
            task,
            TaskTimeoutError(
                f"{task.name} ran longer than its timeout of {task.timeout:g} s{where}; the remote "
                "work was cancelled"
            ),
        )

    # Losing things.

    def _lane_lost(self, node: Node, lane: Lane) -> None:
        """The connection ended; why, the agent will say. It may also be gone itself."""
        if lane.lost or self.closed:
            return
        lane.close()
        with self._lock:
            if lane.open:
                self._scheduler.remove(lane)
            self._lanes.discard(lane)
        # The agent's report follows within moments; without one, the node is in doubt.
        self._loop.later(2.0, lambda: self._bury(node, lane, "its connection was lost"))

    def _executor_down(self, node: Node, down: ExecutorDown) -> None:
        lane = node.lanes.get((down.worker, down.slot))
        if lane is not None and lane.pid == down.pid:
            # Results it sent before it died may still be on their way in.
            self._loop.later(0.0, lambda: self._bury(node, lane, down.reason))
        if not down.restarting:
            failure = PoolStartError(
                f"node {node.index} worker {down.worker} cannot run: {down.reason}"
            )
            if node.state == "starting":
                self._fail_node(node, failure)
            else:
                self._console.note(str(failure))
        elif node.state == "starting" and lane is None:
            self._console.note(f"node {node.index}: worker {down.worker}: {down.reason}")

    def _bury(self, node: Node, lane: Lane, reason: str) -> None:
        """Deal with the tasks of a lane that is gone for good."""
        with self._lock:
            if node.lanes.get((lane.worker, lane.slot)) is lane:
                del node.lanes[lane.worker, lane.slot]
            if lane.open:
                self._scheduler.remove(lane)
            self._lanes.discard(lane)
            started, unstarted = lane.started(), lane.unstarted()
            lane.tasks.clear()
        lane.close()
        if started or unstarted:
            self.counts.workers_died += 1
        for task in started:
            self._strike(
                task, WorkerDiedError(f"{task.name} lost its worker on {lane.where}: {reason}")
            )
        with self._lock:
            for task in reversed(unstarted):
                self._requeue(task)
        self._fill_everywhere()

    def _strike(self, task: Task, problem: SkywardError) -> None:
        """A task lost its place through no fault of its own: again, or the error."""
        if task.stream is not None:
            task.stream.ended(Failed.because(problem))
        if task.done:
            return
        if task.retries > 0 and not task.inputs:
            task.retries -= 1
            self.counts.retried += 1
            with self._lock:
                self._requeue(task)
            return
        self._finish(task, Failed.because(problem))

    def _requeue(self, task: Task) -> None:
        if task.done:
            return
        task.lane = None
        task.waiting = True
        self._scheduler.queue(task, first=True)

    def _node_lost(self, node: Node, reason: str) -> None:
        """A whole node is gone; its tasks are struck, and it is started anew."""
        with self._lock:
            if self.closed or node.state in ("lost", "stopped"):
                return
            was_starting = node.state == "starting"
            was_leaving = node.state == "draining"
            node.state = "lost"
            lanes = list(node.lanes.values())
            node.lanes.clear()
            self.counts.nodes_lost += 1
            struck, again = [], []
            for lane in lanes:
                if lane.open:
                    self._scheduler.remove(lane)
                self._lanes.discard(lane)
                struck += [(lane, task) for task in lane.started()]
                again += lane.unstarted()
                lane.tasks.clear()
        self._console.phase(node.index, "lost")
        threading.Thread(target=node.machine.stop, args=(0,), daemon=True).start()
        for lane in lanes:
            self._loop.forget(lane.channel)
            lane.close()
        if node.control is not None:
            self._loop.forget(node.control)
            node.control = None
        for lane, task in struck:
            self._strike(task, NodeLostError(f"{task.name} lost {lane.where}: {reason}"))
        with self._lock:
            for task in reversed(again):
                self._requeue(task)
        if was_starting or node.starts >= START_ATTEMPTS:
            failure = PoolStartError(f"node {node.index} was lost: {reason}")
            node.failure = failure
            node.ready.set()
            self._fail_stranded()
        elif not was_leaving:
            node.machine = self.spec.provider.machine(node.index, self.id, self.spec.wish)
            node.state = "starting"
            node.ready.clear()
            self._launch(node)
        self._fill_everywhere()

    def _fail_stranded(self) -> None:
        """Waiting tasks that no node will ever take must not wait for ever."""
        with self._lock:
            stranded = [t for t in self._scheduler.queued() if not self._can_ever_run(t)]
            for task in stranded:
                task.waiting = False
        for task in stranded:
            self._finish(task, Failed.because(self._nowhere_to_run(task)))

    # The regular beat: heartbeats, tasks stuck behind slow ones, scaling.

    def _beat(self) -> None:
        if self.closed:
            return
        self._loop.later(PING_SECONDS, self._beat)
        for node in list(self.nodes):
            if node.control is None:
                continue
            node.ping()
            if node.silent_too_long:
                self._node_lost(node, "it has stopped answering")
        now = time.monotonic()
        for lane in list(self._lanes):
            ahead = len(lane.tasks) > lane.capacity
            if ahead and not lane.recalling and now - lane.last_result > RECALL_SECONDS:
                lane.recalling = True
                lane.channel.send(Recall())
        if self.spec.nodes.elastic:
            self._scale(now)

    def _scale(self, now: float) -> None:
        """Within the asked-for range: grow while tasks wait, shrink after `idle_timeout`."""
        with self._lock:
            backlog = self._scheduler.backlog
            busy = backlog or any(lane.tasks for lane in self._lanes)
            count = len(self.nodes)
        if not backlog:
            self._busy_since = now
        if busy:
            self._idle_since = now
        wanted = count
        if backlog and now - self._busy_since > 1.0:
            wanted = min(self.spec.nodes.ceiling, count + 1)
        elif not busy and now - self._idle_since > self.spec.options.idle_timeout:
            wanted = max(self.spec.nodes.floor, count - 1)
        if wanted != count and not self._scaling:
            self._scaling = True
            threading.Thread(target=self._scale_to, args=(wanted,), daemon=True).start()

    def _scale_to(self, count: int) -> None:
        try:
            self._console.note(f"scaling to {count} nodes")
            self.resize(count)
        except SkywardError as problem:
            self._console.note(f"scaling failed: {problem}")
        finally:
            self._scaling = False

    # Looking.

    def _node(self, index: int) -> Node | None:
        return next((node for node in self.nodes if node.index == index), None)

    def workers(self) -> list[tuple[int, int]]:
        """Every (node, worker), in rank order."""
        return [(n.index, w) for n in self.nodes for w in range(self._workers_per_node(n))]

    def slots(self) -> int:
        """Tasks the pool can run at once."""
        return max(1, len(self.workers()) * self.spec.worker.concurrency)

    def views(self) -> list[NodeView]:
        """The nodes as a user sees them."""
        with self._lock:
            return [
                NodeView(
                    node.index,
                    node.state,
                    node.machine.address,
                    node.machine.accelerator,
                    node.machine.accelerators,
                    tuple(t.name for lane in node.lanes.values() for t in lane.started()),
                )
                for node in self.nodes
            ]

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from executors, over sockets."""
        lanes = list(self._lanes)
        sent = sum(lane.channel.bytes_sent for lane in lanes)
        return sent, sum(lane.channel.bytes_received for lane in lanes)

    def after(self, task: Task, action: Callable[[], None]) -> None:
        """Off the loop's thread, once the task is done; to be called before it is submitted."""
        with self._lock:
            if self._results_thread is None:
                self._results_thread = threading.Thread(
                    target=self._serve_results, name="skyward-results", daemon=True
                )
                self._results_thread.start()
        task.on_done = lambda _: self._results.put(action)

    def _serve_results(self) -> None:
        while (action := self._results.get()) is not None:
            action()

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown."""
        if task.wrote:
            self._console.drain()

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError(
                "this pool is closed; run functions inside its `with sky.Compute()` block"
            )
        if os.getpid() != self._owner:
            raise PoolClosedError(
                "this pool belongs to the process that made it; a forked child must make its own"
            )


def _copied(encoded: Encoded) -> Encoded:
    return Encoded(encoded.pieces, list(encoded.buffers), encoded.storages, encoded.handles)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
