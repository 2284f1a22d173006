"""The provider's side of the simulated cloud: machines that are made, lied about and taken back."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from .kernel import File, Process, WaitQueue
from .world import World

FAULTS = (
    "late",
    "refuse",
    "more",
    "twice",
    "answer",
    "look",
    "lie",
    "destroy",
    "reclaim",
    "journal",
)
"""What may go wrong with a provider, and what the client knows of it.

- late: its answers and its machines take long
- refuse: it has no machine for some nodes
- more: it makes more machines than were asked for
- twice: it gives a node the machine of another
- answer: a request is fulfilled, and its answer lost
- look: it does not say what there is
- lie: it says that a machine is gone, or that it is there
- destroy: it refuses to remove a machine
- reclaim: it takes machines back, with a notice or without
- journal: the client cannot write down what it asks for, or what it has
"""
APPEAR_SECONDS = 6.0
"""So long after a request, the machine may be missing from the list, where the provider is late."""


@dataclass(eq=False)
class Rented:
    """A machine that was made."""

    id: str
    pool: str
    node: int
    owner: str
    pid: int
    name: str
    folder: str
    appears: float
    """From when the list has it."""
    runs: float
    """From when it runs."""
    ended: float | None = None
    notice: str = ""
    """The line that says that the machine is taken back."""
    noticed: WaitQueue = field(default_factory=WaitQueue)


@dataclass(eq=False)
class Asked:
    """A request to the provider, on its way there and back."""

    back: float
    """When the answer is there, or the client stops waiting for it."""
    answer: Any = None
    refusal: str = ""
    silent: bool = False
    """Whether no answer comes."""


class Given(File):
    """The input of a process on a machine."""

    def __init__(self, world: World, data: bytes) -> None:
        super().__init__(world.kernel)
        self._data = data

    def events(self) -> int:
        return 1

    def read(self, size: int) -> bytes:
        found, self._data = self._data[:size], self._data[size:]
        return found


class Taken(File):
    """The output of a process on a machine."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kernel)
        self.data = bytearray()

    def events(self) -> int:
        return 4

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


