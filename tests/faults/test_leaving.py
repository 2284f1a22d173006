"""Nodes that leave a pool, or are left behind with it: not brought up again, and seen off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import skyward as sky
from skyward.nodes.ending import Ending
from skyward.nodes.fleet import Fleet
from skyward.nodes.host import Host
from skyward.nodes.journal import Journal
from skyward.nodes.node import Node
from skyward.providers import Order
from skyward.staff import Staff
from skyward.testing import plain_request

from ..conftest import PATIENCE

QUIET = sky.Options(console=False)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with sky.Compute(options=QUIET) as compute:
        yield compute._open_pool._fleet


@pytest.fixture
def retired(tmp_path: Path) -> Node:
    """A node that was lost, and is given up by a resize while it is out of reach."""
    provider: Any = sky.Local()
    order = Order("pool", 1, plain_request())
    journal = Journal(tmp_path / "journal.sqlite")
    node = Node(1, Host(provider, order, journal, lambda _: None, lambda _: None))
    assert node.lose("its agent is gone")
    assert node.drain()
    return node


def test_a_node_that_is_being_retired_is_not_started_anew(fleet: Fleet, retired: Node) -> None:
    host = retired.host
    fleet._startup.start_again(retired)
    assert retired.host is host
    assert retired.state == "draining"


def test_a_node_that_is_being_retired_is_not_waited_for(fleet: Fleet, retired: Node) -> None:
    assert not fleet._startup.await_return(retired, sky.UnreachableError("no answer"))
    assert retired.state == "draining"


def test_leaving_a_pool_sees_the_removal_of_a_lost_machine_through(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """The process may end right after, and what is left of the machine would stay."""
    leaving, removed = threading.Event(), threading.Event()
    # The start of the new node waits for the removal as well.
    monkeypatch.setattr("skyward.nodes.ending.LAUNCH_SECONDS", 0.0)
    with sky.Compute(options=QUIET) as compute:
        fleet = compute._open_pool._fleet
        (node,) = fleet.nodes
        stop_machine, stop_node = node.host.stop, node.stop

        def remove(seconds: float) -> Future[None]:
            def work() -> None:
                leaving.wait(PATIENCE)
                time.sleep(0.2)  # A pool that does not wait would be closed by then.
                stop_machine(seconds).result()
                removed.set()

            return Staff("test-removal", most=1).submit(work)

        def stop() -> None:
            leaving.set()
            stop_node()

        monkeypatch.setattr(node.host, "stop", remove)
        monkeypatch.setattr(node, "stop", stop)
        fleet._loop.call_soon(lambda: fleet._losses.lose(node, "its agent is gone"))
        eventually(lambda: node.state != "ready")
    assert removed.is_set()


def stopping(count: int) -> tuple[Ending, list[Any], list[Node]]:
    """What ends nodes whose machines are gone at once, and the nodes it has forgotten."""
    forgotten: list[Node] = []
    unkept: Any = SimpleNamespace(remove=lambda nodes: None)
    ending: Any = Ending(cast(Any, None), cast(Any, None), unkept)
    ending.forget = forgotten.append
    nodes = []
    for index in range(count):
        end: Future[None] = Future()
        end.set_result(None)
        host: Any = SimpleNamespace(condemn=lambda: None, stop=lambda _, end=end: end)
        nodes.append(Node(index, host))
    return ending, nodes, forgotten


def test_nodes_end_all_the_same_when_the_end_of_one_fails() -> None:
    ending, nodes, forgotten = stopping(3)
    failed: Future[None] = Future()
    failed.set_exception(sky.PoolStartError("the journal cannot be written"))
    nodes[0].host.stop = lambda _: failed
    with pytest.raises(sky.PoolStartError, match="the journal cannot be written"):
        ending.end(nodes, 0)
    assert forgotten == nodes


def test_the_end_of_many_nodes_waits_no_longer_than_that_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyward.nodes.ending.DESTROY_SECONDS", 0.1)
    monkeypatch.setattr("skyward.nodes.ending.LAUNCH_SECONDS", 0.1)
    ending, nodes, forgotten = stopping(50)
    for node in nodes:
        node._removal = Future()
        node.launch(lambda _: Future())
    began = time.monotonic()
    ending.end(nodes, 0)
    assert time.monotonic() - began < 50 * 0.2, "not one after the other"
    assert forgotten == nodes
