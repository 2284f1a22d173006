"""A link by itself: bytes arrive once and in order, and what cannot be is refused."""

from __future__ import annotations

import contextlib
import queue
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from skyward.device import build
from skyward.errors import AuthenticationError
from skyward.kernel import KEEP_IDLE
from skyward.wire import messages, native
from skyward.wire.channel import PEEK_SIZE, Channel
from skyward.wire.frames import HEADER, PROTOCOL
from skyward.wire.handshake import (
    CONNECTIONS,
    Authority,
    Dialer,
    SessionUnknownError,
    connect_pair,
    direct,
    node_name,
)
from skyward.wire.link import pair as pairs
from skyward.wire.link.outgoing import LINK_WINDOW
from skyward.wire.link.pair import IS_COUNT, RECORD, RECORD_MAX, STRIPE_BIT, Pair
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello, Item, Payload, Ping, Result
from skyward.wire.native import NativeLink

from ..conftest import has_compiler, other_case
from .network import Network

POOL = "0123456789ab"
NAME = node_name(POOL, 0)
MIB = 1 << 20
Eventually = Callable[..., None]


@contextlib.contextmanager
def core(kind: str) -> Iterator[None]:
    """Have Python or the native core carry the bytes of what is made meanwhile."""
    if kind == "native":
        native.load(build.library(build.LINK))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "why_not", lambda: "" if kind == "native" else "the test says so")
        yield


class Ends:
    """A client and a worker, and the network between them."""

    def __init__(self, client: str = "python", worker: str = "python") -> None:
        authority = Authority(POOL)
        self.network = Network()
        self.accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        with core(worker):
            self.listener = Listener(
                "tcp:127.0.0.1:0", POOL, authority.issue(NAME), lambda c, _: self.accepted.put(c)
            )
        self.credentials = authority.issue("client")
        with core(client):
            self.dialer = Dialer(
                self.listener.endpoint,
                Hello(POOL, "data"),
                self.credentials,
                NAME,
                self.network.dial,
            )
        self.client, _ = self.dialer.open()
        self.worker = self.accepted.get(timeout=200)

    def hello(self, **changes: object) -> Hello:
        """What the client would say on a new connection, but for some details."""
        return msgspec.structs.replace(self.dialer._hello, attempt=99, **changes)

    def knock(self, hello: Hello) -> None:
        """Connect as the client does."""
        context = self.credentials.context(server=False)
        sender, receiver, _ = connect_pair(self.listener.endpoint, hello, context, NAME, 5, direct)
        sender.close()
        receiver.close()

    def close(self) -> None:
        self.client.close()
        self.worker.close()
        self.listener.close()
        self.network.close()


NATIVE = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")
BOTH = [
    ("python", "python"),
    *(
        pytest.param(ends, marks=NATIVE)
        for ends in (("native", "native"), ("python", "native"), ("native", "python"))
    ),
]


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(*getattr(request, "param", ()))
    yield ends
    ends.close()


whichever = pytest.mark.parametrize("ends", BOTH, indirect=True, ids=lambda pair: "-".join(pair))
"""For what holds whoever carries the bytes on either end."""


@whichever
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=other_case) for seed in range(1, 4))]
)
def test_frames_arrive_once_and_in_order_wherever_it_is_cut(ends: Ends, seed: int) -> None:
    choose = random.Random(seed)
    bodies = [
        choose.randbytes(choose.choice([0, 10, 3_000, 40_000, 300_000, 3 * MIB])) for _ in range(40)
    ]
    ends.network.cut_after(choose.randrange(1, 3 * MIB) for _ in range(12))
    _exchange(ends, bodies)
    assert ends.network.cuts >= 5


@whichever
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=other_case) for seed in range(1, 4))]
)
def test_so_do_large_ones_over_several_connections(
    ends: Ends, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "FAR_SECONDS", 0.0)
    monkeypatch.setattr(native, "STRIPING_PROCESSORS", 0)
    choose = random.Random(seed)
    sizes = [10, 40_000, 8 * MIB, 9 * MIB + 1, 20 * MIB]
    bodies = [choose.randbytes(choose.choice(sizes)) for _ in range(16)]
    ends.network.cut_after(choose.randrange(1, 30 * MIB) for _ in range(8))
    _exchange(ends, bodies)
    assert ends.network.cuts >= 2


