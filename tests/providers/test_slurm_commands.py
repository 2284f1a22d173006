"""What this provider asks Slurm for, and how it reads the answers: with recorded ones."""

from __future__ import annotations

import ast
import asyncio
import datetime
import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import PoolError, UnreachableError
from skyward.providers import Order, Request, owner
from skyward.providers.on_node import keeper
from skyward.providers.piped import program
from skyward.providers.slurm import submission
from skyward.providers.slurm.commands import (
    SlurmCluster,
    SlurmJob,
    comment,
    hopeless,
    numbers,
    read_jobs,
    shortened,
    told_waiting,
)
from skyward.providers.slurm.login import Here, here_environment
from skyward.spec import Volume

from .slurm_site import RUNNING, WAITING, Site, request, site

__all__ = ["site"]


def submit(provider: sky.Slurm, given: Request, nodes: Sequence[int] = (0, 1)) -> str:
    """Submit a job, and give its number."""

    async def scenario() -> str:
        return await provider.allocate("p").submit(nodes, Order("p", 0, given))

    return asyncio.run(scenario())


# Answers.


def test_jobs_are_read_from_squeue() -> None:
    waiting, running = read_jobs(WAITING + RUNNING)

    assert (waiting.is_waiting, waiting.reason, waiting.nodes) == (True, "Priority", (0, 1))
    assert (running.is_running, running.hosts, running.left) == (True, "n[1-2]", 93599.0)


def test_a_comment_that_the_site_added_to_is_still_read() -> None:
    (job,) = read_jobs("7|PENDING|None|gpu|1:00|N/A||site: x | skyward:3,5-6; more\n")

    assert job.nodes == (3, 5, 6)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("PENDING", "is_waiting"),
        ("REQUEUED", "is_waiting"),
        ("RUNNING", "is_running"),
        ("SUSPENDED", "is_running"),
        ("COMPLETING", "has_ended"),
        ("CANCELLED", "has_ended"),
        ("PREEMPTED", "has_ended"),
        ("NODE_FAIL", "has_ended"),
        ("OUT_OF_MEMORY", "has_ended"),
    ],
)
def test_the_states_of_a_job(state: str, kind: str) -> None:
    job = SlurmJob("1", state, "None", "gpu", None, "N/A", "")

    assert [name for name in ("is_waiting", "is_running", "has_ended") if getattr(job, name)] == [
        kind
    ]


def test_a_state_of_a_later_version_is_no_end() -> None:
    job = SlurmJob("1", "A_STATE_OF_A_LATER_VERSION", "None", "gpu", None, "N/A", "")

    assert (job.is_waiting, job.is_running, job.has_ended) == (False, False, False)


def test_the_name_of_a_cluster_has_no_place_in_line(site: Site) -> None:
    site.answers("squeue", "CLUSTER: other\n41\n40_[1-3]\n42")

    (job,) = read_jobs(WAITING)
    assert asyncio.run(SlurmCluster(Here()).place_in_line(job)) == (3, 3)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("0:58", 58), ("2:03:04", 7384), ("1-00:00:01", 86401), ("UNLIMITED", None), ("", None)],
)
def test_times_as_slurm_writes_them(text: str, meant: float | None) -> None:
    assert keeper.seconds_of(text) == meant


@pytest.mark.parametrize("nodes", [(0,), (0, 1, 2), (0, 2, 3, 7), (5, 1)])
def test_the_nodes_of_a_job_travel_in_its_comment(nodes: tuple[int, ...]) -> None:
    assert numbers(shortened(nodes)) == nodes


def test_a_controller_that_does_not_answer_is_out_of_reach_and_no_refusal(site: Site) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    site.answers("squeue", "", error=said, status=1)

    with pytest.raises(UnreachableError, match=r"does not answer on this machine: .*ping"):
        asyncio.run(SlurmCluster(Here()).job("42"))

    site.answers("squeue", "", error="squeue: error: strange", status=1)
    with pytest.raises(PoolError, match="asking for job 42: Slurm on this machine said: strange"):
        asyncio.run(SlurmCluster(Here()).job("42"))


