"""Arrival: workers wait for each other at the head's port, and who does not come is named."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from skyward.context import InstanceInfo, Peer
from skyward.errors import SkywardError
from skyward.plugins import rendezvous

from ..conftest import only_in_all


@pytest.fixture
def infos() -> Iterator[list[InstanceInfo]]:
    """Three nodes that meet at a port of this machine."""
    peers = tuple(Peer(node, "127.0.0.1") for node in range(3))
    head = InstanceInfo(total_nodes=3, head_port=rendezvous.reserve(), peers=peers, job_id="j")
    yield [replace(head, node=node) for node in range(3)]
    with contextlib.suppress(SkywardError):
        rendezvous.take().close()


def arrive(infos: list[InstanceInfo], seconds: float) -> list[BaseException | None]:
    """What becomes of each, all at once."""
    outcomes: dict[int, BaseException | None] = {}

    def one(info: InstanceInfo) -> None:
        try:
            rendezvous.everyone(info, seconds)
            outcomes[info.node] = None
        except Exception as problem:
            outcomes[info.node] = problem

    threads = [threading.Thread(target=one, args=(info,)) for info in infos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[info.node] for info in infos]


def test_all_who_come_may_go_on_and_the_port_is_free_again(infos: list[InstanceInfo]) -> None:
    assert arrive(infos, 10) == [None, None, None]
    with socket.create_server(("", infos[0].head_port)):
        pass


def test_who_does_not_come_is_named_to_all_the_others(infos: list[InstanceInfo]) -> None:
    for problem in arrive([infos[0], infos[2]], 3.0):
        assert isinstance(problem, TimeoutError)
        assert f"node 1 worker 0 did not arrive at 127.0.0.1:{infos[0].head_port}" in str(problem)


def test_a_head_that_does_not_come_is_named(infos: list[InstanceInfo]) -> None:
    for problem in arrive(infos[1:], 0.3):
        assert isinstance(problem, TimeoutError)
        assert "node 0 worker 0 did not arrive" in str(problem)


@only_in_all
def test_strangers_are_not_counted(
    infos: list[InstanceInfo], eventually: Callable[..., None]
) -> None:
    other_pool = replace(infos[1], job_id="another")
    head: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: head.extend(arrive(infos[:1], 6.0)))
    thread.start()

    def listens() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", infos[0].head_port)) == 0

    eventually(listens, 60, "the head")
    for said in (b"GET / HTTP/1.0\r\n\r\n", b'{"pool": "j", "rank": 99}\n', b"[]\n", b"\xff\n"):
        with socket.create_connection(("127.0.0.1", infos[0].head_port), 5) as caller:
            caller.sendall(said)
    arrive([other_pool], 1.0)
    thread.join()

    assert "node 1 worker 0, node 2 worker 0 did not arrive" in str(head[0])
