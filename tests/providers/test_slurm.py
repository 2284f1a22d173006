"""Pools as jobs of a real Slurm cluster."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.nodes.records import Journal
from skyward.providers import Order, Request
from skyward.testing import ProviderSuite, plain_request

from ..conftest import ALL, only_in_all, wait_until
from . import slurm_testbed
from .leftovers import Script, on_this_host, press_ctrl_c, show_and_remove_after_a_kill
from .slurm_testbed import jobs, says
from .ssh_hosts import Sshd, free_port, skip_if_absent

QUIET = sky.Options(console=False)
LINE = "from tests.providers import slurm_testbed"


@pytest.fixture(autouse=True)
def nothing_in_the_queue(slurm: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a job, except the suite, whose tests share a machine."""
    shares = "provider" in request.fixturenames
    before = set(map(_number, jobs()))
    yield
    if not shares:
        wait_until(lambda: set(map(_number, jobs())) <= before, 60, f"the end of {jobs()}")


def _number(job: str) -> str:
    return job.split()[0]


class TestSlurm(ProviderSuite):
    """What every provider must do."""

    @pytest.fixture
    def provider(self, slurm: str) -> sky.Slurm:
        return slurm_testbed.provider()

    @pytest.fixture
    def machine_request(self) -> Request:
        return plain_request()

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[bool]:
        """Slurm's controller has ended; its commands take 18 s to notice."""
        if not ALL:
            yield False
            return
        slurm_testbed.lose("slurmctld")
        try:
            yield True
        finally:
            slurm_testbed.bring_back()


# What happens to jobs.


@sky.function
def variables() -> dict[str, str]:
    return dict(os.environ)


def test_an_impossible_request_is_refused_at_once_in_slurms_own_words() -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match="Requested node configuration is not available"
    ):
        with sky.Compute(slurm_testbed.provider(), nodes=5, options=QUIET):
            pass
    with pytest.raises(sky.errors.ConfigurationError, match="invalid partition specified: nope"):
        with sky.Compute(slurm_testbed.provider(partition="nope"), options=QUIET):
            pass
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"not available.*the GPUs there: h100:2 on 2 nodes"
    ):
        gpu = sky.accelerators.A100(count=2)
        with sky.Compute(slurm_testbed.provider(), accelerator=gpu, options=QUIET):
            pass


def test_a_home_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        notes: list[str] = []
        provider = slurm_testbed.provider(extra=(f"--export=ALL,HOME={tmp_path}",))
        order = Order("t-home", 0, plain_request(), note=notes.append)
        machine = await provider.allocate("t-home").get(order)
        await machine.destroy()
        return notes

    (note,) = asyncio.run(scenario())
    assert "the home folder of this machine is not that of n" in note


@pytest.mark.skipif(
    shutil.which("apptainer") is not None or shutil.which("singularity") is not None,
    reason="this machine has apptainer",
)
def test_a_job_whose_keepers_do_not_start_says_why() -> None:
    said = r"has ended.*; it said: .*there is no apptainer on n"
    with pytest.raises(sky.errors.PoolStartError, match=said):
        with sky.Compute(slurm_testbed.provider(container="x"), options=QUIET):
            pass


def test_without_pyxis_commands_run_in_apptainers_container(tmp_path: Path) -> None:
    """A stand-in notes how it is called, and runs the command where it is."""
    program = tmp_path / "apptainer"
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/called\nshift 4\nexec "$@"\n')
    program.chmod(0o755)

    async def scenario() -> None:
        path = f"--export=ALL,PATH={tmp_path}:{os.environ['PATH']}"
        provider = slurm_testbed.provider(container="pytorch:2", extra=(path,))
        volume = sky.Volume("/usr", "/data")
        request = dataclasses.replace(plain_request(), volumes=(volume,))
        machine = await provider.allocate("t-apptainer").get(Order("t-apptainer", 0, request))
        try:
            assert await machine.run(["sh", "-c", "exit 3"]) == 3
        finally:
            await machine.destroy()

    asyncio.run(scenario())
    called = (tmp_path / "called").read_text()
    assert called.startswith("--quiet exec --bind=/usr:/data docker://pytorch:2 sh -c ")
    assert called.endswith(" sh -c exit 3\n")


