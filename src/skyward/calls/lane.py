"""Lanes: how the client uses executors.

A lane joins the connection to one executor, the executor's holdings, and its load. The lanes of a
pool, and the tasks that wait for one, are under one lock.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from skyward.calls.holdings import Body, Holdings
from skyward.calls.relays import Neighbor, Relays
from skyward.calls.scheduler import Load, Scheduler
from skyward.calls.streams import Feeder
from skyward.calls.task import Standing, Task
from skyward.errors import ProtocolError
from skyward.objects import memory, payloads
from skyward.objects.blobs import BlobStore, Mapped
from skyward.objects.payloads import Pieces
from skyward.staff import Staff
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.messages import (
    SEGMENT,
    STREAMED,
    Buffer,
    Cancel,
    Message,
    Payload,
    Released,
    Run,
    Share,
)

RECALL_SECONDS = 0.05
"""After so long without a result, the client calls tasks back that were sent ahead."""
PROMPT_BYTES = 16 << 10
"""A frame up to this size is sent without waiting, even during an outage of the network."""
LONG_BYTES = 1 << 20
"""A transfer of a larger pickle is cut off when its task is cancelled."""


class Connection:
    """Sends messages to one executor, and reads the payloads that it sends."""

    __slots__ = ("_mapped", "_reconnected", "channel", "closed", "lock")

    def __init__(self, channel: Channel, on_release: Callable[[], None]) -> None:
        """`on_release` is called, also from finalizers, when `flush_releases` has work."""
        self.channel = channel
        self.closed = False
        self.lock = threading.RLock()
        """Held by the thread that sends a task, and the definitions that go before it."""
        self._mapped = Mapped(on_release)
        self._reconnected = 0.0

    def tell(self, message: Message) -> None:
        """Send a small message; if the executor is gone, only its watcher reports that."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def when_free(self, action: Callable[[], None]) -> None:
        """Run an action with the lock held: now, or on another thread after a long transfer.

        A transfer may last as long as an outage of the network. The loop's thread must not wait for
        it: that thread reads the counts that the transfer waits for.
        """
        if self.channel.shares_memory:
            with self.lock:
                action()
            return
        held: list[bool] = []
        try:
            # One step for the interpreter: no Ctrl-C between taking the lock and noting it.
            held.extend(map(self.lock.acquire, (False,)))
            if held[0]:
                action()
        finally:
            if held and held[0]:
                self.lock.release()
        if not held[0]:
            self.on_own_thread(action)

    def on_own_thread(self, action: Callable[[], None]) -> None:
        """Run an action with the lock held, on a thread of its own."""

        def locked() -> None:
            with self.lock:
                action()

        threading.Thread(target=locked, name="skyward-lane", daemon=True).start()

    def reconnected(self) -> None:
        """Note that the channel has a new connection."""
        self._reconnected = time.monotonic()

    def connected_for(self, seconds: float) -> bool:
        """Whether the executor has been within reach for so many seconds without a gap."""
        return self.channel.connected and time.monotonic() - self._reconnected >= seconds

    def take(self, frame: Frame, payload: Payload) -> Pieces:
        """Read a received payload; its shared memory is mapped."""
        if not payload.buffers and frame.body is not None and not frame.descriptors:
            return payloads.unpack(payload, frame.body, payloads.nowhere)
        payloads.check(frame, payload)
        for (segment, size), descriptor in zip(payload.segments, frame.descriptors, strict=True):
            self._mapped.add(segment, size, descriptor)
        places = [memory.fresh(ref.length) for ref in payload.buffers if ref.where == STREAMED]
        body = payloads.read_body(self.channel, frame, payload, places)
        arrived = iter(places)

        def find(ref: Buffer) -> memoryview:
            if ref.where == SEGMENT:
                return self._mapped.view(ref.segment, ref.offset, ref.length)
            if ref.where != STREAMED:
                raise ProtocolError("an executor refers to a blob instead of sending it")
            return next(arrived)

        pieces = payloads.unpack(payload, body, find)
        for segment, _ in payload.segments:
            self._mapped.drop(segment)
        return pieces

    def flush_releases(self) -> None:
        """Tell the executor which of its segments this process maps no more."""
        released = []
        while self._mapped.released:
            released.append(self._mapped.released.popleft())
        if released:
            self.tell(Released(released))

    def close(self) -> None:
        """Close the channel; received values stay valid."""
        self.closed = True
        self.channel.close()
        self._mapped.close()


