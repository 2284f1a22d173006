"""Holdings: the objects that one executor has already, so that the client sends them only once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from skyward.calls.packer import NamedParcel, Parcel
from skyward.calls.relays import RELAY_MIN, Copy, Neighbor, Relays
from skyward.calls.task import Task
from skyward.objects import memory, payloads
from skyward.objects.blobs import BlobStore
from skyward.wire.channel import Channel
from skyward.wire.frames import DESCRIPTOR_LIMIT
from skyward.wire.messages import (
    KNOWN,
    SEGMENT,
    STREAMED,
    Buffer,
    Define,
    Fetch,
    Forget,
    Payload,
)

CODE_MAX = 256
"""How many functions an executor keeps before the client tells it to forget the oldest."""

Body = list[bytes | memoryview]


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
