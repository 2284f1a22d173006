"""Pools on a Ray cluster: how soon they are ready, and calls and bytes beside Ray's own.

Run by `ray.py`. The cluster is that of the tests: a head and two nodes on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import Sample, interleave, p50, timed
from report import Row, absent, absolute, compared, run_suite

import skyward as sky

sys.path.append(str(Path(__file__).parents[1]))

from tests.providers.ray_cluster import PYTHON, RayCluster

QUIET = sky.Options(console=False)
MIB = 2**20
STORE_BYTES = 1024 * MIB
RESOURCE = "big"
"""A resource that one node has, which is not the head."""
TASK = "Ray's own task"
PUT = "`ray.put` and a task that reads it"


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    payload: int
    rounds: int
    calls: int
    starts: int


FULL = Size(payload=256 * MIB, rounds=9, calls=200, starts=5)
QUICK = Size(payload=32 * MIB, rounds=2, calls=20, starts=1)


@contextlib.contextmanager
def cluster() -> Iterator[RayCluster]:
    """The cluster, and a user who may use it."""
    made = RayCluster(STORE_BYTES)
    try:
        made.wait()
        os.environ.update(made.variables)
        yield made
    finally:
        made.stop()


class Peer:
    """Ray's own driver, in a process of its own."""

    def __init__(self, ray: RayCluster) -> None:
        script = Path(__file__).with_name("ray_peer.py")
        self._process = subprocess.Popen(
            [str(PYTHON), str(script), ray.address, RESOURCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | ray.variables,
            cwd="/",
        )

    def ask(self, **what: Any) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("Ray's own driver has ended")
        return float(json.loads(line))

    def close(self) -> None:
        self._process.communicate(timeout=60)


@sky.function
def noop() -> None:
    return None


@sky.function
def read(data: Any) -> int:
    return int(data[::4096].sum())


def pools_on_ray(size: Size) -> Sequence[Row]:
    """A pool of two nodes from a warm cluster; then calls and bytes in turns with Ray's own."""
    what = "Ray: pool of 2 nodes from a warm cluster, until ready"
    if not PYTHON.exists():
        return [absent(what, "", "no environment with Ray")]
    with cluster() as ray:
        provider = ray.provider()
        start(provider)
        starts = Sample(tuple(start(provider) for _ in range(size.starts)))
        rows = [absolute(what, starts, "< 8 s", 8)]
        peer = Peer(ray)
        try:
            with sky.Compute(ray.provider(resources={RESOURCE: 0.001}), options=QUIET) as compute:
                rows += calls_and_bytes(size, peer, compute)
        finally:
            peer.close()
    return rows


def start(provider: sky.Ray) -> float:
    began = time.perf_counter()
    with sky.Compute(provider, nodes=2, options=QUIET):
        return time.perf_counter() - began


def calls_and_bytes(size: Size, peer: Peer, compute: sky.Compute) -> list[Row]:
    calls = interleave(
        {
            "ours": lambda: p50(lambda: noop() >> compute, size.calls),
            TASK: lambda: peer.ask(do="noop", calls=size.calls),
        },
        rounds=size.rounds,
    )
    array = np.ones(size.payload, np.uint8)

    def sent() -> float:
        # Other bytes in every round: what a worker has is not sent again.
        array[::4096] += 1
        return timed(lambda: read(array) >> compute)

    moved = interleave(
        {"ours": sent, PUT: lambda: peer.ask(do="bytes", bytes=size.payload)},
        rounds=size.rounds,
        warmups=2,
    )
    rates = {name: each.per(size.payload, "B/s") for name, each in moved.items()}
    return [
        compared("Ray: no-op call", calls["ours"], TASK, calls[TASK], "<= 0.3x"),
        compared(
            f"Ray: {size.payload // MIB} MiB to a worker", rates["ours"], PUT, rates[PUT], ">= 1.5x"
        ),
    ]


def main() -> None:
    run_suite("Pools on a Ray cluster", [pools_on_ray], full=FULL, quick=QUICK)


if __name__ == "__main__":
    main()