@dataclass(slots=True)
class Preparation:
    """How far an executor is with the plugins' hooks."""

    begun: bool = False
    """Whether the executor was told to enter the hooks; it can enter them only once."""
    done: bool = False
    """Whether the executor has entered the hooks, or there are none."""
    replaced: bool = False
    """Whether its group of workers is over: the executor gets no new tasks, and ends when idle."""
    group: str = ""
    """The hooks that the executor has entered for an earlier client of a pool that stays."""

    def begin(self) -> bool:
        """Note that the executor is told to prepare; False if it has been told before."""
        before, self.begun = self.begun, True
        return not before

    def finish(self) -> bool:
        """Note that the executor can be given tasks; False if that was known."""
        before, self.done = self.done, True
        return not before

    def replace(self) -> bool:
        """Note that another executor will take this one's place; False if that was known."""
        before, self.replaced = self.replaced, True
        return not before


class LaneOwner(Protocol):
    """The node of an executor, as the lane to it needs it."""

    def kill(self, lane: Lane, reason: str) -> None:
        """Have the agent end the executor and start a new one."""

    def find(self, lane: Lane, task: Task) -> Standing:
        """Ask the agent where a task is in its code."""

    def executor_prepared(self, lane: Lane, problem: str) -> None:
        """Note that the executor has entered the plugins' hooks, or why it could not."""

    def gets_memory_back(self, lane: Lane) -> None:
        """Have the executor told which memory it gets back; a finalizer may call this."""


