"""Runs seeds: each in a fork of a process that has everything loaded."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .scenario import Scenario

PROGRAMS = 24
REAL_SECONDS = 120
"""A seed that takes longer is stuck in the simulator itself, or in a loop that never waits."""
SHOWN = 60
"""So many lines of a history are shown that are about what failed, and the last ones."""
LAST_SHOWN = 10
CALLS_AT_ONCE = 8
TOLD = 5
"""Of so many failures the histories are shown."""
FOUND = 3
"""The exit status when a seed has failed: Python ends with 1 by itself, argparse with 2."""
SHRINK_RUNS, SHRINK_SECONDS = 40, 60.0
"""How often, and how long, a seed that failed is run again without some of its faults."""
COMMAND = "python -m tests.simulation"
SCENARIOS = {"pool": 6, "cloud": 2, "shared": 2, "store": 2, "jobs": 1, "many": 1, "links": 4}
"""How often each is chosen."""


@dataclass
class Outcome:
    """How a seed has ended."""

    seed: int
    scenario: str = ""
    problem: str = ""
    history: list[str] = field(default_factory=list)
    stacks: str = ""
    seconds: float = 0.0
    virtual: float = 0.0
    steps: int = 0
    digest: str = ""
    faults: dict[str, str] = field(default_factory=dict)
    """What went wrong, by the names of the faults."""
    without: list[str] = field(default_factory=list)
    """The faults that were left out."""
    counts: dict[str, int] = field(default_factory=dict)
    crashed: bool = False
    """Whether the simulator did not end it: that says nothing of the code that it runs."""


def chosen(seed: int) -> str:
    """The scenario of a seed."""
    return Random(f"scenario {seed}").choices(list(SCENARIOS), list(SCENARIOS.values()))[0]


def scenario(name: str) -> type[Scenario]:
    """The class of a scenario: that of the same name as its module."""
    found: type[Scenario] = getattr(importlib.import_module(f"{__package__}.{name}"), name.title())
    return found


def run_here(seed: int, name: str, without: Collection[str] = ()) -> Outcome:
    """Run a seed in this process, which is good for nothing else afterwards."""
    from .world import world

    began = time.process_time()
    outcome = Outcome(seed, name, without=sorted(without))
    here = world(PROGRAMS)
    try:
        running = scenario(name)(here, seed)
        running.without = frozenset(without)
        try:
            running.run()
        except BaseException:
            outcome.problem = traceback.format_exc()
        else:
            outcome.problem = "\n".join(running.broken)
        outcome.counts = {name: 1, **running.counts}
        outcome.faults = running.faults
    except BaseException:
        outcome.problem, outcome.crashed = traceback.format_exc(), True
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


def _child(
    seed: int, name: str, writing: int, without: Collection[str], *, history: bool
) -> NoReturn:
    """Run a seed, and write how it has ended."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(REAL_SECONDS)
    try:
        outcome = run_here(seed, name, without)
        if not outcome.problem and not history:
            outcome.history = []
        _write(outcome, writing)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    # The threads of the run are left as they are: to end them would run what they do at an end.
    os._exit(0)


def _write(outcome: Outcome, writing: int) -> None:
    data = json.dumps(asdict(outcome)).encode() + b"\n"
    while data:
        data = data[os.write(writing, data) :]


def show(seed: int, only: str | None, without: Collection[str]) -> int:
    """Run one seed, perhaps without some of its faults, and print all that is known of it."""
    (outcome,) = _outcomes([seed], only, jobs=1, history=True, without=without)
    print("\n".join(outcome.history))
    print(_summary(outcome))
    if outcome.problem:
        print(outcome.stacks)
        print(outcome.problem)
    return 1 if outcome.problem else 0


def _summary(outcome: Outcome) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.counts.items()))
    how = "FAILED" if outcome.problem else "held"
    return (
        f"seed {outcome.seed} of {outcome.scenario}: {how} after "
        f"{outcome.virtual:,.1f} s in {outcome.seconds:.2f} s, {outcome.steps:,} steps, "
        f"digest {outcome.digest}; {counts}"
    )


def run(
    seeds: Sequence[int], only: str | None, jobs: int, seconds: float | None, twice: bool
) -> int:
    """Run seeds on several processes; print what failed, and how to see it again."""
    began = time.monotonic()
    failed: list[Outcome] = []
    done, virtual, spent = 0, 0.0, 0.0
    counts: Counter[str] = Counter()
    digests: dict[int, str] = {}
    for outcome in _outcomes(list(seeds), only, jobs, seconds=seconds, times=2 if twice else 1):
        done += 1
        virtual += outcome.virtual
        spent += outcome.seconds
        counts.update(outcome.counts)
        before = digests.setdefault(outcome.seed, outcome.digest)
        if before != outcome.digest:
            outcome.problem += f"\ntwo runs differ: {before} and {outcome.digest}"
        if outcome.problem:
            failed.append(outcome)
    for outcome in failed[:TOLD]:
        _tell(outcome)
    asked = len(seeds) * (2 if twice else 1)
    if done < asked:
        print(f"{asked - done:,} seeds were not begun within {seconds:g} s")
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    print(
        f"{done:,} seeds, {virtual / 3600:,.1f} h of pools in {time.monotonic() - began:,.0f} s "
        f"({spent / max(done, 1):.3f} s of processor time each); {told}"
    )
    if failed:
        print(f"{len(failed):,} failed: {' '.join(str(each.seed) for each in failed[:50])}")
        return 1
    return 0


