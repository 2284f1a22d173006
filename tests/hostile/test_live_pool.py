"""A running pool under attack: it keeps working, in the same processes, with the same memory."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.wire.frames import header
from skyward.wire.handshake import Authority, Credentials, connect
from skyward.wire.messages import STREAMED, Buffer, Hello, Payload, Result

from ..memory import in_use

MIB = 1 << 20
Eventually = Callable[..., None]

over_unix = pytest.mark.parametrize("siege", ["unix"], indirect=True)
over_tcp = pytest.mark.parametrize("siege", ["tcp"], indirect=True)


@sky.function
def add(a: int, b: int) -> int:
    return a + b


@sky.function
def total(values: Any) -> float:
    return float(values.sum())


class Siege:
    """A pool, and everybody around it."""

    def __init__(self, compute: sky.Compute, transport: str) -> None:
        pool = compute._open_fleet
        (node,) = pool.nodes
        (lane,) = node.lanes.values()
        assert node.control is not None
        self.compute = compute
        self.encrypted = transport == "tcp"
        self.pool_id = pool.id
        # The agent's door and the executor's, as the client itself reached them.
        self.addresses = [
            channel._receiver.getpeername() for channel in (node.control, lane.channel)
        ]
        self.processes = [psutil.Process(node.host.agent_pid), psutil.Process(lane.pid)]  # type: ignore[attr-defined,union-attr]

    def knock(self, address: Any) -> socket.socket:
        """A connection nobody has asked for."""
        if not self.encrypted:
            end = socket.socket(socket.AF_UNIX)
            end.connect(address)
            return end
        return socket.create_connection(address)

    def disguises(self) -> list[Callable[[socket.socket], socket.socket]]:
        """Ways to present oneself: as one is and, where there is TLS, with the wrong papers."""
        ways: list[Callable[[socket.socket], socket.socket]] = [lambda end: end]
        if self.encrypted:
            stranger = Authority(self.pool_id).issue("client")
            ways += [
                lambda end, papers=papers: trusting(papers).wrap_socket(end)  # type: ignore[misc]
                for papers in (None, stranger)
            ]
        return ways

    def works(self) -> None:
        """Small calls, large values, the same processes as ever."""
        assert add(1, 2) >> self.compute == 3
        assert total(np.ones(MIB // 8)) >> self.compute == MIB / 8
        stats = self.compute.stats()
        assert (stats.workers_died, stats.nodes_lost) == (0, 0)
        assert all(process.is_running() for process in self.processes)


def trusting(papers: Credentials | None) -> ssl.SSLContext:
    context = papers.context(server=False) if papers else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.fixture(scope="module", params=["unix", "tcp"])
def siege(request: pytest.FixtureRequest) -> Iterator[Siege]:
    options = sky.Options(console=False, default_timeout=300)
    with sky.Compute(sky.Local(transport=request.param), options=options) as compute:
        siege = Siege(compute, request.param)
        siege.works()
        yield siege


def test_the_pool_outlives_whatever_is_said_to_it(
    siege: Siege, hostile: Any, saying: str, tmp_path: Path
) -> None:
    words = hostile.says(siege.pool_id, tmp_path / "bomb")[saying]
    for address in siege.addresses:
        for disguise in siege.disguises():
            end = siege.knock(address)
            with contextlib.suppress(OSError):
                end = disguise(end)
                end.sendall(words)
                socket.socket.shutdown(end, socket.SHUT_WR)
                hostile.hears(end, 10)
            end.close()
    siege.works()
    assert not (tmp_path / "bomb").exists()


@over_tcp
def test_strangers_with_the_right_words_but_no_papers_are_not_heard(
    siege: Siege, hostile: Any
) -> None:
    """Over TCP the pool's id alone opens nothing."""
    for address in siege.addresses:
        for disguise in siege.disguises():
            end = siege.knock(address)
            with contextlib.suppress(OSError):
                end = disguise(end)
                end.sendall(hostile.framed(Hello(siege.pool_id, "control", "send", "s")))
                assert b"python" not in hostile.hears(end, 10)
            end.close()
    siege.works()


@over_unix
def test_a_second_client_cannot_take_a_worker_away(siege: Siege, hostile: Any) -> None:
    agent, executor = siege.addresses
    for address, role in ((agent, "data"), (executor, "data"), (executor, "control")):
        end = siege.knock(address)
        end.sendall(hostile.framed(Hello(siege.pool_id, role)))
        assert hostile.hears(end, 10), "no Welcome"
        end.close()
    siege.works()