class Lane:
    """One executor process."""

    __slots__ = (
        "_feeders",
        "_owner",
        "_sending",
        "channel",
        "connection",
        "end_reason",
        "holdings",
        "load",
        "neighbor",
        "pid",
        "port",
        "preparation",
        "tasks",
    )

    def __init__(
        self,
        load: Load[Task],
        channel: Channel,
        store: BlobStore,
        owner: LaneOwner,
        *,
        pid: int = 0,
        port: int = 0,
        neighbor: Neighbor | None = None,
        relays: Relays | None = None,
    ) -> None:
        """`port` is kept free on the head's first worker."""
        self.load = load
        self.tasks = load.tasks
        self.channel = channel
        self.connection = Connection(channel, lambda: owner.gets_memory_back(self))
        self.neighbor = neighbor or Neighbor()
        self.holdings = Holdings(channel, store, load.tasks, self.neighbor, relays)
        self.preparation = Preparation()
        self._feeders: dict[int, list[Feeder]] = {}
        """For each task with streamed arguments, the feeders that send the items."""
        self.pid, self.port = pid, port
        self.end_reason = ""
        """Why the process ended, after the agent has reported it; empty until then."""
        self._owner = owner
        self._sending: Task | None = None
        """The task that a thread is sending, or whose definitions it is sending."""

    @property
    def node(self) -> int:
        """The node the executor is on."""
        return self.load.node

    @property
    def worker(self) -> int:
        """The worker of the node that the executor belongs to."""
        return self.load.worker

    @property
    def slot(self) -> int:
        """The executor's number among the processes of its worker."""
        return self.load.slot

    @property
    def where(self) -> str:
        """The executor's node and worker, in words."""
        return self.load.where

    @property
    def lost(self) -> bool:
        """Whether the executor is gone for good."""
        return self.connection.closed

    def tell(self, message: Message) -> None:
        """Send a small message; if the executor is gone, only its watcher reports that."""
        self.connection.tell(message)

    def kill(self, reason: str) -> None:
        """Have the agent end the executor and start a new one."""
        self._owner.kill(self, reason)

    def look(self, task: Task) -> Standing:
        """Where a task is in its code; waits for the agent."""
        return self._owner.find(self, task)

    def prepared(self, problem: str) -> None:
        """Note that the executor has entered the plugins' hooks, or why it could not."""
        self._owner.executor_prepared(self, problem)

    def process_ended(self, reason: str) -> None:
        """Note why the process ended; the agent has reported it."""
        self.end_reason = reason

    def takes_long(self, task: Task) -> bool:
        """Whether sending a task may take long enough that the loop must not wait for it."""
        parcel = task.parcel
        if parcel.heavy or self.channel.shares_memory:
            return parcel.heavy
        return parcel.encoded.size > PROMPT_BYTES or any(
            named.parcel.heavy and not self.holdings.has(named)
            for named in (task.code, *task.handles)
        )

    def send(self, task: Task, *, again: bool = False, pending: bool = False) -> bool:
        """Send a task and the objects that the executor lacks, unless the task was cancelled.

        The executor is told to get large buffers from other executors if it can; with `again`,
        those that did not come from another executor. With `pending`, the executor has the task,
        which lacks something; if the executor has given the task back meanwhile, it ignores this.
        """
        with self.connection.lock:
            if self.connection.closed:
                raise BrokenPipeError("the executor is gone")
            # In this order: `cancel` first marks the task as done, then checks whether it is sent.
            self._sending = task
            try:
                return not task.done and self._send(task, again, pending)
            finally:
                self._sending = None

    def _send(self, task: Task, again: bool, pending: bool) -> bool:
        holdings = self.holdings
        holdings.define(task.code, again=again)
        for named in task.handles:
            holdings.define(named, again=again)
        try:
            payload, body, descriptors = holdings.pack(task.parcel, again=again)
        except KeyboardInterrupt:
            # `holdings` may say that the executor has memory which it will not get.
            if task.parcel.digests:
                self.channel.abort()
            raise
        names = [str(index) for index in range(len(task.inputs))] if task.inputs else []
        task.sent = holdings.sends = holdings.sends + 1
        self.channel.send(_run(task, payload, names, pending), body, descriptors)
        return True

    def send_small(self, tasks: list[Task]) -> list[Task]:
        """Send several light tasks in one write; returns those that were cancelled, unsent."""
        with self.connection.lock:
            unsent = [task for task in tasks if task.done]
            batch: list[tuple[Message, Body]] = []
            for task in tasks:
                if task in unsent:
                    continue
                for named in (task.code, *task.handles):
                    self.holdings.define(named)
                packed = payloads.pack(task.parcel.encoded, None)
                task.sent = self.holdings.sends = self.holdings.sends + 1
                batch.append((_run(task, packed.payload, []), packed.body))
            self.channel.send_many(batch)
            return unsent

    def resend(self, task: Task, digests: list[bytes], keys: list[bytes]) -> None:
        """Send a task again, with the objects that the executor has reported missing."""
        with self.connection.lock:
            self.holdings.lacks(task, digests, keys)
            # If the executor is gone, the loss of the lane retries or fails the task.
            with contextlib.suppress(OSError):
                self.send(task, again=True, pending=bool(digests or keys))

    def feed(self, task: Task) -> None:
        """Send the items of a task's streamed arguments, as the executor asks for them."""
        self._feeders[task.id] = [
            Feeder(task.id, index, self.channel, source) for index, source in enumerate(task.inputs)
        ]

    def grant(self, task_id: int, stream: int, count: int) -> None:
        """Send so many more items of a streamed argument: the executor has asked for them."""
        for feeder in self._feeders.get(task_id, [])[stream:][:1]:
            feeder.grant(count)

    def stop_feeding(self, task_id: int) -> None:
        """Stop sending the items of a task's streamed arguments."""
        for feeder in self._feeders.pop(task_id, ()):
            feeder.stop()

    def stop(self, task: Task) -> None:
        """Have a task stopped; during a long transfer, by ending the connection.

        The transfer may read the caller's own memory, which the caller may change after `stop`.
        """
        parcel = task.parcel
        if self._sending is task and (parcel.large or parcel.encoded.pickle_length > LONG_BYTES):
            self.channel.abort()
            return
        # The executor may not read, so that another thread waits to send to it. The loop must not
        # wait, too: the loop has the executor killed if necessary.
        connection = self.connection
        run = connection.on_own_thread if self.channel.shares_memory else connection.when_free
        run(lambda: self.tell(Cancel(task.id)))

    def evicted(self, digests: list[bytes]) -> None:
        """Note that the executor dropped these buffers to stay within its cache's limit."""
        self.connection.when_free(lambda: self.holdings.drop_digests(digests))

    def released(self, segments: list[int]) -> None:
        """Note that the executor no longer maps these segments of the client's."""
        with self.connection.lock:
            self.holdings.released(segments)

    def forget(
        self,
        *,
        segments: Sequence[int] = (),
        keys: Sequence[bytes] = (),
        digests: Sequence[bytes] = (),
    ) -> None:
        """Tell the executor which objects and segments no task will refer to again."""

        def tell() -> None:
            message = self.holdings.forget(segments, keys, digests)
            if message is not None:
                self.tell(message)

        self.connection.when_free(tell)

    def disconnected(self) -> None:
        """Note that the executor is out of reach for now."""
        self.neighbor.connected = False

    def reconnected(self) -> None:
        """Note that the executor is within reach again."""
        self.neighbor.connected = True
        self.connection.reconnected()

    def close(self) -> None:
        """Close the connection: the executor is gone for good."""
        self.neighbor.connected = False
        self.connection.close()
        with self.connection.lock:
            self.holdings.clear()
        for task_id in list(self._feeders):
            self.stop_feeding(task_id)


