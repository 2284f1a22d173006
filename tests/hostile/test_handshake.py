"""The handshake: nobody gets in without proof, and nobody at the door can block it."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import AuthenticationError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.handshake import (
    PEER,
    Authority,
    Credentials,
    connect,
    connect_once,
    node_name,
    with_tls,
)
from skyward.wire.listener import UNPROVEN_PEERS, Listener
from skyward.wire.messages import Hello, Ping, Welcome

POOL = "0123456789ab"
SECONDS = 1.5
"""The deadline of a listener in tests that wait for it."""
FAR = 120.0
"""The deadline in all others: what ends a connection there is what was said."""
Eventually = Callable[..., None]


class Door:
    """A real listener of one node, and the ways to knock on it."""

    def __init__(self, family: str, folder: str) -> None:
        self.authority = Authority(POOL) if family == "tcp" else None
        where = f"unix:{folder}/socket" if family == "unix" else "tcp:127.0.0.1:0"
        self.accepted: list[tuple[Channel, Hello]] = []
        self.listener = Listener(
            where,
            POOL,
            self.credentials(node_name(POOL, 0)),
            lambda channel, hello: self.accepted.append((channel, hello)),
            FAR,
            versions={"python": "3"},
        )
        self._opened: list[Any] = []

    def hurry(self) -> None:
        """Give the next peers little time; a friend has enough again."""
        self.listener._seconds = SECONDS

    def deadline_set(self) -> bool:
        """Whether the peer at the door has its deadline: a friend's is another."""
        return any(end.gettimeout() is not None for end in list(self.listener._unproven.values()))

    def credentials(self, name: str = "client") -> Credentials | None:
        return self.authority.issue(name) if self.authority else None

    def plain(self) -> socket.socket:
        """A connection that has proven nothing."""
        family, _, address = self.listener.endpoint.partition(":")
        if family == "unix":
            end = socket.socket(socket.AF_UNIX)
            end.connect(address)
        else:
            host, _, port = address.rpartition(":")
            end = socket.create_connection((host, int(port)))
        self._opened.append(end)
        return end

    def proven(self) -> socket.socket:
        """A connection whose other end believes it is one of ours, before any frame."""
        end = self.plain()
        credentials = self.credentials()
        if credentials is not None:
            context = credentials.context(server=False)
            end = context.wrap_socket(end, server_hostname=node_name(POOL, 0))
            self._opened.append(end)
        return end

    def friend(self) -> Channel:
        """A proper client, which must be let in at once."""
        started, before = time.monotonic(), len(self.accepted)
        self.listener._seconds = FAR
        channel, welcome = connect(
            self.listener.endpoint, Hello(POOL, "data"), self.credentials(), node_name(POOL, 0), 20
        )
        assert welcome.pid == os.getpid()
        while len(self.accepted) == before:
            assert time.monotonic() - started < 60
            time.sleep(0.001)
        channel.send(Ping(7))
        far = self.accepted[-1][0]
        assert messages.decode_as(Ping, *_kind_and_meta(far)).number == 7
        far.send(Ping(8))
        assert messages.decode_as(Ping, *_kind_and_meta(channel)).number == 8
        assert time.monotonic() - started < 60
        self._opened.append(channel)
        return channel

    def close(self) -> None:
        self.listener.close()
        for end in [*self._opened, *(channel for channel, _ in self.accepted)]:
            end.close()


def _kind_and_meta(channel: Channel) -> tuple[int, bytes]:
    frame = channel.receive()
    return frame.kind, frame.meta


@pytest.fixture
def folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="skyh-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["unix", "tcp"])
def door(request: pytest.FixtureRequest, folder: str) -> Iterator[Door]:
    door = Door(request.param, folder)
    yield door
    door.close()


@pytest.fixture
def tls_door(folder: str) -> Iterator[Door]:
    door = Door("tcp", folder)
    yield door
    door.close()


def test_a_friend_is_let_in(door: Door) -> None:
    door.friend()
    channel, hello = door.accepted[0]
    assert (hello.pool, hello.role) == (POOL, "data")
    assert not channel.closed


def test_whatever_else_is_said_first_ends_the_connection(
    door: Door, hostile: Any, saying: str, tmp_path: Path
) -> None:
    end = door.proven()
    end.sendall(hostile.says(POOL, tmp_path / "bomb")[saying])
    if saying in ("nothing at all", "half a header", "half a Hello"):
        # Nothing is wrong with it but the end.
        socket.socket.shutdown(end, socket.SHUT_WR)
    heard = hostile.hears(end, SECONDS + 60)
    assert door.accepted == []
    assert not (tmp_path / "bomb").exists()
    if saying == "a Hello of another pool":
        assert b"this worker belongs to another pool" in heard
    else:
        assert heard == b""
    door.friend()