class Market:
    """All machines that were ever made, and what goes wrong with them."""

    def __init__(self, world: World, random: Random, faults: set[str]) -> None:
        self.world, self.random, self.faults = world, random, faults
        self.kernel = world.kernel
        self.machines: dict[str, Rented] = {}
        self.counts: Counter[str] = Counter()
        self.agents: dict[str, tuple[str, int]] = {}
        """The pool and the node that each machine runs an agent for."""
        self.broken: list[str] = []
        self.refused = 0.0
        """When it last refused to remove a machine, or to list them, or did not answer that."""
        sys.__dict__["simulated_market"] = self

    # What a client asks.

    def ask(self, what: str, *given: Any) -> Asked:
        """Send a request; it is fulfilled whether or not its client lives on."""
        late = self.goes_wrong("late", 0.3)
        there = self.random.random() * (self.random.choice((1.0, 8.0, 40.0)) if late else 0.05)
        asked = Asked(self.kernel.now + 2 * there)
        if self.goes_wrong("answer", 0.2):
            asked.silent = True
            asked.back += 20.0
            if what in ("list", "destroy"):
                self.refused = asked.back
        work: Callable[..., None] = getattr(self, f"_{what}")
        self.kernel.at(self.kernel.now + there, lambda: work(asked, *given))
        return asked

    def _make(
        self, asked: Asked, pool: str, nodes: Sequence[int], owner: str, pid: int, name: str
    ) -> None:
        nodes = list(nodes)
        if self.goes_wrong("refuse", 0.4):
            nodes = nodes[: self.random.randrange(len(nodes))]
        if not nodes:
            asked.refusal = "sold out"
            return
        marks = list(nodes)
        if self.goes_wrong("more", 0.4):
            marks.append(self.random.choice(nodes))
        made = []
        for node in marks:
            id = f"m{len(self.machines)}"
            now = self.kernel.now
            late = self.goes_wrong("late", 0.3)
            machine = Rented(
                *(id, pool, node, owner, pid, name, f"{self.world.folder}/{id}"),
                appears=now + (self.random.random() * APPEAR_SECONDS if late else 0.0),
                runs=now + self.random.random() * (120.0 if late else 2.0),
            )
            os.makedirs(machine.folder)
            self.machines[id] = machine
            made.append((node, id))
            self.counts["machines"] += 1
            self.kernel.note(f"the market makes {id} for node {node} of {pool}")
        if len(made) > 1 and self.goes_wrong("twice", 0.5):
            first, second = self.random.sample(range(len(nodes)), 2) if len(nodes) > 1 else (0, 0)
            made[second] = (made[second][0], made[first][1])
        asked.answer = made

    def _list(self, asked: Asked, pool: str) -> None:
        if self.goes_wrong("look", 0.4):
            asked.refusal = "the list cannot be had now"
            self.refused = self.kernel.now
            return
        now = self.kernel.now
        asked.answer = [
            each
            for each in self.machines.values()
            if (pool in (each.pool, "")) and each.ended is None and each.appears <= now
        ]

    def _destroy(self, asked: Asked, id: str) -> None:
        if self.goes_wrong("destroy", 0.3):
            asked.refusal = f"{id} cannot be removed now"
            self.refused = self.kernel.now
            return
        self.end(self.machines[id], "removed")

    def _look(self, asked: Asked, id: str) -> None:
        if self.goes_wrong("look", 0.4):
            asked.refusal = f"nobody can say what is with {id}"
            return
        machine = self.machines[id]
        asked.answer = (machine.ended is None) != self.goes_wrong("lie", 0.1)

    # What runs on a machine.

    def reach(self, id: str) -> Rented | None:
        """A machine that a client can reach now."""
        machine = self.machines[id]
        is_up = machine.ended is None and machine.runs <= self.kernel.now
        hosts = {id, "client"}
        return machine if is_up and not hosts & self.world.machinery.network.unreachable else None

    def start(self, machine: Rented, argv: list[str], data: bytes) -> tuple[Process, Taken]:
        """Start a process on a machine, with its input; returns what takes its output."""
        process = self.world.spawn(
            argv, machine.id, TMPDIR=machine.folder, SKYWARD_STATE=f"{machine.folder}/state"
        )
        said = Taken(self.world)
        process.put(0, Given(self.world, data))
        process.put(1, said)
        process.put(2, said)
        return process, said

    def begin_agent(self, machine: Rented, pool: str, node: int) -> None:
        """Note for which node an agent is started on a machine."""
        before = self.agents.get(machine.id)
        if before not in (None, (pool, node)):
            self.says(f"{machine.id} is used for node {node} of {pool} and for {before}")
        self.agents[machine.id] = (pool, node)

    def running(self, machine: Rented) -> list[Process]:
        """The processes on a machine."""
        everywhere = self.kernel.processes.values()
        return [each for each in everywhere if each.host == machine.id and not each.dead]

    # Its end.

    def reclaim(self) -> str:
        """Take a machine back, now or after a notice; returns which."""
        there = self.there
        if not there:
            return ""
        machine = self.random.choice(there)
        seconds = self.random.choice((0.0, 5.0, 30.0, 120.0))
        if seconds:
            machine.notice = f"{seconds:g} the market wants it"
            machine.noticed.wake()
        self.kernel.at(self.kernel.now + seconds, lambda: self.end(machine, "taken back"))
        return machine.id

    def end(self, machine: Rented, why: str) -> None:
        """End a machine with all that runs on it; those that are connected hear nothing."""
        if machine.ended is not None:
            return
        machine.ended = self.kernel.now
        self.kernel.note(f"{machine.id} is {why}")
        for wire in self.world.machinery.network.live():
            if machine.id in (wire.ends[0].host, wire.ends[1].host):
                wire.silence()
        for process in self.running(machine):
            self.kernel.signal(process, signal.SIGKILL)
        shutil.rmtree(machine.folder, ignore_errors=True)

    @property
    def there(self) -> list[Rented]:
        """The machines that cost."""
        return [each for each in self.machines.values() if each.ended is None]

    def goes_wrong(self, kind: str, chance: float) -> bool:
        """Whether a fault of this kind happens now."""
        wrong = kind in self.faults and self.random.random() < chance
        if wrong:
            self.counts[f"market: {kind}"] += 1
        return wrong

    def says(self, text: str) -> None:
        """Note what does not hold."""
        self.broken.append(text)
        self.kernel.note(f"DOES NOT HOLD: {text}")


def market() -> Market:
    """The one of this run; all simulated processes share `sys`."""
    found: Market = sys.__dict__["simulated_market"]
    return found
