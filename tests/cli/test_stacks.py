"""`sky stacks`: where every worker is, of the pools that processes of this user run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.page import door

from ..conftest import Eventually
from .conftest import Run

QUIET = sky.Options(console=False)
HANGS = f"hangs-{os.getpid()}"
"""Another run of these tests may have a pool, too, and all are asked."""


@sky.function
def waits(file: str, marker: str) -> None:
    Path(marker).touch()
    while not Path(file).exists():
        time.sleep(0.01)


def test_a_pool_of_any_process_is_shown_with_its_tasks(
    run: Run, run_json: Callable[..., Any], tmp_path: Path, eventually: Eventually
) -> None:
    with sky.Compute(nodes=2, name=HANGS, options=QUIET) as compute:
        running = compute.submit(waits(f"{tmp_path}/go", f"{tmp_path}/there"), on=1)
        eventually((tmp_path / "there").exists)
        shown = run("stacks", HANGS).stdout
        everything = run("stacks", "--all").stdout
        (document,) = run_json("stacks", HANGS)
        told = run("stacks", "other", code=1).stderr
        (tmp_path / "go").touch()
        running.result()

    assert "\nnode 0 worker 0 (pid " in shown
    assert "): waits for " in shown
    assert f'File "{__file__}"' in shown
    assert "executor.py" not in shown
    assert "executor.py" in everything
    assert document["name"] == HANGS
    assert HANGS in told.partition("no pool is called 'other'; there are: ")[2]
    idle, busy = document["processes"]
    assert (idle["node"], idle["tasks"]) == (0, [])
    assert busy["tasks"][0][1] == "waits"
    (thread,) = [thread for thread in busy["threads"] if thread["task"] == "waits"]
    assert thread["frames"][-1]["function"] in ("waits", "exists", "stat")


def test_a_name_that_no_pool_has_is_an_error(run: Run) -> None:
    for options in ((), ("--json",)):
        told = run("stacks", "no-such-pool", *options, code=1).stderr
        assert "no pool is called 'no-such-pool'; there are: " in told


def test_a_kept_pool_that_is_out_of_reach_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(name: str) -> Any:
        raise {"a": TimeoutError("no route"), "b": EOFError(), "c": OSError("refused")}[name]

    monkeypatch.setattr(door, "addresses", list)
    monkeypatch.setattr(door.records, "names", lambda: ["a", "b", "c"])
    monkeypatch.setattr(door.records, "read", read)
    found = [(pool.name, pool.problem) for pool in door.all_stacks()]
    assert found == [("a", "no route"), ("b", "EOFError"), ("c", "refused")]


def test_the_pools_of_one_process_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def stacks() -> list[Any]:
        both.wait(100)
        return []

    spec = SimpleNamespace(name="p")
    pools = [SimpleNamespace(id=f"{n}", spec=spec, stacks=stacks) for n in range(2)]
    monkeypatch.setattr(door.door, "fleets", pools)
    assert [(each.pool, each.problem) for each in door.own_stacks()] == [("0", ""), ("1", "")]


def test_a_process_that_ends_answers_without_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(id="0", spec=SimpleNamespace(name="p"), stacks=list)
    monkeypatch.setattr(door.door, "fleets", [pool])
    # As the interpreter does at its end, when threads may still answer.
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    assert door.own_stacks() == []
