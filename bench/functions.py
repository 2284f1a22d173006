"""What a call costs: latency, throughput, start-up and scheduling.

Nothing here imports torch: the pool has to be quick for people who do not use it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from measure import Sample, interleave, p50, timed
from peers import Peer, running_peers
from report import Row, absent, absolute, claim, compared, run_suite

import skyward as sky

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
    with ExitStack() as stack:
        executor = stack.enter_context(process_pool(1))
        peers, missing = running_peers(stack)
        compute = stack.enter_context(sky.Compute(options=QUIET))

        def through(peer: Peer) -> float:
            return peer.noop(size.calls)

        samples = interleave(
            {
                "skyward": lambda: p50(lambda: noop() >> compute, size.calls),
                PROCESS_POOL: lambda: p50(lambda: executor.submit(plain_noop).result(), size.calls),
                **{name: lambda peer=peer: through(peer) for name, peer in peers.items()},
            },
            rounds=size.rounds,
            warmups=2,
        )
        ours = samples["skyward"]
        what = "no-op call, p50"
        return [
            compared(what, ours, PROCESS_POOL, samples[PROCESS_POOL], "<= 1.2x"),
            *(
                compared(what, ours, peer.label, samples[name], "< 1x")
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

        def through(peer: Peer) -> float:
            return peer.tiny(size.tasks)

        seconds = interleave(
            {
                "skyward": lambda: timed(gather),
                PROCESS_POOL: lambda: timed(
                    lambda: list(executor.map(plain_tiny, range(size.tasks)))
                ),
                **{name: lambda peer=peer: through(peer) for name, peer in peers.items()},
            },
            rounds=max(3, size.rounds // 2),
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


if __name__ == "__main__":
    run_suite(
        "what a call costs",
        [call_latency, many_tiny_tasks, start_up, broadcast],
        full=FULL,
        quick=QUICK,
    )
