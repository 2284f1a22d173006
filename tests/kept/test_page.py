"""Pools that stay on the page: their nodes without a client, and their calls with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.page.gathering import Gathering

from .conftest import QUIET


@sky.function
def three() -> int:
    return 3


@pytest.fixture(scope="module")
def kept(home: Path) -> Iterator[str]:
    with sky.Compute(name="stays", nodes=2, keep=True, options=QUIET):
        pass
    yield "stays"
    sky.attach("stays").down()


@pytest.fixture
def told(kept: str) -> Iterator[Iterator[dict[str, Any]]]:
    gathering = Gathering([kept])
    viewer = gathering.join()

    def messages() -> Iterator[dict[str, Any]]:
        while (batch := viewer.next(30)) is not None:
            assert batch, "nothing was told for 30 s"
            yield from json.loads(batch)

    yield messages()
    gathering.leave(viewer)
    gathering.close()


def test_a_pool_without_a_client_shows_its_nodes(told: Iterator[dict[str, Any]]) -> None:
    pool = next(message for message in told if message["type"] == "pool")
    assert (pool["name"], [row[:2] for row in pool["nodes"]]) == (
        "stays",
        [[0, "ready"], [1, "ready"]],
    )
    sample = next(message for message in told if message["type"] == "sample")
    assert sample["pool"] == pool["pool"]
    assert [row[0] for row in sample["usage"]] == [0, 1]
    assert all(0 < row[2] < row[3] for row in sample["usage"])


def test_a_client_that_attaches_shows_its_calls_instead(
    kept: str, told: Iterator[dict[str, Any]]
) -> None:
    alone = next(message for message in told if message["type"] == "pool")
    assert alone["pool"].endswith("-kept")
    with sky.attach(kept) as compute:
        shown = next(message for message in told if message["type"] == "pool")
        assert shown["pool"] != alone["pool"]
        gone = next(message for message in told if message["type"] == "gone")
        assert gone["pool"] == alone["pool"]
        assert three() >> compute == 3
        changes = next(message for message in told if message.get("ended"))
        assert (changes["pool"], changes["ended"][0][1]) == (shown["pool"], "three")
    again = next(message for message in told if message["type"] == "pool")
    assert again["pool"] == alone["pool"]
