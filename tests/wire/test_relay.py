"""Buffers go from executor to executor, as they come, and whatever fails is said in the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from skyward.errors import BlobStoreFullError
from skyward.objects import memory
from skyward.objects.memory import BlobStore
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Authority, node_name
from skyward.wire.listener import Listener
from skyward.wire.messages import Fetch, Hello
from skyward.worker import relay
from skyward.worker.arrivals import Arrival, Arrivals
from skyward.worker.relay import Relay

from ..conftest import only_in_all

POOL = "0123456789ab"
MIB = 1 << 20
Eventually = Callable[..., None]


class Peer:
    """What an executor has for its peers."""

    def __init__(self, authority: Authority, number: int) -> None:
        self.cache = BlobStore(1 << 30)
        self.arrivals = Arrivals(self.cache)
        self.settled = threading.Event()
        self.name = node_name(POOL, number)
        credentials = authority.issue(self.name)
        self.relay = Relay(POOL, credentials, self.arrivals, self.settled.set)
        self.served: list[Channel] = []
        self.listener = Listener("tcp:127.0.0.1:0", POOL, credentials, self._accept)

    def _accept(self, channel: Channel, hello: Hello) -> None:
        assert hello.role == PEER
        self.served.append(channel)
        self.relay.serve(channel)

    def fetch(self, source: Peer, *contents: memoryview, number: int = 9) -> None:
        """Begin to fetch these."""
        names = memory.digests(contents)
        blobs = [(name, len(each)) for name, each in zip(names, contents, strict=True)]
        self.relay.fetch(Fetch(blobs, source.listener.endpoint, source.name, number))

    def expect(self, content: memoryview) -> Arrival:
        """Have one buffer on its way, with nothing of it there yet."""
        (name,) = memory.digests([content])
        (arrival,) = self.arrivals.expect([(name, len(content))])
        return arrival

    def receive(self, arrival: Arrival, content: memoryview, until: int) -> None:
        """It has come so far."""
        arrival.view[:until] = content[:until]
        self.arrivals.advance([arrival], until)

    def have(self, content: memoryview) -> bytes | None:
        """The bytes it has of this content."""
        blob = self.cache.find(memory.digests([content])[0])
        return None if blob is None else bytes(blob.view())

    def close(self) -> None:
        self.listener.close()
        self.cache.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    authority = Authority(POOL)
    peers = [Peer(authority, number) for number in range(3)]
    yield peers
    for peer in peers:
        peer.close()


def content(size: int, seed: int = 0) -> memoryview:
    return memoryview(np.random.default_rng(seed).integers(0, 255, size, np.uint8)).cast("B")


def test_what_a_peer_has_is_fetched(peers: list[Peer]) -> None:
    first, second, _ = peers
    several = [content(9 * MIB + 5), content(MIB, 1), content(300_000, 2)]
    first.cache.place(several)
    second.fetch(first, *several)
    assert second.settled.wait(100)
    assert all(second.have(each) == each for each in several)


def test_what_is_here_already_is_not_fetched(peers: list[Peer]) -> None:
    first, second, _ = peers
    data = content(MIB)
    second.cache.place([data])
    second.fetch(first, data)
    assert not first.served
    assert not second.arrivals.awaits(memory.digests([data]))


def test_it_goes_down_a_chain_while_it_is_still_coming(
    peers: list[Peer], eventually: Eventually
) -> None:
    first, second, third = peers
    data = content(8 * MIB)
    # The last asks first: nobody has heard of it yet.
    third.fetch(second, data, number=2)
    second.fetch(first, data, number=1)
    (name,) = memory.digests([data])
    arrival = first.expect(data)
    for until in (1, 3 * MIB, 5 * MIB + 17):
        first.receive(arrival, data, until)
        eventually(lambda until=until: third.arrivals._coming[name].filled >= until)
        assert not second.settled.is_set()
    first.receive(arrival, data, len(data))
    first.arrivals.settle([arrival], complete=True)
    assert second.settled.wait(100)
    assert third.settled.wait(100)
    assert second.have(data) == third.have(data) == data


def test_a_lost_connection_is_made_again_where_it_ended(
    peers: list[Peer], eventually: Eventually
) -> None:
    first, second, _ = peers
    data = content(6 * MIB)
    arrival = first.expect(data)
    second.fetch(first, data)
    first.receive(arrival, data, 2 * MIB)
    eventually(lambda: second.arrivals._coming[arrival.digest].filled == 2 * MIB)
    first.served[-1].abort()
    # Who asks again for the beginning would now get something else.
    arrival.view[: 2 * MIB] = bytes(2 * MIB)
    first.receive(arrival, data, 0)
    arrival.view[2 * MIB :] = data[2 * MIB :]
    first.arrivals.advance([arrival], len(data))
    assert second.settled.wait(100)
    assert second.have(data) == data
    assert len(first.served) == 2


@only_in_all
def test_a_peer_that_waits_is_not_taken_for_dead(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(relay, "SILENT_SECONDS", 1.5)
    first, second, _ = peers
    data = content(MIB)
    arrival = first.expect(data)
    second.fetch(first, data)
    time.sleep(2.0)
    assert not second.settled.is_set()
    assert len(first.served) == 1
    first.receive(arrival, data, len(data))
    assert second.settled.wait(100)
    assert second.have(data) == data


def test_what_nobody_has_heard_of_is_given_up(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(relay, "UNKNOWN_SECONDS", 0.5)
    first, second, _ = peers
    data = content(MIB)
    second.fetch(first, data)
    assert second.arrivals.awaits(memory.digests([data]))
    assert second.settled.wait(100)
    assert second.have(data) is None
    assert not second.arrivals.awaits(memory.digests([data]))


def test_what_was_dropped_is_not_waited_for(peers: list[Peer]) -> None:
    first, second, _ = peers
    data = content(MIB)
    names = memory.digests([data])
    first.arrivals.drop(names)
    second.fetch(first, data)
    assert second.settled.wait(100)
    first.receive(first.expect(data), data, len(data))
    second.settled.clear()
    second.fetch(first, data)
    assert second.settled.wait(100)
    assert second.have(data) == data


def test_peers_that_are_told_to_fetch_from_each_other_do_not_wait_for_ever(
    peers: list[Peer],
) -> None:
    """One had it, dropped it, and wants it again from whom it was to give it to."""
    first, second, third = peers
    data = content(MIB)
    first.fetch(third, data, number=3)
    third.fetch(second, data, number=2)
    second.fetch(first, data, number=1)
    assert second.settled.wait(100)
    # The client sends it to that one, and all have it.
    second.receive(second.expect(data), data, len(data))
    assert third.settled.wait(100)
    assert first.settled.wait(100)
    assert first.have(data) == third.have(data) == data


def test_a_peer_whose_own_source_failed_may_get_it_after_all(
    peers: list[Peer], eventually: Eventually
) -> None:
    """The client sends it, once the first to miss it has said so; those behind need not ask."""
    first, second, _ = peers
    data = content(4 * MIB)
    arrival = first.expect(data)
    second.fetch(first, data)
    first.receive(arrival, data, MIB)
    eventually(lambda: second.arrivals._coming[arrival.digest].filled == MIB)
    first.arrivals.settle([arrival], complete=False)
    again = first.expect(data)
    first.receive(again, data, len(data))
    assert second.settled.wait(100)
    assert second.have(data) == data


def test_wrong_bytes_do_not_pass_for_right_ones(peers: list[Peer]) -> None:
    first, second, _ = peers
    data = content(2 * MIB)
    arrival = first.expect(data)
    first.receive(arrival, content(2 * MIB, 7), len(data))
    second.fetch(first, data)
    assert second.settled.wait(100)
    assert second.have(data) is None


def test_what_there_is_no_room_for_is_not_fetched(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = peers
    data = content(MIB)
    first.cache.place([data])

    def full(size: int) -> None:
        raise BlobStoreFullError(f"no room for {size} bytes")

    monkeypatch.setattr(second.cache.arena, "allocate", full)
    second.fetch(first, data)
    assert not second.arrivals.awaits(memory.digests([data]))
    assert not first.served


def test_who_asks_for_another_length_gets_nothing_and_holds_nothing(peers: list[Peer]) -> None:
    first, *_ = peers
    data = content(MIB)
    (blob,) = first.cache.place([data])
    first.cache.unpin(blob.segment.id)
    pins = dict(first.cache._pins)
    for length in (len(data) - 1, len(data) + 1):
        with (
            pytest.raises(LookupError),
            first.arrivals.lent(blob.digest, length, 0, 1, 0.01),
        ):
            pass
    assert first.cache._pins == pins


def test_nobody_there_is_noticed_at_once(peers: list[Peer]) -> None:
    first, second, _ = peers
    first.listener.close()
    second.fetch(first, content(MIB))
    assert second.settled.wait(9)


def test_a_peer_that_breaks_off_again_and_again_is_given_up(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(Peer, "_accept", lambda self, channel, hello: channel.close())
    authority = Authority(POOL)
    first, second = Peer(authority, 0), Peer(authority, 1)
    try:
        second.fetch(first, content(MIB))
        assert second.settled.wait(100)
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("answer", ["more than all of it", "something else"])
def test_nonsense_from_a_peer_is_given_up(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def serve(self: Any, channel: Channel) -> None:
        channel.receive()
        with contextlib.suppress(OSError, EOFError):
            if answer == "something else":
                channel.send(Hello(POOL, PEER))
            else:
                channel.send(relay.Part(True), [bytes(3 * MIB)])
            channel.receive()
        channel.close()

    monkeypatch.setattr(Relay, "serve", serve)
    first, second, _ = peers
    data = content(2 * MIB)
    second.fetch(first, data)
    assert second.settled.wait(9)
    assert second.have(data) is None