def test_a_large_write_to_a_place_far_away_has_more_connections_made(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    chosen: list[tuple[Pair, int]] = []
    choose = Pair.roomiest

    def noted(pair: Pair) -> tuple[int, socket.socket]:
        number, end = choose(pair)
        chosen.append((pair, number))
        return number, end

    monkeypatch.setattr(Pair, "roomiest", noted)
    monkeypatch.setattr(pairs, "FAR_SECONDS", 99.0)
    client, worker = ends.client.link, ends.worker.link
    assert client is not None
    assert worker is not None
    _exchange(ends, [bytes(9 * MIB)])
    assert not client.first.is_striped
    monkeypatch.setattr(pairs, "FAR_SECONDS", 0.0)
    client.first.stripes_asked = False
    _exchange(ends, [bytes(9 * MIB)])
    both = client.first, worker.first
    eventually(lambda: all(len(pair._out) == len(pair._in) == CONNECTIONS for pair in both))
    chosen.clear()
    _exchange(ends, [secrets.token_bytes(64 * MIB)])
    for pair in both:
        assert {number for who, number in chosen if who is pair} == set(range(CONNECTIONS))


@pytest.mark.parametrize("ends", [pytest.param(("native", "native"), marks=NATIVE)], indirect=True)
def test_several_threads_encrypt_a_large_write_where_there_are_processors(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    client, worker = ends.client.native_link, ends.worker.native_link
    monkeypatch.setattr(native, "STRIPING_PROCESSORS", 10_000)
    _exchange(ends, [bytes(9 * MIB)])
    assert not client.striped
    monkeypatch.setattr(native, "STRIPING_PROCESSORS", 0)
    client._striped_attempt = 0

    def are_used() -> bool:
        _exchange(ends, [secrets.token_bytes(20 * MIB)])
        return bool(client.striped and worker.striped)

    eventually(are_used)


@pytest.mark.parametrize("ends", [pytest.param(("native", "native"), marks=NATIVE)], indirect=True)
def test_a_result_is_taken_alone_and_what_comes_with_it_stays(
    ends: Ends, eventually: Eventually
) -> None:
    client, worker = ends.client, ends.worker
    client.set_blocking(False)
    assert client.ready(lambda: None)
    result = Result(7, 0.0, Payload(3))
    worker.send_many([(result, [b"abc"]), (Ping(1), [])])
    taken = None

    def is_taken() -> bool:
        nonlocal taken
        taken = client.take_result(7)
        return taken is not None

    eventually(is_taken)
    assert taken is not None
    assert bytes(taken[1]) == b"abc"
    assert client.has_rest
    assert [frame.kind for frame in client.poll()] == [Ping.KIND]
    worker.send_many([(Ping(2), []), (result, [b"abc"])])
    eventually(lambda: client.native_link.peek(bytearray(1000), 1000) > 0)
    assert client.take_result(7) is None
    assert [frame.kind for frame in client.poll()] == [Ping.KIND, Result.KIND]


@pytest.mark.parametrize("ends", [pytest.param(("native", "native"), marks=NATIVE)], indirect=True)
def test_what_comes_with_a_result_is_found_though_only_the_result_was_looked_at(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ends.client.native_link
    # A frame of as many bytes as are looked at: no poller tells of what the link holds behind it.
    size = PEEK_SIZE - HEADER.size - len(messages.encode(Result(7, 0.0, Payload(PEEK_SIZE))))
    meta = messages.encode(Result(7, 0.0, Payload(size)))
    frame = HEADER.pack(Result.KIND, 0, PROTOCOL, len(meta), size) + meta + bytes(size)
    assert len(frame) == PEEK_SIZE

    def peek(room: bytearray, most: int) -> int:
        room[:most] = frame
        return most

    skipped: list[int] = []
    monkeypatch.setattr(link, "peek", peek)
    monkeypatch.setattr(link, "skip", skipped.append)
    assert ends.client.take_result(7) is not None
    assert skipped == [PEEK_SIZE]
    assert ends.client.has_rest


def test_the_kernel_probes_each_end_that_only_receives(ends: Ends) -> None:
    """It alone notices that one connection is silent while the node answers over others."""
    for channel in (ends.client, ends.worker):
        assert channel.link is not None
        told = []
        for option in (KEEP_IDLE, "TCP_KEEPINTVL", "TCP_KEEPCNT"):
            value = channel.link.first.receiver.getsockopt(
                socket.IPPROTO_TCP, getattr(socket, option), 4
            )
            told.append(int.from_bytes(value, sys.byteorder))
        assert told == [4, 2, 3]


def test_who_waits_for_room_does_not_wait_for_a_closed_connection(ends: Ends) -> None:
    assert ends.client.link is not None
    pair = ends.client.link.first
    pair.close()
    with pytest.raises(ConnectionError):
        pair.roomiest()


@whichever
def test_a_connection_too_many_is_refused_before_it_is_used(ends: Ends) -> None:
    with pytest.raises(SessionUnknownError):
        ends.knock(ends.hello(stripe=1))
    hello = ends.hello(stripe=1)
    hello.attempt = 1
    ends.knock(hello)


def _exchange(ends: Ends, bodies: list[bytes]) -> None:
    """Send these both ways at once, and see that they come as they are."""
    for link in (ends.client.link, ends.worker.link):
        assert link is not None
        # A new thread may have the number of one that has read before.
        link.connections.reader = 0

    def send(channel: Channel) -> None:
        for number, body in enumerate(bodies):
            channel.send(Item(number, 0, Payload(0)), [body])

    wrong: list[str] = []
    senders: list[threading.Thread] = []
    checkers: list[threading.Thread] = []
    complete = [threading.Event(), threading.Event()]

    def check(channel: Channel, done: threading.Event) -> None:
        for number, body in enumerate(bodies):
            frame = channel.receive()
            place = frame.body
            if place is None:
                place = bytearray(frame.body_length)
                channel.read_body(frame, [memoryview(place)])
            if messages.decode_as(Item, frame.kind, frame.meta).task != number or place != body:
                wrong.append(f"frame {number} is not what was sent")
        done.set()
        # The other direction still needs a reader, for counts and for new connections.
        assert channel.receive().kind == Ping.KIND

    for channel, done in zip((ends.client, ends.worker), complete, strict=True):
        senders.append(threading.Thread(target=send, args=(channel,), daemon=True))
        senders[-1].start()
        checkers.append(threading.Thread(target=check, args=(channel, done), daemon=True))
        checkers[-1].start()
    assert all(done.wait(60) for done in complete)
    for sender in senders:
        sender.join(60)
        assert not sender.is_alive()
    for channel in (ends.client, ends.worker):
        channel.send(Ping(0))
    for checker in checkers:
        checker.join(60)
        assert not checker.is_alive()
    assert not wrong


@whichever
def test_one_refusal_after_a_slow_attempt_proves_nothing(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.wire.handshake.REFUSED_SECONDS", 0.2)
    slow: list[float] = []

    def dial(endpoint: str, seconds: float) -> socket.socket:
        if slow:
            time.sleep(slow.pop())
            raise ConnectionRefusedError
        return ends.network.dial(endpoint, seconds)

    hello = Hello(POOL, "data")
    dialer = Dialer(ends.listener.endpoint, hello, ends.credentials, NAME, dial, gone="gone")
    client, _ = dialer.open()
    worker = ends.accepted.get(timeout=200)
    slow.append(0.5)
    ends.network.cut()
    worker.send(Ping(1))
    assert client.receive().kind == Ping.KIND
    client.close()
    worker.close()


@whichever
def test_small_frames_do_not_wait_for_a_connection(ends: Ends, eventually: Eventually) -> None:
    ends.network.refusing = True
    ends.network.cut()
    reading = threading.Thread(target=lambda: received.append(ends.client.receive()))
    received: list[object] = []
    reading.start()
    eventually(lambda: not ends.client.connected)
    started = time.monotonic()
    for number in range(1000):
        ends.client.send(Ping(number))
    assert time.monotonic() - started < 60
    ends.network.refusing = False
    for number in range(1000):
        frame = ends.worker.receive()
        assert messages.decode_as(Ping, frame.kind, frame.meta).number == number
    ends.worker.send(Ping(1))
    reading.join(60)
    assert received


@whichever
def test_no_more_than_a_window_is_kept_of_what_was_sent(ends: Ends) -> None:
    body = secrets.token_bytes(64 * MIB)
    whole = bytearray(len(body))

    def receive() -> None:
        frame = ends.worker.receive()
        ends.worker.read_body(frame, [memoryview(whole)])

    receiving = threading.Thread(target=receive)
    receiving.start()
    # Somebody has to listen for the counts.
    threading.Thread(target=lambda: _until_the_end(ends.client), daemon=True).start()
    ends.client.send(Item(1, 0, Payload(0)), [body])
    link = ends.client.link
    assert link is not None
    kept = link.kept if isinstance(link, NativeLink) else link.outgoing._backlog.held
    assert kept <= LINK_WINDOW
    receiving.join(60)
    assert whole == body


def _until_the_end(channel: Channel) -> None:
    with pytest.raises((EOFError, OSError)):
        channel.receive()


@whichever
def test_a_session_that_is_not_there_is_refused_by_name(ends: Ends) -> None:
    with pytest.raises(SessionUnknownError, match="unknown session"):
        ends.knock(ends.hello(session="another", received=10))
    ends.client.send(Ping(1))
    assert ends.worker.receive().kind == Ping.KIND


def test_a_late_attempt_does_not_disturb_its_successor(ends: Ends) -> None:
    late = ends.hello()
    late.attempt = 0
    with pytest.raises(AuthenticationError):
        ends.knock(msgspec.structs.replace(late, pool="another"))
    with pytest.raises((SessionUnknownError, EOFError, OSError)):
        stale = ends.hello()
        stale.attempt = 1
        ends.worker.link.connections._attempt = 2  # type: ignore[union-attr]
        ends.knock(stale)
    ends.client.send(Ping(1))
    assert ends.worker.receive().kind == Ping.KIND


@pytest.mark.parametrize(
    "record",
    [
        RECORD.pack(0),
        RECORD.pack(RECORD_MAX + 1),
        RECORD.pack(10 | 3 << STRIPE_BIT),
        RECORD.pack(IS_COUNT | 10 * MIB),
    ],
    ids=[
        "an empty part",
        "too large a part",
        "a part that a stripe carries",
        "a count of what was never sent",
    ],
)
def test_an_impossible_record_ends_the_link(ends: Ends, record: bytes) -> None:
    link = ends.worker.link
    assert link is not None
    link.connections.writing.sender.sendall(record)
    with pytest.raises(EOFError, match=r"a record of|a frame begins|the other end has"):
        ends.client.receive()
    with pytest.raises(OSError):
        ends.client.send(Ping(1))