def test_a_job_that_slurm_has_forgotten_is_gone(site: Site) -> None:
    said = "slurm_load_jobs error: Invalid job id specified"
    site.answers("squeue", "", error=said, status=1)

    assert asyncio.run(SlurmCluster(Here()).job("42")) is None


def test_without_slurm_the_error_says_where_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(sky.errors.ConfigurationError, match=r"no `squeue` .*Slurm\(login="):
        asyncio.run(SlurmCluster(Here()).job("42"))


@pytest.mark.parametrize(
    ("version", "option"), [("slurm 19.05.5", []), ("slurm-wlm 22.05.8", ["--overlap"])]
)
def test_old_versions_get_no_options_that_they_do_not_know(
    site: Site, version: str, option: list[str]
) -> None:
    site.answers("sinfo", version)

    assert asyncio.run(SlurmCluster(Here()).overlap()) == option


# Why a job waits.


@pytest.mark.parametrize(
    ("reason", "start", "place", "told"),
    [
        ("None", "N/A", None, "job 42 is submitted"),
        ("Priority", "N/A", (3, 12), "job 42 waits: Priority (3rd of 12 in gpu)"),
        ("Resources", "N/A", (1, 1), "job 42 waits: Resources"),
        (
            "Resources",
            "2031-01-02T03:04:05",
            (11, 12),
            "job 42 waits: Resources (11th of 12 in gpu, expected to start at 2031-01-02 03:04)",
        ),
        (
            "QOSMaxGRESPerUser",
            "N/A",
            None,
            "job 42 waits: QOSMaxGRESPerUser (a limit of your account: it runs when your other "
            "jobs have ended)",
        ),
    ],
)
def test_a_waiting_job_says_why(
    reason: str, start: str, place: tuple[int, int] | None, told: str
) -> None:
    job = SlurmJob("42", "PENDING", reason, "gpu", None, start, "")

    assert told_waiting(job, place) == told


def test_a_reason_that_no_waiting_mends_is_told_with_the_next_step() -> None:
    job = SlurmJob("42", "PENDING", "PartitionTimeLimit", "gpu", None, "N/A", "")

    assert hopeless(job) == (
        "PartitionTimeLimit; the partition allows less time: give a shorter time="
    )
    assert hopeless(SlurmJob("42", "PENDING", "Priority", "gpu", None, "N/A", "")) == ""


# What is asked for.

NODES = """\
g1|64|512000|gpu:a100_80gb:8(S:0-1)|amd,ib
g1|64|512000|gpu:a100_80gb:8(S:0-1)|amd,ib
g2|32|257000|gpu:nvidia_a100_40gb:4(IDX:0-3),shard:8|amd
g3|128+|1|gpu:l40s:4|(null)
c1|48|190000|(null)|intel
"""


def test_the_nodes_of_a_cluster_are_read_from_sinfo() -> None:
    nodes = submission.read_nodes(NODES)

    assert [node.name for node in nodes] == ["g1", "g2", "g3", "c1"]
    assert nodes[0].gpus == (("a100_80gb", 8),)
    assert nodes[0].features == ("amd", "ib")
    assert nodes[2].cpus == 128
    assert nodes[3].gpus == ()


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        (
            sky.accelerators.A100(count=2),
            ["--gres=gpu:a100_80gb:2", "--cpus-per-task=16", "--mem=121600M"],
        ),
        (
            sky.accelerators.A100(memory="40GB"),
            ["--gres=gpu:nvidia_a100_40gb:1", "--cpus-per-task=8", "--mem=61037M"],
        ),
        (sky.accelerators.L40S(count=4), ["--gres=gpu:l40s:4", "--cpus-per-task=128"]),
        (sky.accelerators.L4(), ["--gres=gpu:l4:1"]),
    ],
)
def test_gpus_bring_their_share_of_the_node(wanted: Any, options: list[str]) -> None:
    found = submission.options(request(accelerator=wanted), submission.read_nodes(NODES))

    assert found == options


def test_gpus_without_a_type_are_asked_for_by_number() -> None:
    nodes = submission.read_nodes("g1|16|64000|gpu:4|x\n")

    asked = request(accelerator=sky.accelerators.H100(count=2), vcpus=3, memory_gb=10)
    assert submission.options(asked, nodes) == [
        *("--gres=gpu:2", "--cpus-per-task=3", "--mem=10240M")
    ]


