"""Payloads that lie: about lengths, places, segments and descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.calls.lane import Connection
from skyward.errors import ProtocolError
from skyward.objects.memory import GRANULE, Segment
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import header
from skyward.wire.messages import INLINE, KNOWN, SEGMENT, STREAMED, Buffer, Item, Payload
from skyward.worker.inbox import Inbox

MIB = 1 << 20
Deliver = Callable[..., Any]


class Desk:
    """Where payloads arrive: a worker's inbox or a client's lane, behind a real socket."""

    def __init__(self, side: str) -> None:
        self.sender, receiver = socket.socketpair(socket.AF_UNIX)
        self.sender.settimeout(100)
        self.channel = Channel(receiver)
        self._inbox = Inbox(64 * MIB)
        self._connection = Connection(self.channel, lambda: None)
        self._side = side

    def deliver(self, payload: Any, body: bytes = b"", descriptors: tuple[int, ...] = ()) -> Any:
        """Send a payload as it stands, however wrong, and have it taken."""
        meta = msgspec.msgpack.encode([1, 0, payload])
        head = header(Item.KIND, len(meta), len(body), len(descriptors)) + meta
        socket.send_fds(self.sender, [head], list(descriptors))
        self.sender.sendall(body)
        frame = self.channel.receive()
        item = messages.decode_as(Item, frame.kind, frame.meta)
        if self._side == "lane":
            return self._connection.take(frame, item.payload)
        pieces, missing = self._inbox.take(self.channel, frame, item.payload)
        return pieces if pieces is not None else missing

    def close(self) -> None:
        self.channel.close()
        self.sender.close()
        self._connection.close()
        self._inbox._mapped.close()
        self._inbox._cache.close()


@pytest.fixture(params=["inbox", "lane"])
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = Desk(request.param)
    yield desk
    desk.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment(MIB)
    segment.write([(0, memoryview(b"shared" * 100))])
    yield segment
    segment.close()


def test_what_adds_up_is_taken(desk: Desk, segment: Segment) -> None:
    payload = Payload(
        6,
        [
            Buffer(4, INLINE, offset=64),
            Buffer(600, SEGMENT, segment=segment.id, offset=0),
            Buffer(5, STREAMED, digest=b"name"),
        ],
        [],
        [(segment.id, segment.size)],
        68,
    )
    body = b"pickle".ljust(64, b"\0") + b"buff" + b"tail!"
    data, buffers, _ = desk.deliver(payload, body, (segment.descriptor,))
    assert bytes(data) == b"pickle"
    assert [bytes(buffer) for buffer in buffers] == [b"buff", b"shared" * 100, b"tail!"]


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (Payload(50, inline=10), "does not fit its body"),
        (Payload(5, [Buffer(1)], inline=400), "account for its body"),
        (Payload(5, [Buffer(6, offset=5)], inline=10), "outside of its body"),
        (Payload(5, [Buffer(1, offset=4)], inline=10), "outside of its body"),
        (Payload(5, [Buffer(1 << 40, offset=5)], inline=10), "outside of its body"),
        (Payload(5, [Buffer(1 << 43, STREAMED, b"d")], inline=10), "account for its body"),
        (Payload(5, [Buffer(6, STREAMED, b"d")], inline=5), "account for its body"),
        (Payload(5, [Buffer(0, STREAMED, b"d")], inline=10), "empty buffer outside of its body"),
        (Payload(5, [Buffer(0, SEGMENT, segment=1)], inline=10), "empty buffer outside"),
        (Payload(5, [Buffer(4, SEGMENT, segment=99)], inline=10), "segment 99, which is not here"),
        (Payload(5, [], [(0, 4)], inline=10), "does not fit its body"),
        (Payload(5, [Buffer(1, offset=5)], [], [(1, MIB)], 10), "1 segments, 0 descriptors"),
    ],
)
def test_what_does_not_add_up_is_refused(desk: Desk, payload: Payload, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        desk.deliver(payload, b"0123456789")


def test_an_executor_cannot_make_the_client_look_up_a_blob() -> None:
    desk = Desk("lane")
    with pytest.raises(ProtocolError, match="refers to a blob instead of sending it"):
        desk.deliver(Payload(5, [Buffer(4, KNOWN, b"digest")], inline=10), b"0123456789")
    desk.close()


def test_a_blob_this_worker_does_not_have_is_asked_for() -> None:
    desk = Desk("inbox")
    payload = Payload(5, [Buffer(4, KNOWN, b"digest")], inline=10)
    assert desk.deliver(payload, b"0123456789") == [b"digest"]
    desk.close()


def test_a_digest_that_stands_for_two_lengths_is_refused() -> None:
    desk = Desk("inbox")
    desk.deliver(Payload(5, [Buffer(4, STREAMED, b"d")], inline=5), b"01234tail")
    with pytest.raises(ProtocolError, match="two lengths"):
        desk.deliver(Payload(5, [Buffer(9, KNOWN, b"d")], inline=5), b"01234")
    assert desk._inbox._cache._pins == {}
    desk.close()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(MIB, 1), (0, MIB + 1), (GRANULE, MIB), (1, 10), (1 << 47, 1), (0, 1 << 47)],
)
def test_a_view_beyond_its_segment_is_refused(
    desk: Desk, segment: Segment, offset: int, length: int
) -> None:
    payload = Payload(
        0, [Buffer(length, SEGMENT, b"", segment.id, offset)], [], [(segment.id, segment.size)]
    )
    with pytest.raises(ProtocolError, match="of a segment of 1048576"):
        desk.deliver(payload, b"", (segment.descriptor,))


def test_a_segment_smaller_than_it_says_is_refused(desk: Desk, segment: Segment) -> None:
    payload = Payload(0, [Buffer(MIB, SEGMENT, b"", 1, MIB)], [], [(1, 1 << 40)])
    with pytest.raises(ProtocolError, match="said to have 1099511627776 bytes has fewer"):
        desk.deliver(payload, b"", (segment.descriptor,))


def test_a_descriptor_that_is_no_memory_is_refused(desk: Desk) -> None:
    reading, writing = os.pipe()
    payload = Payload(0, [Buffer(4096, SEGMENT, b"", 1, 0)], [], [(1, 4096)])
    with pytest.raises(ProtocolError, match="said to have 4096 bytes has fewer"):
        desk.deliver(payload, b"", (reading,))
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("side", ["inbox", "lane"])
def test_refused_frames_leave_no_descriptor_open(side: str, segment: Segment) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for size in (MIB, 1 << 40):
        for segments in ([(1, size)], [(1, size), (2, size)], []):
            desk = Desk(side)
            payload = Payload(0, [Buffer(MIB, SEGMENT, b"", 1, 1)], [], segments)
            with pytest.raises(ProtocolError):
                desk.deliver(payload, b"", (segment.descriptor,))
            desk.close()
    assert len(os.listdir("/proc/self/fd")) == before


numbers = st.integers(-5, 200) | st.sampled_from(
    [GRANULE, MIB, MIB + 1, 2**31, 2**32, 2**40, 2**47, 2**63 - 1, 2**64 - 1, -(2**63)]
)
lying = st.tuples(
    numbers,
    st.lists(
        st.tuples(numbers, st.integers(-1, 5), st.binary(max_size=16), numbers, numbers), max_size=4
    ),
    st.lists(st.tuples(numbers, numbers), max_size=3),
    st.lists(st.tuples(numbers, numbers), max_size=2),
    numbers,
)


@pytest.mark.parametrize("side", ["inbox", "lane"])
@given(payload=lying, body=st.binary(max_size=200), brings=st.integers(0, 2))
@settings(max_examples=150)
def test_any_payload_is_taken_or_refused_and_costs_little(
    side: str, payload: Any, body: bytes, brings: int
) -> None:
    before = psutil.Process().memory_info().rss
    desk, segment = Desk(side), Segment(MIB)
    try:
        desk.deliver(payload, body, (segment.descriptor,) * brings)
    except ProtocolError:
        pass
    finally:
        desk.close()
        segment.close()
    assert psutil.Process().memory_info().rss - before < 64 * MIB
