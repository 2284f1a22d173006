"""Pools that stay in a job of Slurm's: used by another process, and ended."""

from __future__ import annotations

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
