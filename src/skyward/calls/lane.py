"""Lanes: how the client uses executors.

A lane joins the connection to one executor, the executor's holdings, and its load: holdings are the
objects that the executor has already, so that the client sends them only once. The lanes of a pool,
and the tasks that wait for one, are under one lock. A task that runs longer than its timeout is
looked at, so that its error says where it is, and cancelled.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from skyward.calls.loop import Loop
from skyward.calls.packer import NamedParcel, Parcel
from skyward.calls.relays import RELAY_MIN, Copy, Neighbor, Relays
from skyward.calls.scheduler import Load, Scheduler
from skyward.calls.streams import Feeder
from skyward.calls.task import Standing, Task, timeout_error
from skyward.errors import ProtocolError
from skyward.objects import memory, payloads
from skyward.objects.memory import BlobStore, Mapped
from skyward.objects.payloads import Pieces
from skyward.staff import Staff
from skyward.wire.channel import Channel
from skyward.wire.frames import DESCRIPTOR_LIMIT, Frame
from skyward.wire.messages import (
    KNOWN,
    SEGMENT,
    STREAMED,
    Buffer,
    Cancel,
    Define,
    Fetch,
    Forget,
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
CODE_MAX = 256
"""How many functions an executor keeps before the client tells it to forget the oldest."""
LOOK_SECONDS = 10.0
"""How long a timeout may be late, because agents are asked where the tasks are; on a machine that
is not too busy to answer, it is some milliseconds."""
TOGETHER_SECONDS = 0.5
"""Tasks of one broadcast that are due within this time are cancelled together, after the look: one
that is cancelled makes the others fail in the collective that they wait in."""
AGAIN_SECONDS = 0.1
"""How often a timeout is looked at that is due while a debugger holds the time."""
LOOKS_AT_ONCE = 64
SENDS_AT_ONCE = 64
"""How many threads send at the same time to executors that are within reach."""

Body = list[bytes | memoryview]


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


class Holdings:
    """The code, data, buffers and segments of memory that one executor has been sent.

    Every caller holds the lock of the executor's connection, so that the notes here are in the
    same order as the messages.
    """

    __slots__ = (
        "_channel",
        "_digests",
        "_leaving",
        "_missed",
        "_named",
        "_neighbor",
        "_relays",
        "_resent",
        "_segments",
        "_store",
        "_tasks",
        "sends",
    )

    def __init__(
        self,
        channel: Channel,
        store: BlobStore,
        tasks: Mapping[int, Task],
        neighbor: Neighbor,
        relays: Relays | None,
    ) -> None:
        """`tasks` are the executor's tasks; without `relays`, it fetches from no other executor."""
        self._channel, self._store, self._tasks = channel, store, tasks
        self._neighbor, self._relays = neighbor, relays
        self._named: OrderedDict[bytes, NamedParcel] = OrderedDict()
        self._digests: set[bytes] = set()
        self._segments: set[int] = set()
        self._leaving: set[int] = set()
        """Segments that the executor was told to forget and has not released yet."""
        self.sends = 0
        """How many tasks were sent."""
        self._resent: dict[bytes, int] = {}
        """For digests and keys that were missing: the task with which they were sent again."""
        self._missed: dict[bytes, Copy] = {}
        """For digests that did not come from another executor: from which."""

    @property
    def can_fetch(self) -> bool:
        """Whether the executor may be told to get buffers from another executor."""
        return self._relays is not None

    def has(self, named: NamedParcel) -> bool:
        """Whether the executor has the code or data under this key."""
        return named.key in self._named

    def define(self, named: NamedParcel, *, again: bool = False) -> None:
        """Send code or data that the executor does not have under its key yet."""
        if named.key in self._named:
            if not named.frozen:
                self._named.move_to_end(named.key)
            return
        payload, body, descriptors = self.pack(named.parcel, again=again)
        define = Define(named.key, payload, named.frozen, named.fresh)
        self._channel.send(define, body, descriptors)
        self._named[named.key] = named
        if len(self._named) > CODE_MAX:
            self._forget_oldest(named.key)

    def _forget_oldest(self, newest: bytes) -> None:
        used = {key for task in self._tasks.values() for key in _keys(task)}
        old = next((k for k, n in self._named.items() if not n.frozen and k not in used), None)
        if old is not None and old != newest:
            del self._named[old]
            self._channel.send(Forget([old], [], []))

    def pack(self, parcel: Parcel, *, again: bool = False) -> tuple[Payload, Body, list[int]]:
        """A parcel as it is sent: its payload, its body, and descriptors of shared memory.

        The executor is told to get large buffers from other executors if it can; with `again`,
        those that did not come from another executor.
        """
        if not parcel.encoded.buffers:
            length = parcel.encoded.pickle_length
            return Payload(length, inline=length), parcel.encoded.pieces, []
        streamed: dict[bytes, memoryview] = {}
        new: dict[int, memory.Segment] = {}

        def can_map(segment: memory.Segment) -> bool:
            """Whether the executor has the segment, or gets it with this frame."""
            if segment.id in self._segments:
                return segment.id not in self._leaving
            if segment.id not in new and len(new) == DESCRIPTOR_LIMIT:
                return False
            new[segment.id] = segment
            return True

        def large(buffers: list[memoryview]) -> list[Buffer]:
            refs = []
            for index, digest in enumerate(parcel.digests):
                length = len(buffers[index])
                blob = parcel.blobs[index] if parcel.blobs else None
                if self._channel.shares_memory and blob is not None and can_map(blob.segment):
                    refs.append(Buffer(length, SEGMENT, digest, blob.segment.id, blob.offset))
                    continue
                if digest in self._digests:
                    refs.append(Buffer(length, KNOWN, digest))
                    continue
                self._digests.add(digest)
                refs.append(Buffer(length, STREAMED, digest))
                streamed[digest] = buffers[index] if blob is None else blob.view()
            if self._fetches(streamed, again=again):
                for ref in refs:
                    ref.where = KNOWN if ref.where == STREAMED else ref.where
                streamed.clear()
            return refs

        packed = payloads.pack(parcel.encoded, large)
        for segment in new.values():
            self._store.pin(segment)
            self._segments.add(segment.id)
            packed.payload.segments.append((segment.id, segment.size))
        body = packed.body + list(streamed.values())
        return packed.payload, body, [segment.descriptor for segment in new.values()]

    def _fetches(self, buffers: dict[bytes, memoryview], *, again: bool) -> bool:
        """Have the executor fetch buffers from another; False if the client must send them."""
        if self._relays is None or not buffers:
            return False
        worthwhile = sum(map(len, buffers.values())) >= RELAY_MIN
        missed = {digest: self._missed.pop(digest) for digest in buffers if digest in self._missed}
        if again and len(missed) == len(buffers):
            given = self._relays.again(self._neighbor, missed)
        else:
            fetch = worthwhile and not again
            given = self._relays.give(self._neighbor, list(buffers), fetch=fetch)
        if given is None:
            return False
        source, number = given
        wanted = [(digest, len(buffer)) for digest, buffer in buffers.items()]
        self._channel.send(Fetch(wanted, source.address, source.certified, number))
        return True

    def lacks(self, task: Task, digests: Iterable[bytes], keys: Iterable[bytes]) -> None:
        """Note that the executor lacks buffers or objects that a task needs.

        Several tasks may lack the same object; the client sends it again with the first of them.
        """
        lacking = [digest for digest in digests if self._resent.get(digest, 0) <= task.sent]
        for key in keys:
            named = self._named.get(key)
            if named is not None and self._resent.get(key, 0) <= task.sent:
                del self._named[key]
                self._resent[key] = self.sends + 1
                lacking += named.parcel.digests
        missed = self._relays.miss(self._neighbor, lacking) if self._relays is not None else {}
        self.drop_digests(lacking)
        self._missed.update(missed)
        self._resent.update(dict.fromkeys(lacking, self.sends + 1))

    def drop_digests(self, digests: Collection[bytes]) -> None:
        """Note that the executor does not keep these buffers any more."""
        self._digests.difference_update(digests)
        for digest in digests:
            self._resent.pop(digest, None)
            self._missed.pop(digest, None)
        if self._relays is not None:
            self._relays.take(self._neighbor, digests)

    def released(self, segments: list[int]) -> None:
        """Note that the executor no longer maps these segments of the client's."""
        gone = self._segments.intersection(segments)
        self._segments -= gone
        self._leaving -= gone
        for segment in gone:
            self._store.unpin(segment)

    def forget(
        self, segments: Sequence[int], keys: Sequence[bytes], digests: Sequence[bytes]
    ) -> Forget | None:
        """Forget objects that no task will refer to; returns the message for the executor, if any.

        Segments stay pinned until the executor reports that it has released them.
        """
        ours = [segment for segment in segments if segment in self._segments]
        self._leaving.update(ours)
        known = [key for key in keys if self._named.pop(key, None) is not None]
        for key in known:
            self._resent.pop(key, None)
        stale = [digest for digest in digests if digest in self._digests]
        self.drop_digests(stale)
        return Forget(known, ours, stale) if ours or known or stale else None

    def clear(self) -> None:
        """Forget everything: the executor is gone."""
        self.released(list(self._segments))
        self.drop_digests(list(self._digests))