def test_the_unproven_are_never_unpickled_for(
    door: Door, hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    monkeypatch.setattr(pickle, "loads", lambda *_, **__: pytest.fail("something was unpickled"))
    for end in (door.plain(), door.proven()):
        with contextlib.suppress(OSError):
            end.sendall(hostile.bomb(tmp_path / "bomb"))
            hostile.hears(end, SECONDS + 60)
    assert not (tmp_path / "bomb").exists()


def test_a_peer_that_trickles_is_dropped_at_the_deadline_and_blocks_nobody(
    door: Door, hostile: Any, eventually: Eventually
) -> None:
    door.hurry()
    end = door.proven()
    eventually(door.deadline_set, SECONDS + 60, "a deadline for the slow peer")
    slow = hostile.framed(Hello(POOL, "data", session="x" * 2000))
    started = time.monotonic()
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for at in range(len(slow)):
                end.sendall(slow[at : at + 1])
                if stop.wait(0.02):
                    return

    thread = threading.Thread(target=trickle)
    thread.start()
    door.friend()
    assert time.monotonic() - started < SECONDS + 60
    eventually(lambda: not door.listener._unproven, SECONDS + 60, "the end of the slow peer")
    assert time.monotonic() - started >= SECONDS * 0.8
    stop.set()
    thread.join()
    assert len(door.accepted) == 1


def test_a_silent_peer_is_dropped_at_the_deadline(door: Door, hostile: Any) -> None:
    for knock in (door.plain, door.proven):
        door.hurry()
        started = time.monotonic()
        try:
            end = knock()
        except (ConnectionError, ssl.SSLError):
            # On a busy machine, its handshake is not at its end by then.
            assert time.monotonic() - started >= SECONDS * 0.8
        else:
            assert hostile.hears(end, SECONDS + 60) == b""
            assert time.monotonic() - started < SECONDS + 60


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_crowd_at_the_door_is_bounded_and_friends_pass_it(
    family: str, folder: str, eventually: Eventually
) -> None:
    """Its deadline is far: who is gone before was crowded out, or has left."""
    door = Door(family, folder)

    def greetings() -> int:
        return sum(thread.name == "skyward-greeting" for thread in threading.enumerate())

    with contextlib.closing(door):
        crowd = [door.plain() for _ in range(4 * UNPROVEN_PEERS)]
        for _ in range(3):
            door.friend()
        eventually(lambda: greetings() <= UNPROVEN_PEERS + 4, 30, "the end of most threads")
        assert len(door.listener._unproven) <= UNPROVEN_PEERS
        for end in crowd:
            end.close()
        eventually(lambda: not door.listener._unproven, 30, "the end of the crowd")
        assert len(door.accepted) == 3


def test_a_peer_that_is_crowded_out_as_its_handshake_begins_is_dropped(
    tls_door: Door, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was shut for the crowd is not the socket that the handshake uses."""

    def crowd_out(*args: Any, **options: Any) -> socket.socket:
        end = with_tls(*args, **options)
        tls_door.listener._unproven.clear()
        return end

    monkeypatch.setattr("skyward.wire.listener.with_tls", crowd_out)
    assert hostile.hears(tls_door.plain(), FAR / 2) == b""


def test_a_peer_that_leaves_at_once_is_forgotten(door: Door, eventually: Eventually) -> None:
    for _ in range(100):
        door.plain().close()
    door.friend()
    eventually(lambda: not door.listener._unproven, SECONDS + 60)


def test_connections_whose_other_half_never_comes_are_bounded(
    tls_door: Door, hostile: Any, eventually: Eventually
) -> None:
    for number in range(2 * UNPROVEN_PEERS):
        end = tls_door.proven()
        end.sendall(hostile.framed(Hello(POOL, "data", "send", f"session {number}")))
    eventually(lambda: len(tls_door.listener._halves) == UNPROVEN_PEERS, 10)
    assert tls_door.accepted == []
    tls_door.friend()


def test_two_halves_in_the_same_direction_are_no_pair(tls_door: Door, hostile: Any) -> None:
    for _ in range(2):
        end = tls_door.proven()
        end.sendall(hostile.framed(Hello(POOL, "data", "send", "one session")))
        assert b"python" in end.recv(4096)
    assert tls_door.accepted == []
    tls_door.friend()


def test_the_file_of_a_socket_is_its_owners_alone(folder: str) -> None:
    door = Door("unix", folder)
    assert os.stat(f"{folder}/socket").st_mode & 0o777 == 0o600
    door.close()
    assert not os.path.exists(f"{folder}/socket")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else for a moment")
def test_another_user_of_this_machine_is_turned_away(folder: str, hostile: Any) -> None:
    door = Door("unix", folder)
    os.chmod(folder, 0o755)
    os.chmod(f"{folder}/socket", 0o666)
    os.seteuid(65534)
    try:
        end = door.plain()
    finally:
        os.seteuid(0)
    with contextlib.suppress(OSError):
        end.sendall(hostile.framed(Hello(POOL, "data")))
    assert hostile.hears(end, SECONDS + 60) == b""
    assert door.accepted == []
    door.friend()
    door.close()


# TLS.


def client_context(credentials: Credentials | None = None) -> ssl.SSLContext:
    """A client that trusts anyone, and shows the given certificate or none."""
    if credentials is not None:
        context = credentials.context(server=False)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def refused(door: Door, hostile: Any, context: ssl.SSLContext) -> None:
    """Neither a handshake nor a Hello gets an answer."""
    with contextlib.suppress(OSError), context.wrap_socket(door.plain()) as end:
        with contextlib.suppress(OSError):
            end.sendall(hostile.framed(Hello(POOL, "data")))
        assert hostile.hears(end, SECONDS + 60) == b""
    assert door.accepted == []
    door.friend()


def test_without_a_certificate_nobody_gets_in(tls_door: Door, hostile: Any) -> None:
    refused(tls_door, hostile, client_context())


def test_a_certificate_of_another_pool_does_not_help(tls_door: Door, hostile: Any) -> None:
    refused(tls_door, hostile, client_context(Authority("another pool").issue("client")))


def test_another_authority_of_the_same_name_does_not_help(tls_door: Door, hostile: Any) -> None:
    refused(tls_door, hostile, client_context(Authority(POOL).issue("client")))


@pytest.mark.parametrize("role", ["control", "data", "device-ops", ""])
def test_a_node_cannot_pass_for_the_client(
    tls_door: Door, role: str, eventually: Eventually
) -> None:
    """Its certificate is the pool's, but it may only pass buffers on to others."""
    node = tls_door.credentials(node_name(POOL, 1))
    place, name = tls_door.listener.endpoint, node_name(POOL, 0)
    with pytest.raises(AuthenticationError, match="only the client asks for"):
        connect(place, Hello(POOL, role), node, name, 5)
    assert not tls_door.accepted
    connect_once(place, Hello(POOL, PEER), node, name).close()
    eventually(lambda: len(tls_door.accepted) == 1)


@pytest.mark.parametrize(
    "role", ["control", "data", PEER, f"{PEER}-objects", f"{PEER}-service-state", f"{PEER}-1-x"]
)
def test_a_device_of_another_pool_may_only_link_two_devices(
    tls_door: Door, role: str, eventually: Eventually
) -> None:
    """It gets a certificate of this pool, so that tensors go from the one to the other."""
    guest = tls_door.credentials(PEER)
    place, name = tls_door.listener.endpoint, node_name(POOL, 0)
    with pytest.raises(AuthenticationError, match=f"does not ask for '{role}'|only the client"):
        connect(place, Hello(POOL, role), guest, name, 5)
    assert not tls_door.accepted
    connect_once(place, Hello(POOL, f"{PEER}-7-0"), guest, name).close()
    eventually(lambda: len(tls_door.accepted) == 1)


def expired(authority: Authority, name: str) -> Credentials:
    """A certificate that was good until a minute ago."""
    lifetime = datetime.timedelta(minutes=-1)
    return Authority(POOL, authority.save(), lifetime).issue(name)


def test_a_certificate_that_has_expired_does_not_help(tls_door: Door, hostile: Any) -> None:
    assert tls_door.authority is not None
    refused(tls_door, hostile, client_context(expired(tls_door.authority, "client")))


def test_a_recorded_session_opens_nothing(
    tls_door: Door, hostile: Any, eventually: Eventually
) -> None:
    """Somebody on the network has heard all that a client said, and says it again."""
    credentials = tls_door.credentials()
    assert credentials is not None
    incoming, outgoing, recorded = ssl.MemoryBIO(), ssl.MemoryBIO(), bytearray()
    context = credentials.context(server=False)
    client = context.wrap_bio(incoming, outgoing, server_hostname=node_name(POOL, 0))
    end = tls_door.plain()

    def done(step: Callable[[], Any]) -> Any:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                return step()
            say()
            incoming.write(end.recv(65536))

    def say() -> None:
        recorded.extend(said := outgoing.read())
        end.sendall(said)

    done(client.do_handshake)
    client.write(hostile.framed(Hello(POOL, "data")))
    say()
    assert b"python" in done(lambda: client.read(4096))
    # It is accepted after it is answered.
    eventually(lambda: len(tls_door.accepted) == 1)
    again = tls_door.plain()
    with contextlib.suppress(OSError):
        again.sendall(recorded)
    assert b"python" not in hostile.hears(again, SECONDS + 60)
    assert len(tls_door.accepted) == 1
    tls_door.friend()


def test_older_tls_is_not_spoken(tls_door: Door, hostile: Any) -> None:
    context = client_context(tls_door.credentials())
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    refused(tls_door, hostile, context)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 600, id="hello"),
        pytest.param(b"\x16\x03\x01\xff\xff" + b"\0" * 70_000, id="an oversized record"),
        pytest.param(b"\x17\x03\x03\x00\x20" + b"\0" * 32, id="data before the handshake"),
        pytest.param(b"\x15\x03\x03\x00\x02\x02\x28", id="an alert"),
    ],
)
def test_garbage_in_place_of_tls(tls_door: Door, hostile: Any, start: bytes) -> None:
    end = tls_door.plain()
    with contextlib.suppress(OSError):
        end.sendall(start)
    hostile.hears(end, SECONDS + 60)
    assert tls_door.accepted == []
    tls_door.friend()


