"""Calls of objects from tasks: straight to their processes, and how such calls end."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward import handles

from .conftest import Eventually, Sharing, wait_until


@sky.cls
class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def endless(self) -> Iterator[int]:
        yield from itertools.count()

    def breaks(self) -> Iterator[int]:
        yield 1
        raise LookupError("after one")

    def waits(self, name: str) -> None:
        sky.event(name).set()
        sky.event(f"{name} on").wait(60)

    def prints(self) -> None:
        print("printed by a method")

    def echo(self, data: bytes) -> bytes:
        return data

    def insists(self, name: str) -> bytes:
        try:
            self.waits(name)
        except BaseException:
            sky.event(f"{name} on").wait(60)
        return bytes(32 << 20)

    def lock(self) -> Any:
        return threading.Lock()

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def counter(pool: sky.Compute) -> Iterator[Any]:
    """An object on node 0, closed afterwards; no test may leave its worker busy."""
    made: Any = pool.run(Counter(), on=0)
    yield made
    made.close()


@sky.function
def uses(counter: Any) -> tuple[int, list[int], int, str]:
    """Uses an object in all ways."""
    first = counter.count()
    items = list(itertools.islice(counter.endless(), 40))
    try:
        list(counter.breaks())
    except LookupError as problem:
        return first, items, counter.count.submit().result(), str(problem)
    raise AssertionError("no error")


USED = (1, list(range(40)), 2, "after one")


def test_a_call_does_not_pass_the_client_and_may_be_of_any_size(
    pool: sky.Compute, counter: Any
) -> None:
    @sky.function
    def asks(counter: Any, size: int) -> bool:
        data = os.urandom(1000) * (size // 1000)
        return counter.echo(data) == data

    before = pool.stats()
    assert pool.run(asks(counter, 12_000_000), on=1)
    after = pool.stats()
    assert after.bytes_sent + after.bytes_received < before.bytes_sent + before.bytes_received + 1e6
    # Others, which a test before this one has left to end, may be told of meanwhile.
    assert after.submitted >= before.submitted + 2
    assert after.succeeded >= before.succeeded + 2


def test_what_a_method_prints_that_a_task_has_called_has_its_name(
    pool: sky.Compute, counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def asks(counter: Any) -> None:
        counter.prints()

    lines: list[tuple[str, str, int]] = []

    def output(written: Any, node: int, worker: int, name: str) -> None:
        lines.append((written.text, name, node))

    monkeypatch.setattr(pool._open_fleet.dispatcher.teller, "output", output)
    pool.run(asks(counter), on=1)
    wait_until(lambda: bool(lines))
    assert lines == [("printed by a method\n", "Counter.prints", 0)]


def test_another_client_is_told_who_may_call_an_object_over_a_network() -> None:
    place = handles.ObjectPlace("a pool", "tcp:127.0.0.1:1", "node-0", "node 0")
    handle = handles.TaskHandle("Counter 1", "Counter", place, {})
    with pytest.raises(sky.errors.ConfigurationError, match="run that function on the pool"):
        handle.count()


def test_an_object_is_called_over_a_network(sharing: Sharing) -> None:
    options = sky.Options(console=False)
    with sharing(sky.Compute(sky.Local(transport="tcp"), nodes=2, options=options)) as pool:
        counter: Any = pool.run(Counter(), on=0)
        assert pool.run(uses(without_sockets(counter)), on=1) == USED


def without_sockets(counter: Any) -> Any:
    """A handle for tasks that are not on the object's machine."""
    key, name, place, timeouts = counter.__reduce__()[1]
    far = [each for each in place.endpoints.split() if not each.startswith("unix:")]
    place = dataclasses.replace(place, endpoints=" ".join(far))
    return Sent((key, name, place, timeouts))


