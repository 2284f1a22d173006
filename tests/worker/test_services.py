"""Services of an agent: who may ask, what is answered, and that they end with the node."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.errors import PoolError
from skyward.nodes.fleet import Fleet


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


@pytest.mark.parametrize("name", ["activity", "forward", "page"])
def test_services_with_turns_of_their_own_refuse_what_they_do_not_know(
    pool: Fleet, name: str
) -> None:
    with pool.service(0, name) as service, pytest.raises(PoolError, match="'weather'; ask '"):
        service.ask("weather")


def test_a_page_that_cannot_be_served_says_why(pool: Fleet) -> None:
    with pool.service(0, "page") as page:
        with pytest.raises(PoolError, match=r"'\.\./key' is no place in the page's folder"):
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