def test_without_gpus_only_what_was_asked_for_is() -> None:
    assert submission.options(request(), []) == []
    assert submission.options(request(vcpus=1.5, disk_gb=20), []) == [
        "--cpus-per-task=2",
        "--tmp=20G",
    ]


def test_a_job_is_tested_and_then_submitted_with_the_options_of_the_user(site: Site) -> None:
    provider = sky.Slurm(
        partition="gpu",
        account="lab",
        qos="high",
        constraint="ib&amd",
        time=datetime.timedelta(hours=2),
        extra=("--nodelist=n1", "--reservation=tuesday"),
    )

    assert submit(provider, request(vcpus=4), (0, 1, 2)) == "42"

    test, real = site.calls("sbatch")
    assert test[:-1] == real[:-1]
    assert (test[-1], real[-1]) == ("--test-only", "--parsable")
    assert {
        *("--partition=gpu", "--account=lab", "--qos=high", "--constraint=ib&amd"),
        *("--time=120:00", "--nodes=3", "--ntasks-per-node=1"),
        f"--comment=skyward:0-2 by {owner()} process {os.getpid()}",
        *("--job-name=sky-p", "--requeue", "--no-kill", "--cpus-per-task=4"),
        "--signal=B:USR1@120",
    } <= set(real)
    assert real[-3:-1] == ["--nodelist=n1", "--reservation=tuesday"]
    subprocess.run(["sh", "-n"], input=site.script(), text=True, check=True)


def test_gc_finds_the_jobs_of_all_pools(site: Site) -> None:
    mine = comment((0, 1), owner(), 4711, "my train|ing")
    site.answers(
        "squeue",
        f"sky-p1|me|7|RUNNING|None|gpu|1:00|N/A|n1|{mine}\n"
        f"sky-p1|me|8|PENDING|None|gpu|1:00|N/A||{mine}\n"
        "sky-p2|you|9|RUNNING|None|gpu|1:00|N/A|n2|skyward:0\n"
        "sky-watch|you|10|RUNNING|None|gpu|1:00|N/A|n2|telescope\n"
        f"sky-p3|me|11|COMPLETING|None|gpu|1:00|N/A|n2|{mine}\n",
    )

    first, second = asyncio.run(sky.Slurm().remains())

    assert (first.pool, first.name, first.owner, first.pid) == ("p1", "my-train-ing", owner(), 4711)
    assert first.resources == ("job 7", "job 8")
    assert (second.pool, second.owner, second.resources) == ("p2", "you", ("job 9",))


def test_a_time_to_live_is_a_time_limit_unless_there_is_one(site: Site) -> None:
    submit(sky.Slurm(), request(ttl=600.0))
    submit(sky.Slurm(time="5"), request(ttl=600.0))

    limits = [each for call in site.calls("sbatch") for each in call if each.startswith("--time")]
    assert limits == ["--time=11", "--time=11", "--time=5", "--time=5"]


def test_a_refusal_comes_in_slurms_own_words(site: Site) -> None:
    said = "sbatch: error: Batch job submission failed: Invalid account or account/partition"
    site.answers("sbatch", "", error=said, status=1)

    with pytest.raises(
        sky.errors.ConfigurationError,
        match="refuses the job: Batch job submission failed: Invalid account or account/partition",
    ):
        submit(sky.Slurm(), request())
    assert len(site.calls("sbatch")) == 1

    site.answers("sbatch", "", error="sbatch: error: QOSMaxSubmitJobPerUserLimit", status=1)
    with pytest.raises(sky.errors.UnavailableError, match="QOSMaxSubmitJobPerUserLimit"):
        submit(sky.Slurm(), request())


def test_a_job_may_wait_for_nodes_that_are_down(site: Site) -> None:
    """The test of `sbatch` refuses it, but nobody knows what they have."""
    said = "allocation failure: Requested node configuration is not available"
    site.refuses_tests(said)
    site.answers("sinfo", "idle\ndown*")

    assert submit(sky.Slurm(partition="gpu"), request()) == "42"

    site.answers("sinfo", "idle\nmixed")
    with pytest.raises(sky.errors.ConfigurationError, match=f"refuses the job: {said}"):
        submit(sky.Slurm(partition="gpu"), request())


