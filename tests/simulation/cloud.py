"""A pool whose machines come from a provider that does much wrong; nothing of it may be left."""

from __future__ import annotations

import errno
import os
import sqlite3
from typing import Any

from .kernel import Process
from .market import FAULTS, Market
from .pool import Pool
from .world import World

SURPLUS_SECONDS = 60.0
"""So long a pool may have more machines than nodes: some have only been asked to go."""
SLOW_SECONDS = 400.0
"""The same where the provider is slow to remove them, refuses to, or makes too many. It begins with
each refusal: the client asks again at the next start of the node, up to 300 s later.
"""
SLOW = {"late", "more", "answer", "look", "destroy"}
LOOK_SECONDS = 20.0
QUIET = {"agent", "executor", "memory", "cut", "late", "silence", "reclaim"}
"""Machines are lost by these, and the client can remove them before it ends."""
HONEST_SECONDS = 2500.0
"""After so long, the provider does nothing wrong any more: a pool must come to life then."""


class Cloud(Pool):
    """A pool of rented machines, and what removes them."""

    elastic = 0.5
    is_prompt = False

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        random = self.random
        world.hosts, self.keeps, self.clients = True, False, 1
        self.wrong = set(random.sample(FAULTS, random.choice((0, 1, 2, 3, 4))))
        self.market = Market(world, random, self.wrong)
        self.timeout = random.choice((60.0, 200.0, 400.0))
        self.notices = "reclaim" in self.wrong and random.random() < 0.5
        self.most = self.nodes
        """How many machines the pool may have."""
        self.surplus = self.kernel.now
        """Since when there are more, without a pause."""
        self.patience = SLOW_SECONDS if self.wrong & SLOW else SURPLUS_SECONDS
        world.commands["sky"] = self._sky

    def run(self) -> None:
        """Run the client and the faults, then `sky down`; check what is left after each."""
        kernel = self.kernel
        self.client = self.world.spawn(["client"])
        self._begin_faults()
        if "reclaim" in self.wrong:
            for _ in range(self.random.randint(1, 3)):
                self._later(self._reclaim)
        kernel.at(kernel.now + HONEST_SECONDS, self.market.faults.clear)
        kernel.at(kernel.now + LOOK_SECONDS, self._look)
        self._await(self.client)
        self._named("its client")
        is_quiet = not self.kinds - QUIET and not self.wrong - QUIET
        if self.client.status == 0 and is_quiet and not self._has_given_up():
            self._empty("its client")
        if self.random.random() < 0.5:
            # At once, while much still goes wrong.
            self._remove("down")
            self._named("sky down")
        self.market.faults.clear()
        self._end_faults()
        if self.random.random() < 0.5:
            self._remove("gc", "--provider", "vendor")
        if self._remove("down") != 0:
            self._says("sky down has failed though nothing went wrong")
        self._empty("sky down")
        self._end_faults()
        self.broken += self.market.broken
        self.counts += self.market.counts
        self._check()

    # What the processes do.

    def _provider(self, sky: Any) -> Any:
        from skyward import providers

        from .vendor import Vendor

        providers.BUILT_IN["vendor"] = "tests.simulation.vendor:Vendor"
        return Vendor(self.timeout, self.notices)

    def _operation(self, sky: Any, compute: Any) -> None:
        if self.random.random() < 0.8:
            super()._operation(sky, compute)
        else:
            self._resize(compute, self.random.randint(1, 3))

    def _resize(self, compute: Any, count: int) -> None:
        self.most = max(self.most, count)
        super()._resize(compute, count)

    def _remove(self, *argv: str) -> int:
        process = self.world.spawn(["sky", *argv])
        self._await(process)
        return process.status

    def _sky(self, process: Process) -> int:
        """The command line."""
        from skyward import providers
        from skyward.cli.main import sky

        providers.BUILT_IN["vendor"] = "tests.simulation.vendor:Vendor"
        try:
            sky.main(process.argv[1:], prog_name="sky")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    # What goes wrong.

    def _hosts(self) -> list[str]:
        return [each.id for each in self.market.there] or ["nowhere"]

    def _reclaim(self) -> None:
        if not self.over and "reclaim" in self.market.faults:
            which = self.market.reclaim()
            self.kernel.note(f"FAULT reclaim {which}")
            self.counts["market: reclaim"] += bool(which)

    def _disk(self, operation: str, what: Any) -> None:
        is_journal = operation == "write" and str(what).endswith("journal.sqlite")
        if is_journal and self.market.goes_wrong("journal", 0.15):
            raise OSError(errno.EIO, os.strerror(errno.EIO), what)
        super()._disk(operation, what)

    def _expected(self, problem: BaseException, what: str) -> None:
        # By names of their own: bytes that are late cost a call nothing, but machines do.
        kinds, self.kinds = self.kinds, self.kinds | {f"market: {each}" for each in self.wrong}
        super()._expected(problem, what)
        self.kinds = kinds

    # What must hold.

    def _journal(self) -> list[str]:
        """The pools of which `sky down` knows."""
        path = f"{self.world.folder}/state/journal.sqlite"
        try:
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
                return [str(row[0]) for row in database.execute("select id from pools")]
        except sqlite3.OperationalError:
            return []

    def _named(self, after: str) -> None:
        """Every machine that is there is one of a pool of the journal."""
        named = self._journal()
        for each in self.market.there:
            if each.pool not in named:
                self._says(f"after {after}, {each.id} of node {each.node} is forgotten")

    def _empty(self, after: str) -> None:
        for each in self.market.there:
            self._says(f"after {after}, {each.id} of node {each.node} is left")
        if left := self._journal():
            self._says(f"after {after}, the journal still has {left}")

    def _has_given_up(self) -> bool:
        """Whether the client says that a slow provider did not remove a machine in time."""
        told = "its machine could not be removed: TimeoutError"
        return "late" in self.wrong and any(told in line for line in self.world.said)

    def _look(self) -> None:
        """Look now and then whether the pool has more machines than it may."""
        if self.client.dead:
            return
        now = self.kernel.now
        if len(self.market.there) <= self.most:
            self.surplus = now
        elif now - max(self.surplus, self.market.refused) > self.patience:
            there = ", ".join(f"{each.id} of node {each.node}" for each in self.market.there)
            self._says(f"more than {self.most} machines for {now - self.surplus:g} s: {there}")
            self.surplus = now
        self.kernel.at(now + LOOK_SECONDS, self._look)