class Lanes:
    """Gives tasks to lanes with a free slot, and keeps the others until one is free."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Callers hold this around `assign` and `queue`, and around steps that belong together."""
        self._scheduler: Scheduler[Task] = Scheduler()
        self._by_load: dict[Load[Task], Lane] = {}
        self.refillable: dict[Lane, None] = {}
        """Lanes that may have room for waiting tasks; the first is filled first."""

    def __iter__(self) -> Iterator[Lane]:
        """The lanes of this moment."""
        return iter(list(self._by_load.values()))

    # Lanes.

    def add(self, lane: Lane, *, usable: bool) -> None:
        """Add a lane; unless it is `usable`, it gets no tasks yet."""
        with self.lock:
            self._by_load[lane.load] = lane
            lane.load.open = usable
            if usable:
                self._scheduler.add(lane.load)
            self.refillable[lane] = None

    def drain(self, lane: Lane, *, nested: bool = False) -> None:
        """Give a lane no new tasks; with `nested`, only those that a task which waits may need."""
        load = lane.load
        with self.lock:
            nested = nested and load in self._by_load
            load.paused, load.nested_only = load.paused and nested, nested
            if load.open:
                self._scheduler.remove(load)
            if nested:
                self._scheduler.relist(load)
                self.refillable[lane] = None

    def pause(self, lane: Lane) -> None:
        """Give a lane that is out of reach no new tasks for now; it keeps the tasks it has."""
        with self.lock:
            lane.disconnected()
            if lane.load.open:
                self._scheduler.remove(lane.load)
                lane.load.paused = True
            elif lane.load.nested_only:
                lane.load.paused = True

    def resume(self, lane: Lane) -> None:
        """Use a lane again that is back within reach."""
        with self.lock:
            lane.reconnected()
            if lane.load.paused and not lane.lost:
                lane.load.paused = False
                if not lane.load.nested_only:
                    lane.load.open = True
                    self._scheduler.add(lane.load)
                self.refillable[lane] = None

    def remove(self, lane: Lane) -> tuple[list[Task], list[Task]]:
        """Remove a lane; returns its tasks that may have started, and its other tasks.

        The tasks that only this executor can run count as started.
        """
        with self.lock:
            self.drain(lane)
            self._by_load.pop(lane.load, None)
            started, unstarted = lane.load.started(), lane.load.unstarted()
            started += [task for task in unstarted if task.pinned is not None]
            unstarted = [task for task in unstarted if task.pinned is None]
            lane.tasks.clear()
            return started + self._scheduler.take_pinned(lane.load), unstarted

    def with_task(self, task: Task) -> Lane | None:
        """The lane that has a task, if one does."""
        with self.lock:
            load = task.load if task.on_executor else None
            return self._by_load.get(load) if load is not None else None

    def has(self, load: Load[Task]) -> bool:
        """Whether an executor is there; one that is lost never comes back."""
        lane = self._by_load.get(load)
        # Its connection may have ended, while its agent has not told yet why.
        return lane is not None and not lane.lost

    def offer(self, load: Load[Task]) -> tuple[str, str]:
        """Have tasks connect to an executor, to call its objects: where, and whom they find there.

        Empty if the executor is lost.
        """
        lane = self._by_load.get(load)
        if lane is None:
            return "", ""
        if not lane.neighbor.offered:
            lane.neighbor.offered = True
            lane.tell(Share())
        return lane.neighbor.endpoints, lane.neighbor.certified

    def relist(self) -> None:
        """Find every free slot again: a Ctrl-C may have interrupted the assigning of a task."""
        with self.lock:
            for load in self._by_load:
                self._scheduler.relist(load)
        self.refill_all()

    def refill_all(self) -> None:
        """Have every lane asked whether it has room."""
        with self.lock:
            self.refillable.update(dict.fromkeys(self._by_load.values()))

    def take_refillable(self) -> Iterable[Lane]:
        """Lanes that may have room for waiting tasks, since this was last asked."""
        if not self.refillable:
            return ()
        with self.lock:
            refillable, self.refillable = self.refillable, {}
        return refillable

    def take_stuck(self) -> list[Lane]:
        """Lanes with tasks that were sent ahead and wait behind a slow one; each is named once."""
        now = time.monotonic()
        stuck = []
        for load, lane in list(self._by_load.items()):
            behind = (load.overfull or load.crowded) and not load.recalling
            if behind and now - load.last_result > RECALL_SECONDS:
                load.recalling, load.crowded = True, False
                stuck.append(lane)
        return stuck

    def held(self) -> tuple[list[Task], list[Task], bool]:
        """Waiting tasks whose workers are all held by streams that are not read, and the streams.

        The flag says whether no other task is on any worker.
        """
        if not self._scheduler.may_have_queued:
            return [], [], False
        with self.lock:
            loads = list(self._by_load)
            full = [load for load in loads if _held_up(load)]
            full.sort(key=lambda load: (load.node, load.worker, load.slot))
            queued = self._scheduler.queued() if full else []
            if not queued:
                return [], [], False
            free = [load for load in loads if load not in full]
            nodes = {load.node for load in free}
            workers = {(load.node, load.worker) for load in free}

            def waits(task: Task) -> bool:
                if task.pinned is not None:
                    return task.pinned in full
                if task.worker is not None:
                    return task.worker not in workers
                return task.on not in nodes if task.on is not None else not free

            waiting = [task for task in queued if waits(task)]
            streams = [task for load in full for task in load.started() if task.stream is not None]
            return waiting, streams, not any(load.tasks for load in free)

    # Tasks.

    def assign(self, task: Task) -> Lane | None:
        """Give a task to a lane with a free slot, if there is one."""
        load = self._scheduler.pick(task)
        if load is None:
            return None
        # In this order, so that a task on a lane knows its lane even after a Ctrl-C.
        task.load = load
        self._scheduler.begin(load, task)
        return self._by_load[load]

    def assign_next(self, lane: Lane) -> Task | None:
        """Give a lane the waiting task it may take next, if it has room."""
        with self.lock:
            task = self._scheduler.next_for(lane.load)
            if task is not None:
                task.waiting = False
                task.load = lane.load
                self._scheduler.begin(lane.load, task)
            return task

    def queue(self, task: Task) -> None:
        """Keep a task until a lane has room for it."""
        task.waiting = True
        self._scheduler.queue(task)

    def queue_nested(self, task: Task) -> None:
        """Queue a task that another one has started: before all others, unless it is aimed.

        So the tasks that wait for others are as few as the tasks are deep. Aimed tasks keep their
        order: those of two broadcasts must come in the same order everywhere.
        """
        task.waiting = True
        load = self._scheduler.room_for(task)
        self._scheduler.queue(task)
        if load is not None:
            self.refillable[self._by_load[load]] = None

    def lend(self, lane: Lane, task_id: int) -> None:
        """Use the place of a task that waits for others."""
        with self.lock:
            if task_id in lane.tasks:
                self._scheduler.lend(lane.load, task_id)
                self.refillable[lane] = None

    def go_on(self, lane: Lane, task_id: int) -> None:
        """Note that a task that waited for others goes on."""
        with self.lock:
            lane.load.take_back(task_id)

    def requeue(self, tasks: Iterable[Task]) -> None:
        """Queue tasks that lost their lane, before all others; the first given comes last."""
        with self.lock:
            for task in tasks:
                if not task.done:
                    task.load = None
                    task.waiting = True
                    self._scheduler.queue(task, first=True)

    def take_back(self, lane: Lane, task: Task) -> None:
        """Free the slot of a task that its executor does not run."""
        with self.lock:
            self._scheduler.end(lane.load, task.id)
            self.refillable[lane] = None

    def leave(self, lane: Lane, task_id: int, ran: float) -> Task | None:
        """Free the slot of a task that has run for so many seconds."""
        with self.lock:
            task = self._scheduler.end(lane.load, task_id)
            lane.load.note(ran)
            lane.load.last_result = time.monotonic()
            # Else a task that comes later finds the free slot by itself.
            if self._scheduler.may_have_queued:
                self.refillable[lane] = None
        return task

    def recalled(self, lane: Lane, task_ids: list[int]) -> None:
        """Requeue tasks that an executor has given back."""
        with self.lock:
            lane.load.recalling = False
            lane.load.stop_sending_ahead()
            ended = [self._scheduler.end(lane.load, task_id) for task_id in reversed(task_ids)]
            self.requeue(task for task in ended if task is not None)
            self.refill_all()

    def take_unrunnable(self, can_run: Callable[[Task], bool]) -> list[Task]:
        """Remove the waiting tasks that cannot run any more, and return them."""
        with self.lock:
            unrunnable = [task for task in self._scheduler.queued() if not can_run(task)]
            for task in unrunnable:
                task.waiting = False
        return unrunnable

    def take_all(self) -> list[Task]:
        """Empty the queue, and return every task, also those on lanes."""
        with self.lock:
            waiting = self._scheduler.forget_queue()
            return waiting + [task for load in self._by_load for task in load.tasks.values()]

    @property
    def backlog(self) -> int:
        """How many tasks wait for a free slot."""
        with self.lock:
            return self._scheduler.backlog


