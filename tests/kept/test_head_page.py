"""The page from the head node: it stays with the pool, and comes here through the agent."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import skyward as sky
from skyward.compute import reach
from skyward.compute.workbench.head_page import ForwardedPort, HeadPage, stop_page
from skyward.nodes import records
from skyward.nodes.kept import ReachedPool

from ..conftest import PATIENCE, only_in_all
from .conftest import QUIET

Eventually = Callable[[Callable[[], Any]], Any]


@sky.function
def four() -> int:
    return 4


def serving(name: str) -> list[int]:
    """The processes on this machine that serve the page of a head."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "skyward.page.server" in command and command[-1] == name:
            found.append(process.pid)
    return found


# With TLS, the head has a record of its own; with Unix sockets, it reads the user's.
@pytest.fixture(scope="module", params=["tcp", pytest.param("unix", marks=only_in_all)])
def pool(request: pytest.FixtureRequest, home: Path) -> Iterator[ReachedPool]:
    # `serving` finds the processes of every run of these tests.
    name = f"headed-{request.param}-{os.getpid()}"
    local = sky.Local(transport=request.param)
    with sky.Compute(local, nodes=2, name=name, keep=True, options=QUIET):
        pass
    with reach(name) as found:
        yield found
    sky.attach(name).down(force=True)
    assert serving(name) == [], "the page ends with its pool"


def get(url: str, path: str = "", **headers: str) -> tuple[int, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    connection.request("GET", f"{path or '/'}?{parts.query}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def messages(url: str) -> Iterator[dict[str, Any]]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE)
    connection.request("GET", f"/stream?{parts.query}")
    with connection.getresponse() as answer:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield from json.loads(line[6:])


def test_the_head_shows_the_calls_of_all_clients(pool: ReachedPool) -> None:
    name = pool.record.name
    with HeadPage(pool) as page:
        status, text = get(page.url)
        assert (status, "<title>skyward</title>" in text) == (200, True)
        told = messages(page.url)
        shown = next(message for message in told if message["type"] == "pool")
        assert (shown["name"], [row[1] for row in shown["nodes"]]) == (name, ["ready"] * 2)
        with sky.attach(name) as compute:
            assert four() >> compute == 4
            ended = next(m["ended"] for m in told if m.get("ended"))
        assert [call[1] for call in ended] == ["four"]
        told.close()
        status, text = get(page.url, "/metrics")
        assert status == 200
        assert f'skyward_nodes{{pool="{name}"' in text
        assert get(page.url, Host="evil.example")[0] == 421
        assert get(page.address)[0] == 403


def test_it_learns_of_nodes_that_come_are_replaced_and_leave(
    pool: ReachedPool, eventually: Eventually
) -> None:
    states: dict[int, str] = {}

    def shown(*wanted: str) -> bool:
        for message in told:
            states.update({row[0]: row[1] for row in message.get("nodes", ())})
            if [states[index] for index in sorted(states)] == list(wanted):
                return True
        return False

    with HeadPage(pool) as page, sky.attach(pool.record.name) as compute:
        told = messages(page.url)
        assert shown("ready", "ready")
        compute.resize(3)
        assert shown("ready", "ready", "ready")
        lost = psutil.Process(records.read(pool.record.name).nodes[2].pid)
        lost.kill()
        eventually(lambda: records.read(pool.record.name).nodes[2].pid != lost.pid)
        del states[2]
        assert shown("ready", "ready", "ready")
        compute.resize(2)
        assert shown("ready", "ready", "stopped")
        told.close()


def test_it_stays_and_is_found_again_until_it_is_stopped(pool: ReachedPool) -> None:
    name = pool.record.name
    with HeadPage(pool) as page:
        token = urlsplit(page.url).query
        (before,) = serving(name)
    with pytest.raises(ConnectionRefusedError):
        get(page.url)
    with HeadPage(pool) as again:
        assert (again.found, urlsplit(again.url).query) == (True, token)
        assert serving(name) == [before]
        assert stop_page(pool)
        assert again.wait() == "the page was ended"
    assert serving(name) == []
    assert not stop_page(pool)


def test_the_command_brings_it_here_and_leaves_it_there(
    pool: ReachedPool, eventually: Eventually
) -> None:
    name = pool.record.name
    command = [sys.executable, "-m", "skyward", "ui", name, "--on-head", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert (told["pool"], told["node"]) == (name, 0)
    assert get(told["url"])[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0
    process.stdout.close()
    with HeadPage(pool) as page:
        assert page.found
        page_process = psutil.Process(*serving(name))
    page_process.kill()
    eventually(lambda: not serving(name))
    with HeadPage(pool) as page:
        assert not page.found
        assert get(page.url)[0] == 200


def test_a_port_that_nobody_serves_is_closed_at_once(pool: ReachedPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ForwardedPort(pool, 1, port) as forwarded:
        with socket.create_connection(("127.0.0.1", forwarded.port), PATIENCE) as connection:
            assert connection.recv(1) == b""
    with pool.service(1, "forward") as service:
        with pytest.raises(
            sky.errors.PoolError, match=f"nothing answers at port {port} of the node"
        ):
            service.ask("connect", port=port)
    with pool.service(1, "forward") as service:
        with pytest.raises(sky.errors.PoolError, match="port"):
            service.ask("connect", port=70000)


def test_bytes_go_both_ways_and_each_way_ends_alone(pool: ReachedPool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ForwardedPort(pool, 0, server.getsockname()[1]) as forwarded,
        socket.create_connection(("127.0.0.1", forwarded.port), PATIENCE) as here,
    ):
        there, _ = server.accept()
        sent = os.urandom(3 << 20)
        with there, there.makefile("rb") as arrived:
            here.sendall(sent[:1000])
            here.shutdown(socket.SHUT_WR)
            assert arrived.read() == sent[:1000]
            there.sendall(sent)
            there.shutdown(socket.SHUT_WR)
            with here.makefile("rb") as back:
                assert back.read() == sent


def test_what_cannot_be_is_refused_with_the_next_step(home: Path) -> None:
    from click.testing import CliRunner

    from skyward.cli.ui import ui

    def refusal(*arguments: str) -> str:
        result = CliRunner().invoke(ui, arguments)
        assert result.exit_code == 2
        return result.output

    assert "needs the name of one kept pool; given: none" in refusal("--on-head")
    assert "given: a, b" in refusal("a", "b", "--on-head")
    assert "--host 0.0.0.0" in refusal("a", "--on-head", "--host", "0.0.0.0")
    assert "give --on-head, too" in refusal("a", "--stop")
