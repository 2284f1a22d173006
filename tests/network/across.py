"""A client in one network namespace whose packets to and from the other vanish for a while.

Run as a script in the near namespace, with the far one's name and address, a file in which tasks
are tallied, and the seconds without a network; prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from slow_link import Beyond  # from bench/, which is on the path

import skyward as sky

MIB = 1 << 20


@sky.function
def tallied(file: str, seconds: float) -> int:
    with open(file, "a") as lines:
        lines.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return 7


@sky.function
def counting(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.02)
        yield number


@sky.function
def total(values: Any) -> int:
    return int(values.sum())


@sky.function
def ones(count: int) -> Any:
    return np.ones(count, np.uint8)


def vanish(far: str, near_address: str, seconds: float) -> None:
    """Nothing that the far side sends arrives, not even an error."""
    route = ["blackhole", f"{near_address}/32"]
    subprocess.run(["ip", "-n", far, "route", "add", *route], check=True)
    time.sleep(seconds)
    subprocess.run(["ip", "-n", far, "route", "del", *route], check=True)


def main(far: str, far_address: str, file: str, seconds: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((far_address, 9))
        near_address = probe.getsockname()[0]
    outcome: dict[str, Any] = {"states": []}
    values = np.random.default_rng(1).integers(0, 255, 96 * MIB, np.uint8)
    with sky.Compute(
        Beyond(far, far_address),
        worker=sky.Worker(concurrency=5),
        options=sky.Options(console=False),
    ) as pool:
        total(values[:10]) >> pool

        def run(name: str, action: Callable[[], Any]) -> threading.Thread:
            thread = threading.Thread(target=lambda: outcome.update({name: action()}))
            thread.start()
            return thread

        threads = [
            run("task", lambda: tallied(file, 4.0) >> pool),
            run("stream", lambda: sum(counting(200) >> pool)),
            run("up", lambda: total(values) >> pool),
            run("down", lambda: int((ones(96 * MIB) >> pool).sum())),
        ]
        time.sleep(0.3)
        outage = threading.Thread(target=vanish, args=(far, near_address, seconds))
        outage.start()
        while outage.is_alive():
            state = pool.nodes[0].state
            if state not in outcome["states"]:
                outcome["states"].append(state)
            time.sleep(0.02)
        for thread in threads:
            thread.join()
        outcome["right"] = int(values.sum())
        outcome["lost"] = pool.stats().nodes_lost
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:4], float(sys.argv[4]))
