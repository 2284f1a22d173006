"""`sky doctor` and completion with kept pools."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click
import psutil

import skyward as sky
from skyward.cli import health, names
from skyward.nodes import records

from ..conftest import PATIENCE
from .conftest import QUIET


def test_a_kept_pool_is_asked_and_completed(home: Path) -> None:
    with sky.Compute(name="asked", keep=True, options=QUIET):
        pass
    agent = records.read("asked").nodes[0].pid
    context, argument = click.Context(click.Command("down")), click.Argument(["name"])

    (found,) = health.kept("asked")
    assert (found.check, found.state) == ("kept asked", "ok")
    assert found.found == "kept, and answers: 1 node"
    assert names.kept_pools(context, argument, "as") == ["asked"]
    assert "asked" in names.recorded_pools(context, argument, "")

    (found,) = health.recorded()
    assert found.state == "ok", "a kept pool is not left behind"

    process = psutil.Process(agent)
    os.kill(agent, signal.SIGKILL)
    process.wait(PATIENCE)
    (found,) = health.kept("asked")
    assert found.state == "problem"
    assert "`sky down asked` removes it" in found.advice
    assert "asked" in records.names(), "whoever only looks removes nothing"
    if "asked" in records.names():
        records.forget("asked", records.read("asked").id)
