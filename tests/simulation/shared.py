"""A pool whose tasks and client use the same shared objects at the same time."""

from __future__ import annotations

from typing import Any

from . import work
from .pool import Pool

KEYS = ("a", "b")
OPERATIONS: dict[str, dict[str, int]] = {
    "dict": {"get": 1, "__setitem__": 2, "pop": 2, "setdefault": 2, "compare_and_set": 3},
    "set": {"add_new": 1, "discard": 1, "__contains__": 1, "__len__": 0},
    "counter": {"add": 1, "compare_and_set": 2, "__int__": 0},
    "queue": {"put": 1, "get": 0, "get_nowait": 0},
    "short": {"put": 1, "put_nowait": 1, "get": 0, "get_nowait": 0},
    "event": {"set": 0, "clear": 0, "is_set": 0, "wait": 0},
}
"""What is done with each kind of object, and with how many arguments."""


class Shared(Pool):
    """A pool whose shared state is used by several at once."""

    def _operation(self, sky: Any, compute: Any) -> None:
        random = self.random
        number = random.getrandbits(40)
        self.counts["operations"] += 1
        count = random.randint(2, 4)
        objects = [
            (kind, f"{kind}-{random.randint(0, 1)}")
            for kind in random.sample(sorted(OPERATIONS), random.randint(1, 3))
        ]
        plans = [self._plan(objects) for _ in range(count + 1)]
        extra: list[work.Step] = []
        if random.random() < 0.5:
            extra.append(("lock", "lock", "hold", (random.choice((0.0, 0.5, 4.0, 8.0, 15.0)),)))
        if random.random() < 0.3:
            extra.append(("barrier", f"barrier-{number}-{count + 1}", "wait", ()))
        for plan in plans:
            for each in extra:
                plan.insert(random.randrange(len(plan) + 1), each)
        self.kernel.note(f"shared {number}: {count} tasks use {', '.join(n for _, n in objects)}")
        function = sky.function(work.use, retries=self.retries)
        futures = [function(number + at, plans[at]) > compute for at in range(count)]
        with self._watched(sky, "the client"):
            work.use(number + count, plans[count])
        for at, future in enumerate(futures):
            with self._watched(sky, f"call {number + at}"):
                self._result(number + at, (number + at, len(plans[at])), future.result())

    def _plan(self, objects: list[tuple[str, str]]) -> list[work.Step]:
        """What one of those who use the objects does."""
        random = self.random
        steps: list[work.Step] = []
        for _ in range(random.randint(1, 4)):
            kind, name = random.choice(objects)
            what = random.choice(sorted(OPERATIONS[kind]))
            steps.append((kind, name, what, self._given(kind, what)))
        return steps

    def _given(self, kind: str, what: str) -> tuple[Any, ...]:
        random = self.random
        numbers = [random.randint(0, 2) for _ in range(OPERATIONS[kind][what])]
        if kind == "dict":
            numbers[0] = random.choice(KEYS)  # type: ignore[call-overload]
            return (*numbers[:1], None) if what == "pop" else tuple(numbers)
        if kind in ("queue", "short"):
            # Each item is another one, so that the order shows.
            return tuple(random.getrandbits(30) for _ in numbers)
        return tuple(numbers)
