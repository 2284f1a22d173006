"""A link of the native core: the same stream as that of Python's link, at either end."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from skyward.device import build
from skyward.errors import AuthenticationError
from skyward.wire import native
from skyward.wire.channel import Channel
from skyward.wire.handshake import Authority, Credentials, Dialer, node_name
from skyward.wire.link.pair import IS_COUNT, RECORD, RECORD_MAX
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello
from skyward.wire.native import Terms

from ..conftest import has_compiler, other_case
from .network import Network

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")

POOL = "0123456789ab"
NAME = node_name(POOL, 0)
MIB = 1 << 20
TERMS = Terms(4 * MIB)
Eventually = Callable[..., None]
Send = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    native.load(build.library(build.LINK))


class Stream:
    """The bytes of a link, whichever core carries them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        table = ctypes.cast(native.core().table, ctypes.POINTER(ctypes.c_void_p))
        self._send, self._receive = Send(table[0]), Send(table[1])

    def send(self, data: bytes) -> int:
        """Write all of them; how many were taken, or -1 once the link has ended."""
        link = self.channel.link
        if link is not None:
            link.outgoing.send_parts([memoryview(data)])
            return len(data)
        return self._send(self.channel.native_link.handle, data, len(data), 0)

    def receive(self, count: int) -> bytes:
        """So many, or fewer at the end of the link."""
        room = bytearray(count)
        link = self.channel.link
        if link is not None:
            link.incoming.fill(memoryview(room))
            return bytes(room)
        there, done = (ctypes.c_char * count).from_buffer(room), 0
        while done < count:
            place = ctypes.addressof(there) + done
            got = self._receive(self.channel.native_link.handle, place, count - done, -1)
            if got < 0:
                break
            done += got
        return bytes(room[:done])


class Ends:
    """A client and a worker, and the network between them."""

    def __init__(self, client: Terms | None, worker: Terms | None) -> None:
        authority = Authority(POOL)
        self.network = Network()
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._listener = Listener(
            "tcp:127.0.0.1:0",
            POOL,
            authority.issue(NAME),
            lambda channel, _: self._accepted.put(channel),
            terms=None if worker is None else lambda hello: worker,
        )
        self._client = client
        channel, _ = self.dialer(authority.issue("client")).open()
        self.client = Stream(channel)
        self.worker = Stream(self._accepted.get(timeout=200))

    def dialer(self, credentials: Credentials) -> Dialer:
        return Dialer(
            self._listener.endpoint,
            Hello(POOL, "data"),
            credentials,
            NAME,
            self.network.dial,
            terms=self._client,
        )

    def close(self) -> None:
        self.client.channel.close()
        self.worker.channel.close()
        self._listener.close()
        self.network.close()


Open = Callable[..., Ends]


@pytest.fixture
def opened() -> Iterator[Open]:
    made: list[Ends] = []

    def open_one(client: Terms | None = TERMS, worker: Terms | None = TERMS) -> Ends:
        made.append(Ends(client, worker))
        return made[-1]

    yield open_one
    for ends in made:
        ends.close()


def exchange(ends: Ends, bodies: list[bytes]) -> None:
    """Send all of them both ways at once."""

    def send(stream: Stream) -> None:
        for body in bodies:
            stream.send(body)

    senders = [
        threading.Thread(target=send, args=(stream,)) for stream in (ends.client, ends.worker)
    ]
    for sender in senders:
        sender.start()
    heard: list[list[bytes]] = [[], []]

    def receive(stream: Stream, into: list[bytes]) -> None:
        into.extend(stream.receive(len(body)) for body in bodies)

    other = threading.Thread(target=receive, args=(ends.worker, heard[0]))
    other.start()
    receive(ends.client, heard[1])
    for thread in (*senders, other):
        thread.join()
    assert heard == [bodies, bodies]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("client", "worker"),
    [
        (TERMS, TERMS),
        (TERMS, None),
        pytest.param(None, TERMS, marks=other_case),
    ],
)
def test_bytes_arrive_once_and_in_order_wherever_it_is_cut(
    opened: Open, client: Terms | None, worker: Terms | None, seed: int
) -> None:
    ends, choose = opened(client, worker), random.Random(seed)
    sizes = [1, 10, 3_000, 40_000, 300_000, 3 * MIB]
    bodies = [choose.randbytes(choose.choice(sizes)) for _ in range(40)]
    ends.network.cut_after(choose.randrange(1, 3 * MIB) for _ in range(12))
    exchange(ends, bodies)
    assert ends.network.cuts >= 5


def test_it_goes_on_wherever_the_handshake_of_its_next_pair_is_cut(opened: Open) -> None:
    ends = opened()
    # A handshake of TLS and of ours takes about 3 KB each way.
    for after in (*range(1, 100, 17), *range(100, 4000, 433)):
        ends.network.cut_after([after])
        ends.network.cut()
        exchange(ends, [b"%d" % after])
        ends.network.cut_after([])


def test_a_writer_waits_for_a_reader(opened: Open, eventually: Eventually) -> None:
    ends = opened()
    data = random.Random(1).randbytes(3 * TERMS.window)
    done = threading.Event()

    def send() -> None:
        ends.client.send(data)
        done.set()

    writer = threading.Thread(target=send)
    writer.start()
    link = ends.client.channel.native_link
    # All that its keeper reads for the worker is not counted before the worker takes it.
    eventually(lambda: link.kept == TERMS.window)
    assert not done.is_set()
    assert ends.worker.receive(len(data)) == data
    writer.join()


def test_credentials_of_another_pool_are_refused(opened: Open) -> None:
    stranger = Authority(POOL).issue("client")
    with pytest.raises(AuthenticationError, match="certificate"):
        opened().dialer(stranger).open()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            RECORD.pack(IS_COUNT | 5),
            "the other end has 5 bytes of a stream that is between 0 and 0",
        ),
        (RECORD.pack(RECORD_MAX + 1), f"the limit is {RECORD_MAX}"),
        (RECORD.pack(0), "a record of 0 bytes"),
        (RECORD.pack(1 | 2 << 32), "a frame begins on stripe 2"),
    ],
)
def test_a_record_that_cannot_be_ends_the_link(
    opened: Open, eventually: Eventually, record: bytes, reason: str
) -> None:
    ends = opened(client=None)
    link = ends.client.channel.link
    assert link is not None
    link.first.sender.sendall(record)
    worker = ends.worker.channel.native_link
    eventually(lambda: worker.ended)
    assert reason in worker.why
    assert ends.worker.send(b"later") == -1


def test_a_link_without_a_connection_ends_when_its_patience_does(
    opened: Open, eventually: Eventually
) -> None:
    ends = opened(worker=Terms(MIB, patience=0.2, other="the client of this test"))
    told: list[str] = []
    ends.worker.channel.native_link.on_end(told.append)
    ends.client.channel.close()
    eventually(lambda: told)
    assert told == [
        "its connection was lost, and the client of this test did not come back within 0.2 s"
    ]
    assert ends.worker.receive(1) == b""
