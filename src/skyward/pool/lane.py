"""A lane: the client's data connection to one executor, and what that executor already has."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyward.errors import ProtocolError
from skyward.pool.relays import RELAY_MIN, Relays
from skyward.pool.scheduler import Place
from skyward.pool.task import Definition, Parcel, Pieces, Task
from skyward.wire import blobs, memory
from skyward.wire.blobs import BlobStore, Mapped
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
)

if TYPE_CHECKING:
    from skyward.pool.streams import Feeder

CODE_MAX = 256
"""Functions an executor keeps before the client tells it to forget the oldest."""

PROMPT_BYTES = 16 << 10
"""What is not larger is sent without waiting, whatever the network does."""
LONG_BYTES = 1 << 20
"""Larger frames are not waited for to send a message after them."""

Body = list[bytes | memoryview]


@dataclass(slots=True, eq=False)
class Lane(Place[Task]):
    """One executor process, reached directly."""

    pid: int = 0
    channel: Channel = field(default=None, repr=False)  # type: ignore[assignment]
    store: BlobStore = field(default=None, repr=False)  # type: ignore[assignment]
    kill: Callable[[str], None] = field(default=lambda reason: None, repr=False)
    """Have its agent end the executor, which starts a new one; takes the reason."""
    feeders: dict[int, list[Feeder]] = field(default_factory=dict)
    mapped: Mapped = field(default_factory=Mapped)
    lost: bool = False
    end_reason: str = ""
    """Why its process ended, once the agent has said so."""
    sending: Task | None = None
    """The task that is being sent, with all that goes before it."""
    port: int = 0
    """On the head's first worker, the port kept free there."""
    peer: str = ""
    """Where other executors of the pool can reach this one, if they can."""
    certified: str = ""
    """The name in its certificate."""
    relays: Relays | None = field(default=None, repr=False)
    """Who else has which buffers; None where executors do not help each other."""
    prepared: bool = False
    """Whether the plugins' hooks are entered in it."""
    joined: bool = False
    """Whether it was told to prepare, which it can do once."""
    paused: bool = False
    """Whether it gets nothing new only because it is cut off."""
    back_since: float = 0.0
    """When it was last connected again."""
    replaced: bool = False
    """Whether its group is over: it gets nothing new, and is ended when it is idle."""
    last_result: float = 0.0
    recalling: bool = False
    _known: OrderedDict[bytes, Definition] = field(default_factory=OrderedDict)
    _digests: set[bytes] = field(default_factory=set)
    _segments: set[int] = field(default_factory=set)
    _sends: int = 0
    """How many tasks were sent."""
    _resent: dict[bytes, int] = field(default_factory=dict)
    """When digests and keys that were missing were sent again: with which of those tasks."""
    _leaving: set[int] = field(default_factory=set)
    """Segments the executor was told to forget and has not released yet."""
    _lock: Any = field(default_factory=threading.RLock)

    @property
    def where(self) -> str:
        """How people call this place."""
        return f"node {self.node}" + (f" worker {self.worker}" if self.worker else "")

    def tell(self, message: Message) -> None:
        """Send a small message; if the executor is gone, whoever watches it knows soon."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def takes_long(self, task: Task) -> bool:
        """Whether sending a task may take long enough that the loop must not wait for it."""
        if task.parcel.heavy or self.channel.shares_memory:
            return task.parcel.heavy
        return task.parcel.encoded.size > PROMPT_BYTES or any(
            d.parcel.heavy and d.key not in self._known for d in (task.code, *task.handles)
        )

    def soon(self, action: Callable[[], None]) -> None:
        """Do something with the lock: now, or when a transfer that lasts has let go of it.

        A transfer over a network may last for as long as that is gone, and the loop must go on: it
        is the loop that hears how far the transfer has come.
        """
        if self.channel.shares_memory:
            with self._lock:
                action()
            return
        held: list[bool] = []
        try:
            # One step for the interpreter: no Ctrl-C between taking the lock and noting it.
            held.extend(map(self._lock.acquire, (False,)))
            if held[0]:
                action()
        finally:
            if held and held[0]:
                self._lock.release()
        if not held[0]:
            self._apart(action)

    def _apart(self, action: Callable[[], None]) -> None:
        """Do something with the lock, on a thread of its own."""

        def locked() -> None:
            with self._lock:
                action()

        threading.Thread(target=locked, name="skyward-lane", daemon=True).start()

    def send(self, task: Task, *, fetch: bool = True) -> bool:
        """Send a task with whatever its executor does not have yet, unless it was cancelled.

        With `fetch`, it is told to get from others what they have already.
        """
        with self._lock:
            if self.lost:
                raise BrokenPipeError("the executor is gone")
            # In this order: who cancels it marks it as done, and then looks whether it is sent.
            self.sending = task
            try:
                return not task.done and self._send(task, fetch)
            finally:
                self.sending = None

    def _send(self, task: Task, fetch: bool) -> bool:
        self._define(task.code, fetch)
        for definition in task.handles:
            self._define(definition, fetch)
        try:
            payload, body, descriptors = self._pack(task.parcel, fetch)
        except KeyboardInterrupt:
            # The executor may have been put down for memory it will not get.
            if task.parcel.digests:
                self.channel.abort()
            raise
        names = [str(index) for index in range(len(task.inputs))]
        keys = [definition.key for definition in task.handles]
        run = Run(task.id, task.name, task.code.key, payload, keys, names)
        self._sends += 1
        task.sent = self._sends
        self.channel.send(run, body, descriptors)
        return True

    def stop(self, task: Task) -> None:
        """Have a task stopped; amid a long transfer, only by ending the connection.

        What is sent may be the caller's own memory, and the caller is about to have it back.
        """
        parcel = task.parcel
        if self.sending is task and (parcel.large or parcel.encoded.pickle_length > LONG_BYTES):
            self.channel.abort()
            return
        # Its executor may not be reading, and somebody wait for it: the loop, which has it killed
        # if need be, must not.
        act = self._apart if self.channel.shares_memory else self.soon
        act(lambda: self.tell(Cancel(task.id)))

    def send_small(self, tasks: list[Task]) -> list[Task]:
        """Send several light tasks in one write; returns those cancelled meanwhile, unsent."""
        with self._lock:
            unsent = [task for task in tasks if task.done]
            batch: list[tuple[Message, Body]] = []
            for task in tasks:
                if task in unsent:
                    continue
                for definition in (task.code, *task.handles):
                    self._define(definition)
                packed = blobs.pack(task.parcel.encoded, None)
                keys = [definition.key for definition in task.handles]
                self._sends += 1
                task.sent = self._sends
                batch.append(
                    (Run(task.id, task.name, task.code.key, packed.payload, keys, []), packed.body)
                )
            self.channel.send_many(batch)
            return unsent

    def _define(self, definition: Definition, fetch: bool = True) -> None:
        if definition.key in self._known:
            if not definition.frozen:
                self._known.move_to_end(definition.key)
            return
        payload, body, descriptors = self._pack(definition.parcel, fetch)
        self.channel.send(Define(definition.key, payload, definition.frozen), body, descriptors)
        self._known[definition.key] = definition
        if len(self._known) > CODE_MAX:
            used = {key for task in self.tasks.values() for key in _keys(task)}
            old = next((k for k, d in self._known.items() if not d.frozen and k not in used), None)
            if old is not None and old != definition.key:
                del self._known[old]
                self.channel.send(Forget([old], [], []))

    def _pack(self, parcel: Parcel, fetch: bool) -> tuple[Payload, Body, list[int]]:
        if not parcel.encoded.buffers:
            packed = blobs.pack(parcel.encoded, None)
            return packed.payload, packed.body, []
        streamed: dict[bytes, memoryview] = {}
        new: dict[int, memory.Segment] = {}

        def lend(segment: memory.Segment) -> bool:
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
                if self.channel.shares_memory and blob is not None and lend(blob.segment):
                    refs.append(Buffer(length, SEGMENT, digest, blob.segment.id, blob.offset))
                    continue
                if digest in self._digests:
                    refs.append(Buffer(length, KNOWN, digest))
                    continue
                self._digests.add(digest)
                refs.append(Buffer(length, STREAMED, digest))
                streamed[digest] = buffers[index] if blob is None else blob.view()
            if self._fetches(streamed, fetch):
                for ref in refs:
                    ref.where = KNOWN if ref.where == STREAMED else ref.where
                streamed.clear()
            return refs

        packed = blobs.pack(parcel.encoded, large if memory.can_share() else None)
        for segment in new.values():
            self.store.pin(segment)
            self._segments.add(segment.id)
            packed.payload.segments.append((segment.id, segment.size))
        body = packed.body + list(streamed.values())
        return packed.payload, body, [segment.descriptor for segment in new.values()]

    def _fetches(self, buffers: dict[bytes, memoryview], fetch: bool) -> bool:
        """Whether the executor gets these from another one, as it has been told by now."""
        if self.relays is None or not buffers:
            return False
        fetch = fetch and sum(map(len, buffers.values())) >= RELAY_MIN
        given = self.relays.give(self, list(buffers), fetch=fetch)
        if given is None:
            return False
        source, number = given
        blobs = [(digest, len(buffer)) for digest, buffer in buffers.items()]
        self.channel.send(Fetch(blobs, source.peer, source.certified, number))
        return True

    def _forget_digests(self, digests: Collection[bytes]) -> None:
        self._digests.difference_update(digests)
        for digest in digests:
            self._resent.pop(digest, None)
        if self.relays is not None:
            self.relays.take(self, digests)

    def resend(self, task: Task, digests: list[bytes], keys: list[bytes]) -> None:
        """The executor lacks what it was thought to have: forget that, and send again."""
        with self._lock:
            # Several tasks may lack the same, which is sent again with the first of them.
            lacking = [digest for digest in digests if self._resent.get(digest, 0) <= task.sent]
            for key in keys:
                definition = self._known.get(key)
                if definition is not None and self._resent.get(key, 0) <= task.sent:
                    del self._known[key]
                    self._resent[key] = self._sends + 1
                    lacking += definition.parcel.digests
            self._forget_digests(lacking)
            self._resent.update(dict.fromkeys(lacking, self._sends + 1))
            # If the executor is gone, losing the lane decides what becomes of the task.
            with contextlib.suppress(OSError):
                # From here: whom it would ask may by now be waiting for it.
                self.send(task, fetch=False)

    def take(self, frame: Frame, payload: Payload) -> Pieces:
        """Read a received payload, mapping what is in shared memory."""
        if not payload.buffers and frame.body is not None and not frame.descriptors:
            return blobs.unpack(payload, frame.body, _nowhere)
        blobs.check(frame, payload)
        for (segment, size), descriptor in zip(payload.segments, frame.descriptors, strict=True):
            self.mapped.add(segment, size, descriptor)
        places = [memory.fresh(ref.length) for ref in payload.buffers if ref.where == STREAMED]
        body = blobs.read_body(self.channel, frame, payload, places)
        arrived = iter(places)

        def find(ref: Buffer) -> memoryview:
            if ref.where == SEGMENT:
                return self.mapped.view(ref.segment, ref.offset, ref.length)
            if ref.where != STREAMED:
                raise ProtocolError("an executor refers to a blob instead of sending it")
            return next(arrived)

        pieces = blobs.unpack(payload, body, find)
        for segment, _ in payload.segments:
            self.mapped.drop(segment)
        return pieces

    def evicted(self, digests: list[bytes]) -> None:
        """The executor dropped these to stay within its cap."""
        self.soon(lambda: self._forget_digests(digests))

    def let_go(self, segments: list[int]) -> None:
        """The executor no longer maps these segments of ours."""
        with self._lock:
            gone = self._segments.intersection(segments)
            self._segments -= gone
            self._leaving -= gone
        for segment in gone:
            self.store.unpin(segment)

    def forget(
        self,
        *,
        segments: Sequence[int] = (),
        keys: Sequence[bytes] = (),
        digests: Sequence[bytes] = (),
    ) -> None:
        """Tell the executor that nobody will refer to these again."""

        def tell() -> None:
            # Still held until it says so: `let_go` unpins them.
            ours = [segment for segment in segments if segment in self._segments]
            self._leaving.update(ours)
            known = [key for key in keys if self._known.pop(key, None) is not None]
            for key in known:
                self._resent.pop(key, None)
            stale = [digest for digest in digests if digest in self._digests]
            self._forget_digests(stale)
            if ours or known or stale:
                self.tell(Forget(known, ours, stale))

        self.soon(tell)

    def flush_releases(self) -> None:
        """Tell the executor which of its segments nothing here maps any more."""
        released = []
        while self.mapped.released:
            released.append(self.mapped.released.popleft())
        if released:
            with contextlib.suppress(OSError):
                self.channel.send(Released(released))

    def close(self) -> None:
        """The executor is gone: nothing of ours is held there any more."""
        self.lost = True
        self.channel.close()
        self.mapped.close()
        with self._lock:
            held, self._segments = self._segments, set()
            self._forget_digests(list(self._digests))
        for segment in held:
            self.store.unpin(segment)
        for feeders in self.feeders.values():
            for feeder in feeders:
                feeder.stop()


def _nowhere(ref: Buffer) -> memoryview:
    raise ProtocolError("a buffer that is nowhere")


def _keys(task: Task) -> list[bytes]:
    return [task.code.key, *(definition.key for definition in task.handles)]
