"""A pool on a real Slurm cluster, which several tests share.

A node of the cluster may have one processor, so there is no room for another pool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky

from ..conftest import Sharing, only_in_all
from . import slurm_testbed
from .slurm_testbed import jobs, says
from .training import device_losses, synchronised


def _numbers(pool: sky.Compute) -> list[str]:
    """The numbers of a pool's jobs."""
    of_pool = f" sky-{pool._open_fleet.id}"
    return [job.split()[0] for job in jobs() if job.endswith(of_pool)]


def _two_nodes() -> sky.Compute:
    """Nodes with one GPU each, which is not really there."""
    return sky.Compute(
        slurm_testbed.provider(partition="main", time="1:00:00"),
        nodes=2,
        accelerator=sky.accelerators.H100(),
        plugins=[sky.plugins.torch()],
        options=sky.Options(console=False, retries=2),
    )


@pytest.fixture(autouse=True, scope="module")
def _variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("SKYWARD_STATE", str(tmp_path_factory.mktemp("state")))
        changed.setenv("SKYWARD_DEVICE", "cpu")
        changed.setenv("SLURM_NTASKS", "7")  # As where this process itself runs in a job.
        yield


@pytest.fixture(scope="module")
def pool(_variables: None, slurm: str, sharing: Sharing) -> Iterator[sky.Compute]:
    """What tests share that leave the nodes as they are."""
    with sharing(_two_nodes()) as compute:
        yield compute


@only_in_all
def test_ddp_over_two_nodes(pool: sky.Compute) -> None:
    first, second = synchronised() @ pool

    assert [first[0], second[0]] == ["n1", "n2"]
    assert first[1] == second[1] == ("10.212.0.11", "10.212.0.12")
    assert first[2] == second[2]


@sky.function
def variables() -> dict[str, str]:
    return dict(os.environ)


def test_the_job_has_the_share_of_its_gpus_and_no_launch_of_its_own(pool: sky.Compute) -> None:
    """Frameworks would take the variables of a step for a launch of theirs."""
    found = variables() >> pool
    shown = says("scontrol", "show", "job", found["SLURM_JOB_ID"])

    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert [name for name in found if name.startswith(("SLURM_PROCID", "SLURM_NTASKS"))] == []
    assert "TresPerNode=gres:gpu:h100:1" in shown
    assert "CPUs/Task=1" in shown
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (booked,) = re.findall(r"MinMemoryNode=(\d+)M", shown)
    assert int(booked) < 0.5 * memory / 2**20
    assert "Requeue=1" in shown


def test_the_client_connects_to_the_nodes_themselves(pool: sky.Compute) -> None:
    ends = {each.raddr.ip for each in psutil.Process().net_connections("tcp") if each.raddr}

    assert {"10.212.0.11", "10.212.0.12"} <= ends


@sky.function
def slowly(began: str) -> str:
    import socket
    import time

    Path(began).touch()
    time.sleep(1.5)
    return socket.gethostname()


@only_in_all
def test_slurms_warning_lets_tasks_end_and_has_the_nodes_replaced(
    pool: sky.Compute, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """As before the end of the time limit: Slurm sends the signal to the job's script."""
    (before,) = _numbers(pool)
    future = slowly(str(tmp_path / "began")) > pool
    eventually(lambda: (tmp_path / "began").exists(), 60, "the task's start")

    says("scancel", "--batch", "--signal=USR1", before)

    assert future.result(100) in ("n1", "n2")
    eventually(lambda: before not in _numbers(pool), 30, "the end of the first job")
    eventually(lambda: all(node.state == "ready" for node in pool.nodes), 60, "two new nodes")
    assert len(synchronised() @ pool) == 2


@only_in_all
def test_device_training_on_a_node(pool: sky.Compute) -> None:
    assert device_losses(pool.device("cpu", node=1)) == device_losses("cpu")
