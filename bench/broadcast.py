"""A large argument to four nodes behind a slow link, against what the link takes to carry it once.

The parent puts up the testbed's link and runs this file inside the client's namespace. The nodes
are agents in the other one, where they reach each other without the link.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from measure import Sample, interleave, timed
from slow_link import Beyond, Ends, served

import skyward as sky

NODES = 4


def broadcasts_over(ends: Ends, size: int, rounds: int) -> Mapping[str, Sample]:
    """Seconds until four nodes have it, one node has it, and a plain socket has carried it."""
    command = ["ip", "netns", "exec", ends.near, sys.executable, __file__]
    details = [ends.far, ends.far_address, str(size), str(rounds)]
    done = subprocess.run([*command, *details], stdout=subprocess.PIPE, check=True)
    return {name: Sample(tuple(values)) for name, values in json.loads(done.stdout).items()}


@sky.function
def received(values: Any) -> int:
    return len(values)


@contextlib.contextmanager
def sink(namespace: str, address: str) -> Iterator[Callable[[memoryview], None]]:
    """Send bytes to a process over there, and wait until it has them all."""
    answer = "room = bytearray(1 << 20)\nwhile end.recv_into(room): pass\nend.sendall(b'.')"
    with served(namespace, address, answer) as port:
        yield lambda data: _pour(data, address, port)


def _pour(data: memoryview, address: str, port: int) -> None:
    with socket.create_connection((address, port)) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        assert end.recv(1) == b"."


def main(far: str, far_address: str, size: int, rounds: int) -> None:
    """Measure, and print the samples."""
    values = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    provider, quiet = Beyond(far, far_address), sky.Options(console=False)
    with (
        sky.Compute(provider, nodes=NODES, options=quiet) as compute,
        sink(far, far_address) as send,
    ):

        def run(call: Callable[[], Any], right: Any) -> float:
            values[:: 1 << 18] += 1  # every chunk is new
            outcome: list[Any] = []
            taken = timed(lambda: outcome.append(call()))
            assert outcome == [right]
            return taken

        samples = interleave(
            {
                "four": lambda: run(lambda: received(values) @ compute, [size] * NODES),
                "one": lambda: run(lambda: compute.run(received(values), on=0), size),
                "socket": lambda: run(lambda: send(memoryview(values)), None),
            },
            rounds=rounds,
            warmups=0,
        )
    print(json.dumps({name: sample.values for name, sample in samples.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]))
