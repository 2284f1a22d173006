"""What becomes of a pool's jobs while Slurm's controller fails, and when nobody wants them."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

import skyward as sky
from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Order
from skyward.providers import slurm as slurm_module
from skyward.providers.slurm import AskedJob, SlurmAllocation
from skyward.providers.slurm.login import Here

from .slurm_site import RUNNING, WAITING, Site, request, site

__all__ = ["site"]

ENDED = "42|CANCELLED|None|gpu|0:00|N/A||skyward:0-1"
SILENT = "slurm_load_jobs error: Socket timed out on send/recv operation"


def pool_jobs(provider: sky.Slurm) -> SlurmAllocation:
    """The jobs of a pool on this machine."""
    jobs = provider.allocate("p")
    # Nothing here would use the connections to keepers that are opened ahead.
    jobs._spares.prepare = lambda job, hosts: None  # type: ignore[method-assign]
    return jobs


def known(jobs: SlurmAllocation, *nodes: int) -> AskedJob:
    """A job that was asked for and has run."""
    job = AskedJob(list(nodes), "42", has_run=True)
    jobs._jobs.append(job)
    jobs._places |= dict.fromkeys(nodes, job)
    return job


@pytest.mark.parametrize(("ended", "cancelled"), [((0, 1), True), ((1,), False)])
def test_a_job_that_was_put_back_is_cancelled_only_if_nobody_wants_it(
    site: Site, ended: tuple[int, ...], cancelled: bool
) -> None:
    site.answers("squeue", WAITING.strip())
    site.changes("scancel", "squeue", ENDED)

    async def scenario() -> None:
        jobs = pool_jobs(sky.Slurm())
        known(jobs, 0, 1)
        await asyncio.gather(*(jobs.end("42", node, f"n{node + 1}") for node in ended))
        assert jobs._lost == set(ended)
        assert site.calls("scancel") == []
        await jobs.close()  # Nobody orders them again.

    asyncio.run(scenario())
    assert bool(site.calls("scancel")) is cancelled


def test_a_node_of_a_job_that_was_put_back_waits_for_it(site: Site) -> None:
    """No other job is submitted, and the machine of the first run gives nothing back."""
    site.answers("squeue", WAITING.strip())

    async def scenario() -> None:
        jobs, told = pool_jobs(sky.Slurm()), list[str]()
        job = known(jobs, 0, 1)
        await jobs.end("42", 0, "n1")
        getting = asyncio.create_task(jobs.get(Order("p", 0, request(), tell=told.append)))
        while not told:
            await asyncio.sleep(0.01)
        await jobs.end("42", 0, "n1")
        assert jobs._waiting(job) == [0]
        getting.cancel()
        await asyncio.wait({getting})
        await jobs.close()

    asyncio.run(scenario())
    assert site.calls("sbatch") == site.calls("scancel") == []


def test_a_lost_node_that_has_another_job_is_given_back_by_its_first(site: Site) -> None:
    site.answers("squeue", RUNNING.strip())
    site.answers("srun", f"{greeting(0, 'n1')}\n{greeting(1, 'n2')}")
    site.answers("scontrol", "n1\nn2")
    site.answers("sbatch", "43")

    async def scenario() -> list[int]:
        jobs = pool_jobs(sky.Slurm())
        job = known(jobs, 0, 1)
        job.hosts = {0: "n1", 1: "n2"}
        again = await jobs.get(Order("p", 1, request()))
        assert again.job == "42"  # As `squeue` here always says.
        await jobs.end("42", 1, "n2")
        assert again.node in jobs.wanted
        await jobs.close()
        return job.nodes

    assert asyncio.run(scenario()) == [0]
    assert ["update", "JobId=42", "NodeList=n1", "Comment=skyward:0"] in site.calls("scontrol")


def test_a_found_node_is_given_back_without_the_others(site: Site) -> None:
    """By a process that has ordered nothing, such as `sky down`."""
    site.answers("srun", f"{greeting(0, 'n1')}\n{greeting(1, 'n2')}")
    site.answers("scontrol", "n1\nn2")
    site.changes("scancel", "squeue", ENDED)

    async def scenario() -> None:
        jobs = pool_jobs(sky.Slurm())
        first, second = await jobs.find()
        await second.destroy()
        assert site.calls("scancel") == []
        await first.destroy()

    asyncio.run(scenario())
    assert ["update", "JobId=42", "NodeList=n1", "Comment=skyward:0"] in site.calls("scontrol")
    assert site.calls("scancel") == [["42"]]


def test_the_end_of_the_allocation_closes_the_login(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Here] = []

    async def close(login: Here) -> None:
        closed.append(login)

    monkeypatch.setattr(Here, "close", close)

    async def scenario() -> None:
        jobs = pool_jobs(sky.Slurm())
        known(jobs, 0)  # The machines of a kept pool.
        await jobs.close()
        assert closed == [jobs.login]

    asyncio.run(scenario())


def wait_for(
    provider: sky.Slurm, *nodes: int, told: list[str] | None = None
) -> list[BaseException]:
    """Order nodes of a pool together, and give what each raised."""

    async def scenario() -> list[BaseException]:
        jobs = pool_jobs(provider)
        say = (told if told is not None else []).append
        jobs.expect(nodes)
        getting = [jobs.get(Order("p", node, request(), tell=say)) for node in nodes]
        found = await asyncio.gather(*getting, return_exceptions=True)
        await jobs.close()
        return [each for each in found if isinstance(each, BaseException)]

    return asyncio.run(scenario())


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
    monkeypatch.setattr(slurm_module, "LONGEST_POLL_SECONDS", 0.05)
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
        getting = asyncio.create_task(jobs.get(Order("p", 0, request())))
        while not jobs._jobs or not jobs._jobs[0].id:
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
        jobs = pool_jobs(sky.Slurm())
        known(jobs, 0, 1)
        return await jobs.submit((0, 1), Order("p", 0, request()))

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
    monkeypatch.setattr(slurm_module, "GREETING_SECONDS", 0.0)
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
        jobs.expect([0, 1])
        first, second = (
            asyncio.create_task(jobs.get(Order("p", node, request()))) for node in (0, 1)
        )
        while not jobs._jobs:
            await asyncio.sleep(0.01)
        # Before its job runs.
        await asyncio.gather(jobs.release(1), second, return_exceptions=True)
        machine = await first
        async with asyncio.timeout(60):
            again = await jobs.get(Order("p", 0, request()))
        while len(jobs._jobs[0].nodes) > 1:
            await asyncio.sleep(0.01)
        await jobs.close()
        return [machine.node, again.node]

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