def test_a_site_with_pyxis_starts_the_keepers_in_the_container(site: Site) -> None:
    site.answers("srun", "Usage: srun ...\n      --container-image=[USER@][REGISTRY#]IMAGE")
    data = Volume("/scratch", "/data", read_only=True)

    submit(sky.Slurm(container="docker://pytorch/pytorch:2"), request(volumes=(data,)))

    text = site.script()
    assert "--container-image=pytorch/pytorch:2" in text
    assert "--container-mounts=/tmp:/tmp,/scratch:/data:ro" in text
    assert '"container":' not in text


def test_a_site_without_pyxis_runs_commands_with_apptainer(site: Site) -> None:
    asked = request(accelerator=sky.accelerators.H100(), volumes=(Volume("/scratch", "/data"),))

    submit(sky.Slurm(container="pytorch/pytorch:2"), asked)

    config = json.loads(re.findall(r"'(\{\"pool\".*?\})'", site.script())[0])
    assert config["container"] == "docker://pytorch/pytorch:2"
    assert config["container_options"] == ["--nv", "--bind=/scratch:/data"]


def test_the_keeper_runs_commands_in_the_container(site: Site, tmp_path: Path) -> None:
    config = {"container": "docker://x", "container_options": ["--nv"]}
    with pytest.raises(SystemExit) as ended:
        keeper.inside(config)
    assert ended.value.code == keeper.NO_CONTAINERS

    site.answers("singularity", "")
    assert keeper.inside(config) == [
        *(str(tmp_path / "singularity"), "--quiet", "exec", "--nv", "docker://x")
    ]


# Arguments.


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"time": 60}, "write the time as Slurm does, 'hours:minutes:seconds'"),
        ({"time": datetime.timedelta(0)}, "a time limit is above 0"),
        ({"extra": ["--nodes=4"]}, "leave --nodes out: the pool's nodes= says how many"),
        ({"extra": ["-N4"]}, "leave -N out"),
        ({"extra": ["--clusters=other"]}, "leave --clusters out: .*set SLURM_CLUSTERS"),
        ({"extra": ["-Mother"]}, "leave -M out"),
        ({"extra": ["nodelist=n1"]}, "'nodelist=n1' is no option of sbatch"),
        ({"login": ["a"]}, "login"),
        ({"login": sky.SSH(["a", "b"])}, "name one login node"),
        ({"partition": ""}, "partition"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=match):
        sky.Slurm(**given)


def test_a_login_node_is_named_as_for_ssh() -> None:
    provider = sky.Slurm(login="me@cluster")

    again = sky.Slurm(**json.loads(json.dumps(provider.describe())))
    assert again == provider
    assert provider._ssh == sky.SSH(["me@cluster"])


