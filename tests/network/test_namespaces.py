"""The real thing: two network namespaces, a delay between them, and packets that vanish."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import only_in_all
from .namespaces import linked


@only_in_all
@pytest.mark.slow
def test_packets_that_vanish_for_six_seconds_cost_nothing_but_time(tmp_path: Path) -> None:
    """Slow: the outage must be long enough to be noticed, and what went on is done afterwards."""
    with linked(10) as link:
        (outcome,) = link.client(
            100,
            beyond=[link.far, link.far_address],
            nodes=1,
            act="outlast",
            doing="everything",
            size=32 << 20,
            file=str(tmp_path / "runs"),
            after=0.3,
            seconds=6,
        )
    assert outcome["cut short"] == 6
    assert outcome["task"] == 7
    assert len((tmp_path / "runs0").read_text().splitlines()) == 1
    assert outcome["stream"] == outcome["fed"] == sum(range(200))
    assert outcome["broadcast"] == [outcome["sent"]]
    assert outcome["up"] == outcome["down"] == outcome["right"]
    assert outcome["lost"] == 0
    assert "reconnecting" in outcome["states"]