class Sent:
    """Becomes a handle of its own when it is sent."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return handles.TaskHandle, self._arguments


def test_a_task_that_cannot_reach_an_object_calls_it_through_the_client(
    pool: sky.Compute, counter: Any
) -> None:
    assert pool.run(uses(without_sockets(counter)), on=1) == USED


def test_an_object_is_called_between_threads_of_processes(sharing: Sharing) -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sharing(
        sky.Compute(nodes=2, worker=worker, options=sky.Options(console=False))
    ) as threads:
        counter: Any = threads.run(Counter(), on=0)
        assert threads.run(uses(counter), on=1) == USED


def test_a_process_that_a_task_has_forked_calls_an_object(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def forks(counter: Any) -> tuple[int, int, int]:
        first = counter.count()
        with multiprocessing.get_context("fork").Pool(1) as processes:
            second = processes.apply(counter.count)
        return first, second, counter.count()

    assert pool.run(forks(counter), on=1) == (1, 2, 3)


def test_a_task_that_is_killed_ends_its_generators(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def dies(counter: Any) -> None:
        next(iter(counter.endless()))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(sky.errors.WorkerDiedError):
        pool.run(dies(counter), on=1)
    assert counter.count.submit().result(100) == 1, "the generator still has the worker"


def test_a_generator_that_a_task_drops_ends(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def drops(counter: Any) -> int:
        counter.endless()
        next(iter(counter.endless()))
        return int(counter.count())

    assert pool.submit(drops(counter), on=1).result(100) == 1


def test_a_generator_may_be_dropped_anywhere(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def drops(counter: Any) -> int:
        items = counter.endless()
        next(items)
        # As where the collector finds it while this thread sends.
        with items._call._line._lock:
            del items
        return int(counter.count())

    assert pool.submit(drops(counter), on=1).result(100) == 1


def test_a_process_that_a_task_has_forked_leaves_its_generators_alone(
    pool: sky.Compute, counter: Any
) -> None:
    @sky.function
    def forks(counter: Any) -> tuple[int, list[int]]:
        items = counter.endless()
        first = next(items)
        child = os.fork()
        if not child:
            items.close()
            os._exit(0)
        os.waitpid(child, 0)
        return first, list(itertools.islice(items, 40))

    assert pool.submit(forks(counter), on=1).result(100) == (0, list(range(1, 41)))


def test_an_object_is_closed_from_its_own_process(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def closes(counter: Any) -> None:
        counter.close()

    key = counter._residence.key
    pool.submit(closes(counter), on=0).result(100)
    assert key not in pool._open_fleet.dispatcher.offered
    with pytest.raises(sky.errors.InstanceLostError, match="this Counter was closed"):
        counter.count()


def test_a_call_from_a_task_can_be_cancelled(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def cancels(counter: Any) -> tuple[bool, bool, bool]:
        future = counter.waits.submit("cancelled call")
        sky.event("cancelled call").wait(100)
        never_begun = counter.count.submit()
        return never_begun.cancel(), future.cancel(), future.cancelled()

    assert pool.run(cancels(counter), on=1) == (True, True, True)
    try:
        assert counter.count.submit().result(100) == 1
    finally:
        sky.event("cancelled call on", on=pool).set()


def test_a_result_that_nobody_wants_any_more_holds_nobody_up(
    pool: sky.Compute, counter: Any
) -> None:
    @sky.function
    def cancels(counter: Any) -> None:
        future = counter.insists.submit("insisting call")
        sky.event("insisting call").wait(100)
        future.cancel()
        for thread in threading.enumerate():
            if thread.name == "skyward-handle":
                thread.join()
        sky.event("insisting call on").set()

    pool.run(cancels(counter), on=1)
    assert counter.count.submit().result(100) == 1


def test_a_task_that_is_cancelled_ends_its_call(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def asks(counter: Any) -> None:
        counter.waits("cancelled task")

    future = pool.submit(asks(counter), on=1)
    sky.event("cancelled task", on=pool).wait(100)
    future.cancel()
    try:
        assert counter.count.submit().result(100) == 1
    finally:
        sky.event("cancelled task on", on=pool).set()


def test_a_call_that_takes_too_long_is_an_error_in_the_task(pool: sky.Compute) -> None:
    @sky.function
    def asks(counter: Any) -> tuple[str, int]:
        try:
            counter.waits("too long")
        except sky.errors.TaskTimeoutError as problem:
            return str(problem), counter.count()
        raise AssertionError("no error")

    counter: Any = pool.run(sky.cls(timeout=1.0)(Counter.kind)(), on=0)
    said, count = pool.submit(asks(counter), on=1).result(100)
    assert said.startswith("Counter.waits ran longer than its timeout of 1 s on node 0")
    assert count == 1


def test_a_result_that_cannot_be_encoded_is_an_error_in_the_task(
    pool: sky.Compute, counter: Any
) -> None:
    @sky.function
    def asks(counter: Any) -> str:
        try:
            return str(counter.lock())
        except sky.errors.SerializationError as problem:
            return str(problem)

    assert "the result of Counter.lock cannot be sent" in pool.run(asks(counter), on=1)


def test_an_object_that_restarts_is_made_again_for_a_task(pool: sky.Compute) -> None:
    @sky.function
    def loses(counter: Any) -> tuple[str, int, list[int]]:
        try:
            counter.dies()
        except sky.errors.InstanceLostError as problem:
            said = str(problem)
        return said, counter.count(), list(itertools.islice(counter.endless(), 3))

    counter: Any = pool.run(sky.cls(restart=True)(Counter.kind)(), on=0)
    said, count, items = pool.run(loses(counter), on=1)
    assert said.startswith("Counter.dies lost its worker on node 0")
    assert (count, items) == (1, [0, 1, 2])


def test_a_call_that_does_not_end_when_it_is_cancelled_costs_its_process(
    pool: sky.Compute, eventually: Eventually
) -> None:
    class Stubborn:
        def ignores(self) -> None:
            while True:
                try:
                    sky.event("stubborn").set()
                    threading.Event().wait(60)
                except BaseException:
                    continue

        def pid(self) -> int:
            return os.getpid()

    @sky.function
    def cancels(stubborn: Any) -> int:
        pid = stubborn.pid()
        future = stubborn.ignores.submit()
        sky.event("stubborn").wait(100)
        future.cancel()
        return int(pid)

    def lives(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    pid = pool.run(cancels(pool.run(sky.cls(Stubborn)(), on=0)), on=1)
    eventually(lambda: not lives(pid))
    # Its node may not have noticed yet, and a call that it has sent there is lost with it.
    with contextlib.suppress(sky.errors.WorkerDiedError):
        pool.run(sky.function(os.getpid)(), on=0)
