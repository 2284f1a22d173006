"""A pool and its client, with faults; and what must hold, whatever the faults are."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import work
from .kernel import Process
from .linear import MODELS, Operation, is_linear
from .scenario import END_SECONDS, HARMLESS, MOST_SECONDS, Scenario
from .world import World

NOTICE_SECONDS = 11.0
"""How soon a connection that is lost without a word is noticed."""
GRACE_SECONDS = (1.0, 2.0)
"""So long a call that was cancelled may go on before its process is killed."""
OPERATIONS = (
    *("call", "futures", "futures", "gather", "broadcast", "stream", "fail", "timeout"),
    *("nested", "counter", "counter", "stubborn", "placed"),
)


class Pool(Scenario):
    """A pool, and one client after another."""

    killed = ("executor", "agent", "client")
    stopped = ("agent", "executor")
    crowded = ("memory",)
    elastic = 0.2
    """How many of the pools grow and shrink."""
    keeping = 0.25
    """In how many runs the pool is kept."""
    keep: bool | float = 100.0
    """How long a kept pool goes on when nobody uses it."""
    ttl = 600.0
    is_prompt = True
    """Whether nodes are there as soon as they are asked for."""
    pauses: tuple[float, ...] = (0.0, 0.0, 0.1, 3.0, 40.0)
    """How long a client may wait between its calls."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.client: Process
        self.is_down = False
        """Whether a client has ended the kept pool."""
        world.hosts = self.random.random() < 0.6
        self.nodes = self.random.randint(1, 3)
        self.workers = self.random.choice((1, 1, 2))
        self.retries = self.random.choice((0, 0, 1, 3))
        self.keeps = self.random.random() < self.keeping
        self.longest = math.inf
        """How long the operation that runs now takes at most, without faults."""
        self.clients = self.random.randint(1, 3) if self.keeps else 1
        self._choose_faults()
        world.commands["client"] = self._client
        world.commands["later"] = self._later_client

    def run(self) -> None:
        """Run the client and the faults, wait for the end, and check what is left."""
        self.client = self.world.spawn(["client"])
        self._begin_faults()
        self._await(self.client)
        for _ in range(self.clients - 1):
            self.client = self.world.spawn(["later"])
            self._await(self.client)
        self._end_faults()
        self._check()

    # The client.

    def _client(self, process: Process) -> int:
        import skyward as sky

        options = sky.Options(
            console=False,
            orphan_timeout=self.random.choice((20.0, 60.0)),
            idle_timeout=self.random.choice((30.0, 300.0)),
        )
        executor = self.random.choice(("process", "process", "thread"))
        more = {"keep": self.keep, "name": "kept", "ttl": self.ttl} if self.keeps else {}
        nodes: Any = self.nodes
        if self.random.random() < self.elastic:
            nodes = (self.random.randint(1 if self.keeps else 0, self.nodes), self.nodes)
        with (
            self._watched(sky, "the pool"),
            sky.Compute(
                self._provider(sky),
                nodes=nodes,
                worker=sky.Worker(per_node=self.workers, executor=executor),
                options=options,
                **more,
            ) as compute,
        ):
            self._use(sky, compute)
        return 0

    def _provider(self, sky: Any) -> Any:
        return sky.Local(transport="tcp") if self.world.hosts else sky.Local()

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
            began, self.longest = self.kernel.now, math.inf
            with self._watched(sky, "a call"):
                self._operation(sky, compute)
            took = self.kernel.now - began
            late = NOTICE_SECONDS * len(self.faults)
            is_prompt = self.is_prompt and not self.kernel.lag
            if is_prompt and not self.kinds - HARMLESS and took > self.longest + late:
                self._says(f"a call took {took:.1f} s")
            time.sleep(self.random.choice(self.pauses))

    @property
    def _is_over(self) -> bool:
        """Whether the kept pool's time to live may be over.

        It ends by the wall clock, which clients on several machines share.
        """
        return self.keeps and max(self.ahead, self.longest_ahead) > self.ttl

    def _expected(self, problem: BaseException, what: str) -> None:
        # Without a jump of the clock, the client ends the pool before its nodes end themselves.
        told = "time to live" in str(problem) or what == "attaching"
        if self._is_over and (told or "clock" in self.kinds):
            self.counts["ends of a time to live"] += 1
            self.kernel.note(f"{what}: {type(problem).__name__}: {problem}")
        else:
            super()._expected(problem, what)

    def _operation(self, sky: Any, compute: Any) -> None:
        # The copy of this process: it raises the copy's errors.
        import concurrent.futures as futures_module

        random = self.random
        kind = random.choice(OPERATIONS)
        number = random.getrandbits(40)
        seconds = random.choice((0.0, 0.0, 0.01, 0.5, 3.0))
        # Eight calls on one worker, and what nodes take that are made for them.
        self.longest = 8 * seconds + 6.0
        self.counts["operations"] += 1
        self.kernel.note(f"{kind} {number}")
        function = sky.function(work.work, retries=self.retries)
        if kind == "call":
            payload = bytes(random.choice((0, 100, 300_000, 2_500_000)))
            lines = random.choice((0, 1, 5))
            found = function(number, seconds, lines, payload) >> compute
            self._result(number, (number, len(payload)), found)
            self._check_lines(number)
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
        elif kind == "stubborn":
            self._stubborn(sky, compute, number)
        elif kind == "placed":
            self._placed(sky, compute, function, number, seconds)
        elif kind == "nested":
            found = sky.function(work.nested)(number, seconds) >> compute
            self._result(number, (number, 0), found)
        elif kind == "counter":
            steps = [("counter", f"counter-{random.randint(0, 1)}", "add", (1,))]
            count = random.randint(1, 5)
            for at, each in enumerate(
                sky.gather(*(sky.function(work.use)(number + at, steps) for at in range(count)))
                >> compute
            ):
                self._result(number + at, (number + at, 1), each)

    def _stubborn(self, sky: Any, compute: Any, number: int) -> None:
        """A call that does not end when it is cancelled, about as long as that is waited for."""
        random = self.random
        grace = random.choice(GRACE_SECONDS)
        late = random.choice((-1.0, 1.0)) * random.choice((0.002, 0.02, 0.2, 2.0)) * random.random()
        count = random.randint(1, 6)
        self.longest = 20.0
        slow = sky.function(work.stubborn, timeout=1.0)(number, 1.0 + grace + late)
        first = slow > compute
        others = [sky.function(work.work)(number + at, 0.0, 1) for at in range(1, count)]
        futures = [each > compute for each in others]
        with self._watched(sky, f"call {number}"):
            try:
                first.result(timeout=MOST_SECONDS)
            except sky.TaskTimeoutError:
                self.counts["timeouts"] += 1
        for at, future in enumerate(futures, 1):
            with self._watched(sky, f"call {number + at}"):
                self._result(number + at, (number + at, 0), future.result(timeout=MOST_SECONDS))

    def _placed(self, sky: Any, compute: Any, function: Any, number: int, seconds: float) -> None:
        """Calls on given nodes, some of which may leave the pool meanwhile."""
        random = self.random
        self.longest = math.inf
        nodes = [each.node for each in compute.nodes] or [0]
        futures = [
            compute.submit(function(number + at, seconds, 1), on=random.choice(nodes))
            for at in range(random.randint(1, 6))
        ]
        count = random.randint(1, 3)
        resized = not self.keeps and random.random() < 0.5
        if resized:
            with self._watched(sky, "resizing"):
                self._resize(compute, count)
        for at, future in enumerate(futures):
            with self._watched(sky, f"call {number + at}"):
                try:
                    self._result(number + at, (number + at, 0), future.result(timeout=MOST_SECONDS))
                except sky.NodeLostError as problem:
                    if not resized or "has left the pool" not in str(problem):
                        raise

    def _resize(self, compute: Any, count: int) -> None:
        self.counts["resized"] += 1
        self.kernel.note(f"resize to {count}")
        compute.resize(count)

    def _result(self, number: int, wanted: Any, found: Any) -> None:
        if found != wanted:
            self._says(f"call {number} returned {found} and not {wanted}")
        if not work.ledger().finished[number]:
            self._says(f"call {number} returned, and never ran to its end")
        self.counts["results"] += 1

    def _check_lines(self, number: int) -> None:
        """All lines that the call has printed were shown before its result, in order."""
        wanted = work.ledger().written[number]
        shown = [line.partition("] ")[2] for line in self.world.said if f"call {number} " in line]
        if shown[len(shown) - len(wanted) :] != wanted:
            self._says(f"call {number} printed {wanted}, and {shown} was shown")

    # The end.

    def _check(self) -> None:
        for number, times in work.ledger().began.items():
            if times > 1 + self.retries and number not in self._ranks():
                self._says(f"call {number} began {times} times with {self.retries} retries")
        self._check_shared()
        for process in self._living():
            self._says(f"{process.name} lives {END_SECONDS:g} s after its client has ended")
        if not self.broken and self.client.status == 0 and not self.keeps:
            left = [str(each) for each in Path(self.world.folder).glob("sky-*")]
            if left:
                self._says(f"left behind: {', '.join(sorted(left))}")

    def _ranks(self) -> set[int]:
        """The numbers of broadcasts: one for all ranks."""
        return {number for number in work.ledger().began if number not in work.ledger().written}

    def _check_shared(self) -> None:
        """Each shared object was as if it had been used by one after the other."""
        book = work.ledger()
        for (kind, name), history in book.shared.items():
            # With its owner, the head of the pool, the state is lost; the next owner has its own.
            for epoch in {each.epoch for each in history} - {""}:
                seen = [each for each in history if each.epoch in (epoch, "")]
                if kind == "barrier":
                    self._check_barrier(name, seen)
                elif kind in MODELS:
                    found = is_linear(kind, seen)
                    self.counts["histories" if found is not None else "unclear histories"] += 1
                    if found is False:
                        told = "; ".join(str(each) for each in seen)
                        self._says(f"{name}, in any order, does not give this: {told}")
        for name, epoch in {(each.name, each.epoch) for each in book.holdings}:
            self._check_lock([e for e in book.holdings if (e.name, e.epoch) == (name, epoch)])

    def _check_lock(self, holdings: list[work.Holding]) -> None:
        """Each holding has a token of its own; those that were let go were apart, in order."""
        holdings.sort(key=lambda each: each.token)
        for one, other in pairwise(holdings):
            if one.token == other.token:
                self._says(f"{one.name}: two holdings have one token: {one} and {other}")
        for one, other in pairwise(each for each in holdings if each.released):
            if other.since < one.until:
                self._says(f"{one.name}: two held it at the same time: {one} and {other}")
        for each in holdings:
            if each.refused - each.since < work.LEASE_SECONDS:
                self._says(f"{each.name}: it was taken from its holder within its lease: {each}")

    def _check_barrier(self, name: str, waits: list[Operation]) -> None:
        """Those who passed have each a number, and passed when all had come."""
        parties = int(name.rpartition("-")[2])
        passed = [each for each in waits if isinstance(each.result, int)]
        numbers = [each.result for each in passed]
        if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(parties)):
            self._says(f"{name}: {parties} parties got {numbers}")
        for each in passed:
            there = sum(other.began <= each.ended for other in waits)
            if there < parties:
                self._says(f"{name}: one of {parties} passed when {there} had come")
