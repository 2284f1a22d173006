"""Ray or Dask behind JSON lines: one request on stdin, one answer on stdout.

Runs in the peers' own environment, so it imports nothing of ours. Requests are
`{"do": "noop", "calls": n}` (answer: the p50 seconds of a call) and `{"do": "tiny", "tasks": n}`
(answer: the seconds of all of them). It ends when stdin does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

WORKERS = 2

# How to make one call, how to make many, and the peer's version.
Calls = tuple[Callable[[], Any], Callable[[int], list[int]], str]


def noop() -> None:
    return None


def tiny(i: int) -> int:
    return i


@contextmanager
def ray_cluster() -> Iterator[Calls]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    remote_noop, remote_tiny = ray.remote(noop), ray.remote(tiny)

    def call() -> Any:
        return ray.get(remote_noop.remote())

    def call_many(count: int) -> list[int]:
        return ray.get([remote_tiny.remote(i) for i in range(count)])

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            _temp_dir=folder,
        )
        yield call, call_many, ray.__version__
        ray.shutdown()


@contextmanager
def dask_cluster() -> Iterator[Calls]:
    import dask
    from distributed import Client, LocalCluster

    # pure=False: a pure task with known arguments would be answered from the scheduler's memory.
    def call() -> Any:
        return client.submit(noop, pure=False).result()

    def call_many(count: int) -> list[int]:
        return client.gather(client.map(tiny, range(count), pure=False))

    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield call, call_many, dask.__version__


def serve(call: Callable[[], Any], call_many: Callable[[int], list[int]], answer: Any) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "noop":
            seconds = []
            for _ in range(request["calls"]):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            answer(seconds=statistics.median(seconds))
        elif request["do"] == "tiny":
            start = time.perf_counter()
            results = call_many(request["tasks"])
            taken = time.perf_counter() - start
            assert results == list(range(request["tasks"]))
            answer(seconds=taken)


def main(peer: str) -> None:
    # Ray and Dask print; the answers go to what was stdout, everything else to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    clusters: dict[str, Callable[[], AbstractContextManager[Calls]]]
    clusters = {"ray": ray_cluster, "dask": dask_cluster}
    with clusters[peer]() as (call, call_many, version):
        answer(ready=version)
        serve(call, call_many, answer)


if __name__ == "__main__":
    main(sys.argv[1])
