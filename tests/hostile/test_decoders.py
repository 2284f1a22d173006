"""Decoders: bytes from anyone give frames and messages, or a ProtocolError, and nothing else."""

from __future__ import annotations

import os
import socket
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skyward.errors import ProtocolError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import (
    BODY_LIMIT,
    DESCRIPTOR_LIMIT,
    GREETING_LIMIT,
    HEADER,
    META_LIMIT,
    PROTOCOL,
    FrameDecoder,
    header,
)
from skyward.wire.messages import KINDS, Message

MIB = 1 << 20


def drain(decoder: FrameDecoder) -> int:
    count = 0
    while (frame := decoder.next()) is not None:
        assert len(frame.meta) <= decoder.meta_limit
        assert frame.body_length <= decoder.body_limit
        count += 1
        if frame.body is None:
            break
    return count


@given(parts=st.lists(st.binary(max_size=200), max_size=10), greeting=st.booleans())
@settings(max_examples=200)
def test_any_bytes_are_frames_or_refused(parts: list[bytes], greeting: bool) -> None:
    decoder = FrameDecoder(GREETING_LIMIT, 0) if greeting else FrameDecoder()
    try:
        for part in parts:
            decoder.feed(part)
            drain(decoder)
    except ProtocolError:
        pass


@given(
    kind=st.integers(0, 255),
    count=st.integers(0, 255),
    protocol=st.sampled_from([PROTOCOL, 0, PROTOCOL + 1, 0xFFFF]),
    meta=st.integers(0, 2**32 - 1) | st.integers(0, 300),
    body=st.integers(0, 2**64 - 1) | st.integers(0, 300),
    follows=st.binary(max_size=400),
)
@example(1, 0, PROTOCOL, 2**32 - 1, 0, b"")
@example(1, 0, PROTOCOL, 0, 2**64 - 1, b"")
@settings(max_examples=300)
def test_any_header_is_a_frame_a_wait_or_refused(
    kind: int, count: int, protocol: int, meta: int, body: int, follows: bytes
) -> None:
    decoder = FrameDecoder(GREETING_LIMIT, 0)
    decoder.feed(HEADER.pack(kind, count, protocol, meta, body) + follows)
    acceptable = protocol == PROTOCOL and meta <= GREETING_LIMIT and body == 0 and count == 0
    if not acceptable:
        waits = protocol == PROTOCOL and meta <= GREETING_LIMIT and body == 0
        if waits and count <= DESCRIPTOR_LIMIT and len(follows) < meta:
            assert decoder.next() is None
            return
        with pytest.raises(ProtocolError):
            decoder.next()
        return
    frame = decoder.next()
    assert (frame is None) == (len(follows) < meta)


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (HEADER.pack(1, 0, PROTOCOL, META_LIMIT + 1, 0), "16777217 bytes of meta; the limit is"),
        (HEADER.pack(1, 0, PROTOCOL, 0, BODY_LIMIT + 1), "bytes of body; the limit is"),
        (HEADER.pack(1, 65, PROTOCOL, 0, 0), "65 descriptors of 64"),
        (HEADER.pack(1, 0, 9, 0, 0), "protocol 9, this end speaks .*the same skyward version"),
    ],
)
def test_a_lying_header_is_refused_before_anything_is_read_for_it(
    head: bytes, problem: str
) -> None:
    decoder = FrameDecoder()
    decoder.feed(head)
    with pytest.raises(ProtocolError, match=problem):
        decoder.next()


def test_an_announced_length_reserves_no_memory() -> None:
    tracemalloc.start()
    decoder = FrameDecoder()
    decoder.feed(HEADER.pack(1, 0, PROTOCOL, META_LIMIT, 0) + b"x")
    assert decoder.next() is None
    decoder = FrameDecoder()
    decoder.feed(HEADER.pack(1, 0, PROTOCOL, 0, BODY_LIMIT))
    frame = decoder.next()
    assert frame is not None
    assert frame.body is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MIB


