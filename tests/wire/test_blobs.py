"""Blobs: named by content, kept within a cap, and never overwritten while anyone looks."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skyward import kernel
from skyward.calls.packer import Packer
from skyward.errors import ProtocolError
from skyward.objects import memory
from skyward.objects.encoding import encode
from skyward.objects.memory import (
    CHUNK,
    GRANULE,
    SEGMENTS_MAX,
    Arena,
    Blob,
    BlobStore,
    Mapped,
    Segment,
    Sources,
)

MIB = 1 << 20


def digest(data: bytes) -> bytes:
    return memory.digests([memoryview(data)])[0]


# The digest.


def as_defined(data: bytes) -> bytes:
    """The definition in docs/wire.md, word for word."""
    leaves = b"".join(
        xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)
    )
    return xxhash.xxh3_128_digest(leaves + len(data).to_bytes(8, "little"))


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 63, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 9 * CHUNK + 5]),
        max_size=4,
    ),
    seed=st.binary(min_size=1, max_size=8),
)
@settings(max_examples=20)
def test_digests_follow_their_definition_alone_or_together(sizes: list[int], seed: bytes) -> None:
    contents = [(seed * (size // len(seed) + 1))[:size] for size in sizes]
    assert memory.digests([memoryview(c) for c in contents]) == [as_defined(c) for c in contents]


def test_digests_are_the_same_in_every_version() -> None:
    assert digest(b"").hex() == "2c0a8a99dc147d5445c3b49d035665b2"
    assert digest(b"skyward").hex() == "fa5ee21fe98aa1d51e9d0acba5f09425"


@given(data=st.binary(min_size=1, max_size=3000), at=st.integers(0), bit=st.integers(0, 7))
@settings(max_examples=50)
def test_any_change_gives_another_digest(data: bytes, at: int, bit: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << bit
    assert len({digest(d) for d in (data, bytes(changed), data + b"\0", data[:-1])}) == 4
    assert digest(data) == digest(bytes(bytearray(data)))


def test_zeros_of_different_lengths_differ() -> None:
    lengths = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    assert len({digest(bytes(length)) for length in lengths}) == len(lengths)


# The store.


class Storing(RuleBasedStateMachine):
    """A store with many users: who holds a pin always reads what was placed."""

    CAP = 4 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.store = BlobStore(self.CAP)
        self.pinned: list[tuple[Blob, bytes]] = []

    @staticmethod
    @functools.cache
    def content(name: int) -> bytes:
        return bytes([name]) * (name * 100_000 + 1)

    @rule(names=st.lists(st.integers(1, 15), min_size=1, max_size=3))
    def place(self, names: list[int]) -> None:
        contents = [self.content(name) for name in names]
        placed = self.store.place([memoryview(content) for content in contents])
        assert [blob.digest for blob in placed] == [digest(content) for content in contents]
        self.pinned += zip(placed, contents, strict=True)

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0))
    def unpin(self, index: int) -> None:
        blob, _ = self.pinned.pop(index % len(self.pinned))
        self.store.unpin(blob.segment.id)

    @rule(name=st.integers(1, 15))
    def find(self, name: int) -> None:
        blob = self.store.find(digest(self.content(name)))
        if blob is not None:
            self.pinned.append((blob, self.content(name)))

    @rule(name=st.integers(1, 15))
    def evict(self, name: int) -> None:
        self.store.evict(digest(self.content(name)))
        assert self.store.find(digest(self.content(name))) is None

    @invariant()
    def pinned_contents_are_as_placed(self) -> None:
        for blob, content in self.pinned:
            view = blob.view()
            assert len(view) == len(content)
            assert bytes(view[:: 4 * GRANULE]) == content[:: 4 * GRANULE]

    @invariant()
    def blobs_stay_within_the_cap(self) -> None:
        held = self.store._blobs
        assert self.store._size == sum(blob.length for blob in held.values())
        assert self.store._size <= self.CAP or len(held) == 1

    @invariant()
    def memory_is_in_use_idle_within_the_cap_or_given_back(self) -> None:
        used = {blob.segment.id for blob in self.store._blobs.values()}
        used |= {blob.segment.id for blob, _ in self.pinned}
        assert set(self.store._segments) == used
        idle = self.store.arena._free
        assert sum(segment.size for segment in idle) <= self.CAP
        assert not used & {segment.id for segment in idle}

    @invariant()
    def retired_segments_hold_no_blob(self) -> None:
        while self.store.retired:
            assert self.store.retired.popleft() not in self.store._in_segment

    def teardown(self) -> None:
        descriptors = [segment.descriptor for segment in self.store._segments.values()]
        descriptors += [segment.descriptor for segment in self.store.arena._free]
        self.pinned.clear()
        self.store.close()
        for descriptor in descriptors:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)


TestStore = Storing.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=20)


@pytest.fixture
def store() -> Iterator[BlobStore]:
    store = BlobStore(4 * MIB)
    yield store
    store.close()


def place(store: BlobStore, *contents: bytes) -> list[Blob]:
    return store.place([memoryview(content) for content in contents])


def test_the_least_recently_used_goes_first(store: BlobStore) -> None:
    contents = [bytes([number]) * MIB for number in range(4)]
    for content in contents:
        for blob in place(store, content):
            store.unpin(blob.segment.id)
    refreshed = store.find(digest(contents[0]))
    assert refreshed is not None
    store.unpin(refreshed.segment.id)
    place(store, b"new" * (MIB // 3))
    assert list(store.evicted) == [digest(contents[1])]


def test_the_same_content_is_held_once(store: BlobStore) -> None:
    first, second, third = place(store, b"a" * MIB, b"a" * MIB, b"b" * MIB)
    (again,) = place(store, bytearray(b"a" * MIB))
    assert first is second is again
    assert third.segment is first.segment
    for _ in range(4):
        store.unpin(first.segment.id)
    assert store._pins == {}


def test_a_blob_larger_than_the_cap_is_held_alone(store: BlobStore) -> None:
    place(store, b"a" * MIB)
    (huge,) = place(store, b"h" * (6 * MIB))
    assert list(store._blobs) == [huge.digest]
    assert bytes(huge.view()[-5:]) == b"hhhhh"


def test_memory_is_used_again_only_when_nobody_has_it_pinned(store: BlobStore) -> None:
    (pinned,) = place(store, b"a" * MIB)
    store.evict(pinned.digest)
    (second,) = place(store, b"b" * MIB)
    assert second.segment is not pinned.segment
    assert pinned.view() == b"a" * MIB
    store.unpin(pinned.segment.id)
    (third,) = place(store, b"c" * MIB)
    assert third.segment is pinned.segment
    assert third.view() == b"c" * MIB


def test_the_number_of_segments_is_bounded() -> None:
    store = BlobStore(1 << 40)
    for number in range(SEGMENTS_MAX + 20):
        for blob in place(store, number.to_bytes(4, "little") * 100):
            store.unpin(blob.segment.id)
    assert len(store._in_segment) == SEGMENTS_MAX
    store.arena._idle_cap = 0
    store.close()


def test_two_threads_placing_the_same_content_leave_nothing_over() -> None:
    store = BlobStore(64 * MIB)
    start = threading.Barrier(4)
    placed: list[Blob] = []

    def work() -> None:
        for number in range(10):
            start.wait()
            placed.extend(place(store, bytes([number]) * 300_000))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for blob in placed:
        store.unpin(blob.segment.id)
    assert store._pins == {}
    in_use = {blob.segment.id for blob in store._blobs.values()}
    assert set(store._segments) == in_use
    assert len(in_use) == 10
    store.close()


def test_a_view_dying_inside_the_store_does_not_lock_it_up(store: BlobStore) -> None:
    """Finalizers run wherever the interpreter happens to be, also inside these very methods."""
    (blob,) = place(store, b"a" * MIB)
    segment = blob.segment.id
    view = memory.map_private(
        blob.segment.descriptor, blob.offset, blob.length, lambda: store.unpin(segment)
    )
    store.evict(blob.digest)
    with store._lock, store.arena._lock:
        del view
    assert segment not in store._segments


# What was sent from where.


def test_a_buffer_with_new_contents_replaces_its_old_ones() -> None:
    sources = Sources()
    first, second = (memoryview(bytearray(100)) for _ in range(2))
    assert sources.replaced([first, second], [b"1", b"2"]) == []
    assert sources.replaced([first, second], [b"1", b"3"]) == [b"2"]
    assert sources.replaced([memoryview(b"read-only")], [b"4"]) == []
    for _ in range(2):
        assert sources.replaced([memoryview(b"read-only")], [b"5"]) == []


@pytest.mark.parametrize("at", [0, -1])
def test_what_the_caller_has_replaced_is_not_held_wherever_it_changed(at: int) -> None:
    packer = Packer(encrypted=False, relayed=False)
    data = np.zeros(4 * MIB, np.uint8)
    held = []
    for value in range(3):
        data[at] = value
        parcel = packer.parcel(encode(data), keep=True)
        packer.release(parcel)
        held += parcel.digests
    assert [packer.store.has(digest) for digest in held] == [False, False, True]
    packer.close()


# Segments of another process.


class Mapping(RuleBasedStateMachine):
    """A segment is released once: after it was dropped, and its last view died."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped = Mapped()
        self.owned: dict[int, Segment] = {}
        self.open: set[int] = set()
        self.views: list[tuple[int, memoryview]] = []
        self.expected: list[int] = []

    def _settle(self, segment: int) -> None:
        if segment not in self.open and all(owner != segment for owner, _ in self.views):
            self.expected.append(segment)

    @rule()
    def add(self) -> None:
        segment = Segment(3 * GRANULE)
        segment.write([(0, memoryview(b"x" * 2 * GRANULE))])
        self.owned[segment.id] = segment
        self.open.add(segment.id)
        self.mapped.add(segment.id, segment.size, os.dup(segment.descriptor))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), page=st.integers(0, 1), length=st.integers(1, GRANULE))
    def look(self, data: st.DataObject, page: int, length: int) -> None:
        segment = data.draw(st.sampled_from(sorted(self.open)))
        view = self.mapped.view(segment, page * GRANULE, length)
        assert view == b"x" * length
        view[:] = b"y" * length
        self.views.append((segment, view))

    @precondition(lambda self: self.views)
    @rule(index=st.integers(0))
    def let_go(self, index: int) -> None:
        segment, view = self.views.pop(index % len(self.views))
        del view
        self._settle(segment)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.open)))
        self.open.discard(segment)
        self.mapped.drop(segment)
        self.mapped.drop(segment)
        self._settle(segment)

    @invariant()
    def released_exactly_what_nobody_maps(self) -> None:
        assert list(self.mapped.released) == self.expected

    @invariant()
    def writes_to_a_view_are_its_own(self) -> None:
        for segment in self.owned.values():
            assert os.pread(segment.descriptor, 2 * GRANULE, 0) == b"x" * 2 * GRANULE

    def teardown(self) -> None:
        self.mapped.close()
        self.views.clear()
        assert sorted(self.mapped.released) == sorted(self.owned)
        for segment in self.owned.values():
            segment.close()


