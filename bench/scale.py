"""A client and 10, 100 and 1,000 simulated nodes: what grows with the nodes, and how fast.

The client is the real one. The nodes are in one helper process (`simulated.py`): real sockets with
TLS, and no work. Each size runs in a process of its own. The table says how much processor time the
client took, and how much the simulation; where both share two processors, the seconds are of both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import Sample, say, timed
from report import Row, absolute, claim, figure, save, text_table
from simulated import Simulation, simulation

import skyward as sky

SIZES = (10, 100, 1000)
BYTES = 64 << 20
LOST_SHARE = 10
"""One node in so many is lost."""
TASK_SECONDS = 3
"""How long the tasks run that some nodes are lost with; `wait_3` says the same."""
IDLE_SECONDS = 4.0
THREADS_MOST = 8
DESCRIPTORS_MOST = 4
OWN_DESCRIPTORS = 10


@sky.function
def nothing() -> None:
    pass


@sky.function
def take(values: Any) -> None:
    pass


@sky.function(retries=3)
def wait_3() -> None:
    pass


def threads() -> int:
    """The threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def most_threads(found: list[int]) -> Iterator[None]:
    """Note how many threads this process has at most, without the one that looks."""
    over = threading.Event()

    def look() -> None:
        most = 0
        while not over.wait(0.002):
            most = max(most, threads() - 1)
        found.append(most)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield
    finally:
        over.set()
        looker.join()


def await_that(what: Callable[[], bool], seconds: float = 120.0, pause: float = 0.01) -> None:
    """Wait until something holds."""
    start = time.monotonic()
    while not what():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(pause)