def _keys(task: Task) -> list[bytes]:
    return [task.code.key, *(named.key for named in task.handles)]


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
    """The hooks that the executor has entered for an earlier client of a kept pool."""

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
        "given_up",
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
        self.given_up = False
        """Whether the connection was given up, and with it what the process still has to send."""
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
        parcel, has = task.parcel, self.holdings.has
        if self.channel.shares_memory:
            return parcel.heavy
        if parcel.large or parcel.encoded.size > PROMPT_BYTES:
            return True
        # The code of most tasks is there: a call of nothing makes few steps here.
        if has(task.code) and not task.handles:
            return False
        return any(not has(named) and named.parcel.heavy for named in (task.code, *task.handles))

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
            # Over a link, nothing would be a record of 0 bytes, which ends it.
            if batch:
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
        """Find every free slot again, and count what waits: a Ctrl-C may have come between."""
        with self.lock:
            for load in self._by_load:
                self._scheduler.relist(load)
            self._scheduler.tidy()
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
            self._scheduler.drop(unrunnable)
        return unrunnable

    def drop(self, task: Task) -> None:
        """Remove a task from the queue, if it waits there."""
        with self.lock:
            self._scheduler.drop([task])

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


@dataclass(slots=True)
class TimeoutGroup:
    """Tasks that are looked at together, and how many looks have not ended."""

    tasks: Sequence[Task]
    due: list[Task]
    left: int


