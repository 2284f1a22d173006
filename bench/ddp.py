"""Distributed training over `@` against the same steps under `torchrun`, two processes each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import Sample, interleave, timed
from report import Row, absolute, compared, run_suite

import skyward as sky

HERE = Path(__file__).parent
QUIET = sky.Options(console=False)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    steps: int


FULL = Size(rounds=9, steps=400)
QUICK = Size(rounds=2, steps=50)


@sky.function
def steps(count: int) -> float:
    from ddp_steps import seconds_for

    return seconds_for(count)


@sky.function
def nothing() -> None:
    return None


@sky.function
def die_in_a_step() -> None:
    import signal

    import torch
    import torch.distributed as dist

    for step in range(1_000_000):
        if dist.get_rank() == 1 and step == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1000))


def under_torchrun(count: int) -> float:
    """Seconds for the steps, as rank 0 of a fresh launch says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, HERE / "ddp_steps.py", str(count)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return float(done.stdout.split()[-1])


def training(size: Size) -> Sequence[Row]:
    """Steps a second, and what a warm pool adds to a broadcast."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with sky.Compute(nodes=2, plugins=[sky.plugins.torch()], options=QUIET) as compute:
        samples = interleave(
            {
                "sky": lambda: max(steps(size.steps) @ compute),
                "torchrun": lambda: under_torchrun(size.steps),
            },
            rounds=size.rounds,
        )
        warm = [timed(lambda: nothing() @ compute) for _ in range(10 * size.rounds)]
    ours, theirs = (samples[k].per(size.steps, "tasks/s") for k in ("sky", "torchrun"))
    return [
        compared("DDP steps a second, 2 processes", ours, "torchrun", theirs, ">= 0.98x"),
        absolute("another broadcast on a warm pool", Sample(tuple(warm)), "<= 10 ms", 10e-3),
    ]


def losing_a_rank(size: Size) -> Sequence[Row]:
    """From the kill of a rank until every other has raised, and until a new group has answered."""
    raised, recovered = [], []
    with sky.Compute(nodes=2, plugins=[sky.plugins.torch()], options=QUIET) as compute:
        for _ in range(max(2, size.rounds // 3)):
            start = time.perf_counter()
            try:
                die_in_a_step() @ compute
            except sky.BroadcastError:
                raised.append(time.perf_counter() - start)
            nothing() @ compute
            recovered.append(time.perf_counter() - start)
    return [
        absolute(
            "a rank is killed: all others have raised", Sample(tuple(raised)), "<= 10 s", 10.0
        ),
        absolute("and a new group has answered", Sample(tuple(recovered))),
    ]


if __name__ == "__main__":
    run_suite("distributed training", [training, losing_a_rank], full=FULL, quick=QUICK)
