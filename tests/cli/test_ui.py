"""`sky ui`: the pools of the user's processes, in another process."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

import skyward as sky
from skyward.cli.ui import opened
from skyward.nodes.fleet import Fleet
from skyward.page import door as sockets
from skyward.page.door import Door
from skyward.page.hub import Hub

from ..conftest import PATIENCE, other_case

# A page shows all pools of a name, also those of another run of these tests.
ELSEWHERE, LATER, ALONE = (f"{name}-{os.getpid()}" for name in ("elsewhere", "later", "alone"))


@sky.function
def square(x: int) -> int:
    return x * x


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute(name=ELSEWHERE, options=sky.Options(console=False)) as compute:
        yield compute


def messages(url: str) -> Iterator[dict[str, Any]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    connection.request("GET", f"/stream?{parts.query}")
    answer = connection.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield from json.loads(line[6:])


def address(process: Any) -> str:
    url: str = json.loads(process.stdout.readline())["url"]
    return url


def test_it_shows_the_pools_of_another_process(
    compute: sky.Compute, start: Any, eventually: Any
) -> None:
    process = start("ui", ELSEWHERE, LATER, "--json")
    url = address(process)
    told = messages(url)
    assert next(told)["type"] == "hello"
    pool = next(message for message in told if message.get("name") == ELSEWHERE)
    assert [row[1] for row in pool["nodes"]] == ["ready"]
    square(3) >> compute
    for message in told:
        if message["type"] == "changes" and message["ended"]:
            break
    assert [call[1] for call in message["ended"]] == ["square"]

    with sky.Compute(name=LATER, options=sky.Options(console=False)):
        later = next(message for message in told if message.get("name") == LATER)
    gone = next(message for message in told if message["type"] == "gone")
    assert gone["pool"] == later["pool"]

    parts = urlsplit(url)
    for _ in range(2):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
        connection.request("GET", f"/metrics?{parts.query}")
        text = connection.getresponse().read().decode()
        connection.close()
        assert f'skyward_calls_total{{pool="{ELSEWHERE}"' in text
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    eventually(lambda: not compute._open_fleet.events.listened)  # nobody looks any more


@other_case
def test_it_shows_only_the_pools_that_are_named(compute: sky.Compute, start: Any) -> None:
    process = start("ui", ALONE, "--json")
    told = messages(address(process))
    told_so = process.stderr.readline().decode()
    assert f"no kept pool is called '{ALONE}' (there are: " in told_so
    with sky.Compute(name=ALONE, options=sky.Options(console=False)):
        pool = next(message for message in told if message["type"] == "pool")
    assert pool["name"] == ALONE
    process.terminate()
    assert process.wait(PATIENCE) == 0


def test_viewers_share_one_connection_to_a_process(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def connect(address: str, wish: bytes) -> socket.socket | None:
        asked.append(address)
        return sockets.connect(address, wish)

    monkeypatch.setattr("skyward.page.hub.connect", connect)
    gathered = Hub([ELSEWHERE])
    viewers = [gathered.join() for _ in range(2)]
    try:
        for viewer in viewers:
            while ELSEWHERE not in (viewer.next(PATIENCE) or ELSEWHERE):
                pass
        assert asked.count(sockets.own_address()) == 1
    finally:
        gathered.close()
    assert gathered._doors == {}


def test_a_process_is_found_while_it_has_a_pool() -> None:
    with sky.Compute(options=sky.Options(console=False)):
        assert sockets.own_address() in sockets.addresses()


def test_a_socket_of_a_process_that_was_killed_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where sockets are files."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("skyward.kernel.IS_LINUX", False)
    sockets.listen(sockets.own_address()).close()
    (left,) = tmp_path.iterdir()
    assert left.stat().st_mode & 0o777 == 0o600
    hub = Hub()
    viewer = hub.join()
    assert viewer.next(10) != ""
    assert hub.measure() == []
    hub.leave(viewer)
    hub.close()
    assert not left.exists()


def test_a_process_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with sky.Compute(options=sky.Options(console=False)):
        connection = sockets.connect(sockets.own_address(), sockets.VIEW)
        assert connection is not None
        connection.close()
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert sockets.connect(f"\0skyward-pools-{user}-{os.getpid()}", sockets.VIEW) is None


def test_the_browser_gets_the_token_through_a_file_of_the_user_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", asked.append)
    with opened("http://127.0.0.1:1/?token=secret&x=1"):
        (address,) = asked
        file = Path(urlsplit(address).path)
        assert "secret" not in address
        assert file.stat().st_mode & 0o777 == 0o600
        assert "url=http://127.0.0.1:1/?token=secret&amp;x=1" in file.read_text()
    assert not file.exists()


@pytest.fixture
def door_address(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address for a door of a test; that of this process may be in use."""
    address = f"\0skyward-test-{os.getpid()}"
    monkeypatch.setattr("skyward.page.door.own_address", lambda: address)
    return address


def test_a_forked_child_does_not_keep_the_address_of_its_parent(
    door_address: str, eventually: Any
) -> None:
    door, pool = Door(), cast(Fleet, object())
    door.enter(pool)
    child = os.fork()
    if not child:
        door._forked()
        signal.pause()
    try:
        door.leave(pool)
        eventually(lambda: _opens(door, pool))
        door.leave(pool)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _opens(door: Door, pool: Fleet) -> bool:
    door.enter(pool)
    if door._listener is None:
        door.leave(pool)
        return False
    return True


def test_the_door_stays_open_when_a_process_cannot_be_let_in(
    compute: sky.Compute, door_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def accept(listener: socket.socket) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return found(listener)

    found = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    door = Door()
    door.enter(compute._open_fleet)
    connection = sockets.connect(door_address, sockets.VIEW)
    assert connection is not None
    with connection, connection.makefile("rb") as lines:
        assert lines.readline().startswith(b"[")
    assert failed.is_set()
    door.leave(compute._open_fleet)


def test_a_port_that_cannot_be_had_is_an_error(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run("ui", "--port", port, code=1)
    assert f"port {port}" in result.stderr
    assert "give another port" in result.stderr