@only_in_all
def test_a_job_that_is_cancelled_from_outside_is_not_submitted_again(
    eventually: Callable[..., None],
) -> None:
    with sky.Compute(slurm_testbed.provider(), options=QUIET) as compute:
        (job,) = map(_number, jobs())
        assert (variables() >> compute)["SLURM_JOB_ID"] == job
        says("scancel", job)
        eventually(lambda: compute.nodes[0].state != "ready", 30, "the loss of the node")

        with pytest.raises(sky.SkywardError, match=f"job {job} was cancelled, and not by this"):
            variables() >> compute

        assert jobs() == []


def test_a_job_gives_back_the_nodes_that_leave() -> None:
    with sky.Compute(slurm_testbed.provider(), nodes=2, options=QUIET) as pool:
        (job,) = map(_number, jobs())
        pool.resize(1)

        shown = ("squeue", "-h", "-j", job, "-o", "%D")
        wait_until(lambda: says(*shown) == "1", 30, "one job with one node")
        assert [*map(_number, jobs())] == [job]


@pytest.fixture
def blocked() -> Iterator[str]:
    """All nodes belong to somebody else's job, whose number this is."""
    command = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"]
    job = says(*command, "--chdir=/", "--wrap=exec sleep 300")
    wait_until(lambda: says("squeue", "-h", "-j", job, "-o", "%T") == "RUNNING", 30, "that job")
    yield job
    says("scancel", job)


def test_a_waiting_job_says_why_and_starts_when_there_is_room(blocked: str) -> None:
    told: list[str] = []

    async def scenario() -> None:
        order = Order("t-waiting", 0, plain_request(), tell=told.append)
        allocation = slurm_testbed.provider().allocate("t-waiting")
        creating = asyncio.create_task(allocation.get(order))
        while not any("waits: " in each for each in told):
            assert not creating.done()
            await asyncio.sleep(0.05)
        says("scancel", blocked)
        machine = await creating
        await machine.destroy()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert any(re.match(r"job \d+ waits: (Resources|Priority)", each) for each in told), told


@only_in_all
def test_the_first_node_of_a_job_may_end_before_the_others() -> None:
    """Slurm does not take back the node on which the job's script runs."""

    async def scenario() -> None:
        allocation = slurm_testbed.provider().allocate("t-first")
        orders = [Order("t-first", node, plain_request()) for node in range(2)]
        allocation.expect([0, 1])
        first, second = await asyncio.gather(*map(allocation.get, orders))

        await first.destroy()

        assert [machine.node for machine in await allocation.find()] == [1]
        assert await second.alive()
        assert await second.run(["true"]) == 0
        await second.destroy()
        assert await allocation.find() == []

    asyncio.run(scenario())


# The client's end.


@only_in_all
def test_a_client_killed_while_its_job_waits(blocked: str, state: Journal) -> None:
    script = Script("slurm_testbed.provider()", LINE)

    pool = show_and_remove_after_a_kill(script, "waits: ", state)

    assert jobs() == []
    assert on_this_host(pool) == []


@only_in_all
@pytest.mark.parametrize(
    "phase", ["submitting a job", "starting on", "looking at", "starting the agent", "ready"]
)
def test_what_a_killed_client_leaves_is_removed(phase: str, state: Journal) -> None:
    pool = show_and_remove_after_a_kill(Script("slurm_testbed.provider()", LINE), phase, state)

    wait_until(lambda: jobs() == [], 60, "the end of the job")
    wait_until(lambda: on_this_host(pool) == [], 60, f"the removal of {on_this_host(pool)}")


@only_in_all
@pytest.mark.parametrize("phase", ["submitting a job", "starting on", "starting workers", "ready"])
def test_ctrl_c_leaves_nothing(phase: str, state: Journal) -> None:
    pools = press_ctrl_c(Script("slurm_testbed.provider()", LINE), phase, state)

    assert jobs() == []
    assert [left for pool in pools for left in on_this_host(pool)] == []


@only_in_all
@pytest.mark.parametrize("phase", ["waits: ", "starting on", "ready"])
def test_the_job_of_a_vanished_client_ends_itself(
    phase: str, state: Journal, request: pytest.FixtureRequest
) -> None:
    """Also one that starts only when the client has gone."""
    options = "idle_timeout=2, orphan_timeout=2"
    blocker = request.getfixturevalue("blocked") if phase == "waits: " else ""
    with Script("slurm_testbed.provider()", LINE, options).reaching(phase) as process:
        (pool,) = [each.id for each in state.pools()]
        process.kill()
        process.wait()
    if blocker:
        says("scancel", blocker)

    wait_until(lambda: jobs() == [], 60, "the end of the job")
    wait_until(lambda: on_this_host(pool) == [], 60, f"the removal of {on_this_host(pool)}")


