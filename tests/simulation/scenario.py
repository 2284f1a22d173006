"""What all scenarios share: the faults that a seed chooses, and what is said of what they break."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from .kernel import Process, Stuck
from .network import Wire
from .world import World

END_SECONDS = 700.0
"""So long after its clients have left or died, nothing is left of a pool."""
MOST_SECONDS = 10_000.0
"""A client that is still there then hangs."""
MOMENTS = {
    "call": (30, 300, 3000),
    "send": (3, 30, 300),
    "connect": (2, 10),
    "start": (2, 6),
    "end": (2, 6),
}
"""Of which events of a run faults come at the n-th, and up to which n."""
LATE_SECONDS = (0.01, 0.3, 3.0, 9.0)
"""So late at most is what an end of a connection sends; after 10 s, probes would have failed."""
HARMLESS = frozenset(("clock", "cut", "late", "silence"))
"""Faults that a call may notice by no more than a delay."""


class Scenario:
    """One run: what processes do, and what happens to them, as a seed says."""

    killed: tuple[str, ...] = ()
    """The names of processes that are faults of their own kind: they are killed."""
    stopped: tuple[str, ...] = ()
    """The names of processes that may stop for a while."""
    crowded: tuple[str, ...] = ()
    """The fault "memory", where processes start that the kernel kills when there is none."""
    spans: tuple[float, ...] = (0.002, 0.01, 0.05, 0.3, 1.0, 5.0, 20.0, 100.0)
    """Within how many seconds the next fault comes, if it does not wait for a moment."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.kernel = world.kernel
        self.network = world.machinery.network
        self.random = Random(f"plan {seed}")
        self.broken: list[str] = []
        """What did not hold."""
        self.counts: Counter[str] = Counter()
        self.kinds: set[str] = set()
        """The kinds of faults of this run."""
        self.nodes = 1
        self.fault = ""
        """The name of the fault that comes now."""
        self.over = False
        """Whether nothing goes wrong any more."""
        self.earliest = 1000.0 + self.kernel.wall
        """The earliest time of the wall clock in this run."""
        self.longest_ahead = 0.0
        """How far it has been after that time at most, at a jump."""
        self.failing: list[str] = []
        """The errors that the next writes of files meet."""
        self.seed = seed
        self.without: frozenset[str] = frozenset()
        """The faults that are left out, by their names."""
        self.faults: dict[str, str] = {}
        """What went wrong, by the names of the faults."""
        world.begin(seed)
        self._choose_order(Random(f"order {seed}"))
        world.machinery.disk.check = self._disk

    def run(self) -> None:
        """Run what the scenario is of, and check what must hold."""
        raise NotImplementedError

    def _choose_order(self, random: Random) -> None:
        """Choose how often threads pause in this run, and whether its machines are busy."""
        self.kernel.pauses = random.choice((4.0, 16.0, 16.0, 64.0))
        self.kernel.lag = random.choice((0.0, 0.0, 0.03, 0.2))

    def _choose_faults(self) -> None:
        """Have one to three kinds of faults in most runs: some things break by two together."""
        if self.random.random() < 0.75:
            kinds = [*self.killed, *self.crowded, "stop", "clock", "disk"]
            if self.world.hosts:
                kinds += ["cut", "cut", "cut", "late", "late", "silence", "partition"]
            self.kinds = {self.random.choice(kinds) for _ in range(self.random.randint(1, 3))}

    def _begin_faults(self) -> None:
        for row in range(self.random.randint(1, 6) if self.kinds else 0):
            self._plan_fault(Random(f"faults {self.seed} {row}"), row, 0)

    def _plan_fault(self, times: Random, row: int, number: int) -> None:
        """Have one fault come, and perhaps others after it."""
        name = f"{row}.{number}"

        def come() -> None:
            if self.over:
                return
            # Each has chances of its own: the others stay as they are if one is left out.
            plan, self.random = self.random, Random(f"fault {self.seed} {name}")
            if name not in self.without:
                self.fault = name
                self._fault()
            self.random = plan
            if times.random() < 0.7:
                self._plan_fault(times, row, number + 1)

        if times.random() < 0.5:
            self._at_random(times, come)
        else:
            # In the middle of something, and not only while all wait.
            kind = times.choice(list(MOMENTS))
            self.kernel.after(kind, times.randint(1, times.choice(MOMENTS[kind])), come)

    def _await(self, process: Process) -> None:
        """Let the world go on until a process has ended."""
        kernel = self.kernel
        kernel.run(lambda: process.dead or kernel.now > 1000 + MOST_SECONDS)
        if not process.dead:
            raise Stuck(f"{process.name} has not ended after {MOST_SECONDS:,.0f} s")

    def _end_faults(self) -> None:
        """Let nothing go wrong any more, and wait until everything has ended."""
        kernel = self.kernel
        self.over = True
        self.failing.clear()
        for process in kernel.processes.values():
            kernel.signal(process, signal.SIGCONT)
        self.network.unreachable.clear()
        deadline = kernel.now + END_SECONDS
        kernel.at(deadline, lambda: None)
        kernel.run(lambda: not kernel.living or kernel.now >= deadline)

    def _living(self) -> list[Process]:
        return [each for each in self.kernel.processes.values() if not each.dead]

    def _says(self, text: str) -> None:
        self.broken.append(text)
        self.kernel.note(f"DOES NOT HOLD: {text}")

    # Faults.

    def _later(self, action: Callable[[], None]) -> None:
        self._at_random(self.random, action)

    def _at_random(self, random: Random, action: Callable[[], None]) -> None:
        seconds = random.choice(self.spans)
        self.kernel.at(self.kernel.now + random.random() * seconds, action)

    def _fault(self) -> None:
        kind = self.random.choice(sorted(self.kinds))
        kernel = self.kernel
        done = ""
        if kind in (*self.killed, "stop"):
            names = self.stopped if kind == "stop" else (kind,)
            found = [each for each in self._living() if each.name.partition("-")[0] in names]
            if found:
                process = self.random.choice(found)
                done = f"{kind} {process.name}"
                if kind != "stop":
                    if kind == "executor" and self.random.random() < 0.3:
                        done += self._hold_up_last(process)
                    kernel.signal(process, signal.SIGKILL)
                elif not process.stopped:
                    kernel.signal(process, signal.SIGSTOP)
                    self._later(lambda: kernel.signal(process, signal.SIGCONT))
        elif kind == "clock":
            seconds = self.random.choice((-86400.0, -60.0, 5.0, 3600.0))
            kernel.wall += seconds
            self.earliest = min(self.earliest, kernel.now + kernel.wall)
            self.longest_ahead = max(self.longest_ahead, self.ahead)
            done = f"the wall clock jumps by {seconds:g} s"
        elif kind == "memory":
            count = self.random.choice((1, 2, 4, 12))
            done = f"the next {count} executors are killed as they start"
            self._kill_starting(self.random, count)
        elif kind == "disk":
            count = self.random.choice((1, 1, 3, 20))
            self.failing += [self.random.choice(("ENOSPC", "EIO"))] * count
            done = f"the next {count} writes fail"
            self._later(self.failing.clear)
        elif kind in ("cut", "late", "silence"):
            wires = self.network.live()
            if wires:
                wire = self.random.choice(wires)
                done = f"{kind} {wire.ends[0].host} to {wire.ends[1].host}"
                if kind == "silence":
                    wire.silence()
                elif kind == "late":
                    done += self._hold_up(wire)
                else:
                    done += self._cut(wire)
        else:
            host = self.random.choice(self._hosts())
            done = f"{kind} {host}"
            self.network.unreachable.add(host)
            for wire in self.network.live():
                if host in (wire.ends[0].host, wire.ends[1].host):
                    wire.silence()
            self._later(lambda: self.network.unreachable.discard(host))
        if done:
            self.counts[kind] += 1
            self.faults[self.fault] = done
            kernel.note(f"FAULT {self.fault}: {done}")

    def _kill_starting(self, random: Random, count: int) -> None:
        """Kill the next processes of that number that run tasks, each as it starts."""
        kernel = self.kernel

        def look() -> None:
            if self.over:
                return
            process, left = kernel.processes[max(kernel.processes)], count
            if process.name.startswith("executor-"):
                left -= 1
                due = kernel.now + random.choice((0.0, 0.002, 0.05)) * random.random()
                kernel.at(due, lambda: kernel.signal(process, signal.SIGKILL))
            if left:
                self._kill_starting(random, left)

        kernel.after("start", 1, look)

    @property
    def ahead(self) -> float:
        """How far the wall clock is after its earliest time."""
        return self.kernel.now + self.kernel.wall - self.earliest

    def _cut(self, wire: Wire) -> str:
        """Cut a connection in one of three ways; says in which."""
        way = self.random.choice(("at once", "when more arrives", "at one end first"))
        if way == "at once":
            wire.cut()
        elif way == "when more arrives":
            wire.tears = True
        else:
            wire.cut_at(self.random.choice(wire.ends), self.random.choice((0.001, 0.1, 5.0)))
        return f", {way}"

    def _hold_up(self, wire: Wire) -> str:
        """Have what one end or both ends of a connection send arrive late; says how late."""
        seconds = self.random.choice(LATE_SECONDS) * self.random.random()
        ends = self.random.choice((wire.ends, wire.ends[:1], wire.ends[1:]))
        for end in ends:
            wire.hold_up(end, seconds)
        return f", from {' and '.join(end.host for end in ends)}, {seconds:.3f} s"

    def _hold_up_last(self, process: Process) -> str:
        """Have the last bytes of a process, and the end of its connections, arrive late."""
        seconds = self.random.choice((0.003, 0.1, 0.5)) * self.random.random()
        files = set(process.descriptors.values())
        for wire in self.network.live():
            for end in files.intersection(wire.ends):
                wire.hold_up(end, seconds)
        return f", its last bytes {seconds:.3f} s late"

    def _hosts(self) -> list[str]:
        """The hosts that may be out of reach."""
        return [f"host{node}" for node in range(self.nodes)]

    def _disk(self, operation: str, what: Any) -> None:
        if self.failing and operation in ("write", "fsync", "mkdir", "rename", "replace", "link"):
            current = self.kernel.current
            if current is None or (isinstance(what, int) and what < 3):
                return
            name = self.failing.pop()
            self.kernel.note(f"{operation} {what} fails: {name}")
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number), what if isinstance(what, str) else None)

    # What is said.

    @contextlib.contextmanager
    def _watched(self, sky: Any, what: str) -> Iterator[None]:
        """Let an error pass that a fault explains; note any other."""
        try:
            yield
        except sky.SkywardError as problem:
            self._expected(problem, what)
        except OSError as problem:
            if "disk" in self.kinds:
                self._expected(problem, what)
            else:
                self._says(f"{what}: {''.join(traceback.format_exception(problem))}")
        except Exception as problem:
            self._says(f"{what}: {''.join(traceback.format_exception(problem))}")

    def _expected(self, problem: BaseException, what: str) -> None:
        """Errors are for faults alone, and say what has happened."""
        self.counts["errors"] += 1
        self.kernel.note(f"{what}: {type(problem).__name__}: {problem}")
        is_call = what.startswith(("a call", "call "))
        if not self.kinds - HARMLESS if is_call else not self.kinds:
            self._says(f"{what}: without a fault: {''.join(traceback.format_exception(problem))}")
