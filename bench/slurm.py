"""What a pool on a Slurm cluster costs: from the start of its job until its nodes are ready.

    python bench/slurm.py [--quick]

The cluster is the testbed's, on this machine: its controller, its two nodes, the client and the
workers share the processors. The nodes have an environment already, as from the second pool on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from measure import Sample
from report import Row, absent, absolute, run_suite
from testbed import NoTestbedError

import skyward as sky

HERE = Path(__file__).parent
QUIET = sky.Options(console=False)


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    rounds: int


FULL = Size(rounds=7)
QUICK = Size(rounds=2)


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """A Slurm cluster, to which the environment leads."""
    if str(HERE.parent) not in sys.path:
        sys.path.append(str(HERE.parent))
    tests = importlib.import_module("tests.providers.slurm_testbed")
    before = dict(os.environ)
    try:
        tests.skip_if_absent()
        os.environ["SLURM_CONF"] = tests.start()
    except BaseException as problem:
        # What skips a test is an exception that means to end the process.
        if type(problem).__name__ != "Skipped":
            raise
        raise NoTestbedError(str(problem)) from None
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SKYWARD_STATE"] = folder
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tests.stop()


def began() -> float:
    """When the script of the one job that runs was started."""
    for process in psutil.process_iter(["name", "cmdline", "create_time"]):
        if ".batch]" in " ".join(process.info["cmdline"] or [process.info["name"]]):
            return float(process.info["create_time"])
    raise RuntimeError("no job's script runs on this machine")


def pools(size: Size) -> Sequence[Row]:
    """A pool of two nodes, from the start of its job."""
    what = "2 nodes ready, from the start of the job"
    ready, ended = [], []
    try:
        with cluster():
            for number in range(size.rounds + 1):
                with sky.Compute(sky.Slurm(python=sys.executable), nodes=2, options=QUIET):
                    seconds = time.time() - began()
                    leaving = time.monotonic()
                if number:  # The first compiles the sources.
                    ready.append(seconds)
                    ended.append(time.monotonic() - leaving)
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    return [
        absolute(what, Sample(tuple(ready)), "<= 2 s", 2.0),
        absolute("the job cancelled and gone", Sample(tuple(ended))),
    ]


if __name__ == "__main__":
    run_suite("slurm", [pools], full=FULL, quick=QUICK)
