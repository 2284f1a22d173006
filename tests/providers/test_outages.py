"""Machines whose network is cut: what goes on there costs time and nothing else, or is given up.

SSH hosts are in a network namespace of their own, behind a link; a cut drops every packet there,
and nobody is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

from ..conftest import only_in_all
from ..network.namespaces import Link, linked
from ..network.network import OUTAGE_SECONDS
from .ssh_hosts import Sshd

QUIET = sky.Options(console=False)
MIB = 1 << 20
WAYS = (True, False)
"""Straight to the hosts, and through SSH; both at the same time, since all of it is slow."""
pytestmark = [pytest.mark.slow, only_in_all]


@pytest.fixture(scope="module")
def prepared(sshd: Sshd) -> Sshd:
    """The environment is made while something can be downloaded: the namespaces reach nothing."""
    with sky.Compute(sshd.provider(), options=QUIET):
        return sshd


@pytest.fixture
def client(
    prepared: Sshd, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Does something on two hosts over the link that the test asks for."""
    link: Link
    with linked(*request.param) as link, link.hosts(prepared, tmp_path) as hosts:

        def act(direct: Sequence[bool] = WAYS, **told: Any) -> list[dict[str, Any]]:
            file = str(tmp_path / "runs")
            return link.client(300, ssh=hosts, direct=list(direct), file=file, **told)

        if len(request.param) > 1:
            link.congest("cubic")
        yield act


LOSSY = pytest.mark.parametrize("client", [(20, 0.01, 100)], indirect=True, ids=["lossy"])
FAST = pytest.mark.parametrize("client", [(0,)], indirect=True, ids=["fast"])
FAR = pytest.mark.parametrize("client", [(250,)], indirect=True, ids=["far"])


def check(outcome: dict[str, Any]) -> None:
    """Everything was done, and nothing twice."""
    assert outcome["task"] == 7
    assert outcome["stream"] == outcome["fed"] == sum(range(200))
    assert outcome["broadcast"] == [outcome["sent"]] * 2
    assert outcome["lost"] == 0


@LOSSY
def test_a_network_that_is_away_during_everything_costs_only_time(
    client: Any, tmp_path: Path
) -> None:
    outcomes = client(
        act="outlast", doing="everything", size=4 * MIB, after=1.0, seconds=OUTAGE_SECONDS
    )
    for outcome in outcomes:
        assert outcome["cut short"] == 6
        assert outcome["states"] == ["ready", "reconnecting"]
        check(outcome)
        assert outcome["up"] == outcome["down"] == outcome["right"]
    for runs in ("runs0", "runs1"):
        assert len((tmp_path / runs).read_text().splitlines()) == 1


@FAST
def test_large_transfers_go_on_when_the_network_is_back(client: Any) -> None:
    for outcome in client(
        act="outlast", doing="transfers", size=256 * MIB, after=0.7, seconds=OUTAGE_SECONDS
    ):
        assert outcome["cut short"] == 2
        assert outcome["up"] == outcome["down"] == outcome["right"]
        assert outcome["lost"] == 0


@LOSSY
def test_past_the_orphan_timeout_both_ends_give_up_and_say_so(client: Any) -> None:
    for outcome in client(act="give_up", seconds=60, orphan_timeout=6):
        assert re.fullmatch(
            r"NodeLostError: tallied lost node \d: there was no contact for 6 s "
            r"\(orphan_timeout\), after which a node ends itself; call again, or have `retries` "
            "do that",
            outcome["said"],
        )
        assert 5 < outcome["given up after"] < 60
        assert 5 < outcome["ended after"] < 60
        assert outcome["left"] == 0
        assert len(outcome["again"]) == 2


@LOSSY
def test_a_slow_network_that_loses_packets_is_not_taken_for_a_dead_one(client: Any) -> None:
    """One connection carries half a megabyte a second there, and heartbeats must not wait."""
    for outcome in client(act="watch", doing="everything", size=4 * MIB):
        check(outcome)
        assert outcome["states"] == ["ready"]


@FAR
def test_a_host_far_away_is_connected_to_again_through_ssh(client: Any) -> None:
    """Connecting takes longer than any of those who wait for it."""
    (outcome,) = client([False], act="outlast", doing="work", size=1000, after=2.0, seconds=8)
    assert outcome["cut short"] == 4
    check(outcome)