def find(seeds: Sequence[int], only: str | None, jobs: int) -> int:
    """Run seeds until one fails; say how many it took. A crash is told, and does not count."""
    began = time.monotonic()
    outcomes = _outcomes(list(seeds), only, jobs)
    crashed = 0
    for count, outcome in enumerate(outcomes, 1):
        if outcome.crashed:
            crashed += 1
            print(f"seed {outcome.seed} of {outcome.scenario}: {outcome.problem}", flush=True)
        elif outcome.problem:
            outcomes.close()
            lines = outcome.problem.strip().splitlines()
            what = lines[-1 if lines[0].startswith("Traceback") else 0]
            print(
                f"found with seed {outcome.seed} of {outcome.scenario}, after {count:,} seeds and "
                f"{time.monotonic() - began:,.0f} s: {what[:200]}",
                flush=True,
            )
            return FOUND
    print(f"not found, {crashed} crashed" if crashed else "not found", flush=True)
    return 1 if crashed else 0


def _outcomes(
    seeds: list[int],
    only: str | None,
    jobs: int,
    *,
    seconds: float | None = None,
    history: bool = False,
    times: int = 1,
    without: Collection[str] = (),
) -> Generator[Outcome, None, None]:
    """How seeds end, on several processes, as they end."""
    from .world import world

    # Before the forks, so that all run the same.
    for each in SCENARIOS:
        scenario(each)
    world(PROGRAMS)
    pipes, workers = [], []
    for job in range(jobs):
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            os.close(reading)
            mine = [seed for seed in seeds[job::jobs] for _ in range(times)]
            _work(mine, only, writing, seconds, without, history=history)
        os.close(writing)
        with contextlib.suppress(OSError):
            os.setpgid(worker, worker)
        workers.append(worker)
        pipes.append(os.fdopen(reading, "r"))
    waiting = list(pipes)
    try:
        while waiting:
            for file in select.select(waiting, [], [])[0]:
                line = file.readline()
                if line:
                    yield Outcome(**json.loads(line))
                else:
                    waiting.remove(file)
    finally:
        for worker in workers:
            # With the seed that it runs now, if nobody wants to know the rest.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def _work(
    seeds: list[int],
    only: str | None,
    writing: int,
    seconds: float | None,
    without: Collection[str],
    *,
    history: bool,
) -> NoReturn:
    """Run each seed in a fork of this process, which does nothing else: so they start alike."""
    deadline = time.monotonic() + (1e9 if seconds is None else seconds)
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        pid = os.fork()
        if pid == 0:
            _child(seed, only or chosen(seed), writing, without, history=history)
        _, status = os.waitpid(pid, 0)
        if status:
            what = f"no end after {REAL_SECONDS} s of real time, or a crash: status {status}"
            _write(Outcome(seed, only or chosen(seed), problem=what, crashed=True), writing)
    os._exit(0)


def _tell(outcome: Outcome) -> None:
    """Print what failed: with the fewest faults that it takes, and only what is about it."""
    needed = _with_fewest_faults(outcome)
    print(f"\n{_summary(needed)}")
    print("\n".join(about(needed)))
    print(needed.problem)
    faults = [f"{name} ({what})" for name, what in needed.faults.items()]
    print(f"it takes the faults {', '.join(faults)}" if faults else "it takes no fault")
    command = f"{COMMAND} --seed {outcome.seed} --scenario {outcome.scenario}"
    if needed.without:
        print(f"again, with these faults alone: {command} --without {','.join(needed.without)}")
    print(f"again, with its whole history: {command}\n", flush=True)


def _with_fewest_faults(outcome: Outcome) -> Outcome:
    """Run a seed that failed again without one fault after the other, as long as it fails so."""
    best = outcome
    tries = [list(outcome.faults), *([name] for name in reversed(outcome.faults))]
    deadline = time.monotonic() + SHRINK_SECONDS
    for leaving in tries[:SHRINK_RUNS]:
        if time.monotonic() > deadline or not best.faults:
            break
        without = sorted({*best.without, *leaving})
        (again,) = _outcomes([outcome.seed], outcome.scenario, 1, without=without)
        if _kind(again) == _kind(outcome):
            best = again
    return best


def _kind(outcome: Outcome) -> str:
    """What failed, without the numbers in it."""
    lines = outcome.problem.strip().splitlines()
    return re.sub(r"\d+", "N", lines[-1])[:60] if lines else ""


def about(outcome: Outcome) -> list[str]:
    """The lines of a history that are about what failed, and its last ones."""
    problem = outcome.problem
    words = set(re.findall(r"\b[a-z]+-\d{4,}\b|\bcounter-\d+|\bnode \d+\b|\bhost\d+", problem))
    words |= {f"host{each.split()[1]}" for each in words if each.startswith("node ")}
    calls = {int(each) for each in re.findall(r"\b\d{5,}\b", problem)}

    def is_about(line: str) -> bool:
        if "FAULT" in line or "DOES NOT HOLD" in line or any(word in line for word in words):
            return True
        # An operation has several calls, from its own number on.
        found = map(int, re.findall(r"\b\d{5,}\b", line))
        return any(number <= call < number + CALLS_AT_ONCE for number in found for call in calls)

    last = outcome.history[-LAST_SHOWN:]
    lines = [each for each in outcome.history[:-LAST_SHOWN] if is_about(each)]
    left_out = len(outcome.history) - len(last) - len(lines[-SHOWN:])
    return [f"({left_out:,} lines of its history are left out)", *lines[-SHOWN:], *last]
