"""Runs seeds: each in a fork of a process that has everything loaded."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import NoReturn

PROGRAMS = 24
REAL_SECONDS = 120.0
"""A seed that takes longer is stuck in the simulator itself, or in a loop that never waits."""
SHOWN = 40
COMMAND = "python -m tests.simulation --seed"


@dataclass
class Outcome:
    """How a seed has ended."""

    seed: int
    problem: str = ""
    history: list[str] = field(default_factory=list)
    stacks: str = ""
    seconds: float = 0.0
    virtual: float = 0.0
    steps: int = 0
    digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def run_here(seed: int) -> Outcome:
    """Run a seed in this process, which is good for nothing else afterwards."""
    from .pool import Pool
    from .world import world

    began = time.process_time()
    outcome = Outcome(seed)
    here = world(PROGRAMS)
    try:
        pool = Pool(here, seed)
        try:
            pool.run()
        except BaseException:
            outcome.problem = traceback.format_exc()
        else:
            outcome.problem = "\n".join(pool.broken)
        outcome.counts = dict(pool.counts)
    except BaseException:
        outcome.problem = traceback.format_exc()
    kernel = here.kernel
    outcome.history = list(kernel.history)
    outcome.digest = hashlib.sha256("\n".join(kernel.history).encode()).hexdigest()[:16]
    if outcome.problem:
        outcome.stacks = kernel.stacks()
    outcome.seconds = time.process_time() - began
    outcome.virtual = kernel.now - 1000
    outcome.steps = kernel.steps
    here.end()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return outcome


def run_forked(seed: int) -> Outcome:
    """Run a seed in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            outcome = run_here(seed)
            if not outcome.problem:
                outcome.history = []
            with os.fdopen(writing, "wb") as file:
                file.write(json.dumps(asdict(outcome)).encode())
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(0)
    os.close(writing)
    data = b""
    deadline = time.monotonic() + REAL_SECONDS
    with os.fdopen(reading, "rb", buffering=0) as file:
        while True:
            ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(pid, signal.SIGKILL)
                break
            part = file.read(1 << 20)
            if not part:
                break
            data += part
    os.waitpid(pid, 0)
    if not data:
        return Outcome(seed, problem=f"no end after {REAL_SECONDS:g} s of real time, or a crash")
    return Outcome(**json.loads(data))


def show(seed: int) -> NoReturn:
    """Run one seed, and print all that is known of it."""
    from .world import world

    world(PROGRAMS)
    outcome = run_here(seed)
    print("\n".join(outcome.history))
    print(_summary(outcome))
    if outcome.problem:
        print(outcome.stacks)
        print(outcome.problem)
    sys.stdout.flush()
    # The threads of the run are left as they are: to end them would run what they do at an end.
    os._exit(1 if outcome.problem else 0)


def _summary(outcome: Outcome) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.counts.items()))
    return (
        f"seed {outcome.seed}: {'FAILED' if outcome.problem else 'held'} after "
        f"{outcome.virtual:,.1f} s in {outcome.seconds:.2f} s, {outcome.steps:,} steps, "
        f"digest {outcome.digest}; {counts}"
    )


def run(seeds: Iterable[int], jobs: int, seconds: float | None, twice: bool) -> int:
    """Run seeds on several processes; print what failed, and how to see it again."""
    began = time.monotonic()
    todo = list(seeds)
    pipes = []
    for job in range(jobs):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            with os.fdopen(writing, "w") as lines:
                _work(todo[job::jobs], lines, began, seconds, twice)
            os._exit(0)
        os.close(writing)
        pipes.append(os.fdopen(reading, "r"))
    failed: list[Outcome] = []
    done, virtual, spent = 0, 0.0, 0.0
    counts: dict[str, int] = {}
    waiting = list(pipes)
    while waiting:
        for file in select.select(waiting, [], [])[0]:
            line = file.readline()
            if not line:
                waiting.remove(file)
                continue
            outcome = Outcome(**json.loads(line))
            done += 1
            virtual += outcome.virtual
            spent += outcome.seconds
            for name, count in outcome.counts.items():
                counts[name] = counts.get(name, 0) + count
            if outcome.problem:
                failed.append(outcome)
                _tell(outcome)
    for _ in range(jobs):
        os.wait()
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    print(
        f"{done:,} seeds, {virtual / 3600:,.1f} h of pools in {time.monotonic() - began:,.0f} s "
        f"({spent / max(done, 1):.3f} s of processor time each); {told}"
    )
    if failed:
        print(f"{len(failed):,} failed: {' '.join(str(each.seed) for each in failed[:50])}")
        return 1
    return 0


def _work(seeds: list[int], lines, began: float, seconds: float | None, twice: bool) -> None:  # type: ignore[no-untyped-def]
    from .world import world

    world(PROGRAMS)
    for seed in seeds:
        if seconds is not None and time.monotonic() - began > seconds:
            break
        outcome = run_forked(seed)
        if twice and not outcome.problem:
            again = run_forked(seed)
            if again.digest != outcome.digest:
                outcome.problem = f"two runs differ: {outcome.digest} and {again.digest}"
        print(json.dumps(asdict(outcome)), file=lines, flush=True)


def _tell(outcome: Outcome) -> None:
    print(f"\n{_summary(outcome)}")
    print("\n".join(outcome.history[-SHOWN:]))
    print(outcome.problem)
    print(f"again, with its whole history: {COMMAND} {outcome.seed}\n", flush=True)
