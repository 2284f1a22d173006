"""A listener in several places at once."""

from __future__ import annotations

import contextlib
import errno
import gc
import queue
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError
from skyward.nodes.node import _among
from skyward.wire.channel import Channel
from skyward.wire.handshake import CLIENT, Authority, Credentials, connect
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello

Accepted = queue.SimpleQueue[Channel]


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture
def authority() -> Authority:
    return Authority("pool")


@pytest.fixture
def credentials(authority: Authority) -> Credentials:
    return authority.issue("node.skyward")


@pytest.fixture
def accepted() -> Accepted:
    return queue.SimpleQueue()


@pytest.fixture
def listener(tmp_path: Path, credentials: Credentials, accepted: Accepted) -> Iterator[Listener]:
    where = f"tcp:127.0.0.1:0 unix:{tmp_path}/both.sock"
    made = Listener(where, "pool", credentials, lambda channel, hello: accepted.put(channel))
    yield made
    made.close()


def test_both_places_lead_to_it(
    listener: Listener, authority: Authority, accepted: Accepted
) -> None:
    network, private = listener.endpoint.split(" ")
    assert network.startswith("tcp:127.0.0.1:")
    assert network != "tcp:127.0.0.1:0"
    for endpoint in (network, private):
        channel, _ = connect(
            endpoint, Hello("pool", "data"), authority.issue(CLIENT), "node.skyward"
        )
        accepted.get(timeout=200).close()
        channel.close()


def test_only_the_unix_socket_is_open_to_who_has_no_certificate(
    listener: Listener, accepted: Accepted
) -> None:
    network, private = listener.endpoint.split(" ")
    with pytest.raises(AuthenticationError):
        connect(network, Hello("pool", "data"), None, "node.skyward")
    host, _, port = network.removeprefix("tcp:").rpartition(":")
    with socket.create_connection((host, int(port)), 5) as plain:
        plain.sendall(b"no hello of TLS" * 10)
        with contextlib.suppress(ConnectionResetError):
            assert len(plain.recv(4096)) < 16, "an alert at most"
    assert accepted.empty()
    channel, _ = connect(private, Hello("pool", "data"), None, "node.skyward")
    accepted.get(timeout=200).close()
    channel.close()


def test_an_address_that_is_another_machines_is_left_out(
    tmp_path: Path, credentials: Credentials
) -> None:
    private = f"unix:{tmp_path}/one.sock"
    made = Listener(f"tcp:192.0.2.7:0 {private}", "pool", credentials, lambda *_: None)
    assert made.endpoint == private
    made.close()
    with pytest.raises(OSError):
        Listener("tcp:192.0.2.7:0", "pool", credentials, lambda *_: None)


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL])
def test_a_name_that_this_machine_does_not_know_is_left_out(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    private = f"unix:{tmp_path}/one.sock"
    made = Listener(f"tcp:gpu1.example:0 {private}", "pool", credentials, lambda *_: None)
    assert made.endpoint == private
    made.close()
    with pytest.raises(socket.gaierror):
        Listener("tcp:gpu1.example:0", "pool", credentials, lambda *_: None)


def test_where_there_is_no_ipv6_an_address_of_it_is_left_out(
    tmp_path: Path, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "create_server", unsupported)
    private = f"unix:{tmp_path}/one.sock"
    made = Listener(f"tcp:2001:db8::7:0 {private}", "pool", credentials, lambda *_: None)
    assert made.endpoint == private
    made.close()


@pytest.mark.parametrize("written", ["::1", "[::1]"])
@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_is_listened_on_and_found(
    authority: Authority, credentials: Credentials, accepted: Accepted, written: str
) -> None:
    where = f"tcp:127.0.0.1:0 tcp:{written}:0"
    made = Listener(where, "pool", credentials, lambda channel, hello: accepted.put(channel))
    endpoint = made.endpoint.split(" ")[1]
    channel, _ = connect(endpoint, Hello("pool", "data"), authority.issue(CLIENT), "node.skyward")
    accepted.get(timeout=200).close()
    channel.close()
    made.close()


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
def test_a_name_that_has_only_an_ipv6_address_is_listened_on(
    credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolved(host: str, *args: int, **kwargs: int) -> object:
        return real("::1" if host == "gpu6.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    made = Listener("tcp:gpu6.example:0", "pool", credentials, lambda *_: None)
    port = int(made.endpoint.rpartition(":")[2])
    socket.create_connection(("::1", port), 5).close()
    made.close()


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("10.0.0.1", "tcp:10.0.0.1:3"),
        ("fe80::1", "tcp:fe80::1:4"),
        ("[fe80::1]", "tcp:fe80::1:4"),
        ("fe80::1:2", "tcp:[fe80::1:2]:5"),
        ("10.0.0.2", ""),
        ("/run/a", ""),
    ],
)
def test_the_place_for_other_nodes_is_the_one_at_the_nodes_address(
    address: str, endpoint: str
) -> None:
    places = "tcp:[fe80::1:2]:5 tcp:10.0.0.1:3 tcp:fe80::1:4 unix:/run/a:0"
    assert _among(places, address) == endpoint


def test_closing_it_leaves_no_socket_behind(listener: Listener, tmp_path: Path) -> None:
    listener.close()
    assert not list(tmp_path.iterdir())
    host, _, port = listener.endpoint.split(" ")[0].removeprefix("tcp:").rpartition(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5)


def test_a_connection_that_is_reset_before_its_handshake_leaves_no_socket_behind(
    authority: Authority,
) -> None:
    def dial(endpoint: str, seconds: float) -> socket.socket:
        """A connection whose peer has already ended it with a reset, as a killed process does."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            end = socket.create_connection(server.getsockname(), seconds)
            peer, _ = server.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        opened.append(end)
        return end

    opened: list[socket.socket] = []
    hello = Hello("pool", "data")
    with pytest.raises(OSError, match="reset by peer"):
        connect("tcp:127.0.0.1:1", hello, authority.issue(CLIENT), "node.skyward", dial=dial)
    # A socket that is left open would be a warning, which fails the test.
    gc.collect()
    assert [end.fileno() for end in opened] == [-1]