TestMapped = Mapping.TestCase
TestMapped.settings = settings(max_examples=20, stateful_step_count=20)


def test_a_view_of_what_is_not_there_is_refused() -> None:
    mapped, segment = Mapped(), Segment(MIB)
    mapped.add(segment.id, segment.size, os.dup(segment.descriptor))
    for offset, length in ((0, MIB + 1), (GRANULE, MIB), (-GRANULE, 10), (0, -1), (0, 0), (1, 10)):
        with pytest.raises(ProtocolError, match="of a segment of 1048576"):
            mapped.view(segment.id, offset, length)
    mapped.drop(segment.id)
    with pytest.raises(ProtocolError, match=f"names segment {segment.id}, which is not here"):
        mapped.view(segment.id, 0, 10)
    assert list(mapped.released) == [segment.id]
    segment.close()


def test_a_view_outlives_its_segment() -> None:
    mapped, segment = Mapped(), Segment(MIB)
    segment.write([(0, memoryview(b"kept"))])
    mapped.add(segment.id, segment.size, os.dup(segment.descriptor))
    view = mapped.view(segment.id, 0, 4)
    mapped.close()
    segment.close()
    assert view == b"kept"
    assert not mapped.released
    del view
    gc.collect()
    assert list(mapped.released) == [segment.id]


