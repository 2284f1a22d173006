"""A pool that runs many calls; of those that are done, nothing may be kept."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from . import work
from .pool import Pool
from .world import World

CALLS = 20
"""How many calls are made at once."""
TIMES = 6
KINDS = ("calls", "errors", "streams", "nested", "shared", "cancelled")
MOST = 20
"""A table of a living pool that is idle has no more entries: there were more calls of each kind."""
SETTLE_SECONDS = 20.0
TABLES = (dict, list, set, deque)
AS_LARGE_AS_CODE = ("skyward.objects.modules.References",)
"""Their tables have an entry for each name in a function's code, however often it is called."""


class Many(Pool):
    """A pool that is used much, and then idle."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        # What a process keeps of each call shows if it has run most of them.
        self.nodes = self.workers = 1

    def _use(self, sky: Any, compute: Any) -> None:
        import time

        kinds = self.random.sample(KINDS, 2)
        for at in range(TIMES):
            with self._watched(sky, "many calls"):
                self._many(sky, compute, kinds[at % 2])
        with self._watched(sky, "an operation"):
            self._operation(sky, compute)
        time.sleep(SETTLE_SECONDS)
        gc.collect()
        for what, size in _large():
            self._says(f"{what} has {size} entries after {CALLS * TIMES} calls")
        self.counts["looks at memory"] += 1

    def _many(self, sky: Any, compute: Any, kind: str) -> None:
        # The copy of this process: it raises the copy's errors.
        import concurrent.futures as futures_module

        random = self.random
        first = random.getrandbits(40)
        self.kernel.note(f"{CALLS} {kind} from {first}")
        self.counts["operations"] += 1
        calls = []
        for number in range(first, first + CALLS):
            if kind == "errors":
                calls.append(sky.function(work.fail)(number))
            elif kind == "streams":
                for _ in sky.function(work.stream)(number, 3, 0.0) >> compute:
                    pass
            elif kind == "nested":
                calls.append(sky.function(work.nested)(number, 0.0))
            elif kind == "shared":
                steps = [("counter", "one", "add", (1,)), ("event", f"{number}", "delete", ())]
                calls.append(sky.function(work.use)(number, steps))
            else:
                calls.append(sky.function(work.work)(number, 0.0, 1))
        futures = [each > compute for each in calls]
        if kind == "cancelled":
            for each in futures[::2]:
                each.cancel()
        for at, each in enumerate(futures):
            with self._watched(sky, f"call {first + at}"):
                try:
                    self._is_own(kind, first + at, each.result())
                except ValueError:
                    if kind != "errors":
                        raise
                except futures_module.CancelledError:
                    if kind != "cancelled":
                        raise

    def _is_own(self, kind: str, number: int, found: Any) -> None:
        if found[0] != number:
            self._says(f"one of the {kind}, {number}, returned {found}")
        self.counts["results"] += 1


def _large() -> Iterator[tuple[str, int]]:
    """The tables of Skyward's own objects, of all processes, that have many entries."""
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        module = str(getattr(kind, "__module__", ""))
        name = f"{module}.{kind.__name__}"
        if not module.startswith("skyward.") or name in AS_LARGE_AS_CODE:
            continue
        names = [*getattr(each, "__dict__", ())]
        names += [slot for base in kind.__mro__ for slot in base.__dict__.get("__slots__", ())]
        for attribute in names:
            table = getattr(each, attribute, None)
            if isinstance(table, TABLES) and len(table) > MOST:
                what = f"{name}.{attribute}"
                found[what] = max(found[what], len(table))
    return iter(sorted(found.items()))