def test_frames_without_tls_are_not_read(tls_door: Door, hostile: Any) -> None:
    end = tls_door.plain()
    end.sendall(hostile.framed(Hello(POOL, "data")))
    assert b"python" not in hostile.hears(end, SECONDS + 60)
    assert tls_door.accepted == []


def test_a_tls_handshake_that_trickles_is_dropped(
    tls_door: Door, hostile: Any, eventually: Eventually
) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    stalled = client_context(tls_door.credentials()).wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        stalled.do_handshake()
    first_flight = outgoing.read()
    tls_door.hurry()
    end = tls_door.plain()
    started = time.monotonic()
    with contextlib.suppress(OSError):
        for at in range(len(first_flight)):
            end.sendall(first_flight[at : at + 1])
            if time.monotonic() - started > SECONDS + 1:
                break
            time.sleep(0.02)
    eventually(lambda: not tls_door.listener._unproven, SECONDS + 60)
    assert tls_door.accepted == []
    tls_door.friend()


# The client is as careful as the worker.


def impostor(context: ssl.SSLContext | None, answer: bytes, folder: str) -> tuple[str, Any]:
    """A server that answers the first connection with the given bytes."""
    if context is None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/impostor")
        server.listen()
        endpoint = f"unix:{folder}/impostor"
    else:
        server = socket.create_server(("127.0.0.1", 0))
        endpoint = f"tcp:127.0.0.1:{server.getsockname()[1]}"

    def serve() -> None:
        with contextlib.suppress(OSError):
            end, _ = server.accept()
            if context is not None:
                end = context.wrap_socket(end, server_side=True)
            end.sendall(answer)
            with contextlib.suppress(OSError):
                while end.recv(4096):
                    pass
            end.close()

    threading.Thread(target=serve, daemon=True).start()
    return endpoint, server


