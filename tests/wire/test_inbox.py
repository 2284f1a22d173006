"""The inbox: what was streamed once is found again, within a cap the client is told about."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.objects import memory
from skyward.objects.memory import Segment
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.messages import (
    KNOWN,
    SEGMENT,
    STREAMED,
    Buffer,
    Evicted,
    Item,
    Payload,
    Released,
)
from skyward.worker.inbox import Inbox

KIB = 1 << 10
CAP = 64 * KIB


class Client:
    """Remembers what the inbox has, as the protocol says, and sends only the rest."""

    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX)
        self.near, self.far = Channel(here), Channel(there)
        self.inbox = Inbox(CAP)
        self.known: set[bytes] = set()

    def send(self, contents: list[bytes]) -> list[bytes]:
        """Have some buffers delivered; returns them as they arrived."""
        refs, streamed = [], []
        for content, digest in zip(contents, digests(contents), strict=True):
            new = digest not in self.known
            refs.append(Buffer(len(content), STREAMED if new else KNOWN, digest))
            if new:
                self.known.add(digest)
                streamed.append(content)
        sender = threading.Thread(
            target=self.near.send, args=(Item(1, 0, Payload(2, refs, inline=2)), [b"ok", *streamed])
        )
        sender.start()
        frame = self.far.receive()
        item = messages.decode_as(Item, frame.kind, frame.meta)
        pieces, missing = self.inbox.take(self.far, frame, item.payload)
        sender.join()
        assert missing == []
        assert pieces is not None
        for told in self.near.poll():
            self.known.difference_update(messages.decode_as(Evicted, told.kind, told.meta).digests)
        return [bytes(buffer) for buffer in pieces[1]]

    def close(self) -> None:
        self.near.close()
        self.far.close()
        self.inbox._cache.close()


def digests(contents: list[bytes]) -> list[bytes]:
    return memory.digests([memoryview(content) for content in contents])


def content(name: int) -> bytes:
    return bytes([name]) * (name * 3 * KIB + 1)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@given(calls=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), max_size=12))
@settings(max_examples=40)
def test_whoever_listens_to_evictions_never_misses_anything(calls: list[list[int]]) -> None:
    client = Client()
    for names in calls:
        contents = [content(name) for name in names]
        assert client.send(contents) == contents
        held = client.inbox._cache
        assert set(held._blobs) == client.known
        assert held._size <= CAP or len(held._blobs) == 1
    client.close()


def test_a_payload_larger_than_the_cap_is_taken_whole(client: Client) -> None:
    contents = [bytes([name]) * (CAP // 2) for name in range(6)]
    for _ in range(2):
        assert client.send(contents) == contents
    assert len(client.known) == 2


def test_what_the_client_forgets_is_dropped(client: Client) -> None:
    client.send([content(1), content(2)])
    client.inbox.forget(client.far, [], digests([content(1)]))
    client.known -= set(digests([content(1)]))
    assert set(client.inbox._cache._blobs) == client.known
    assert client.near.poll() == []
    assert client.send([content(1), content(2)]) == [content(1), content(2)]


def test_a_segment_is_released_when_forgotten_and_unused(client: Client) -> None:
    segment = Segment(1 << 20)
    segment.write([(0, memoryview(b"contents"))])
    ref = Buffer(8, SEGMENT, b"", segment.id, 0)
    payload = Payload(0, [ref], [], [(segment.id, segment.size)])
    client.near.send(Item(1, 0, payload), [], [segment.descriptor])
    frame = client.far.receive()
    pieces, _ = client.inbox.take(client.far, frame, payload)
    assert pieces is not None
    assert bytes(pieces[0]) == b"contents"
    client.inbox.forget(client.far, [segment.id], [])
    assert client.near.poll() == []
    del pieces
    client.inbox.send_releases(client.far)
    (told,) = client.near.poll()
    assert messages.decode_as(Released, told.kind, told.meta).segments == [segment.id]
    assert os.fstat(segment.descriptor).st_size == segment.size
    segment.close()