def test_the_variables_of_a_job_of_ones_own_are_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be options of `srun`; and some name what only this machine has."""
    ours = ("SLURM_JOB_ID", "SLURM_NTASKS", "VIRTUAL_ENV", "SBATCH_CLUSTERS")
    for name in (*ours, "SLURM_CONF", "MINE"):
        monkeypatch.setenv(name, "x")

    found = here_environment()

    assert {"SLURM_CONF", "MINE"} <= set(found)
    assert not set(ours) & set(found)


# Programs for the nodes.


@pytest.mark.parametrize("name", ["keeper", "relay"])
def test_the_programs_for_nodes_are_read_by_an_old_python(name: str) -> None:
    """And import nothing but the standard library of Python 3.6."""
    tree = ast.parse(program(name), feature_version=(3, 6))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }

    assert imported <= set(sys.stdlib_module_names)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [each for each in ast.walk(tree) if isinstance(each, ast.AnnAssign)]


def test_frameworks_see_the_job_and_not_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_ID", "PMI_RANK", "HOME"):
        monkeypatch.setenv(name, "1")

    found = keeper.environment(keeper.OF_STEP, keeper.OF_JOB)

    assert {"SLURM_JOB_ID", "HOME"} <= set(found)
    assert not {"SLURM_PROCID", "SLURM_STEP_ID", "PMI_RANK"} & set(found)


def test_a_relay_without_a_keeper_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "nothing-like-a-job")
    done = subprocess.run(
        [sys.executable, "-c", program("relay"), "keeper-now", "{}"],
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert (done.returncode, done.stderr) == (69, "skyward: no keeper runs on this node\n")


def test_the_version_of_a_cluster_is_asked_for_once(site: Site) -> None:
    async def scenario() -> None:
        cluster = SlurmCluster(Here())
        assert await cluster.version() == (23, 11)
        assert await cluster.version() == (23, 11)

    asyncio.run(scenario())
    assert site.calls("sinfo") == [["--version"]]


def test_every_executable_is_called_by_itself(site: Site) -> None:
    """Sites have lists of what may be called on a login node: no shell is among them."""
    called: list[str] = []
    login = Here()
    start = login._start

    def noted(command: Sequence[str], *given: Any) -> Any:
        called.append(command[0])
        return start(command, *given)

    login._start = noted  # type: ignore[method-assign]

    async def scenario() -> None:
        cluster = SlurmCluster(login)
        jobs = sky.Slurm().allocate("p")
        jobs.login, jobs.cluster = login, cluster
        await jobs.submit([0], Order("p", 0, request()))
        await cluster.jobs_called("sky-p")
        await cluster.hostnames("n[1-2]")
        await cluster.shrink("42", ["n1"], "skyward:0")
        await cluster.cancel("42")

    asyncio.run(scenario())
    assert set(called) <= {"sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo"}


def run_script(site: Site, **variables: str) -> int:
    """Run the script of a job as Slurm would, and give its exit status."""
    text = submission.batch_script(
        {"pool": "p", "nodes": [0, 1], "idle": 1}, ["--quiet"], ["--step"]
    )
    env = {"PATH": f"{site.folder}:/usr/bin:/bin", "SLURM_JOB_ID": "42", **variables}
    return subprocess.run(["sh"], input=text, env=env, timeout=200).returncode


def test_why_the_keepers_failed_is_told_though_the_job_has_no_folder_for_files(site: Site) -> None:
    made, mktemp = site.folder / "made", site.folder / "mktemp"
    mktemp.write_text(f'#!/bin/sh\n/usr/bin/mktemp "$@" | tee -a "{made}"\n')
    mktemp.chmod(0o755)
    site.answers("srun", "", error="skyward: no Python\n", status=78)

    assert run_script(site, TMPDIR="/nothing/here") == 78

    assert site.calls("scontrol") == [["update", "JobId=42", "Comment=skyward: no Python"]]
    (file,) = made.read_text().split()
    assert not Path(file).exists()


def test_the_warning_goes_to_all_nodes_in_one_step(site: Site) -> None:
    site.answers("squeue", "n[1-2]")
    site.answers("scontrol", "n1\nn2")
    srun = site.folder / "srun"
    warn = 'case "$*" in *--step*) ;; *) kill -USR1 $PPID; sleep 0.5 ;; esac'
    srun.write_text(srun.read_text().replace("exit 0", f"{warn}\nexit 0"))

    assert run_script(site) == 0

    warned = [call for call in site.calls("srun") if call[0] == "--step"]
    assert [call[1:5] for call in warned] == [
        ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n[1-2]"]
    ]


@pytest.fixture
def one_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> keeper.Keeper:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setattr(keeper, "PLACES", (str(tmp_path),))
    return keeper.Keeper(keeper.folder_name(), 0, {"pool": "p", "idle": 1}, {})


def test_the_keeper_is_private_and_what_commands_write_is_not(one_keeper: keeper.Keeper) -> None:
    mask = os.umask(0o022)
    try:
        one_keeper.listen().close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(mask)

    assert stat.S_IMODE(os.stat(one_keeper.folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{one_keeper.folder}/s").st_mode) == 0o700


def test_a_client_that_goes_without_a_word_does_no_harm(one_keeper: keeper.Keeper) -> None:
    ours, theirs = socket.socketpair()
    ours.close()

    one_keeper.answer(theirs)

    assert one_keeper.busy == 0
