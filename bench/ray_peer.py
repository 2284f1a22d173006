"""Ray's own calls behind JSON lines: one request on stdin, one answer, in seconds, on stdout.

Runs in Ray's own environment, as a driver of a cluster that exists, so it imports nothing of ours.
Its tasks run on a node that is not the driver's, as a pool's workers do.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

# Whoever looks in this folder first for Ray finds `ray.py` of ours.
sys.path.pop(0)

import numpy as np


def main() -> None:
    import ray

    address, resource = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)

    @ray.remote(num_cpus=1, resources={resource: 0.001})
    def noop() -> None:
        return None

    @ray.remote(num_cpus=1, resources={resource: 0.001})
    def read(data: Any) -> int:
        return int(data[::4096].sum())

    array: Any = np.zeros(0, np.uint8)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "noop":
            taken = []
            for _ in range(asked["calls"]):
                began = time.perf_counter()
                ray.get(noop.remote())
                taken.append(time.perf_counter() - began)
            seconds = statistics.median(taken)
        else:
            if len(array) != asked["bytes"]:
                array = np.ones(asked["bytes"], np.uint8)
            array[::4096] += 1
            began = time.perf_counter()
            ray.get(read.remote(ray.put(array)))
            seconds = time.perf_counter() - began
        print(json.dumps(seconds), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
