"""The real thing: two network namespaces, a delay between them, and packets that vanish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_packets_that_vanish_for_six_seconds_cost_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: the outage must be long enough to be noticed, and what went on is done afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    from slow_link import NoLinkError, slow_link

    link = slow_link()
    try:
        ends = link.__enter__()
    except NoLinkError as problem:
        pytest.skip(str(problem))
    try:
        script = str(Path(__file__).with_name("across.py"))
        details = [ends.far, ends.far_address, str(tmp_path / "runs"), "6"]
        paths = [str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            ["ip", "netns", "exec", ends.near, sys.executable, script, *details],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            timeout=100,
            check=True,
        )
    finally:
        link.__exit__(None, None, None)
    outcome = json.loads(done.stdout)
    assert outcome["task"] == 7
    assert len((tmp_path / "runs").read_text().splitlines()) == 1
    assert outcome["stream"] == sum(range(200))
    assert outcome["up"] == outcome["right"]
    assert outcome["down"] == 96 << 20
    assert outcome["lost"] == 0
    assert "reconnecting" in outcome["states"]
