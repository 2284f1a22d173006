"""Kept pools in a job of Slurm's: used by another process, and ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.nodes import records

from ..conftest import only_in_all
from . import kept_pools, slurm_testbed


def test_a_pool_stays_in_a_job_and_is_not_stopped(slurm: str) -> None:
    workers = kept_pools.start(slurm_testbed.provider(), "jobs")
    kept_pools.use_elsewhere("jobs", workers)
    refused = kept_pools.says("stop", "jobs", code=1)
    assert "jobs: the provider slurm cannot stop a pool and keep its machines" in refused
    assert "`sky down jobs` ends it, `sky up jobs` makes it anew" in refused
    assert len(slurm_testbed.jobs()) == 1
    kept_pools.end("jobs")
    assert slurm_testbed.jobs() == []


@only_in_all
def test_gc_ends_a_job_that_no_record_knows(
    slurm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_pools.start(slurm_testbed.provider(), "jobs")
    (job,) = (each.split()[0] for each in slurm_testbed.jobs())
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
        # The process that made it, which is this one, runs still.
        listed = kept_pools.says("gc", "--provider", "slurm")
        assert "may be in use" in listed
        assert f"job {job}" in listed
        removed = kept_pools.says("gc", "--provider", "slurm", "--all", "--yes")
        assert "1 machine" in removed
        assert slurm_testbed.jobs() == []
    with pytest.raises(sky.errors.PoolError, match="its machines are gone, so its record is, too"):
        sky.attach("jobs")
    kept_pools.says("down", "jobs", "--yes")


@only_in_all
def test_the_node_of_an_agent_that_was_killed_is_used_again(
    slurm: str, eventually: Callable[..., None]
) -> None:
    kept_pools.start(slurm_testbed.provider(), "jobs")
    before = slurm_testbed.jobs()
    with sky.attach("jobs") as compute:
        killed = records.read("jobs").nodes[0].pid
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: records.read("jobs").nodes[0].pid != killed, 60, "another agent")
        assert kept_pools.pid() >> compute
        assert slurm_testbed.jobs() == before
    kept_pools.end("jobs")
    assert slurm_testbed.jobs() == []
