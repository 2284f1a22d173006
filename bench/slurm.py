"""What a pool on a Slurm cluster costs: from the start of its job until its nodes are ready.

    python bench/slurm.py [--quick]

The cluster is the testbed's, on this machine: its controller, its two nodes, the client and the
workers share the processors. The nodes have an environment already, as from the second pool on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


class Watch:
    """Notes when a job starts, by asking Slurm over and over."""

    def __init__(self) -> None:
        self.running = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.is_set():
            asked = time.monotonic()
            command = ["squeue", "--noheader", "--format=%T"]
            told = subprocess.run(command, capture_output=True, text=True).stdout
            if "RUNNING" in told and not self.running:
                # It may have started at any moment since the question before: the earliest counts.
                self.running = asked - 0.02
            time.sleep(0.02)

    def stop(self) -> None:
        """End the watch."""
        self._over.set()
        self._thread.join()


def pools(size: Size) -> Sequence[Row]:
    """A pool of two nodes, from the start of its job."""
    what = "2 nodes ready, from the start of the job"
    ready, ended = [], []
    try:
        with cluster():
            for number in range(size.rounds + 1):
                watch = Watch()
                with sky.Compute(sky.Slurm(python=sys.executable), nodes=2, options=QUIET):
                    now = time.monotonic()
                    watch.stop()
                    leaving = time.monotonic()
                if number:  # The first compiles the sources.
                    ready.append(now - watch.running)
                    ended.append(time.monotonic() - leaving)
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    return [
        absolute(what, Sample(tuple(ready)), "<= 2 s", 2.0),
        absolute("the job cancelled and gone", Sample(tuple(ended))),
    ]


if __name__ == "__main__":
    run_suite("slurm", [pools], full=FULL, quick=QUICK)
