"""Framing: however the bytes are cut on their way, the same frames come out."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import ProtocolError
from skyward.wire import frames
from skyward.wire.channel import Channel
from skyward.wire.frames import FrameDecoder, header
from skyward.wire.messages import Item, Payload, Ping, Written

SMALL_INLINE = 64
"""Stands in for the megabyte above which a body is left on the socket."""

Sent = tuple[int, bytes, bytes]
some_frames = st.lists(
    st.tuples(st.integers(0, 255), st.binary(max_size=100), st.binary(max_size=150)), max_size=8
)


def joined(sent: list[Sent]) -> bytes:
    return b"".join(header(kind, len(meta), len(body)) + meta + body for kind, meta, body in sent)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def read_all(parts: list[bytes]) -> list[Sent]:
    """What a reader does: feed, take what is whole, fetch a large body itself."""
    decoder = FrameDecoder()
    source = iter(parts)
    got: list[Sent] = []
    for part in source:
        decoder.feed(part)
        while (frame := decoder.next()) is not None:
            if frame.body is not None:
                got.append((frame.kind, frame.meta, bytes(frame.body)))
                continue
            place = memoryview(bytearray(frame.body_length))
            at = decoder.take(place)
            while at < len(place):
                decoder.feed(next(source))
                at += decoder.take(place[at:])
            got.append((frame.kind, frame.meta, bytes(place)))
    assert decoder.buffered == 0
    return got


@given(sent=some_frames, cuts=st.lists(st.integers(0, 4000), max_size=20))
@settings(max_examples=100)
def test_any_split_of_the_stream_yields_the_same_frames(sent: list[Sent], cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "INLINE_BODY", SMALL_INLINE)
        assert read_all(pieces(joined(sent), cuts)) == sent


@given(sent=some_frames)
@settings(max_examples=25)
def test_a_stream_of_single_bytes_yields_the_same_frames(sent: list[Sent]) -> None:
    stream = joined(sent)
    assert read_all([stream[at : at + 1] for at in range(len(stream))]) == sent


@given(counts=st.lists(st.integers(0, 4), max_size=10))
def test_each_frame_gets_its_own_descriptors_in_order(counts: list[int]) -> None:
    decoder = FrameDecoder()
    numbers = iter(range(1000, 2000))
    expected = []
    for count in counts:
        attached = [next(numbers) for _ in range(count)]
        expected.append(tuple(attached))
        decoder.attach(attached)
        decoder.feed(header(1, 0, 0, count))
    got = []
    while (frame := decoder.next()) is not None:
        got.append(frame.descriptors)
    assert got == expected
    assert decoder.drain_descriptors() == []


def test_a_frame_waits_for_its_descriptors_no_longer_than_for_its_bytes() -> None:
    decoder = FrameDecoder()
    decoder.feed(header(1, 0, 0, 1))
    with pytest.raises(ProtocolError, match="announces 1 descriptors, 0 came with it"):
        decoder.next()


def test_the_header_is_sixteen_bytes_whatever_is_in_it() -> None:
    assert len(header(255, 2**32 - 1, 2**64 - 1, 255)) == frames.HEADER.size == 16


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    here, there = socket.socketpair(socket.AF_UNIX)
    ends = Channel(here), Channel(there)
    yield ends
    for end in ends:
        end.close()


def test_descriptors_travel_with_their_frame(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    held = [os.memfd_create(f"test-{number}") for number in range(3)]
    for number, descriptor in enumerate(held):
        os.write(descriptor, b"contents %d" % number)
    here.send(Ping(1))
    here.send(Item(1, 0, Payload(4)), [b"body"], held[:2])
    here.send(Ping(2))
    here.send(Item(2, 0, Payload(0)), [], held[2:])
    assert there.receive().descriptors == ()
    first = there.receive()
    assert (len(first.descriptors), first.body) == (2, b"body")
    assert there.receive().descriptors == ()
    second = there.receive()
    received = [*first.descriptors, *second.descriptors]
    assert [os.pread(one, 100, 0) for one in received] == [
        b"contents 0",
        b"contents 1",
        b"contents 2",
    ]
    for descriptor in held + received:
        os.close(descriptor)


def test_a_closing_channel_closes_descriptors_nobody_claimed(
    pair: tuple[Channel, Channel],
) -> None:
    here, there = pair
    reading, writing = os.pipe()
    socket.send_fds(here._sender, [b"\0"], [writing])
    os.close(writing)
    assert there.poll() == []
    there.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


@given(
    bodies=st.lists(st.lists(st.integers(0, 40_000), max_size=6), min_size=1, max_size=5),
    several=st.booleans(),
)
@settings(max_examples=25)
def test_a_body_of_many_parts_arrives_as_one(bodies: list[list[int]], several: bool) -> None:
    here, there = (Channel(end) for end in socket.socketpair(socket.AF_UNIX))
    sent = [
        (Written(number, "stdout", "text", False), [os.urandom(length) for length in lengths])
        for number, lengths in enumerate(bodies)
    ]

    def send() -> None:
        if several:
            here.send_many(sent)
            return
        for message, body in sent:
            here.send(message, body)

    sender = threading.Thread(target=send)
    sender.start()
    for _, body in sent:
        assert there.receive().body == b"".join(body)
    sender.join()
    assert there.bytes_received == here.bytes_sent
    here.close()
    with pytest.raises(EOFError, match="closed the connection"):
        there.receive()
    there.close()


def test_a_large_body_goes_straight_to_its_places(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    parts = [os.urandom(300_000), os.urandom(2_000_000), os.urandom(1)]
    sender = threading.Thread(
        target=lambda: (here.send(Item(1, 0, Payload(0)), parts), here.send(Ping(7)))
    )
    sender.start()
    frame = there.receive()
    assert frame.body is None
    assert frame.body_length == 2_300_001
    places = [memoryview(bytearray(len(part))) for part in parts]
    there.read_body(frame, places)
    assert [bytes(place) for place in places] == parts
    assert there.receive().kind == Ping.KIND
    sender.join()


def test_places_of_the_wrong_size_are_refused(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    sender = threading.Thread(target=here.send, args=(Item(1, 0, Payload(0)), [bytes(2 << 20)]))
    sender.start()
    frame = there.receive()
    with pytest.raises(ProtocolError, match="a body of 2097152 bytes for places of 5"):
        there.read_body(frame, [memoryview(bytearray(5))])
    there.read_body(frame, [memoryview(bytearray(2 << 20))])
    sender.join()