# Losses.


@sky.function(retries=2)
def once(folder: str) -> str:
    """Wait for long, the first time that it runs anywhere; says where it ended."""
    import socket
    import time

    with contextlib.suppress(FileExistsError):
        Path(folder, "began").touch(exist_ok=False)
        time.sleep(200)
    return socket.gethostname()


@only_in_all
def test_a_lost_node_is_replaced_and_its_task_repeated(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """Slurm takes 25 s to give a node up."""
    with sky.Compute(slurm_testbed.provider(), nodes=2, options=QUIET) as compute:
        (first,) = map(_number, jobs())
        future = compute.submit(once(str(tmp_path)), on=1)
        eventually(lambda: (tmp_path / "began").exists(), 60, "the task's start")
        slurm_testbed.lose("slurmd2")
        try:
            assert future.result(90) == "n1"
            eventually(lambda: len(jobs()) == 2, 60, "a job for the lost node")
            assert first in map(_number, jobs())
        finally:
            slurm_testbed.bring_back()


@only_in_all
def test_a_job_that_slurm_puts_back_into_the_queue_goes_on(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """As after a preemption; Slurm waits two minutes, unless it is told not to."""
    with sky.Compute(slurm_testbed.provider(), nodes=2, options=QUIET) as compute:
        (job,) = map(_number, jobs())
        future = once(str(tmp_path)) > compute
        eventually(lambda: (tmp_path / "began").exists(), 60, "the task's start")

        says("scontrol", "requeue", job)
        eventually(lambda: any("PENDING" in each for each in jobs()), 60, "a job that waits")
        time.sleep(1)  # Slurm takes no new time in the second in which it requeues.
        says("scontrol", "update", f"JobId={job}", "StartTime=now")

        assert future.result(90) in ("n1", "n2")
        eventually(lambda: all(n.state == "ready" for n in compute.nodes), 60, "both nodes")
        assert list(map(_number, jobs())) == [job]


# From elsewhere.


@pytest.fixture(scope="module")
def login(slurm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.SSH]:
    """A login node that is reached over SSH."""
    skip_if_absent()
    sshd = Sshd(tmp_path_factory.mktemp("login"), free_port(), ("127.0.0.1",))
    sshd.make()
    settings = sshd.folder / "sshd1.conf"
    changed = settings.read_text().replace("SHLVL=1", f"SHLVL=1 SLURM_CONF={slurm}")
    # Fewer than the suite uses at once: more take further connections.
    settings.write_text(changed.replace("MaxSessions 100", "MaxSessions 5"))
    sshd.up()
    try:
        yield sshd.provider()
    finally:
        sshd.down()


@only_in_all
def test_a_client_elsewhere_reaches_the_nodes_through_the_login_node(
    login: sky.SSH, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    provider = slurm_testbed.provider(login=login)

    with sky.Compute(provider, options=QUIET) as compute:
        assert (variables() >> compute)["SLURM_JOB_ID"]
        assert compute.nodes[0].address == "10.212.0.11"
        connections = psutil.Process().net_connections("tcp")
        assert "10.212.0.11" not in {each.raddr.ip for each in connections if each.raddr}
    monkeypatch.undo()
    wait_until(lambda: jobs() == [], 60, "the end of the job")


@only_in_all
class TestSlurmOverSSH(ProviderSuite):
    """What every provider must do, also through a login node."""

    @pytest.fixture
    def provider(self, login: sky.SSH) -> sky.Slurm:
        return slurm_testbed.provider(login=login)

    @pytest.fixture
    def machine_request(self) -> Request:
        return plain_request()


@only_in_all
def test_a_model_is_trained_on_two_nodes_as_the_example_does() -> None:
    """With an environment that is there: what an image installs, other tests show."""
    example = Path(__file__).parents[2] / "examples" / "slurm_ddp.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        env=os.environ | {"SKYWARD_SLURM_PYTHON": sys.executable, "SKYWARD_EXAMPLE_QUICK": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert done.returncode == 0, done.stderr
    assert "rank 0 on 10.212.0.11: 2000 digits an epoch\nrank 1 on 10.212.0.12" in done.stdout
    assert re.search(r"Held-out accuracy: \d+\.\d%, the same weights on both nodes", done.stdout)
