"""What becomes of a pool's jobs while Slurm's controller fails, and when nobody wants them."""

from __future__ import annotations

import asyncio

import pytest

import skyward as sky
from skyward.providers.slurm import jobs as jobs_module
from skyward.providers.slurm.asked import AskedJob
from skyward.providers.slurm.jobs import Jobs
from skyward.providers.slurm.login import Here

from .slurm_site import Site, site

__all__ = ["site"]


def pool_jobs(provider: sky.Slurm) -> Jobs:
    """The jobs of a pool on this machine."""
    return Jobs(Here(), provider._submission, "p", lambda jobs: None)


def known(jobs: Jobs, *nodes: int) -> AskedJob:
    """A job that was asked for and has run."""
    asked = AskedJob(nodes=list(nodes), id="42", is_closed=True, has_run=True)
    jobs._asked.append(asked)
    return asked


@pytest.mark.parametrize(("released", "cancelled"), [((0, 1), True), ((1,), False)])
def test_a_job_that_was_put_back_is_cancelled_only_if_nobody_wants_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, released: tuple[int, ...], cancelled: bool
) -> None:
    monkeypatch.setattr(jobs_module, "REORDER_SECONDS", 0.0)
    site.changes("scancel", "squeue", ENDED)

    async def scenario() -> None:
        jobs = pool_jobs(sky.Slurm())
        asked = known(jobs, 0, 1)
        asked.released.update(released)
        await jobs._cancel_later(asked)

    asyncio.run(scenario())
    assert bool(site.calls("scancel")) is cancelled


ENDED = "42|CANCELLED|None|gpu|0:00|N/A||skyward:0-1"
