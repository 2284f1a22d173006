"""The pool: a running set of nodes and the tasks on them, as `Compute` uses it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from skyward.calls import tracing
from skyward.calls.counts import Counts
from skyward.calls.debuggers import DEBUG_KEY, ENVIRONMENT, debug_mode
from skyward.calls.device_tensors import BroadcastTensors, DeviceTensors, Holder
from skyward.calls.dispatch import CLOSED, Dispatcher
from skyward.calls.loop import Loop
from skyward.calls.nesting import Broadcast, NestedCalls
from skyward.calls.packing import Packer
from skyward.calls.prospects import Prospects
from skyward.calls.results import ResultThread
from skyward.calls.scheduler import Load
from skyward.calls.staying import Staying, node_of_result
from skyward.calls.task import Task
from skyward.calls.telling import CallTeller
from skyward.console import Console
from skyward.errors import ConfigurationError, PoolClosedError, PoolStartError
from skyward.events import EventStream
from skyward.files.transfer import Synced
from skyward.functions import Function, Pending
from skyward.future import Future
from skyward.nodes.fleet import Fleet
from skyward.nodes.keeping import KeptPool
from skyward.nodes.ledger import Ledger
from skyward.nodes.node import Node, NodeView
from skyward.nodes.reaching import Adoption
from skyward.nodes.spec import PoolSpec
from skyward.nodes.stacks import Stacks, read_stacks
from skyward.nodes.usage import NodeUsage
from skyward.spec import Nodes
from skyward.state.link import RemoteLink
from skyward.state.reaching import OWNER
from skyward.wire.asking import ServiceConnection
from skyward.wire.channel import Channel
from skyward.wire.messages import AT_BREAKPOINTS

LEFT = "its client left the pool, which stays; wait for results before you leave"
"""Why tasks fail that were not done when the client left."""


class Pool:
    """Joins the fleet of nodes with the dispatch of tasks."""

    def __init__(
        self,
        spec: PoolSpec,
        console: Console,
        broadcast: Broadcast,
        adoption: Adoption | None = None,
    ) -> None:
        """`broadcast` makes the broadcasts that tasks ask for.

        With `adoption`, the pool is one that stays, and has its nodes already.
        """
        self.spec = spec
        self.id = spec.id or uuid.uuid4().hex[:12]
        self._adoption = adoption
        self.console = console
        self._loop = Loop()
        secret = spec.provider.capabilities.encrypted
        self._packer = Packer(encrypted=secret, relayed=secret and spec.options.cluster)
        prospects = Prospects(grouped=spec.preparations.together)
        self.events = EventStream(spec.name)
        """What happens in the pool."""
        nested = NestedCalls(self, broadcast)
        self._dispatcher = Dispatcher(
            self._loop, console, self._packer, prospects, self.events, nested
        )
        self._fleet = Fleet(
            self.id, spec, self._loop, self._dispatcher, prospects, console, self.events, adoption
        )
        self.group = self._fleet.preparer
        """Has the workers form a process group."""
        self.timeouts = self._dispatcher.timeouts
        """Looks where tasks are."""
        self.has_folders = self._fleet.deliveries.follows
        """Whether the nodes have folders of this machine."""
        self._ids = itertools.count(1)
        self._results = ResultThread(self._packer, self._dispatcher.cancel)
        self._closing = threading.Lock()
        self._ended = threading.Event()
        """Set when everything has been taken down."""
        self._expired = ""
        """Why the pool ended by itself; empty if it did not."""
        self._owner = os.getpid()
        self._state = RemoteLink(self._connect_to_state, f"the client (process {os.getpid()})")

    @property
    def closed(self) -> bool:
        """Whether the pool has been taken down."""
        return self._fleet.closed

    @property
    def nodes(self) -> list[Node]:
        """The nodes, by index."""
        return self._fleet.nodes

    @property
    def counts(self) -> Counts:
        """The numbers of the pool's tasks so far."""
        return self._dispatcher.counts

    @property
    def teller(self) -> CallTeller:
        """Tells of calls, and of what calls and the client log."""
        return self._dispatcher.teller

    @property
    def ledger(self) -> Ledger:
        """What the pool's machines cost."""
        return self._fleet.ledger

    def start(self) -> None:
        """Start the nodes; raises the first failure that leaves too few nodes."""
        ttl = self.spec.request.ttl
        if ttl is not None:
            ends = self._adoption.record.ends if self._adoption is not None else None
            left = ttl if ends is None else ends - time.time()
            self._loop.later(max(0.0, left), lambda: self._expire(ttl))
        try:
            if self._adoption is None:
                self._fleet.start()
            else:
                self._fleet.attach()
        except PoolClosedError as problem:
            if self._expired:
                raise PoolStartError(f"{self.spec.name} did not start: {self._expired}") from None
            raise problem

    def _expire(self, ttl: float) -> None:
        """End the pool, because its time to live is over; the loop's thread must not wait."""
        self._expired = (
            f"the pool's time to live of {ttl:g} s is over; give Compute a larger ttl, or none"
        )
        self.console.note(f"{self.spec.name}: its time to live of {ttl:g} s is over; it ends")
        threading.Thread(target=self.close, name="skyward-expiry", daemon=True).start()

    def keep(self) -> None:
        """Let the pool stay when this client leaves."""
        self._fleet.keep()

    @property
    def record(self) -> KeptPool | None:
        """The record of a pool that stays; None if the pool does not stay."""
        return self._fleet.record

    @property
    def head(self) -> int:
        """The first node."""
        return min((node.index for node in self.nodes), default=0)

    @property
    def stays(self) -> bool:
        """Whether the pool stays when this client leaves."""
        return self._fleet.stays

    def detach(self, seconds: float = 5.0) -> None:
        """Leave a pool that stays; tasks that are not done are cancelled, and fail."""
        if self._closing.acquire(blocking=False):
            try:
                self._state.close()
                self._results.give_up(LEFT)
                self._dispatcher.cancel_all(LEFT, seconds / 2)
                if self._adoption is None or not self._adoption.record.inside:
                    # Now: nobody else brings folders back to this machine.
                    self._bring_back(last=False)
                self._dispatcher.close(LEFT)
                self._fleet.detach(seconds)
                self._end_threads()
            finally:
                self._ended.set()
        elif not self._results.is_current:
            self._ended.wait()

    def lock(self, *, force: bool) -> contextlib.ExitStack:
        """Keep other clients from changing a pool that stays; without `force`, if none uses it."""
        return self._fleet.lock(force=force)

    def close(self, seconds: float = 5.0) -> None:
        """End the nodes and remove their machines; tasks that are not done fail.

        If another thread does that, waits for it.
        """
        if self._closing.acquire(blocking=False):
            try:
                self._close(seconds)
            finally:
                self._ended.set()
        elif not self._results.is_current:
            # The thread that closes waits for the one that runs callbacks of the user's.
            self._ended.wait()

    def _close(self, seconds: float) -> None:
        try:
            # Before anything else ends: functions are done, and the nodes still answer.
            self._bring_back(last=True)
        finally:
            # Also when the user interrupts that: machines that are left would cost.
            self._state.close()
            self._results.give_up(self._expired or "the pool closed before its arguments came")
            self._dispatcher.close(self._expired)
            self._fleet.close(seconds)
            self._end_threads()

    def _bring_back(self, *, last: bool) -> None:
        """Write back what functions have written; what fails is told, and stops nothing."""
        if not self._fleet.deliveries.comes_back:
            return
        try:
            self.write_back(last=last)
        except Exception as problem:
            self.console.note(f"{self.spec.name}: not everything was written back: {problem}")

    def _end_threads(self) -> None:
        self._loop.stop()
        for node in self.nodes:
            if node.control is not None:
                node.control.close()
        self._results.close()
        self._packer.close()

    def hurry(self) -> None:
        """End the machines at once, while `close` still gives them time."""
        self._fleet.hurry()

    def resize(self, nodes: int | Nodes, *, force: bool = False) -> None:
        """Grow or shrink to that many nodes; with `force`, also while others use the pool."""
        self._check_open()
        self._fleet.resize(nodes, force=force)

    def prepare(
        self,
        pending: Pending[Any],
        *,
        keep: bool,
        on: int | None = None,
        worker: tuple[int, int] | None = None,
        like: Task | None = None,
        copies: BroadcastTensors | None = None,
        pinned: Load[Task] | None = None,
    ) -> Task:
        """Encode a call; `keep` copies arguments that the caller may change before they are sent.

        `like` is a task of the same call, whose parcel is used again. Unless a worker is given, the
        call goes to the node of its device tensors, and the tensors stay there. With `copies`, the
        worker gets copies of them.
        """
        if self._dispatcher.closed or os.getpid() != self._owner:
            self._check_open()
        function = pending.use().function
        if pinned is None and (seat := function.seat) is not None:
            pinned = self._check_seat(function, seat, free=on is None and worker is None)
        if pinned is not None:
            on = pinned.node
        code = function.code()
        inputs: list[Iterator[Any]] = []
        tensors = None
        if worker is None and "torch" in sys.modules:
            tensors = DeviceTensors(
                self._fleet.devices.holder, on, self._fleet.devices.desk.open_on
            )
        if like is not None and not like.inputs:
            parcel = self._packer.shared(like.parcel)
        else:
            refer = tensors if copies is None or worker is None else copies.refer(worker)
            parcel, inputs = self._packer.call(
                pending, keep=keep, for_many=worker is not None, refer=refer
            )
        if tensors is not None and tensors.holder is not None:
            on = tensors.holder[0]
            worker = None if tensors.holder[1] is None else (on, tensors.holder[1])
        staying = None
        if function.stays is not None:
            node = on if worker is None else worker[0]
            holder = self._fleet.devices.holder
            on = node_of_result(function.name, function.stays, node, holder)
            device = functools.partial(self._fleet.devices.for_result, function.stays)
            staying = Staying(device, parcel.encoded.referred)
        handles = (*code.encoded.handles, *parcel.encoded.handles)
        awaits = [each for each in handles if isinstance(each, Future)] if handles else ()
        options = self.spec.options
        number = next(self._ids)
        return Task(
            number,
            function.name,
            self._packer.code(code),
            parcel,
            [self._packer.handle(each) for each in handles if each not in awaits]
            if handles
            else [],
            inputs,
            on=on,
            worker=worker,
            pinned=pinned,
            timeout=options.default_timeout if function.timeout is None else function.timeout,
            retries=function.retries or options.retries,
            staying=staying,
            trace=tracing.begin(function.name, number, self.spec.name)
            if tracing.MODULE in sys.modules
            else None,
            cell=None if self.console.shell is None else self.console.cell(),
            debugged=debug_mode() if DEBUG_KEY in ENVIRONMENT else AT_BREAKPOINTS,
            awaits=awaits,
            apart=function.apart,
        )

    def _check_seat(self, function: Function[..., Any], seat: Any, *, free: bool) -> Load[Task]:
        """The executor of an object whose method is called."""
        if seat.pool is not self:
            raise ConfigurationError(
                f"{function.name} belongs to an object on another pool ({seat.pool.spec.name}); "
                "call it there, or make an object on this one"
            )
        if not free:
            raise ConfigurationError(
                f"{function.name} runs where its object is, on {seat.where}; leave `on` out, and "
                "use `>>` or `>`, not `@`"
            )
        load: Load[Task] = seat.load
        return load

    def has(self, load: Load[Task]) -> bool:
        """Whether an executor is there; one that is lost never comes back."""
        return self._dispatcher.lanes.has(load)

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have the pool's thread call a function, which must not wait; never waits itself."""
        self._loop.call_soon(action)

    def copies(self, workers: Sequence[tuple[int, int]]) -> BroadcastTensors:
        """Copies of the device tensors of one call, for each of these workers."""
        return BroadcastTensors(
            self._fleet.devices.holder, self._fleet.devices.desk.open_on, workers
        )

    def run(self, task: Task) -> Any:
        """Submit a task and wait for its result; an exception meanwhile cancels the task."""
        return self._dispatcher.run(task, self.submit if task.awaits else None)

    def result(self, task: Task) -> Any:
        """Wait for a task, until all that it printed is shown; its result, or its exception."""
        return self._dispatcher.result(task)

    def submit(self, task: Task) -> None:
        """Send a task to an executor with a free slot, or queue it, or wait for its arguments."""
        if task.awaits:
            self._results.submit_later([task], lambda: self._dispatcher.submit(task))
        else:
            self._dispatcher.submit(task)

    def submit_nested(self, task: Task) -> None:
        """Queue a task that another one has started; never waits."""
        if task.awaits:
            self._results.submit_later([task], lambda: self._dispatcher.submit_nested(task))
        else:
            self._dispatcher.submit_nested(task)

    def submit_all(self, tasks: list[Task]) -> None:
        """Submit tasks together: no other task comes between them on any worker."""
        if any(task.awaits for task in tasks):
            self._results.submit_later(tasks, lambda: self._dispatcher.submit_all(tasks))
        else:
            self._dispatcher.submit_all(tasks)

    def cancel(self, task: Task, problem: BaseException | None = None) -> None:
        """Give a task up: the caller stops waiting at once, and the remote work is stopped."""
        self._dispatcher.cancel(task, problem)

    def after(self, task: Task, action: Callable[[], None]) -> None:
        """Run an action when the task is done, not on the loop's thread; call before `submit`."""
        self._results.after(task, action)

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown."""
        self._dispatcher.flush_output(task)

    def device(self, node: int, kind: str) -> int:
        """The index of the sky device of that kind on that node."""
        self._check_open()
        return self._fleet.devices.get(node, kind)

    def resident_device(self, node: int, kind: str, pid: int) -> int:
        """The index of the sky device that is a process with kept values, if that is to be had."""
        self._check_open()
        return self._fleet.devices.resident(node, kind, pid)

    def device_holder(self, index: int) -> Holder | None:
        """The node of a sky device of this pool, and the worker if only one sees the GPU."""
        return self._fleet.devices.holder(index)

    def device_home(self, index: int) -> tuple[int, str] | None:
        """The node and the kind of a sky device of this pool; None if it has no such device."""
        return self._fleet.devices.home(index)

    def device_process(self, index: int) -> int:
        """The number of an open device's process on its node."""
        return self._fleet.devices.desk.process_of(index)

    def keep_device(self, index: int) -> None:
        """Note that tensors of a sky device stay there when this client leaves."""
        self._fleet.devices.desk.keep(index)

    def finish_devices(self, note: Callable[[str], None]) -> None:
        """Wait until all that was issued on devices with kept tensors is done."""
        self._fleet.devices.desk.finish(note)

    def workers(self) -> list[tuple[int, int]]:
        """Every (node, worker), in rank order."""
        return self._fleet.workers()

    def wake(self) -> None:
        """Have at least one node, and wait until it is ready."""
        self._check_open()
        self._fleet.wake()

    def ready_nodes(self) -> int:
        """How many nodes have been ready."""
        return sum(node.joined for node in self.nodes)

    def slots(self) -> int:
        """How many tasks the pool can run at once."""
        return self._fleet.slots()

    def views(self) -> list[NodeView]:
        """The nodes as a user sees them."""
        return self._fleet.views()

    def usage(self, node: int) -> NodeUsage | None:
        """How busy a node is; None if it does not answer now."""
        return self._fleet.usage(node)

    def usages(self, nodes: Iterable[int], seconds: float) -> dict[int, NodeUsage]:
        """How busy these nodes are; those that do not answer in so many seconds are left out."""
        return self._fleet.usages(nodes, seconds)

    def devices(self) -> list[tuple[int, int, str]]:
        """The node, index and kind of every open device."""
        return self._fleet.devices.desk.all_open()

    def running(self) -> list[tuple[int, str, int, int]]:
        """The number, name, node and worker of every call that a worker runs."""
        return self._dispatcher.running()

    @property
    def backlog(self) -> int:
        """How many calls wait for a worker."""
        return self._dispatcher.backlog

    def service(self, node: int, name: str) -> ServiceConnection:
        """A connection to a service of a node's agent; the caller closes it."""
        self._check_open()
        return self._fleet.service(node, name)

    @property
    def failed(self) -> tuple[int, int] | None:
        """The worker whose task failed last, if it may be looked at in a debugger."""
        return self._dispatcher.failed

    def sync(self) -> Synced:
        """Make the folders that nodes got from this machine as they are here now."""
        self._check_open()
        return self._fleet.deliveries.sync(self._with_files())

    def write_back(self, *, last: bool = False) -> Synced:
        """Write what functions have written into volumes to where the volumes come from."""
        return self._fleet.deliveries.write_back(self._with_files(), self.console.note, last=last)

    def before_calls(self) -> None:
        """Send what has changed, if the user wants that before every call."""
        self._fleet.deliveries.before_calls(self._with_files)

    def _with_files(self) -> list[int]:
        return [node.index for node in self.nodes if node.joined and node.host.endpoint]

    def stacks(self) -> Stacks:
        """Where every process of the nodes that have started is."""
        there = [node.index for node in self.nodes if node.joined and node.host.endpoint]
        return read_stacks(there, self.service)

    @property
    def state(self) -> RemoteLink:
        """The way to the shared state."""
        self._check_open()
        return self._state

    def _connect_to_state(self) -> Channel:
        self.wake()
        return self.service(OWNER, "state").channel

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from executors, over sockets."""
        return self._dispatcher.traffic()

    def _check_open(self) -> None:
        if self._fleet.closed:
            raise PoolClosedError(self._expired or CLOSED)
        if os.getpid() != self._owner:
            raise PoolClosedError(
                "this pool belongs to the process that made it; a forked child must make its own"
            )
