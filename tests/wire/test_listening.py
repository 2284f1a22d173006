"""A listener in several places at once."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.errors import AuthenticationError
from skyward.wire.channel import Channel
from skyward.wire.identity import CLIENT, Authority, Credentials, connect
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello

Accepted = queue.SimpleQueue[Channel]


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
        accepted.get(timeout=5).close()
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
    accepted.get(timeout=5).close()
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


def test_closing_it_leaves_no_socket_behind(listener: Listener, tmp_path: Path) -> None:
    listener.close()
    assert not list(tmp_path.iterdir())
    host, _, port = listener.endpoint.split(" ")[0].removeprefix("tcp:").rpartition(":")
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5)
