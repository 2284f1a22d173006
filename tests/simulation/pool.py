"""A pool and its client, with faults; and what must hold, whatever the faults are."""

from __future__ import annotations

import os
import signal
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from . import work
from .kernel import Process, Stuck
from .world import World

END_SECONDS = 400.0
"""So long after its client has left or died, nothing is left of a pool."""
MOST_SECONDS = 20_000.0
"""A client that is still there then hangs."""


class Pool:
    """One run: what the client does, and what happens to it, as a seed says."""

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
        self.client: Process
        self.over = False
        world.begin(seed)
        world.hosts = self.random.random() < 0.6
        self.nodes = self.random.randint(1, 3)
        self.workers = self.random.choice((1, 1, 2))
        self.retries = self.random.choice((0, 0, 1, 3))
        if self.random.random() < 0.75:
            kinds = ["executor", "agent", "stop", "client"]
            kinds += ["cut", "cut", "cut", "silence", "partition"] if world.hosts else []
            self.kinds = {self.random.choice(kinds) for _ in range(self.random.randint(1, 2))}
        world.commands["client"] = self._client

    def run(self) -> None:
        """Run the client and the faults, wait for the end, and check what is left."""
        kernel = self.kernel
        self.client = self.world.spawn(["client"])
        for _ in range(self.random.randint(1, 6) if self.kinds else 0):
            self._later(self._fault)
        kernel.run(lambda: self.client.dead or kernel.now > 1000 + MOST_SECONDS)
        if not self.client.dead:
            raise Stuck(f"the client has not ended after {MOST_SECONDS:,.0f} s")
        self.over = True
        for process in kernel.processes.values():
            kernel.signal(process, signal.SIGCONT)
        self.network.unreachable.clear()
        deadline = kernel.now + END_SECONDS
        kernel.at(deadline, lambda: None)
        kernel.run(lambda: not self._living() or kernel.now >= deadline)
        self._check()

    def _living(self) -> list[Process]:
        return [each for each in self.kernel.processes.values() if not each.dead]

    def _says(self, text: str) -> None:
        self.broken.append(text)
        self.kernel.note(f"DOES NOT HOLD: {text}")

    # Faults.

    def _later(self, action: Any) -> None:
        seconds = self.random.choice((0.002, 0.01, 0.05, 0.3, 1.0, 5.0, 20.0))
        self.kernel.at(self.kernel.now + self.random.random() * seconds, action)

    def _fault(self) -> None:
        if self.over:
            return
        kind = self.random.choice(sorted(self.kinds))
        kernel = self.kernel
        done = ""
        if kind in ("executor", "agent", "stop", "client"):
            names = {"stop": ("agent", "executor")}.get(kind, (kind,))
            found = [each for each in self._living() if each.name.partition("-")[0] in names]
            if found:
                process = self.random.choice(found)
                done = f"{kind} {process.name}"
                if kind != "stop":
                    kernel.signal(process, signal.SIGKILL)
                elif not process.stopped:
                    kernel.signal(process, signal.SIGSTOP)
                    self._later(lambda: kernel.signal(process, signal.SIGCONT))
        elif kind in ("cut", "silence"):
            wires = self.network.live()
            if wires:
                wire = self.random.choice(wires)
                done = f"{kind} {wire.ends[0].host} to {wire.ends[1].host}"
                if kind == "cut":
                    wire.cut()
                else:
                    wire.silent = True
        else:
            host = f"host{self.random.randrange(self.nodes)}"
            done = f"{kind} {host}"
            self.network.unreachable.add(host)
            for wire in self.network.live():
                if host in (wire.ends[0].host, wire.ends[1].host):
                    wire.silent = True
            self._later(lambda: self.network.unreachable.discard(host))
        if done:
            self.counts[kind] += 1
            kernel.note(f"FAULT {done}")
        if self.random.random() < 0.7:
            self._later(self._fault)

    # The client.

    def _client(self, process: Process) -> int:
        import skyward as sky

        provider = sky.Local(transport="tcp") if self.world.hosts else sky.Local()
        options = sky.Options(console=False, orphan_timeout=self.random.choice((20.0, 60.0)))
        try:
            with sky.Compute(
                provider, nodes=self.nodes, worker=sky.Worker(per_node=self.workers), options=options
            ) as compute:
                for _ in range(self.random.randint(2, 8)):
                    self._operation(sky, compute)
        except sky.SkywardError as problem:
            self._expected(problem, "the pool")
        except Exception as problem:
            self._says(f"the pool: {''.join(traceback.format_exception(problem))}")
        return 0

    def _expected(self, problem: BaseException, what: str) -> None:
        """Errors are for faults alone, and say what has happened."""
        self.counts["errors"] += 1
        self.kernel.note(f"{what}: {type(problem).__name__}: {problem}")
        if not self.kinds:
            self._says(f"{what}: without a fault: {''.join(traceback.format_exception(problem))}")

    def _operation(self, sky: Any, compute: Any) -> None:
        random = self.random
        kind = random.choice(("call", "futures", "futures", "gather", "broadcast", "stream", "fail", "counter"))
        number = random.getrandbits(40)
        seconds = random.choice((0.0, 0.0, 0.01, 0.5, 3.0))
        self.counts["operations"] += 1
        self.kernel.note(f"{kind} {number}")
        function = sky.function(work.work, retries=self.retries)
        try:
            if kind == "call":
                payload = bytes(random.choice((0, 100, 300_000)))
                lines = random.choice((0, 1, 5))
                found = function(number, seconds, lines, payload) >> compute
                self._result(number, (number, len(payload)), found)
            elif kind == "futures":
                futures = {
                    number + at: function(number + at, seconds, 1) > compute
                    for at in range(random.randint(2, 8))
                }
                for each, future in futures.items():
                    try:
                        self._result(each, (each, 0), future.result(timeout=MOST_SECONDS))
                    except sky.SkywardError as problem:
                        self._expected(problem, f"call {each}")
            elif kind == "gather":
                calls = [function(number + at, seconds, 0) for at in range(random.randint(2, 6))]
                found = sky.gather(*calls) >> compute
                for at, each in enumerate(found):
                    self._result(number + at, (number + at, 0), each)
            elif kind == "broadcast":
                found = sky.function(work.rank)(number) @ compute
                if found != [(number, each) for each in range(len(found))] or not found:
                    self._says(f"broadcast {number} returned {found}")
            elif kind == "stream":
                count = random.randint(1, 20)
                got = []
                try:
                    for each in sky.function(work.stream)(number, count, seconds / 10) >> compute:
                        got.append(each)
                finally:
                    if got != [(number, each) for each in range(len(got))]:
                        self._says(f"stream {number} gave {got}")
                if len(got) != count:
                    self._says(f"stream {number} gave {len(got)} of {count} items, and no error")
            elif kind == "fail":
                try:
                    sky.function(work.fail)(number) >> compute
                except ValueError as problem:
                    if str(problem) != f"call {number} fails":
                        self._says(f"call {number} raised the error of another: {problem}")
                else:
                    self._says(f"call {number} should have raised an error")
            elif kind == "counter":
                name = f"counter-{random.randint(0, 1)}"
                calls = [sky.function(work.add)(name, 1) for _ in range(random.randint(1, 5))]
                found = sky.gather(*calls) >> compute
                if len(set(found)) != len(found):
                    self._says(f"{name}: increments returned {found}")
        except sky.SkywardError as problem:
            self._expected(problem, f"{kind} {number}")
        except Exception as problem:
            self._says(f"{kind} {number}: {''.join(traceback.format_exception(problem))}")

    def _result(self, number: int, wanted: Any, found: Any) -> None:
        if found != wanted:
            self._says(f"call {number} returned {found} and not {wanted}")
        if not work.ledger().finished[number]:
            self._says(f"call {number} returned, and never ran to its end")
        self.counts["results"] += 1

    # The end.

    def _check(self) -> None:
        for number, times in work.ledger().began.items():
            if times > 1 + self.retries and number not in self._ranks():
                self._says(f"call {number} began {times} times with {self.retries} retries")
        for process in self._living():
            self._says(f"{process.name} lives {END_SECONDS:g} s after its client has ended")
        if not self.broken and self.client.status == 0:
            left = [str(each) for each in Path(self.world.folder).glob("sky-*")]
            if left:
                self._says(f"left behind: {', '.join(sorted(left))}")

    def _ranks(self) -> set[int]:
        """The numbers of broadcasts: one for all ranks."""
        return {number for number in work.ledger().began if number not in work.ledger().written}