# Segments of our own.


@given(
    sizes=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=8),
    cap=st.integers(0, 6 * MIB),
)
@settings(max_examples=30)
def test_an_arena_gives_enough_and_keeps_no_more_than_its_cap(sizes: list[int], cap: int) -> None:
    arena = Arena(cap)
    for size in sizes:
        segment = arena.allocate(size)
        assert segment.size >= size
        assert os.fstat(segment.descriptor).st_size == segment.size
        arena.recycle(segment)
        assert sum(idle.size for idle in arena._free) <= cap
    arena.close()


def test_an_arena_hands_out_the_closest_fit_and_nothing_twice_as_large() -> None:
    arena = Arena(100 * MIB)
    small, fitting, large = (arena.allocate(size * MIB) for size in (2, 4, 40))
    for segment in (large, fitting, small):
        arena.recycle(segment)
    assert arena.allocate(3 * MIB) is fitting
    assert arena.allocate(3 * MIB) not in (small, large)
    assert arena.allocate(2 * MIB) is small
    arena.close()


@pytest.mark.skipif(not kernel.IS_LINUX, reason="only Linux makes pages beforehand")
def test_a_segment_without_memory_is_an_error_and_no_signal() -> None:
    segment = Segment(2 * MIB)
    start = ctypes.addressof(ctypes.c_char.from_buffer(segment.shared()))
    os.ftruncate(segment.descriptor, MIB)
    with pytest.raises(OSError, match="no memory for 2 MiB of arguments or results; free some"):
        segment._make_pages(start, segment.size)
    segment.close()


@given(
    rounds=st.lists(st.lists(st.binary(min_size=1, max_size=20_000), max_size=4), max_size=4),
    read_only=st.booleans(),
)
@settings(max_examples=20)
def test_a_segment_written_again_holds_the_new_contents(
    rounds: list[list[bytes]], read_only: bool
) -> None:
    segment = Segment(MIB)
    for contents in rounds:
        offsets, size = memory.aligned([len(content) for content in contents])
        assert size <= MIB
        assert all(offset % GRANULE == 0 for offset in offsets)
        kind: Any = bytes if read_only else bytearray
        sources = [memoryview(kind(content)) for content in contents]
        segment.write(list(zip(offsets, sources, strict=True)))
        for offset, content in zip(offsets, contents, strict=True):
            assert os.pread(segment.descriptor, len(content), offset) == content
    segment.close()
