"""A link of the native core: the same stream as that of Python's link, at either end."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import os
import queue
import random
import socket
import ssl
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skyward.device import build
from skyward.errors import AuthenticationError
from skyward.wire import native
from skyward.wire.channel import Channel
from skyward.wire.handshake import Authority, Credentials, Dialer, node_name
from skyward.wire.link.link import Link
from skyward.wire.link.pair import IS_COUNT, RECORD, RECORD_MAX
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello
from skyward.wire.native import Terms

from ..conftest import has_compiler, only_in_all, other_case
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
        if isinstance(link, Link):
            link.outgoing.send_parts([memoryview(data)])
            return len(data)
        return self._send(self.channel.native_link.handle, data, len(data), 0)

    def receive(self, count: int) -> bytes:
        """So many, or fewer at the end of the link."""
        room = bytearray(count)
        link = self.channel.link
        if isinstance(link, Link):
            link.incoming.fill([memoryview(room)])
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
        self._client, self._authority = client, authority

    def begin(self) -> Ends:
        """Connect."""
        channel, _ = self.dialer(self._authority.issue("client")).open()
        self.client = Stream(channel)
        self.worker = Stream(self._accepted.get(timeout=200))
        return self

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
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    # Ends without terms are Python's.
    monkeypatch.setattr(native, "why_not", lambda: "the test wants Python's")
    # A machine that stands still for a while says nothing of the links.
    monkeypatch.setattr("skyward.wire.handshake.GREETING_SECONDS", 200.0)
    made: list[Ends] = []

    def open_one(
        client: Terms | None = TERMS, worker: Terms | None = TERMS, *, begin: bool = True
    ) -> Ends:
        made.append(Ends(client, worker))
        return made[-1].begin() if begin else made[-1]

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


# The two connections of a pair take 9 KB for their handshakes, of TLS and ours.
@pytest.mark.parametrize(
    "places",
    [
        pytest.param((*range(1, 100, 17), *range(100, 9000, 907)), id="some"),
        # The second one's is as the first one's.
        pytest.param(range(1, 4800), id="all", marks=only_in_all),
    ],
)
def test_it_goes_on_wherever_the_handshake_of_its_next_pair_is_cut(
    opened: Open, places: Iterable[int]
) -> None:
    every, places = [opened() for _ in range(4)], list(places)

    def cut(which: int) -> None:
        ends = every[which]
        for after in places[which :: len(every)]:
            ends.network.cut_after([after])
            ends.network.cut()
            exchange(ends, [b"%d" % after])
            ends.network.cut_after([])

    with ThreadPoolExecutor(len(every)) as threads:
        list(threads.map(cut, range(len(every))))


# A record, with what TLS adds, and the next one's first bytes.
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(range(1, 160, 13), id="some"),
        pytest.param(range(1, 160), id="all", marks=only_in_all),
    ],
)
def test_it_goes_on_wherever_a_record_is_cut(opened: Open, places: Iterable[int]) -> None:
    ends = opened()
    for after in places:
        ends.network.cut_after([after])
        exchange(ends, [bytes([after]) * 60, b"next"])
        ends.network.cut_after([])
    assert ends.network.cuts >= len(list(places)) // 2


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


@pytest.mark.parametrize(("connection", "end"), [(-2, 1), (-1, 0)], ids=["worker", "client"])
def test_garbage_after_the_handshake_costs_a_connection_and_nothing_else(
    opened: Open, eventually: Eventually, connection: int, end: int
) -> None:
    ends = opened()
    connections = ends.network.connections
    ends.network.pairs[connection][end].sendall(b"\x17\x03\x03\x00\x40" + bytes(64))
    eventually(lambda: ends.network.connections >= connections + 2)
    exchange(ends, [b"next"] * 3)


def test_a_peer_that_sends_more_than_it_may_is_not_kept_in_memory(
    opened: Open, eventually: Eventually
) -> None:
    ends = opened(client=None)
    link = ends.client.channel.link
    assert link is not None
    sender = link.first.sender

    def flood() -> None:
        with contextlib.suppress(OSError):
            for _ in range(80):
                sender.sendall(RECORD.pack(MIB) + bytes(MIB))

    thread = threading.Thread(target=flood)
    thread.start()
    worker = ends.worker.channel.native_link
    eventually(lambda: worker.ended)
    assert "bytes that nobody has asked for" in worker.why
    # The network between them has closed neither end, so the flood may stand still.
    ends.network.cut()
    thread.join()


@only_in_all
def test_a_link_keeps_its_connections_if_an_end_only_sends_or_nobody_does(opened: Open) -> None:
    """Slow: must last longer than a silence may."""
    ends, idle, sent = opened(), opened(), 0
    connections = ends.network.connections
    until = time.monotonic() + 1.5 * native.SILENCE_SECONDS
    while time.monotonic() < until:
        sent += ends.client.send(b"x")
        time.sleep(0.001)
    assert ends.network.connections == idle.network.connections == connections
    assert ends.worker.receive(sent) == b"x" * sent


def test_credentials_of_another_pool_are_refused(opened: Open) -> None:
    stranger = Authority(POOL).issue("client")
    with pytest.raises(AuthenticationError, match="certificate"):
        opened().dialer(stranger).open()


def test_a_server_that_is_not_the_one_is_refused() -> None:
    """Another node, the client, one whose certificate has expired, and whoever has no name."""
    ours = Authority(POOL)
    late = Authority(POOL, ours.save(), datetime.timedelta(minutes=-1))
    client = ours.issue("client").native_context(server=False)
    wrong = (ours.issue(node_name(POOL, 1)), ours.issue("client"), late.issue(NAME))
    for papers in (*wrong, ours.issue(NAME)):
        near, far = socket.socketpair()
        server = papers.native_context(server=True).wrap_socket(
            far, server_side=True, do_handshake_on_connect=False
        )
        with ThreadPoolExecutor(1) as thread:
            shaking = thread.submit(server.do_handshake)
            if papers in wrong:
                with pytest.raises(ssl.SSLCertVerificationError, match="certificate"):
                    client.wrap_socket(near, server_hostname=NAME)
            else:
                client.wrap_socket(near, server_hostname=NAME).close()
            with contextlib.suppress(OSError):
                shaking.result()
        server.close()
    near, far = socket.socketpair()
    with near, far, pytest.raises(ValueError, match="has to name the server"):
        client.wrap_socket(near)


def test_an_expired_client_is_refused(opened: Open) -> None:
    ends = opened()
    late = Authority(POOL, ends._authority.save(), datetime.timedelta(minutes=-1))
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        ends.dialer(late.issue("client")).open()


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


# Peers that are not what they should be.


@pytest.fixture
def answer() -> Iterator[Callable[[Callable[[socket.socket], object]], Dialer]]:
    """A dialer of a server that does so with its connection."""
    with contextlib.ExitStack() as held:

        def serve(deal: Callable[[socket.socket], object]) -> Dialer:
            listening = held.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with contextlib.suppress(OSError), listening.accept()[0] as end:
                    deal(end)

            thread = threading.Thread(target=run)
            thread.start()
            held.callback(thread.join)
            place = f"tcp:127.0.0.1:{listening.getsockname()[1]}"
            credentials = Authority(POOL).issue("client")
            return Dialer(place, Hello(POOL, "data"), credentials, NAME, terms=TERMS)

        yield serve


def test_a_server_of_an_older_tls_is_refused(answer: Callable[..., Dialer]) -> None:
    context = Authority(POOL).issue(NAME).context(server=True)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2

    def deal(end: socket.socket) -> None:
        context.wrap_socket(end, server_side=True).close()

    with pytest.raises(AuthenticationError, match="protocol version"):
        answer(deal).open()


def test_a_server_without_tls_is_refused(answer: Callable[..., Dialer]) -> None:
    with pytest.raises(AuthenticationError, match="wrong version number"):
        answer(lambda end: (end.recv(1), end.sendall(b"220 ready" * 99))).open()


def test_a_server_that_says_nothing_is_given_up(answer: Callable[..., Dialer]) -> None:
    with pytest.raises(TimeoutError, match="the handshake of TLS took too long"):
        answer(lambda end: [end.recv(4096) for _ in range(2)]).open(seconds=0.2)


def test_a_record_that_comes_in_parts_is_waited_for(eventually: Eventually) -> None:
    authority = Authority(POOL)
    near, far = socket.socketpair()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = authority.issue(NAME).context(server=True).wrap_bio(incoming, outgoing, True)
    client = authority.issue("client").native_context(server=False)
    near.settimeout(200)
    with far, ThreadPoolExecutor(1) as threads:
        made = threads.submit(client.wrap_socket, near, server_hostname=NAME)
        while True:
            try:
                server.do_handshake()
                break
            except ssl.SSLWantReadError:
                far.sendall(outgoing.read())
                incoming.write(far.recv(1 << 16))
        end = made.result()
        server.write(b"some bytes")
        record = outgoing.read()
        reading = threads.submit(end.recv, 100)
        far.sendall(record[:-5])

        def is_taken() -> bool:
            left = fcntl.ioctl(end.fileno(), termios.FIONREAD, bytes(4))
            return struct.unpack("i", left)[0] == 0

        eventually(is_taken)
        far.sendall(record[-5:])
        assert reading.result() == b"some bytes"
        end.close()


def test_what_a_plain_connection_has_read_ahead_is_told_and_read() -> None:
    near, far = socket.socketpair()
    end = native.NativeSocket(near)
    with far:
        far.sendall(b"some bytes")
        assert end.recv(5) == b"some "
        assert end.pending()
        assert end.recv(100) == b"bytes"
        assert not end.pending()
    assert end.recv(1) == b""
    end.close()


def test_a_closed_connection_says_so() -> None:
    near, far = socket.socketpair()
    far.close()
    end = native.NativeSocket(near)
    end.close()
    for use in (lambda: end.recv(1), lambda: end.sendall(b"x"), end.do_handshake, end.peer):
        with pytest.raises(OSError, match="closed"):
            use()


# Processes.


def test_a_forked_child_leaves_links_alone_and_can_make_its_own(opened: Open) -> None:
    ends = opened()
    near, far = os.pipe()
    child = os.fork()
    if not child:
        try:
            stream = ends.client
            refused = stream.send(b"x"), stream.receive(1), stream.channel.native_link.received
            ends.client.channel.close()
            own = Ends(TERMS, TERMS).begin()
            exchange(own, [bytes(MIB)])
            os.write(far, repr(refused).encode())
        except BaseException as problem:
            os.write(far, repr(problem).encode())
        os._exit(0)
    os.close(far)
    with os.fdopen(near) as said:
        assert said.read() == "(-1, b'', 0)"
    os.waitpid(child, 0)
    exchange(ends, [b"still here"])
    assert ends.network.cuts == 0


# Libraries of OpenSSL.


@pytest.fixture
def without_openssl(monkeypatch: pytest.MonkeyPatch) -> None:
    found = native.LinkCore(build.library(build.LINK), ["libnone.so"])
    assert found.openssl is None
    assert "libnone.so" in found.openssl_name
    monkeypatch.setattr(native, "_core", found)


@pytest.mark.usefixtures("without_openssl")
@pytest.mark.parametrize("worker", [TERMS, None])
def test_without_openssl_python_encrypts(opened: Open, worker: Terms | None) -> None:
    ends, choose = opened(TERMS, worker), random.Random(2)
    ends.network.cut_after(choose.randrange(1, MIB) for _ in range(5))
    exchange(ends, [choose.randbytes(choose.choice([1, 3_000, MIB])) for _ in range(20)])
    assert ends.network.cuts >= 3


def another_openssl(folder: Path) -> str:
    """A second copy of libssl with a libcrypto of its own: they know each other by other names."""
    import _ssl

    text = subprocess.run(["ldd", _ssl.__file__], capture_output=True, text=True).stdout
    found = [
        line.split()[2] for line in text.splitlines() if "libssl" in line or "libcrypto" in line
    ]
    if len(found) != 2:
        pytest.skip("Python's ssl has OpenSSL in itself")
    paths = {}
    for path in map(Path, found):
        data = path.read_bytes()
        for name in (b"libcrypto.so", b"libssl.so"):
            data = data.replace(name, name.replace(b"lib", b"LIB"))
        paths[path.name[:6]] = folder / path.name.replace("lib", "LIB")
        paths[path.name[:6]].write_bytes(data)
    ctypes.CDLL(str(paths["libcry"]))
    return str(paths["libssl"])


def test_links_with_different_libraries_are_neighbours(
    opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = native.core()
    second = native.LinkCore(build.library(build.LINK), [another_openssl(tmp_path)])
    assert second.openssl is not None, second.openssl_name
    assert str(tmp_path) in second.openssl_name
    every = []
    for one, other in ((first, second), (second, first), (second, second), (first, first)):
        monkeypatch.setattr(native, "_core", one)
        ends = opened(begin=False)
        monkeypatch.setattr(native, "_core", other)
        ends.begin()
        every.append(ends)
    with ThreadPoolExecutor(4) as threads:
        bodies = [random.Random(3).randbytes(MIB)] * 4
        list(threads.map(lambda ends: exchange(ends, bodies), every))
