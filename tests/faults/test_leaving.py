"""Nodes that leave a pool, or are left behind with it: not brought up again, and seen off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.nodes.fleet import Fleet
from skyward.nodes.host import Host
from skyward.nodes.journal import Journal
from skyward.nodes.node import Node
from skyward.providers import Order
from skyward.testing import plain_request

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


def test_leaving_a_pool_sees_the_removal_of_a_lost_machine_through() -> None:
    """The process may end right after, and what is left of the machine would stay."""
    removed = threading.Event()

    def remove() -> None:
        # Longer than all else takes that is done on leaving.
        time.sleep(1.0)
        removed.set()

    with sky.Compute(options=QUIET) as compute:
        node = compute._open_pool.nodes[0]
        node._removal = threading.Thread(target=remove, daemon=True)
        node._removal.start()
    assert removed.is_set()