class Timeouts:
    """Cancels the tasks of a pool whose time is over."""

    def __init__(
        self, loop: Loop, lanes: Lanes, cancel: Callable[[Task, BaseException], None]
    ) -> None:
        self._loop, self._lanes, self._cancel = loop, lanes, cancel
        self._staff = Staff("skyward-looks", LOOKS_AT_ONCE)
        self._lock = threading.Lock()
        self._looking: dict[int, TimeoutGroup] = {}
        """The looks that have not ended, by the number of the first task."""
        self._holds = 0
        self._held = 0.0
        """For how long the time has been held so far."""
        self._held_since = 0.0

    def start(self, task: Task) -> None:
        """Let a task's time run, if it has a timeout; a second call changes nothing."""
        if task.timeout is not None and task.timer is None and not task.done:
            task.due = self.now() + task.timeout
            task.timer = self._loop.later(task.timeout, functools.partial(self._strike, task))

    def hold(self) -> None:
        """Let no task's time run for now: somebody is in a debugger."""
        with self._lock:
            if not self._holds:
                self._held_since = time.monotonic()
            self._holds += 1

    def release(self) -> None:
        """Let the time run again, once for every `hold`."""
        with self._lock:
            self._holds -= 1
            if not self._holds:
                self._held += time.monotonic() - self._held_since

    def now(self) -> float:
        """The time without the times in which it was held."""
        with self._lock:
            now = self._held_since if self._holds else time.monotonic()
            return now - self._held

    def _strike(self, task: Task) -> None:
        """Have a task looked at and cancelled; on the loop's thread, which must not wait."""
        if not _unfinished(task):
            return
        left = task.due - self.now()
        if self._holds or left > AGAIN_SECONDS:
            again = functools.partial(self._strike, task)
            task.timer = self._loop.later(max(left, AGAIN_SECONDS), again)
            return
        task.overdue = True
        tasks = task.together or [task]
        key = tasks[0].id
        places = [(each, self._reachable(each)) for each in tasks]
        asked = [(each, lane) for each, lane in places if lane is not None]
        with self._lock:
            group = self._looking.get(key)
            if group is not None:
                group.due.append(task)
                return
            self._looking[key] = TimeoutGroup(tasks, [task], len(asked))
        if not asked:
            self._end(key)
        for each, lane in asked:
            self._staff.run(functools.partial(self._look, key, each, lane))
        self._loop.later(LOOK_SECONDS, functools.partial(self._end, key))

    def look_at(self, tasks: Sequence[Task], seconds: float) -> None:
        """Note where tasks are, each in its `standing`; waits so many seconds for their agents."""
        places = [(task, self._reachable(task)) for task in tasks]
        looks = [
            self._staff.submit(self._note_standing, task, lane)
            for task, lane in places
            if lane is not None
        ]
        concurrent.futures.wait(looks, seconds)

    def _note_standing(self, task: Task, lane: Lane) -> None:
        task.standing = lane.look(task)

    def _reachable(self, task: Task) -> Lane | None:
        lane = self._lanes.with_task(task) if _unfinished(task) else None
        return lane if lane is not None and lane.channel.connected else None

    def _look(self, key: int, task: Task, lane: Lane) -> None:
        try:
            self._note_standing(task, lane)
        finally:
            with self._lock:
                group = self._looking.get(key)
                last = False
                if group is not None:
                    group.left -= 1
                    last = not group.left
            if last:
                self._end(key)

    def _end(self, key: int) -> None:
        """Cancel what is due, after the look or without waiting for it any longer."""
        with self._lock:
            group = self._looking.pop(key, None)
        if group is None:
            return
        soon = self.now() + TOGETHER_SECONDS
        for task in group.tasks:
            due = task in group.due or (task.timer is not None and task.due < soon)
            if due and _unfinished(task):
                self._cancel(task, timeout_error(task))


def _unfinished(task: Task) -> bool:
    """Whether the task has no answer yet, or is a stream that has not ended."""
    return not task.done or (task.stream is not None and task.on_executor)


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
        self._staff = Staff("skyward-send", SENDS_AT_ONCE)
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
            self._staff.allow(SENDS_AT_ONCE + len(self._stuck))