def test_more_descriptors_than_anyone_claims_are_refused_and_closed() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    channel = Channel(there)
    before = len(os.listdir("/proc/self/fd"))
    spare = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(ProtocolError, match="file descriptors no frame has claimed"):
        for _ in range(10):
            socket.send_fds(here, [b"\0"], [spare] * DESCRIPTOR_LIMIT)
            channel.poll()
    channel.close()
    here.close()
    os.close(spare)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_more_descriptors_than_a_frame_may_have_never_reach_us() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    channel = Channel(there)
    spare = os.open(os.devnull, os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(here, [header(3, 0, 0, 200)], [spare] * 200)
    with pytest.raises(ProtocolError, match="200 descriptors of 64"):
        channel.poll()
    assert len(os.listdir("/proc/self/fd")) <= before + DESCRIPTOR_LIMIT
    channel.close()
    here.close()
    os.close(spare)


# Messages.

kinds = st.sampled_from(sorted(KINDS))
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=15,
)  # fmt: skip


def decoded(kind: int, meta: bytes) -> Message | None:
    try:
        return messages.decode(kind, meta)
    except ProtocolError:
        return None


@given(kind=st.integers(0, 255), meta=st.binary(max_size=300))
@settings(max_examples=300)
def test_any_bytes_are_a_message_or_refused(kind: int, meta: bytes) -> None:
    message = decoded(kind, meta)
    assert message is None or kind == message.KIND


@given(kind=kinds, value=st.lists(junk, max_size=8) | junk)
@settings(max_examples=300)
def test_any_values_in_any_places_are_a_message_or_refused(kind: int, value: Any) -> None:
    message = decoded(kind, msgspec.msgpack.encode(value))
    if message is not None:
        assert messages.decode(kind, messages.encode(message)) == message


SAMPLES = [
    messages.Hello("pool", "data", "both", "session", {"python": "3.11"}, 7),
    messages.Failure(1, 0.5, "T", "text", [("f", 1, "g", "s")], None, False),
    messages.Run(
        1, "name", b"code", messages.Payload(9, [messages.Buffer(1)], [(0, 1)], [(1, 2)], 9), [], []
    ),
    messages.Forget([b"key"], [1, 2], [b"digest"]),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
@given(data=st.data())
@settings(max_examples=100)
def test_a_damaged_message_is_a_message_or_refused(sample: Message, data: st.DataObject) -> None:
    meta = bytearray(messages.encode(sample))
    for _ in range(data.draw(st.integers(1, 4))):
        meta[data.draw(st.integers(0, len(meta) - 1))] = data.draw(st.integers(0, 255))
    decoded(sample.KIND, bytes(meta[: data.draw(st.integers(0, len(meta)))]))
    decoded(sample.KIND, bytes(meta))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "meta",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of four billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of four billion"),
        pytest.param(b"\x91" * 100_000, id="nested a hundred thousand deep"),
        pytest.param(b"\x96" + b"\xdd\xff\xff\xff\xff" * 6, id="six arrays of four billion"),
        pytest.param(b"\x96" + b"\xc6\xff\xff\xff\xff" * 6, id="six byte strings of 4 GiB"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="a byte MessagePack never uses"),
    ],
)
def test_a_message_that_claims_to_be_huge_costs_nothing(kind: type[Message], meta: bytes) -> None:
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ProtocolError, match=f"a malformed {kind.__name__} message"):
        messages.decode(kind.KIND, meta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MIB
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("kind", sorted({0, 9, 15, 29, 32, 100, 255} - set(KINDS)))
def test_an_unknown_kind_is_refused_by_number(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown kind {kind}"):
        messages.decode(kind, b"\x90")


@pytest.mark.parametrize(
    "payload",
    [
        [-1],
        [1 << 60],
        [5, [[-3]]],
        [5, [[3, 4]]],
        [5, [[3, -1]]],
        [5, [[3, 1, b"", -1, 0]]],
        [5, [[3, 1, b"", 0, -4096]]],
        [5, [[3, 1, b"", 0, 1 << 62]]],
        [5, [], [[-1, 4]]],
        [5, [], [[0, -4]]],
        [5, [], [[0]]],
        [5, [], [], [[-1, 10]]],
        [5, [], [], [[1, -10]]],
        [5, [], [], [], -5],
        ["5"],
        [5.5],
        [5, [[True]]],
    ],
)
def test_a_payload_of_impossible_numbers_is_refused_on_arrival(payload: list[Any]) -> None:
    meta = msgspec.msgpack.encode([b"key", payload, False])
    with pytest.raises(ProtocolError, match="a malformed Define message"):
        messages.decode(messages.Define.KIND, meta)