class Trial:
    """One size: takes its measurements, and keeps the figures."""

    def __init__(self, provider: Simulation, nodes: int, rounds: int) -> None:
        self._provider, self._nodes, self._rounds = provider, nodes, rounds
        self.figures: dict[str, list[float]] = {}

    def _note(self, name: str, *values: float) -> None:
        self.figures.setdefault(name, []).extend(values)

    def _measure(self, name: str, work: Callable[[], object]) -> None:
        """Seconds that `work` takes, and the processor time of the client and the simulation."""
        client, simulated = time.process_time(), self._provider.tell(do="spent")
        self._note(name, timed(work))
        self._note(f"{name}: client", time.process_time() - client)
        self._note(f"{name}: simulation", self._provider.tell(do="spent") - simulated)

    def run(self) -> None:
        """Start a pool, and measure."""
        before, memory = descriptors(), resident()
        compute = sky.Compute(self._provider, nodes=self._nodes, options=sky.Options(console=False))
        found: list[int] = []
        with most_threads(found):
            self._measure("start", compute.__enter__)
        self._note("threads at the start", *found)
        try:
            # A thread that has nothing to do ends after a second.
            time.sleep(2.0)
            self._note("threads", threads())
            self._note("descriptors", descriptors() - before)
            self._note("memory a node", (resident() - memory) / self._nodes)
            self._heartbeats()
            self._broadcasts(compute)
            self._large(compute)
            self._loss(compute)
        finally:
            with most_threads(found):
                self._measure("end", lambda: compute.__exit__(None, None, None))
        self._note("threads at the end", found[-1])

    def _heartbeats(self) -> None:
        client, simulated = time.process_time(), self._provider.tell(do="spent")
        time.sleep(IDLE_SECONDS)
        self._note("heartbeats", (time.process_time() - client) / IDLE_SECONDS)
        simulated = self._provider.tell(do="spent") - simulated
        self._note("heartbeats: simulation", simulated / IDLE_SECONDS)

    def _broadcasts(self, compute: sky.Compute) -> None:
        assert nothing() @ compute == [None] * self._nodes
        found: list[int] = []
        with most_threads(found):
            for _ in range(self._rounds):
                self._measure("nothing", lambda: nothing() @ compute)
        self._note("threads of a broadcast", *found)

    def _large(self, compute: sky.Compute) -> None:
        values = np.random.default_rng(0).integers(0, 255, BYTES, np.uint8)
        self._provider.tell(do="relayed")
        for _ in range(max(2, self._rounds // 4)):
            values[:: 1 << 12] += 1
            sent = compute.stats().bytes_sent
            self._measure("64 MB", lambda: take(values) @ compute)
            self._note("64 MB: times sent", (compute.stats().bytes_sent - sent) / BYTES)
            relayed = self._provider.tell(do="relayed")
            self._note("64 MB: depth", relayed["depth"])
            self._note("64 MB: passed on", relayed["served"])

    def _loss(self, compute: sky.Compute) -> None:
        count = max(1, self._nodes // LOST_SHARE)
        done: list[float] = []
        start = time.monotonic()
        tasks = [wait_3() > compute for _ in range(self._nodes)]
        for task in tasks:
            task.add_done_callback(lambda _: done.append(time.monotonic() - start))
        self._note("submitted", time.monotonic() - start)
        time.sleep(0.5)
        assert not done
        lost = compute.stats().nodes_lost
        client = time.process_time()
        self._provider.tell(do="remove", nodes=list(range(0, self._nodes, LOST_SHARE)))
        killed = time.monotonic()
        await_that(lambda: compute.stats().nodes_lost - lost >= count)
        self._note("loss noticed", time.monotonic() - killed)
        back = threading.Thread(target=self._await_whole, args=(compute, killed))
        back.start()
        for task in tasks:
            task.result(120)
        assert compute.stats().nodes_lost - lost == count
        assert compute.stats().retried == count
        # The last of the tasks whose node was not lost.
        self._note("the others", sorted(done)[self._nodes - count - 1] - TASK_SECONDS)
        self._note("retried", max(done))
        back.join()
        self._note("loss: client", time.process_time() - client)
        assert nothing() @ compute == [None] * self._nodes

    def _await_whole(self, compute: sky.Compute, since: float) -> None:
        """Note when all nodes are ready."""
        await_that(
            lambda: sum(node.state == "ready" for node in compute.nodes) == self._nodes, pause=0.1
        )
        self._note("whole again", time.monotonic() - since)


def measured(nodes: int, rounds: int) -> dict[str, list[float]]:
    """The figures of one size, from a process of its own."""
    command = [sys.executable, __file__, "--alone", str(nodes), "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory(prefix="sky-scale-") as state:
        environment = {**os.environ, "SKYWARD_STATE": state}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{nodes} nodes: {done.stderr.strip()[-3000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def rows_of(nodes: int, figures: dict[str, list[float]]) -> Iterator[Row]:
    """The lines of the table for one size; the bars are those of a thousand nodes."""

    def sample(name: str, unit: str = "s") -> Sample:
        return Sample(tuple(figures[name]), unit)

    def processors(name: str) -> str:
        client, simulated = sample(f"{name}: client"), sample(f"{name}: simulation")
        return f"client {figure(client.median, 's')}, simulation {figure(simulated.median, 's')}"

    def shared(row: Row, name: str) -> Row:
        """The row, with the processor time of both sides beside it."""
        return Row(
            row.what,
            row.ours,
            "processor time",
            processors(name),
            bar=row.bar,
            met=row.met,
            spread=row.spread,
        )

    where = f"{nodes} nodes: "
    yield shared(absolute(f"{where}start", sample("start")), "start")
    yield shared(absolute(f"{where}end", sample("end")), "end")
    yield shared(
        absolute(f"{where}broadcast of nothing", sample("nothing"), "< 1 s", 1.0), "nothing"
    )
    yield shared(absolute(f"{where}64 MB to all", sample("64 MB")), "64 MB")
    times = sample("64 MB: times sent").median
    yield claim(f"{where}64 MB leave the client", f"{times:.3f} times", "<= 2", times <= 2)
    depth, passed_on = (int(max(figures[f"64 MB: {what}"])) for what in ("depth", "passed on"))
    yield Row(f"{where}64 MB go down", f"{depth} steps, each node passes on {passed_on}")
    beats, simulated = figures["heartbeats"][0], figures["heartbeats: simulation"][0]
    yield Row(
        f"{where}idle client",
        f"{beats:.1%} of a processor",
        "simulation",
        f"{simulated:.1%}",
    )
    used = [int(figures[name][0]) for name in ("threads", "threads of a broadcast")]
    yield claim(
        f"{where}threads, idle and in a broadcast",
        f"{used[0]} and {used[1]}",
        f"<= {THREADS_MOST}",
        max(used) <= THREADS_MOST,
    )
    others = [int(figures[f"threads at the {when}"][0]) for when in ("start", "end")]
    yield Row(f"{where}threads, at the start and the end", f"{others[0]} and {others[1]}")
    # What the client has open for itself, such as a selector and a pipe, is no node's.
    each, besides = divmod(int(figures["descriptors"][0]), nodes)
    yield claim(
        f"{where}descriptors",
        f"{each} a node, {besides} besides",
        f"<= {DESCRIPTORS_MOST} a node",
        each <= DESCRIPTORS_MOST and besides < OWN_DESCRIPTORS,
    )
    yield Row(f"{where}memory a node", figure(figures["memory a node"][0], "B"))
    lost = max(1, nodes // LOST_SHARE)
    yield absolute(f"{where}loss of {lost} noticed", sample("loss noticed"))
    yield absolute(f"{where}its tasks done elsewhere, after the call", sample("retried"))
    yield absolute(f"{where}the other tasks, later than without a loss", sample("the others"))
    yield absolute(f"{where}all nodes back", sample("whole again"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", help="sizes of the pools")
    parser.add_argument("--rounds", type=int, default=9, help="broadcasts of each kind")
    parser.add_argument("--quick", action="store_true", help="10 nodes: a smoke test")
    parser.add_argument("--rows", type=Path, help="write the rows here as JSON, print nothing")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        with simulation() as provider:
            trial = Trial(provider, options.alone, options.rounds)
            trial.run()
        print(json.dumps(trial.figures))
        return
    rows: list[Row] = []
    for nodes in options.nodes or (SIZES[:1] if options.quick else SIZES):
        start = time.perf_counter()
        try:
            rows += rows_of(nodes, measured(nodes, options.rounds))
        except (RuntimeError, ValueError) as problem:
            rows.append(Row(f"{nodes} nodes", str(problem).splitlines()[-1], failed=True))
            say(str(problem))
        say(f"  {nodes} nodes: {time.perf_counter() - start:.1f} s")
    if options.rows:
        save(rows, options.rows)
    else:
        print(text_table(rows))
    sys.exit(1 if any(row.failed for row in rows) else 0)


if __name__ == "__main__":
    main()
