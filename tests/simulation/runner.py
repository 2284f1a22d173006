"""Runs seeds: each in a fork of a process that has everything loaded."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .scenario import Scenario

PROGRAMS = 24
REAL_SECONDS = 120
"""A seed that takes longer is stuck in the simulator itself, or in a loop that never waits."""
SHOWN = 40
COMMAND = "python -m tests.simulation"
SCENARIOS = {"pool": 1}
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
    counts: dict[str, int] = field(default_factory=dict)


def chosen(seed: int) -> str:
    """The scenario of a seed."""
    return Random(f"scenario {seed}").choices(list(SCENARIOS), list(SCENARIOS.values()))[0]


def scenario(name: str) -> type[Scenario]:
    """The class of a scenario: that of the same name as its module."""
    found: type[Scenario] = getattr(importlib.import_module(f"{__package__}.{name}"), name.title())
    return found


def run_here(seed: int, name: str) -> Outcome:
    """Run a seed in this process, which is good for nothing else afterwards."""
    from .world import world

    began = time.process_time()
    outcome = Outcome(seed, name)
    here = world(PROGRAMS)
    try:
        running = scenario(name)(here, seed)
        try:
            running.run()
        except BaseException:
            outcome.problem = traceback.format_exc()
        else:
            outcome.problem = "\n".join(running.broken)
        outcome.counts = {name: 1, **running.counts}
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


def _child(seed: int, name: str, writing: int, *, history: bool) -> NoReturn:
    """Run a seed, and write how it has ended."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(REAL_SECONDS)
    try:
        outcome = run_here(seed, name)
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


def show(seed: int, only: str | None) -> int:
    """Run one seed, and print all that is known of it."""
    (outcome,) = _outcomes([seed], only, jobs=1, history=True)
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
    seeds: Iterable[int], only: str | None, jobs: int, seconds: float | None, twice: bool
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
            _tell(outcome)
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
    print(
        f"{done:,} seeds, {virtual / 3600:,.1f} h of pools in {time.monotonic() - began:,.0f} s "
        f"({spent / max(done, 1):.3f} s of processor time each); {told}"
    )
    if failed:
        print(f"{len(failed):,} failed: {' '.join(str(each.seed) for each in failed[:50])}")
        return 1
    return 0


def _outcomes(
    seeds: list[int],
    only: str | None,
    jobs: int,
    *,
    seconds: float | None = None,
    history: bool = False,
    times: int = 1,
) -> Iterator[Outcome]:
    """How seeds end, on several processes, as they end."""
    from .world import world

    # Before the forks, so that all run the same.
    for each in SCENARIOS:
        scenario(each)
    world(PROGRAMS)
    pipes = []
    for job in range(jobs):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            mine = [seed for seed in seeds[job::jobs] for _ in range(times)]
            _work(mine, only, writing, seconds, history=history)
        os.close(writing)
        pipes.append(os.fdopen(reading, "r"))
    waiting = list(pipes)
    while waiting:
        for file in select.select(waiting, [], [])[0]:
            line = file.readline()
            if line:
                yield Outcome(**json.loads(line))
            else:
                waiting.remove(file)
    for _ in range(jobs):
        os.wait()


def _work(
    seeds: list[int], only: str | None, writing: int, seconds: float | None, *, history: bool
) -> NoReturn:
    """Run each seed in a fork of this process, which does nothing else: so they start alike."""
    deadline = time.monotonic() + (1e9 if seconds is None else seconds)
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        pid = os.fork()
        if pid == 0:
            _child(seed, only or chosen(seed), writing, history=history)
        _, status = os.waitpid(pid, 0)
        if status:
            what = f"no end after {REAL_SECONDS} s of real time, or a crash: status {status}"
            _write(Outcome(seed, only or chosen(seed), problem=what), writing)
    os._exit(0)


def _tell(outcome: Outcome) -> None:
    print(f"\n{_summary(outcome)}")
    print("\n".join(outcome.history[-SHOWN:]))
    print(outcome.problem)
    print(
        f"again, with its whole history: {COMMAND} --seed {outcome.seed} "
        f"--scenario {outcome.scenario}\n",
        flush=True,
    )
