"""A pool and its client, with faults; and what must hold, whatever the faults are."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from . import work
from .kernel import Process, Stuck
from .world import World

OPERATIONS = (
    *("call", "futures", "futures", "gather", "broadcast", "stream", "fail", "timeout"),
    *("nested", "counter", "counter"),
)
END_SECONDS = 700.0
"""So long after its client has left or died, nothing is left of a pool."""
MOST_SECONDS = 10_000.0
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
        self.is_down = False
        """Whether a client has ended the kept pool."""
        world.begin(seed)
        world.hosts = self.random.random() < 0.6
        self.nodes = self.random.randint(1, 3)
        self.workers = self.random.choice((1, 1, 2))
        self.retries = self.random.choice((0, 0, 1, 3))
        self.keeps = self.random.random() < 0.25
        self.clients = self.random.randint(1, 3) if self.keeps else 1
        if self.random.random() < 0.75:
            kinds = ["executor", "agent", "stop", "client", "clock", "disk"]
            kinds += ["cut", "cut", "cut", "silence", "partition"] if world.hosts else []
            self.kinds = {self.random.choice(kinds) for _ in range(self.random.randint(1, 2))}
        world.commands["client"] = self._client
        world.commands["later"] = self._later_client
        self.failing: list[str] = []
        """The errors that the next writes of files meet."""
        world.machinery.disk.check = self._disk

    def run(self) -> None:
        """Run the client and the faults, wait for the end, and check what is left."""
        kernel = self.kernel
        self.client = self.world.spawn(["client"])
        for _ in range(self.random.randint(1, 6) if self.kinds else 0):
            self._later(self._fault)
        kernel.run(lambda: self.client.dead or kernel.now > 1000 + MOST_SECONDS)
        self._ended()
        for _ in range(self.clients - 1):
            self.client = self.world.spawn(["later"])
            kernel.run(lambda: self.client.dead or kernel.now > 1000 + MOST_SECONDS)
            self._ended()
        self.over = True
        self.failing.clear()
        for process in kernel.processes.values():
            kernel.signal(process, signal.SIGCONT)
        self.network.unreachable.clear()
        deadline = kernel.now + END_SECONDS
        kernel.at(deadline, lambda: None)
        kernel.run(lambda: not self._living() or kernel.now >= deadline)
        self._check()

    def _ended(self) -> None:
        if not self.client.dead:
            raise Stuck(f"the client has not ended after {MOST_SECONDS:,.0f} s")

    def _living(self) -> list[Process]:
        return [each for each in self.kernel.processes.values() if not each.dead]

    def _says(self, text: str) -> None:
        self.broken.append(text)
        self.kernel.note(f"DOES NOT HOLD: {text}")

    # Faults.

    def _later(self, action: Any) -> None:
        seconds = self.random.choice((0.002, 0.01, 0.05, 0.3, 1.0, 5.0, 20.0, 100.0))
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
        elif kind == "clock":
            seconds = self.random.choice((-86400.0, -60.0, 5.0, 3600.0))
            kernel.wall += seconds
            done = f"the wall clock jumps by {seconds:g} s"
        elif kind == "disk":
            count = self.random.choice((1, 1, 3, 20))
            self.failing += [self.random.choice(("ENOSPC", "EIO"))] * count
            done = f"the next {count} writes fail"
            self._later(self.failing.clear)
        elif kind in ("cut", "silence"):
            wires = self.network.live()
            if wires:
                wire = self.random.choice(wires)
                done = f"{kind} {wire.ends[0].host} to {wire.ends[1].host}"
                if kind == "cut":
                    wire.cut()
                else:
                    wire.silence()
        else:
            host = f"host{self.random.randrange(self.nodes)}"
            done = f"{kind} {host}"
            self.network.unreachable.add(host)
            for wire in self.network.live():
                if host in (wire.ends[0].host, wire.ends[1].host):
                    wire.silence()
            self._later(lambda: self.network.unreachable.discard(host))
        if done:
            self.counts[kind] += 1
            kernel.note(f"FAULT {done}")
        if self.random.random() < 0.7:
            self._later(self._fault)

    def _disk(self, operation: str, what: Any) -> None:
        if self.failing and operation in ("write", "fsync", "mkdir", "rename", "replace"):
            current = self.kernel.current
            if current is None or (isinstance(what, int) and what < 3):
                return
            name = self.failing.pop()
            self.kernel.note(f"{operation} {what} fails: {name}")
            number = getattr(errno, name)
            raise OSError(number, os.strerror(number), what if isinstance(what, str) else None)

    # The client.

    def _client(self, process: Process) -> int:
        import skyward as sky

        provider = sky.Local(transport="tcp") if self.world.hosts else sky.Local()
        options = sky.Options(
            console=False,
            orphan_timeout=self.random.choice((20.0, 60.0)),
            idle_timeout=self.random.choice((30.0, 300.0)),
        )
        executor = self.random.choice(("process", "process", "thread"))
        more = {"keep": True, "name": "kept", "ttl": 600.0} if self.keeps else {}
        nodes: Any = self.nodes
        if self.random.random() < 0.2:
            nodes = (self.random.randint(1 if self.keeps else 0, self.nodes), self.nodes)
        with (
            self._watched(sky, "the pool"),
            sky.Compute(
                provider,
                nodes=nodes,
                worker=sky.Worker(per_node=self.workers, executor=executor),
                options=options,
                **more,
            ) as compute,
        ):
            self._use(sky, compute)
        return 0

    def _later_client(self, process: Process) -> int:
        """One that attaches to a pool that another has made, and may end it."""
        import skyward as sky

        with self._watched(sky, "the kept pool"):
            try:
                with sky.attach("kept") as compute:
                    self._use(sky, compute)
                if self.random.random() < 0.5:
                    sky.attach("kept").down(force=True)
                    self.is_down = True
            except sky.SkywardError as problem:
                if not self.is_down:
                    self._expected(problem, "attaching")
        return 0

    def _use(self, sky: Any, compute: Any) -> None:
        import time

        for _ in range(self.random.randint(2, 8)):
            with self._watched(sky, "a call"):
                self._operation(sky, compute)
            time.sleep(self.random.choice((0.0, 0.0, 0.1, 3.0, 40.0)))

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
        if not self.kinds:
            self._says(f"{what}: without a fault: {''.join(traceback.format_exception(problem))}")

    def _operation(self, sky: Any, compute: Any) -> None:
        # The copy of this process: it raises the copy's errors.
        import concurrent.futures as futures_module

        random = self.random
        kind = random.choice(OPERATIONS)
        number = random.getrandbits(40)
        seconds = random.choice((0.0, 0.0, 0.01, 0.5, 3.0))
        self.counts["operations"] += 1
        self.kernel.note(f"{kind} {number}")
        function = sky.function(work.work, retries=self.retries)
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
            dropped = set()
            if random.random() < 0.3:
                dropped = {random.choice(sorted(futures))}
                for each in dropped:
                    self.counts["cancelled"] += futures[each].cancel()
            for each, future in futures.items():
                with self._watched(sky, f"call {each}"):
                    try:
                        self._result(each, (each, 0), future.result(timeout=MOST_SECONDS))
                    except futures_module.CancelledError:
                        if each not in dropped:
                            self._says(f"call {each} was cancelled, and nobody had asked for it")
        elif kind == "gather":
            calls = [function(number + at, seconds, 0) for at in range(random.randint(2, 6))]
            for at, each in enumerate(sky.gather(*calls) >> compute):
                self._result(number + at, (number + at, 0), each)
        elif kind == "broadcast":
            found = sky.function(work.rank)(number) @ compute
            if found != [(number, each) for each in range(len(found))]:
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
        elif kind == "timeout":
            try:
                sky.function(work.work, timeout=1.0)(number, 5.0, 0) >> compute
            except sky.TaskTimeoutError:
                self.counts["timeouts"] += 1
            else:
                self._says(f"call {number} should have timed out")
        elif kind == "nested":
            found = sky.function(work.nested)(number, seconds) >> compute
            self._result(number, (number, 0), found)
        elif kind == "counter":
            name = f"counter-{random.randint(0, 1)}"
            calls = [sky.function(work.add)(name) for _ in range(random.randint(1, 5))]
            sky.gather(*calls) >> compute

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
        # Shared state is lost with node 0; whoever comes then finds it new.
        if not any("node 0 was lost" in line for line in self.world.said) and not self.keeps:
            for name, changes in work.ledger().changes.items():
                self._check_order(name, changes)
        for process in self._living():
            self._says(f"{process.name} lives {END_SECONDS:g} s after its client has ended")
        if not self.broken and self.client.status == 0 and not self.keeps:
            left = [str(each) for each in Path(self.world.folder).glob("sky-*")]
            if left:
                self._says(f"left behind: {', '.join(sorted(left))}")

    def _ranks(self) -> set[int]:
        """The numbers of broadcasts: one for all ranks."""
        return {number for number in work.ledger().began if number not in work.ledger().written}

    def _check_order(self, name: str, changes: list[tuple[float, float, int | None]]) -> None:
        """Increments that returned are linearizable: each has a number of its own, in order."""
        told = sorted((value, began, ended) for began, ended, value in changes if value is not None)
        values = [value for value, _, _ in told]
        if len(set(values)) != len(values):
            self._says(f"{name}: two increments returned the same: {values}")
        latest = 0.0
        for value, began, ended in told:
            if ended < latest:
                self._says(f"{name}: the increment to {value} ended before an earlier one began")
            latest = max(latest, began)
        if values and values[-1] > len(changes):
            self._says(f"{name}: it is {values[-1]} after {len(changes)} increments")
