"""Services of an agent: who may ask, what is answered, and that they end with the node."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.errors import PoolError
from skyward.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with sky.Compute(nodes=2, options=sky.Options(console=False)) as compute:
        yield compute._open_pool


def test_a_node_says_what_it_is(pool: Pool) -> None:
    for index in (0, 1):
        with pool.service(index, "about") as about:
            facts = about.ask("facts")
            assert facts["node"] == index
            assert facts["pool"] == pool.id
            for executor in facts["executors"]:
                os.kill(executor["pid"], 0)


def test_questions_and_services_that_are_unknown_are_refused_by_name(pool: Pool) -> None:
    with pool.service(0, "about") as about, pytest.raises(PoolError, match="'weather'"):
        about.ask("weather")
    with pool.service(0, "oracle") as oracle, pytest.raises(PoolError, match="'oracle'"):
        oracle.ask("facts")


def test_a_node_that_is_not_there_is_named(pool: Pool) -> None:
    with pytest.raises(sky.ConfigurationError, match=r"node 7 .* \[0, 1\]"):
        pool.service(7, "about")


def test_connections_to_services_end_with_the_pool() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        about = compute._open_pool.service(0, "about")
        about.ask("facts")
    with about, pytest.raises((EOFError, OSError)):
        about.ask("facts")
