"""What the page costs, and how soon it shows what happens.

The viewer is a plain client of the page's stream in a process of its own, so that the browser's own
work is not counted. The cost is the processor time of the client and of all agents with a viewer,
less that without one; both are taken in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import psutil
from measure import Sample, interleave
from report import Row, absolute, compared, run_suite

import skyward as sky

VIEWER = """
import sys, time, urllib.request
with urllib.request.urlopen(sys.argv[1]) as stream:
    for line in stream:
        if line.startswith(b"data: "):
            print(time.time(), line[6:].decode().strip(), flush=True)
"""


@dataclass(frozen=True)
class Size:
    nodes: int
    seconds: float
    rounds: int
    events: int
    calls: int


QUIETLY = sky.Options(console=False)
FULL = Size(nodes=10, seconds=10.0, rounds=5, events=50, calls=5000)
QUICK = Size(nodes=4, seconds=2.0, rounds=1, events=5, calls=500)


@sky.function
def say_number(number: int) -> None:
    print(f"number {number}")


@sky.function
def nothing(number: int) -> None:
    pass


class Looking:
    """A viewer in another process."""

    def __init__(self, url: str) -> None:
        address = url.replace("/?", "/stream?")
        self.process = subprocess.Popen(
            [sys.executable, "-c", VIEWER, address], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.lines = self.process.stdout
        self.lines.readline()

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def quiet(nodes: int) -> sky.Compute:
    return sky.Compute(nodes=nodes, name="page", options=QUIETLY)


@contextmanager
def page(pool: str) -> Iterator[str]:
    """The address of a page in a process of its own that shows a pool."""
    command = [sys.executable, "-m", "skyward", "ui", pool, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        yield json.loads(served.stdout.readline())["url"]
        served.terminate()


@contextmanager
def kept(nodes: int) -> Iterator[None]:
    """A kept pool that has no client."""
    try:
        with sky.Compute(nodes=nodes, name="page", keep=600, options=QUIETLY):
            pass
        yield
    finally:
        sky.attach("page").down(force=True)


def processes_of(pool: str) -> list[psutil.Process]:
    """This process, the page and the agents of a pool; those of a kept one are no children."""
    found, folder = [psutil.Process()], os.environ["SKYWARD_STATE"]
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(each.cmdline())
            ours = pool in command or "skyward.worker" in command
            if ours and each.environ().get("SKYWARD_STATE") == folder:
                found.append(each)
    return found


def spent_by(processes: Sequence[psutil.Process]) -> float:
    """Processor seconds of these processes so far, also of their threads that have ended.

    The clock of another process has the number that `clock_getcpuclockid` computes.
    """
    return sum(time.clock_gettime((~each.pid << 3) | 2) for each in processes)


def cost(what: str, pool: AbstractContextManager[object], size: Size) -> Sequence[Row]:
    """What a page that somebody looks at takes from the processors."""

    def during() -> float:
        before = spent_by(processes)
        time.sleep(size.seconds)
        return (spent_by(processes) - before) / size.seconds

    def looked_at() -> float:
        with Looking(url):
            return during()

    with tempfile.TemporaryDirectory(prefix="skyward-bench-") as folder:
        os.environ["SKYWARD_STATE"] = folder
        try:
            with pool, page("page") as url:
                processes = processes_of("page")
                taken = interleave({"looked at": looked_at, "alone": during}, rounds=size.rounds)
        finally:
            del os.environ["SKYWARD_STATE"]
    pairs = zip(taken["looked at"].values, taken["alone"].values, strict=True)
    more = Sample(tuple(100 * (a - b) * 10 / size.nodes for a, b in pairs), " % of a core")
    return [absolute(f"{what}, for each 10 nodes", more, "< 1 % of a core", 1.0)]


def own_cost(size: Size) -> Sequence[Row]:
    """A pool of this process, in whose place the page of another process asks its agents."""
    return cost("a page that is open", quiet(size.nodes), size)


def kept_cost(size: Size) -> Sequence[Row]:
    """A kept pool, whose agents the page asks itself."""
    return cost("a page that shows a kept pool", kept(size.nodes), size)


def events(size: Size) -> Sequence[Row]:
    """How long after a function has printed a line a viewer has it."""
    delays = []
    with quiet(2) as compute, Looking(compute.ui()) as looking:
        for number in range(size.events):
            began = time.time()
            say_number(number) >> compute
            delays.append(arrival(looking, f"number {number}") - began)
            time.sleep(0.037)
    return [absolute("a line on the page after its call", Sample(tuple(delays)), "<= 0.5 s", 0.5)]


def arrival(looking: Looking, text: str) -> float:
    """When the viewer got the batch with that line."""
    for line in looking.lines:
        at, _, batch = line.partition(" ")
        for message in json.loads(batch):
            if any(text == each[4] for each in message.get("lines", ())):
                return float(at)
    raise EOFError("the stream has ended")


def calls(size: Size) -> Sequence[Row]:
    """What the calls of a pool cost more while somebody looks."""

    def each() -> float:
        began = time.perf_counter()
        for _ in compute.map(nothing, range(size.calls)):
            pass
        return (time.perf_counter() - began) / size.calls

    def looked_at() -> float:
        with Looking(url):
            return each()

    with quiet(2) as compute:
        url = compute.ui()
        held = interleave({"looked at": looked_at, "served": each}, rounds=size.rounds)
    with quiet(2) as compute:
        alone = interleave({"alone": each}, rounds=size.rounds)["alone"]
    return [
        compared("a call, with a page open", held["looked at"], "no page", alone),
        compared("a call, with a page that nobody looks at", held["served"], "no page", alone),
    ]


if __name__ == "__main__":
    run_suite("the page", [own_cost, kept_cost, events, calls], full=FULL, quick=QUICK)
