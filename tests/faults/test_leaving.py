"""Nodes that leave a pool, or are left behind with it: not brought up again, and seen off."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.events import EventStream
from skyward.nodes.fleet import Fleet
from skyward.nodes.host import Host
from skyward.nodes.kept import PoolKeeper
from skyward.nodes.node import Node, Roster
from skyward.nodes.records import Journal
from skyward.providers import Order
from skyward.staff import Staff
from skyward.testing import plain_request

from ..conftest import PATIENCE

QUIET = sky.Options(console=False)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with sky.Compute(options=QUIET) as compute:
        yield compute._open_fleet


@pytest.fixture
def retired(fleet: Fleet, tmp_path: Path) -> Node:
    """A node that was lost, and is given up by a resize while it is out of reach."""
    provider: Any = sky.Local()
    order = Order("pool", 1, plain_request())
    journal = Journal(tmp_path / "journal.sqlite")
    host = Host(provider, fleet.allocation, order, journal)
    node = Node(1, host, fleet)
    assert node.lose("its agent is gone")
    assert node.drain()
    return node


def test_a_node_that_is_being_retired_is_not_started_anew(retired: Node) -> None:
    host = retired.host
    assert not retired.start_again()
    assert retired.host is host
    assert retired.state == "draining"


def test_a_node_that_is_being_retired_is_not_waited_for(retired: Node) -> None:
    assert retired.return_pause(sky.errors.UnreachableError("no answer")) is None
    assert retired.state == "draining"


def test_leaving_a_pool_sees_the_removal_of_a_lost_machine_through(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """The process may end right after, and what is left of the machine would stay."""
    leaving, removed = threading.Event(), threading.Event()
    # The start of the new node waits for the removal as well.
    monkeypatch.setattr("skyward.nodes.fleet.RUN_SECONDS", 0.0)
    with sky.Compute(options=QUIET) as compute:
        fleet = compute._open_fleet
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
        fleet.loop.call_soon(lambda: node.handle_loss("its agent is gone"))
        eventually(lambda: node.state != "ready")
    assert removed.is_set()


def stopping(count: int) -> tuple[Fleet, list[Any], list[Node]]:
    """A fleet of nodes whose machines are gone at once, and the nodes that are forgotten."""
    forgotten: list[Node] = []
    fleet: Any = object.__new__(Fleet)
    fleet.roster, fleet.events = Roster(), EventStream()
    fleet.keeper = PoolKeeper(None)
    nodes: list[Any] = []
    for index in range(count):
        end: Future[None] = Future()
        end.set_result(None)
        host: Any = SimpleNamespace(condemn=lambda: None, stop=lambda _, end=end: end)
        nodes.append(Node(index, host, fleet))
        nodes[-1].forget = functools.partial(forgotten.append, nodes[-1])
    return fleet, nodes, forgotten


def test_nodes_end_all_the_same_when_the_end_of_one_fails() -> None:
    fleet, nodes, forgotten = stopping(3)
    failed: Future[None] = Future()
    failed.set_exception(sky.errors.PoolStartError("the journal cannot be written"))
    nodes[0].host.stop = lambda _: failed
    with pytest.raises(sky.errors.PoolStartError, match="the journal cannot be written"):
        fleet._end(nodes, 0)
    assert forgotten == nodes


def test_the_end_of_many_nodes_waits_no_longer_than_that_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyward.nodes.fleet.DESTROY_SECONDS", 0.1)
    monkeypatch.setattr("skyward.nodes.fleet.RUN_SECONDS", 0.1)
    fleet, nodes, forgotten = stopping(50)
    for node in nodes:
        node._removal = Future()
        node.end_run = Future
    began = time.monotonic()
    fleet._end(nodes, 0)
    assert time.monotonic() - began < 50 * 0.2, "not one after the other"
    assert forgotten == nodes