@pytest.mark.parametrize(
    "whose", ["another authority", "another node", "another client", "an expired one"]
)
def test_a_client_checks_who_it_talks_to(whose: str, folder: str, hostile: Any) -> None:
    ours = Authority(POOL)
    papers = {
        "another authority": Authority(POOL).issue(node_name(POOL, 0)),
        "another node": ours.issue(node_name(POOL, 1)),
        "another client": ours.issue("client"),
        "an expired one": expired(ours, node_name(POOL, 0)),
    }
    context = papers[whose].context(server=True)
    endpoint, server = impostor(context, hostile.framed(Welcome()), folder)
    with pytest.raises(AuthenticationError, match=r"is not node-0\.0123456789ab\.skyward"):
        connect(endpoint, Hello(POOL, "data"), ours.issue("client"), node_name(POOL, 0), 20)
    server.close()


def test_a_client_never_speaks_tcp_without_credentials(tls_door: Door) -> None:
    with pytest.raises(AuthenticationError, match="no credentials for tcp:"):
        connect(tls_door.listener.endpoint, Hello(POOL, "data"), None, "node", 2)


def test_a_client_hangs_up_on_anything_but_a_welcome(
    folder: str, hostile: Any, saying: str, tmp_path: Path
) -> None:
    answer = hostile.says(POOL, tmp_path / "bomb")[saying]
    endpoint, server = impostor(None, answer, folder)
    with pytest.raises((OSError, EOFError)):
        connect(endpoint, Hello(POOL, "data"), None, "node", 0.3)
    assert not (tmp_path / "bomb").exists()
    server.close()
    os.unlink(f"{folder}/impostor")


def test_a_refusal_is_told_with_its_reason(door: Door) -> None:
    with pytest.raises(AuthenticationError, match="refused the connection: this worker belongs"):
        connect(
            door.listener.endpoint, Hello("other", "data"), door.credentials(), node_name(POOL, 0)
        )