def _run(task: Task, payload: Payload, inputs: list[str], pending: bool = False) -> Run:
    """The message that gives an executor a task."""
    keys = [named.key for named in task.handles] if task.handles else []
    kept = task.kept is not None
    trace = {} if task.trace is None else task.trace.carrier
    code, mode = task.code.key, task.debugged
    name, apart = task.name, task.apart
    return Run(task.id, name, code, payload, keys, inputs, kept, trace, mode, apart, pending)


def _held_up(load: Load[Task]) -> bool:
    """Whether streams that are not read have every slot of an executor."""
    slotless = load.waiting | load.apart
    tasks = [task for task in load.tasks.values() if task.id not in slotless]
    return len(load.tasks) >= load.capacity and all(
        task.stream is not None and task.stream.held_up for task in tasks
    )


# Senders.


MOST = 64
"""How many threads send at the same time to executors that are within reach."""


@dataclass(slots=True, eq=False)
class Queue:
    """What is to be sent on one lane."""

    actions: deque[Callable[[], None]] = field(default_factory=deque)
    busy: bool = False
    """Whether a thread sends on the lane, or is about to."""
    cut_off: bool = False


class Sending:
    """Runs the large sends of a pool, in order for each lane, on threads of its own.

    They are too large for the caller or the loop to wait for. A lane has one thread at a time. A
    send that has begun when its executor is cut off waits for as long as the outage: its thread
    does not count among those that the other lanes share. A send that has not begun waits without
    a thread.
    """

    def __init__(self) -> None:
        self._staff = Staff("skyward-send", MOST)
        self._queues: dict[Lane, Queue] = {}
        """The lanes that something is to be sent on, or that are cut off."""
        self._stuck: set[Lane] = set()
        """The lanes that are cut off in the middle of a send."""
        self._lock = threading.Lock()

    def run(self, lane: Lane, action: Callable[[], None]) -> None:
        """Send on a lane after what is sent there now."""
        with self._lock:
            queue = self._queues.setdefault(lane, Queue())
            queue.actions.append(action)
            self._go_on(lane, queue)

    def submit(self, lane: Lane, action: Callable[[], None]) -> Future[None]:
        """Send on a lane like `run`; the future says when that is done."""
        future: Future[None] = Future()

        def send() -> None:
            try:
                action()
            except BaseException as problem:
                future.set_exception(problem)
            else:
                future.set_result(None)

        self.run(lane, send)
        return future

    def aside(self, action: Callable[[], None]) -> None:
        """Run an action that prepares a send, and may wait for sends on any lane."""
        self._staff.run(action)

    def cut_off(self, lane: Lane) -> None:
        """Begin no send on a lane that is out of reach."""
        with self._lock:
            if lane.lost:
                return
            queue = self._queues.setdefault(lane, Queue())
            queue.cut_off = True
            self._count_stuck(lane, queue)

    def release(self, lane: Lane) -> None:
        """Begin the sends on a lane that is back within reach, or lost: then they fail."""
        with self._lock:
            queue = self._queues.get(lane)
            if queue is not None:
                queue.cut_off = False
                self._count_stuck(lane, queue)
                self._go_on(lane, queue)

    def _go_on(self, lane: Lane, queue: Queue) -> None:
        if queue.busy or queue.cut_off:
            return
        if queue.actions:
            queue.busy = True
            self._staff.run(functools.partial(self._send_next, lane, queue))
        else:
            del self._queues[lane]

    def _send_next(self, lane: Lane, queue: Queue) -> None:
        with self._lock:
            action = None if queue.cut_off else queue.actions.popleft()
        try:
            if action is not None:
                action()
        finally:
            with self._lock:
                queue.busy = False
                self._count_stuck(lane, queue)
                self._go_on(lane, queue)

    def _count_stuck(self, lane: Lane, queue: Queue) -> None:
        before = len(self._stuck)
        if queue.busy and queue.cut_off:
            self._stuck.add(lane)
        else:
            self._stuck.discard(lane)
        if len(self._stuck) != before:
            self._staff.allow(MOST + len(self._stuck))
