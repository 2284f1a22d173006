"""What a call costs: latency, throughput, start-up and scheduling.

Nothing here imports torch: the pool has to be quick for people who do not use it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from measure import Sample, interleave, p50, timed
from peers import running_peers
from report import Row, absent, absolute, claim, compared, run_suite

import skyward as sky
from skyward.calls.scheduler import Load, Scheduler

QUIET = sky.Options(console=False)
PROCESS_POOL = "ProcessPoolExecutor"


def plain_noop() -> None:
    return None


def plain_tiny(i: int) -> int:
    return i


@sky.function
def noop() -> None:
    return None


@sky.function
def tiny(i: int) -> int:
    return i


@sky.function
def torch_is_loaded() -> bool:
    import sys

    return "torch" in sys.modules


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    rounds: int
    calls: int
    tasks: int
    starts: int


FULL = Size(rounds=15, calls=200, tasks=5000, starts=5)
QUICK = Size(rounds=3, calls=50, tasks=1000, starts=2)


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A process pool whose workers run: they are forked before this process has other threads."""
    with ProcessPoolExecutor(workers) as executor:
        list(executor.map(plain_tiny, range(workers)))
        yield executor


def call_latency(size: Size) -> Sequence[Row]:
    """One call at a time, one worker, nothing to carry."""
    what = "no-op call, p50"
    with ExitStack() as stack:
        executor = stack.enter_context(process_pool(1))
        compute = stack.enter_context(sky.Compute(options=QUIET))

        def through_skyward() -> float:
            return p50(lambda: noop() >> compute, size.calls)

        def through_process_pool() -> float:
            return p50(lambda: executor.submit(plain_noop).result(), size.calls)

        # Before Ray and Dask are there: on a small machine their daemons show in 100 µs.
        alone = interleave(
            {"skyward": through_skyward, PROCESS_POOL: through_process_pool},
            rounds=size.rounds,
            warmups=2,
        )
        peers, missing = running_peers(stack)
        together = interleave(
            {
                "skyward": through_skyward,
                **{name: partial(peer.noop, size.calls) for name, peer in peers.items()},
            },
            rounds=size.rounds,
            warmups=2,
        )
    ours = together["skyward"]
    return [
        compared(what, alone["skyward"], PROCESS_POOL, alone[PROCESS_POOL], "<= 0.7x"),
        *(
            compared(f"{what}, beside them", ours, peer.label, together[name], "< 1x")
            for name, peer in peers.items()
        ),
        *(absent(what, name.capitalize(), why, ours) for name, why in missing.items()),
    ]


