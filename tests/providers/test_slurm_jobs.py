"""What becomes of a pool's jobs while Slurm's controller fails, and when nobody wants them."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

import skyward as sky
from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Order
from skyward.providers.slurm import jobs as jobs_module
from skyward.providers.slurm.asked import AskedJob
from skyward.providers.slurm.commands import SlurmCluster
from skyward.providers.slurm.jobs import Jobs
from skyward.providers.slurm.login import Here
from skyward.providers.together import GATHER_SECONDS

from .slurm_site import RUNNING, WAITING, Site, request, site

__all__ = ["site"]

ENDED = "42|CANCELLED|None|gpu|0:00|N/A||skyward:0-1"
SILENT = "slurm_load_jobs error: Socket timed out on send/recv operation"


def pool_jobs(provider: sky.Slurm) -> Jobs:
    """The jobs of a pool on this machine."""
    jobs = Jobs(Here(), provider._submission, "p", lambda jobs: None)
    # Nothing here would use the connections to keepers that are opened ahead.
    jobs._spares.prepare = lambda job, hosts: None  # type: ignore[method-assign]
    return jobs


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


def wait_for(
    provider: sky.Slurm, *nodes: int, told: list[str] | None = None
) -> list[BaseException]:
    """Order nodes of a pool together, and give what each raised."""

    async def scenario() -> list[BaseException]:
        jobs = pool_jobs(provider)
        say = (told if told is not None else []).append
        orders = [Order("p", node, request(), tell=say) for node in nodes]
        getting = [jobs.get(order, provider.timeout) for order in orders]
        found = await asyncio.gather(*getting, return_exceptions=True)
        return [each for each in found if isinstance(each, BaseException)]

    return asyncio.run(scenario())


def test_a_job_waits_for_the_late_order_of_a_node_that_comes_together_with_others(
    site: Site,
) -> None:
    site.answers("squeue", WAITING.replace("Priority", "BadConstraints").strip())
    site.changes("scancel", "squeue", ENDED)

    async def scenario() -> None:
        jobs = pool_jobs(sky.Slurm())
        together = frozenset({0, 1})
        first, second = (Order("p", node, request(), together=together) for node in (0, 1))
        getting = asyncio.create_task(jobs.get(first, None))
        await asyncio.sleep(5 * GATHER_SECONDS)
        await asyncio.gather(getting, jobs.get(second, None), return_exceptions=True)

    asyncio.run(scenario())
    submitted = [call for call in site.calls("sbatch") if "--test-only" not in call]
    assert ["--nodes=2" in call for call in submitted] == [True]


def test_a_job_that_waits_too_long_is_cancelled_once_for_all_its_nodes(site: Site) -> None:
    site.answers("squeue", WAITING.strip())
    site.changes("scancel", "squeue", ENDED)

    problems = wait_for(sky.Slurm(timeout=3), 0, 1)

    # On a slow machine, the job's number may not be known by then.
    (said,) = {re.sub("^(job 42|the job)", "it", str(each)) for each in problems}
    assert said == "it did not run within 3 s; give a longer timeout=, or ask for less"
    assert len(problems) == 2
    assert site.calls("scancel") == [["42"]]


def test_a_job_keeps_its_place_while_the_controller_does_not_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "LONGEST_POLL_SECONDS", 0.05)
    site.answers("squeue", WAITING.replace("Priority", "BadConstraints").strip())
    site.fails_first("squeue", 3, SILENT)
    site.changes("scancel", "squeue", ENDED)
    told: list[str] = []

    (problem,) = wait_for(sky.Slurm(), 0, told=told)

    assert "job 42 will not run: BadConstraints" in str(problem)
    assert [each.partition(" on ")[0] for each in told] == [
        "submitting a job",
        "Slurm's controller does not answer",
    ]


def test_a_node_whose_order_was_cancelled_is_given_back_by_who_finds_it(
    site: Site,
) -> None:
    """Its job may run already, while nobody has told the order so."""
    site.answers("squeue", WAITING.replace("0-1", "0").strip())

    async def scenario() -> None:
        jobs = pool_jobs(sky.Slurm())
        getting = asyncio.create_task(jobs.get(Order("p", 0, request()), None))
        while not jobs._asked or not jobs._asked[0].id:
            await asyncio.sleep(0.01)
        getting.cancel()
        await asyncio.wait({getting})
        site.changes("scancel", "squeue", ENDED)
        await jobs.end("42", 0, "n1")

    asyncio.run(scenario())
    assert site.calls("scancel") == [["42"]]


def test_a_job_that_cannot_be_cancelled_is_not_forgotten(site: Site) -> None:
    site.answers("squeue", WAITING.strip())
    site.answers("scancel", "", error=SILENT, status=1)

    (problem,) = wait_for(sky.Slurm(timeout=1), 0)

    assert isinstance(problem, PoolStartError)
    assert problem.leaves_machine
    assert "job 42 could not be cancelled" in problem.__notes__[0]


@pytest.mark.parametrize(
    ("queue", "numbers"), [(WAITING.replace("42|", "43|"), ["43"]), (WAITING, [])]
)
def test_a_job_that_slurm_took_without_an_answer_is_known(
    site: Site, queue: str, numbers: list[str]
) -> None:
    """Another job of the pool for the same nodes, number 42, is not taken for it."""
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    site.answers("sbatch", "", error=said, status=1)
    site.passes_tests()
    site.answers("squeue", queue.strip())

    async def scenario() -> str:
        submission, order = sky.Slurm()._submission, Order("p", 0, request())
        return await submission.submit(SlurmCluster(Here()), "p", (0, 1), order, {"42"})

    if numbers:
        assert [asyncio.run(scenario())] == numbers
        return
    with pytest.raises(UnreachableError, match="controller does not answer") as raised:
        asyncio.run(scenario())
    assert raised.value.leaves_machine


def greeting(node: int, host: str) -> str:
    """What a relay prints for a keeper."""
    told = {"node": node, "slurm": host, "address": "10.0.0.1", "token": "t", "home": {}}
    return f"skyward {json.dumps(told)}"


def test_a_container_may_take_longer_to_start_than_a_keeper(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "GREETING_SECONDS", 0.0)
    site.answers("squeue", RUNNING.replace("n[1-2]", "n1").strip())
    site.answers("srun", f"--container-image\n{greeting(0, 'n1')}")
    site.fails_first("srun", 2, "skyward: no keeper runs on this node", unless="--help")
    told: list[str] = []

    problems = wait_for(sky.Slurm(container="pytorch/pytorch:2", timeout=20), 0, told=told)

    assert problems == []
    assert told == ["submitting a job", "starting the container"]

    site.changes("scancel", "squeue", ENDED)
    (site.folder / "srun.failures").unlink()
    (problem,) = wait_for(sky.Slurm(timeout=20), 0)
    assert "no command can be run there" in str(problem)


def test_a_node_that_is_ordered_while_others_are_given_back_gets_its_machine(site: Site) -> None:
    site.answers("squeue", RUNNING.strip())
    site.answers("srun", f"{greeting(0, 'n1')}\n{greeting(1, 'n2')}")
    site.answers("scontrol", "n1\nn2")

    async def scenario() -> list[int]:
        jobs = pool_jobs(sky.Slurm())
        asked = known(jobs, 0, 1)
        asked.submitted.set()
        asked.add(Order("p", 0, request()))
        asked.released.add(1)
        asked.following = jobs._start(jobs._follow(asked))
        first = await asked.waiting[0]
        settling = asked.settling
        assert settling is not None
        async with asyncio.timeout(60):
            again = await jobs.get(Order("p", 0, request()), None)
        await settling
        return [first.node, again.node]

    assert asyncio.run(scenario()) == [0, 0]
    assert ["update", "JobId=42", "NodeList=n1", "Comment=skyward:0"] in site.calls("scontrol")


def test_nodes_that_end_together_look_for_their_jobs_once(site: Site) -> None:
    site.answers("squeue", WAITING.strip())

    async def scenario() -> list[list[int]]:
        jobs = pool_jobs(sky.Slurm())
        found = await asyncio.gather(*(jobs.find() for _ in range(5)))
        return [[machine.node for machine in each] for each in found]

    assert asyncio.run(scenario()) == 5 * [[0, 1]]
    assert len(site.calls("squeue")) == 1
