"""Calls by name on a kept pool, which go on without their clients; and what must hold."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from . import work
from .pool import Pool
from .world import World

LONGEST = 200.0
"""A call by name ends sooner than this, unless something has stopped."""
OPERATIONS = ("submit",) * 5 + ("result", "result", "cancel", "list", "forget", "other")
KINDS = ("work", "work", "work", "stream", "broadcast", "fail")
LOSING = {"agent", "memory", "runner", "program", "stop", "disk"}
"""The faults by which a call may get lost, or the node that has it."""


@dataclass
class Named:
    """A call by name, as its clients know it."""

    number: int
    kind: str
    count: int
    """Of a stream, its items; of others, their lines."""
    is_there: bool = False
    """Whether a client was told that the pool has it."""
    is_cancelled: bool = False
    """Whether a client has asked for that."""
    is_forgotten: bool = False
    began: int | None = None
    """How often it had begun when it was known to be cancelled."""


class Jobs(Pool):
    """A kept pool, and clients that leave calls there for the next ones."""

    killed = ("executor", "agent", "client", "runner", "program")
    stopped = ("agent", "executor", "runner", "program")
    keeping = 1.0
    keep = True
    ttl = 250.0
    pauses = (0.0, 0.0, 0.1, 3.0, 10.0)

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.jobs: dict[str, Named] = {}

    def _use(self, sky: Any, compute: Any) -> None:
        for name in list(self.jobs):
            if self.random.random() < 0.3:
                with self._watched(sky, f"the result of {name}"):
                    self._wait(sky, compute, name)
        super()._use(sky, compute)

    def _operation(self, sky: Any, compute: Any) -> None:
        kind = self.random.choice(OPERATIONS)
        if kind == "other":
            super()._operation(sky, compute)
            return
        self.counts["operations"] += 1
        name = self.random.choice(sorted(self.jobs)) if self.jobs else ""
        self.kernel.note(f"{kind} {name}")
        if kind == "submit":
            self._submit(sky, compute)
        elif kind == "list":
            self._list(compute)
        elif name and kind == "result":
            self._wait(sky, compute, name)
        elif name and kind == "cancel":
            self._cancel(sky, compute, name)
        elif name:
            self._forget(sky, compute, name)

    def _submit(self, sky: Any, compute: Any) -> None:
        random = self.random
        number = random.getrandbits(40)
        name = f"run-{number}"
        job = Named(number, random.choice(KINDS), random.randint(0, 5))
        seconds = random.choice((0.0, 0.01, 0.5, 3.0))
        self.jobs[name] = job
        if job.kind == "work":
            pending = sky.function(work.work, retries=self.retries)(number, seconds, job.count)
        elif job.kind == "stream":
            pending = sky.function(work.stream)(number, job.count, seconds / 10)
        elif job.kind == "broadcast":
            pending = sky.function(work.rank)(number)
        else:
            pending = sky.function(work.fail)(number)
        put = compute.broadcast if job.kind == "broadcast" else compute.submit
        future = put(pending, name=name)
        job.is_there = True
        self.counts["named"] += 1
        if random.random() < 0.3:
            self._taken(sky, compute, name, lambda: future.result(timeout=LONGEST))

    def _wait(self, sky: Any, compute: Any, name: str) -> None:
        self._taken(sky, compute, name, lambda: compute.result(name, timeout=LONGEST))

    def _taken(self, sky: Any, compute: Any, name: str, get: Any) -> None:
        """What comes of a call is its own."""
        job = self.jobs[name]
        try:
            found = get()
            if job.kind == "stream":
                found = list(found)
        except sky.errors.TaskCancelledError:
            if not job.is_cancelled:
                raise
            self._was_cancelled(job)
        except sky.errors.BroadcastError as problem:
            # Some ranks may have returned before.
            cancelled = (isinstance(e, sky.errors.TaskCancelledError) for e in problem.exceptions)
            if job.is_cancelled and all(cancelled):
                self._was_cancelled(job)
            else:
                self._explained(sky, compute, name, problem)
        except sky.errors.SkywardError as problem:
            self._explained(sky, compute, name, problem)
        except ValueError as problem:
            if job.kind != "fail" or str(problem) != f"call {job.number} fails":
                raise
            self.counts["results"] += 1
        except TimeoutError as problem:
            if not LOSING & self.kinds:
                raise
            self._expected(problem, name)
        else:
            self._own(compute, name, found)

    def _was_cancelled(self, job: Named) -> None:
        if job.began is None:
            job.began = work.ledger().began[job.number]

    def _explained(self, sky: Any, compute: Any, name: str, problem: BaseException) -> None:
        """A call that its client was told of is lost only with its node or its runner."""
        job = self.jobs[name]
        missing = isinstance(problem, sky.errors.ConfigurationError | sky.errors.PoolError)
        if missing and (job.is_forgotten or not job.is_there):
            return
        self._expected(problem, name)
        if (missing or f"{name} is lost" in str(problem)) and not self._loses():
            self._says(f"{name}: {type(problem).__name__}: {problem}")

    def _loses(self) -> bool:
        return self.is_down or self._is_over or bool(LOSING & self.kinds)

    def _own(self, compute: Any, name: str, found: Any) -> None:
        job = self.jobs[name]
        number = job.number
        if job.kind == "work":
            self._result(number, (number, 0), found)
            self._check_output(compute, name)
        elif job.kind == "stream":
            self._result(number, [(number, at) for at in range(job.count)], found)
        elif job.kind == "broadcast":
            if [list(each) for each in found] != [[number, at] for at in range(len(found))]:
                self._says(f"{name} returned {found}")
        else:
            self._says(f"{name} should have raised an error, and returned {found}")

    def _check_output(self, compute: Any, name: str) -> None:
        """The lines of every try are in order, and those of the last one are all there."""
        if "disk" in self.kinds:
            return
        job = self.jobs[name]
        fleet = compute._open_fleet
        text = b""
        with fleet.service(fleet.head, "jobs") as agent:
            agent.send("follow", job=name, log="output", follow=False)
            while True:
                reply, data = agent.next_part()
                if not reply.more:
                    break
                text += data
        tries: dict[int, list[int]] = defaultdict(list)
        for line in text.decode().splitlines():
            told = re.fullmatch(rf"call {job.number} try (\d+) line (\d+)", line)
            if told:
                tries[int(told[1])].append(int(told[2]))
            elif not line.startswith("skyward: "):
                self._says(f"{name} has written {line!r}")
        for lines in tries.values():
            if lines != list(range(len(lines))):
                self._says(f"{name} has lines {dict(tries)}")
        last = work.ledger().began[job.number]
        if job.count and last not in tries:
            self._says(f"{name} has lines {dict(tries)}, and began {last} times")
        if not any(len(lines) == job.count for lines in tries.values()) and job.count:
            self._says(f"{name} has lines {dict(tries)} of {job.count}")

    def _cancel(self, sky: Any, compute: Any, name: str) -> None:
        job = self.jobs[name]
        job.is_cancelled = True
        try:
            compute.cancel(name)
            self.counts["cancelled"] += 1
        except sky.errors.SkywardError as problem:
            self._explained(sky, compute, name, problem)

    def _list(self, compute: Any) -> None:
        """All calls are listed that clients were told of."""
        expected = [
            name for name, job in self.jobs.items() if job.is_there and not job.is_forgotten
        ]
        listed = {each.name: each for each in compute.calls()}
        for name in expected:
            job = self.jobs[name]
            if name not in listed and not job.is_forgotten and not self._loses():
                self._says(f"{name} is not among {sorted(listed)}")
        for name, each in listed.items():
            if name not in self.jobs:
                self._says(f"nobody has made the call {name}")
            elif each.state == "cancelled":
                if not self.jobs[name].is_cancelled:
                    self._says(f"{name} was cancelled, and nobody had asked for it")
                self._was_cancelled(self.jobs[name])
            elif each.state == "lost" and not self._loses():
                self._says(f"{name} is lost: {each.problem}")

    def _forget(self, sky: Any, compute: Any, name: str) -> None:
        try:
            self.jobs[name].is_forgotten = True
            compute.forget(name)
        except sky.errors.SkywardError as problem:
            # It goes on, or was forgotten before.
            self.kernel.note(f"{name} is not forgotten: {problem}")

    # The end.

    def _check(self) -> None:
        super()._check()
        began = work.ledger().began
        for name, job in self.jobs.items():
            if job.began is not None and began[job.number] > job.began:
                self._says(f"{name} was cancelled, and began again")
            if job.kind in ("stream", "fail") and began[job.number] > 1:
                self._says(f"{name} began {began[job.number]} times")
