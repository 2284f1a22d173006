"""Services of an agent: who may ask, what is answered, and that they end with the node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.errors import PoolError
from skyward.nodes.fleet import Fleet
from skyward.wire.channel import ServiceConnection
from skyward.wire.handshake import connect, node_name
from skyward.wire.messages import Hello
from skyward.worker.services import ServedNode
from skyward.worker.services.files import NodeFolders


@pytest.fixture(scope="module")
def pool() -> Iterator[Fleet]:
    with sky.Compute(nodes=2, options=sky.Options(console=False)) as compute:
        yield compute._open_fleet


def test_a_node_says_what_it_is(pool: Fleet) -> None:
    for index in (0, 1):
        with pool.service(index, "about") as about:
            facts = about.ask("facts")
            assert facts["node"] == index
            assert facts["pool"] == pool.id
            for executor in facts["executors"]:
                os.kill(executor["pid"], 0)


def test_questions_and_services_that_are_unknown_are_refused_by_name(pool: Fleet) -> None:
    with pool.service(0, "about") as about, pytest.raises(PoolError, match="'weather'"):
        about.ask("weather")
    with pool.service(0, "oracle") as oracle, pytest.raises(PoolError, match="'oracle'"):
        oracle.ask("facts")


def test_arguments_are_checked_and_what_can_be_asked_is_told(pool: Fleet) -> None:
    with pool.service(0, "values") as values:
        with pytest.raises(PoolError, match=r"'weather'; ask 'begin', 'find', 'finish', 'forget'"):
            values.ask("weather")
        with pytest.raises(PoolError, match="missing required field `name`"):
            values.ask("find")
        with pytest.raises(PoolError, match=r"Expected `str`, got `int` - at `\$\.name`"):
            values.ask("find", name=3)
        with pytest.raises(PoolError, match="unknown field `more`"):
            values.ask("find", name="x", more=1)
        assert values.ask("find", name="x") is None, "it goes on"


def test_a_node_may_ask_only_what_is_for_nodes(pool: Fleet) -> None:
    def ask(service: str, what: str) -> Any:
        hello = Hello(pool.id, f"peer-service-{service}", pid=os.getpid())
        endpoint = pool.nodes[0].host.endpoint.split()[0]
        channel, _ = connect(endpoint, hello, None, node_name(pool.id, 0))
        with ServiceConnection(channel) as connection:
            return connection.ask(what)

    assert ask("idle", "idle") >= 0
    with pytest.raises(PoolError, match="the agent has no service 'about'"):
        ask("about", "facts")


def test_a_page_that_cannot_be_served_says_why(pool: Fleet) -> None:
    with pool.service(0, "page") as page:
        with pytest.raises(PoolError, match=r"'\.\./key' is no place in a job's folder"):
            page.ask("open", name="none", private={"../key": "x"})
        with pytest.raises(PoolError, match=r"File name too long"):
            page.ask("open", name="none", private={"x" * 300: "x"})
        with pytest.raises(PoolError, match=r"ended as it started: no pool called 'none-there'"):
            page.ask("open", name="none-there")
        with pytest.raises(PoolError, match="name"):
            page.ask("open")
        assert page.ask("stop") is False


def test_a_node_that_is_not_there_is_named(pool: Fleet) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=r"node 7 .* \[0, 1\]"):
        pool.service(7, "about")


def test_connections_to_services_end_with_the_pool() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        about = compute._open_fleet.service(0, "about")
        about.ask("facts")
    with about, pytest.raises((EOFError, OSError)):
        about.ask("facts")


def test_nothing_is_made_on_a_node_that_is_ending() -> None:
    node: Any = ServedNode(*[None] * 5)  # type: ignore[arg-type]
    folders, ended = node.own(NodeFolders), list[str]()
    node.close()
    with pytest.raises(PoolError, match="the node is ending"):
        node.own(NodeFolders)
    volume: Any = SimpleNamespace(open=ended.append, close=lambda tell: ended.append("closed"))
    with pytest.raises(PoolError, match="the node is ending"):
        folders.mount("/data", volume, "opened")
    assert ended == ["opened", "closed"]