def many_tiny_tasks(size: Size) -> Sequence[Row]:
    """Thousands of calls at once on two workers."""
    with ExitStack() as stack:
        executor = stack.enter_context(process_pool(2))
        peers, missing = running_peers(stack)
        compute = stack.enter_context(sky.Compute(nodes=2, options=QUIET))

        def gather() -> None:
            results = sky.gather(*[tiny(i) for i in range(size.tasks)]) >> compute
            assert list(results) == list(range(size.tasks))

        seconds = interleave(
            {
                "skyward": lambda: timed(gather),
                PROCESS_POOL: lambda: timed(
                    lambda: list(executor.map(plain_tiny, range(size.tasks)))
                ),
                **{name: partial(peer.tiny, size.tasks) for name, peer in peers.items()},
            },
            rounds=max(3, size.rounds // 3),
            warmups=1,
        )
        rates = {name: sample.per(size.tasks, "tasks/s") for name, sample in seconds.items()}
        ours = rates["skyward"]
        what = f"{size.tasks:,} tiny tasks, gather"
        bars = {"ray": ">= 3x"}
        return [
            *(
                compared(what, ours, peer.label, rates[name], bars.get(name, ""))
                for name, peer in peers.items()
            ),
            *(absent(what, name.capitalize(), why, ours) for name, why in missing.items()),
            compared(what, ours, f"{PROCESS_POOL}.map", rates[PROCESS_POOL]),
        ]


def start_up(size: Size) -> Sequence[Row]:
    """From nothing to the first answer of two nodes."""
    loaded: list[bool] = []

    def start_in_this_process() -> float:
        start = time.perf_counter()
        with sky.Compute(nodes=2, options=QUIET) as compute:
            noop() >> compute
            taken = time.perf_counter() - start
            loaded.extend(torch_is_loaded() @ compute)
            return taken

    def start_in_a_new_one() -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", FRESH], check=True))

    samples = interleave(
        {"here": start_in_this_process, "new": start_in_a_new_one},
        rounds=size.starts,
        warmups=1,
    )
    torch_free = not any(loaded) and "torch" not in sys.modules
    return [
        absolute("2 nodes: ready and first call answered", samples["here"], "< 2 s", 2.0),
        absolute("the same as a program: start, import, pool, call, exit", samples["new"]),
        claim(
            "torch in client or workers", "none" if torch_free else "imported", "none", torch_free
        ),
    ]


FRESH = """
import skyward as sky

@sky.function
def one():
    return 1

with sky.Compute(nodes=2, options=sky.Options(console=False)) as compute:
    assert one() >> compute == 1
"""


def broadcast(size: Size) -> Sequence[Row]:
    """The same call on both nodes at once, next to the same call on one of them."""
    firsts: list[float] = []
    for _ in range(size.starts):
        with sky.Compute(nodes=2, options=QUIET) as compute:
            firsts.append(timed(lambda compute=compute: noop() @ compute))
    with sky.Compute(nodes=2, options=QUIET) as compute:
        samples = interleave(
            {
                "both": lambda: p50(lambda: noop() @ compute, size.calls),
                "one": lambda: p50(lambda: noop() >> compute, size.calls),
            },
            rounds=size.rounds,
        )
    return [
        compared("no-op broadcast to 2 nodes, p50", samples["both"], "one >>", samples["one"]),
        absolute("first broadcast of a pool", Sample(tuple(firsts))),
    ]


@dataclass(slots=True, eq=False)
class SimulatedTask:
    """As much of a task as the scheduler looks at."""

    id: int
    on: int | None = None
    worker: tuple[int, int] | None = None
    pinned: Load[SimulatedTask] | None = None
    waiting: bool = True
    order: int = 0
    apart: bool = False
    depth: int = 0


def any_node(task: int, nodes: int) -> SimulatedTask:
    return SimulatedTask(task)


def one_node(task: int, nodes: int) -> SimulatedTask:
    return SimulatedTask(task, on=task % nodes)


def one_worker(task: int, nodes: int) -> SimulatedTask:
    return SimulatedTask(task, worker=(task % nodes, 0))


def scheduling_cost(
    nodes: int,
    describe: Callable[[int, int], SimulatedTask] = any_node,
    *,
    tasks: int = 5000,
    ran: float = 1e-4,
) -> float:
    """Processor seconds per task to place `tasks` on simulated nodes, first come first served.

    All arrive at once, each ends in the order it began after `ran` seconds of simulated time, and
    the place it leaves is given what waits: the steps the pool takes, without its processes.
    """
    scheduler: Scheduler[SimulatedTask] = Scheduler()
    for node in range(nodes):
        scheduler.add(Load(node, 0, 0))
    arriving = [describe(task, nodes) for task in range(tasks)]
    running: deque[tuple[Load[SimulatedTask], int]] = deque()
    ended = 0

    start = time.thread_time()
    for task in arriving:
        load = scheduler.pick(task)
        if load is None:
            scheduler.queue(task)
        else:
            scheduler.begin(load, task)
            running.append((load, task.id))
    while running:
        load, task_id = running.popleft()
        scheduler.end(load, task_id)
        load.note(ran)
        ended += 1
        while (following := scheduler.next_for(load)) is not None:
            scheduler.begin(load, following)
            running.append((load, following.id))
    taken = time.thread_time() - start
    assert ended == tasks
    return taken / tasks


def scheduling(size: Size) -> Sequence[Row]:
    """What placing one task costs on few nodes and on many."""
    rows = []
    for describe in (any_node, one_node, one_worker):
        samples = interleave(
            {
                "few": partial(scheduling_cost, 2, describe, tasks=size.tasks),
                "many": partial(scheduling_cost, 64, describe, tasks=size.tasks),
            },
            rounds=size.rounds,
        )
        aim = describe.__name__.replace("_", " ")
        rows.append(
            compared(
                f"scheduling a task for {aim} of 64",
                samples["many"],
                f"{aim} of 2",
                samples["few"],
                "<= 1.25x",
            )
        )
    return rows


if __name__ == "__main__":
    run_suite(
        "what a call costs",
        [call_latency, many_tiny_tasks, start_up, broadcast, scheduling],
        full=FULL,
        quick=QUICK,
    )