@over_unix
def test_descriptors_sent_along_are_not_kept(siege: Siege, eventually: Eventually) -> None:
    before = [process.num_fds() for process in siege.processes]
    with open(os.devnull, "rb") as spare:
        for address in siege.addresses:
            for _ in range(10):
                with siege.knock(address) as end:
                    socket.send_fds(end, [b"\x01\x20"], [spare.fileno()] * 32)
    siege.works()

    def after() -> list[int]:
        return [process.num_fds() for process in siege.processes]

    eventually(
        lambda: all(now <= was + 8 for was, now in zip(before, after(), strict=True)),
        30,
        f"the return of descriptors to about {before}",
    )


def test_a_crowd_of_slow_and_silent_peers_does_not_slow_the_pool(
    siege: Siege, hostile: Any
) -> None:
    slow = hostile.framed(Hello(siege.pool_id, "data", session="x" * 2000))
    ends = [siege.knock(address) for address in siege.addresses for _ in range(30)]
    done = threading.Event()

    def trickle(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for at in range(len(slow)):
                end.sendall(slow[at : at + 1])
                if done.wait(0.05):
                    return

    with ThreadPoolExecutor(4) as threads:
        for end in ends[-4:]:
            threads.submit(trickle, end)
        assert sky.gather(*[add(n, n) for n in range(200)]) >> siege.compute == [
            2 * n for n in range(200)
        ]
        siege.works()
        done.set()
    for end in ends:
        end.close()


def test_a_long_attack_costs_neither_memory_nor_descriptors_nor_threads(
    siege: Siege, hostile: Any, tmp_path: Path, eventually: Eventually
) -> None:
    words = list(hostile.says(siege.pool_id, tmp_path / "bomb").values())

    def wave(count: int) -> None:
        disguises = siege.disguises()
        for number in range(count):
            end = siege.knock(siege.addresses[number % 2])
            with contextlib.suppress(OSError):
                if number % 5 == 0:
                    end = disguises[number // 5 % len(disguises)](end)
                end.sendall(words[number % len(words)])
            end.close()
        gc.collect()

    def sizes() -> list[tuple[int, int, int]]:
        return [
            (in_use(process), process.num_fds(), process.num_threads())
            for process in siege.processes
        ]

    wave(100)
    siege.works()
    before = sizes()
    wave(300)
    siege.works()

    def settled() -> bool:
        return all(
            now[1] <= was[1] + 4 and now[2] <= was[2] + 4
            for was, now in zip(before, sizes(), strict=True)
        )

    eventually(settled, 15, "that the attackers are forgotten")
    for was, now in zip(before, sizes(), strict=True):
        assert now[0] - was[0] < 32 * MIB
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("written", ["noise", "a malformed result", "a result of lies"])
def test_a_function_that_scribbles_on_the_wire_costs_its_worker_only(
    transport: str, written: str, hostile: Any
) -> None:
    """User code shares a process with our socket; what it writes there must not hurt the client."""

    @sky.function
    def scribble(garbage: bytes) -> None:
        import gc
        import time

        from skyward.wire.channel import Channel

        for thing in gc.get_objects():
            if isinstance(thing, Channel) and thing.link is not None:
                thing.link.outgoing.send(garbage)
            elif isinstance(thing, Channel):
                thing._sender.sendall(garbage)
        time.sleep(60)

    garbage = {
        "noise": b"\xff" * 100,
        "a malformed result": header(Result.KIND, 3, 0) + b"\x92\x01\x01",
        "a result of lies": hostile.framed(
            Result(1, 0.0, Payload(5, [Buffer(1 << 40, STREAMED)], inline=5)), b"short"
        ),
    }[written]
    options = sky.Options(console=False, default_timeout=300)
    with sky.Compute(sky.Local(transport=transport), options=options) as compute:  # type: ignore[arg-type]
        with pytest.raises(sky.WorkerDiedError, match="scribble lost its worker on node 0"):
            scribble(garbage) >> compute
        assert add(1, 2) >> compute == 3


def test_a_worker_that_cannot_be_reached_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd at a new executor's door may keep its own client out."""
    from skyward.nodes import host

    kept_out = []

    def crowded(endpoint: str, *rest: Any) -> Any:
        if len(kept_out) < 2:
            kept_out.append(endpoint)
            raise ConnectionRefusedError("crowded out")
        return connect(endpoint, *rest)

    @sky.function
    def die() -> None:
        os._exit(1)

    options = sky.Options(console=False, default_timeout=300)
    with sky.Compute(options=options) as compute:
        monkeypatch.setattr(host, "connect", crowded)
        with pytest.raises(sky.WorkerDiedError):
            die() >> compute
        assert add(1, 2) >> compute == 3
        assert len(kept_out) == 2
