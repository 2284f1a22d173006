"""What a call costs, counted in Python functions: unlike microseconds, this is the same each time.

What only some calls need must cost the others one look. If a limit here is too low for something
that every call needs, raise it, and measure `bench/functions.py` before.
"""

import sys
import types
from collections import Counter
from typing import Any

import skyward as sky

from .conftest import wait_until

CALLS = 50
ON_CLIENT = 57
ON_WORKER = 54
OF_AN_ADD = 20


@sky.function
def nothing() -> None:
    return None


@sky.function
def begin_counting() -> None:
    count = [0]

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        count[0] += event == "call"

    sys.counted_calls = count  # type: ignore[attr-defined]
    sys.setprofile(note)


@sky.function
def end_counting() -> int:
    sys.setprofile(None)
    return sys.counted_calls[0]  # type: ignore[attr-defined, no-any-return]


def test_the_client_runs_few_functions_for_a_call(pool: sky.Compute) -> None:
    nothing() @ pool
    nothing() >> pool
    counts: Counter[str] = Counter()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        counts[frame.f_code.co_qualname] += event == "call"

    before, watched = sys.getprofile(), True
    while watched:
        # A page of another test shows the pools of all processes for a moment.
        wait_until(lambda: not pool._open_fleet.events.listened)
        counts.clear()
        sys.setprofile(note)
        try:
            for _ in range(CALLS):
                nothing() >> pool
        finally:
            sys.setprofile(before)
        watched = pool._open_fleet.events.listened
    assert counts.total() / CALLS < ON_CLIENT, counts


def test_a_worker_runs_few_functions_for_a_call(pool: sky.Compute) -> None:
    pool.run(nothing(), on=0)
    pool.run(begin_counting(), on=0)
    for _ in range(CALLS):
        pool.run(nothing(), on=0)
    assert pool.run(end_counting(), on=0) / (CALLS + 1) < ON_WORKER


@sky.cls
class Shared:
    """An object that a task calls."""

    def nothing(self) -> None:
        return None


@sky.function
def calls(shared: Any) -> None:
    shared.nothing()


def test_a_worker_whose_objects_tasks_call_reads_its_clients_calls_without_a_second_thread(
    pool: sky.Compute,
) -> None:
    shared: Any = pool.run(Shared(), on=0)
    pool.run(calls(shared), on=1)

    @sky.function
    def begin() -> None:
        entered: set[str] = set()
        sys.entered = entered  # type: ignore[attr-defined]
        sys.setprofile(lambda frame, *_: entered.add(frame.f_code.co_qualname))

    @sky.function
    def end() -> Any:
        sys.setprofile(None)
        return sys.entered  # type: ignore[attr-defined]

    def main_thread_reads() -> bool:
        pool.run(begin(), on=0)
        for _ in range(CALLS):
            pool.run(nothing(), on=0)
        return "FrameDecoder.next" in pool.run(end(), on=0)

    # A call that lasts, as on a machine that stands still, is reason to have the second one read.
    wait_until(main_thread_reads)
    shared.close()


@sky.function
def functions_of_an_add() -> float:
    counter = sky.counter("cost of an add")
    counter.add()
    count = [0]

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        count[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    for _ in range(CALLS):
        counter.add()
    sys.setprofile(before)
    return count[0] / CALLS


def test_a_worker_runs_few_functions_for_a_shared_counter(pool: sky.Compute) -> None:
    assert pool.run(functions_of_an_add(), on=0) < OF_AN_ADD
