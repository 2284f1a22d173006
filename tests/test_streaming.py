"""Streams: generators whose values arrive as they are made, iterators sent item by item."""

import asyncio
import concurrent.futures
import gc
import itertools
import os
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import skyward as sky

from .conftest import only_in_all, other_case
from .waiting import wait_for

QUIET = sky.Options(console=False)
FAR = 200
"""More items than either side may ever be ahead of the other."""


@pytest.fixture(scope="module")
def compute(pool):
    return pool


@pytest.fixture
def idle(compute, eventually):
    """Whether every slot of the pool becomes free again."""
    return lambda: eventually(lambda: not any(view.running for view in compute.nodes))


def tally(path):
    """Count one in a file; its size is the count."""
    with open(path, "ab") as marks:
        marks.write(b".")


def counted(path):
    return path.stat().st_size if path.exists() else 0


@sky.function
def add(a, b=1):
    return a + b


@sky.function
def count(n):
    yield from range(n)


@sky.function
def tallied(made, closed=None):
    """Endless; counts what it makes, and says when it is closed."""
    try:
        for number in itertools.count():
            tally(made)
            yield number
    finally:
        if closed is not None:
            Path(closed).touch()


@sky.function
def failing(n):
    yield from range(n)
    raise LookupError("out of numbers", n)


@sky.function
def total(numbers: Iterator[int]):
    return sum(numbers)


@sky.function
def first(numbers: Iterator[int], n):
    return list(itertools.islice(numbers, n))


@sky.function
def doubled(numbers: Iterator[int]):
    for number in numbers:
        yield 2 * number


def keep_busy(compute, on):
    """Time for a runaway stream to run away: calls on the node that has nothing to do with it."""
    for number in range(100):
        compute.run(add(number), on=on)


# Results that stream.


def test_a_generator_yields_all_its_values_in_order(compute):
    assert list(count(1000) >> compute) == list(range(1000))
    assert list(count(0) >> compute) == []


def test_values_arrive_as_they_are_made(compute, tmp_path):
    @sky.function
    def stepwise(gate):
        yield "first"
        wait_for(gate)
        yield "second"

    values = stepwise(tmp_path / "gate") >> compute

    assert next(values) == "first"
    (tmp_path / "gate").touch()
    assert list(values) == ["second"]


@pytest.fixture
def impatient(monkeypatch):
    """A call that can never run fails as soon as that is known."""
    monkeypatch.setattr("skyward.calls.dispatch.ENDLESS_SECONDS", 0.0)


@only_in_all
def test_a_call_that_streams_keep_from_running_for_ever_fails_and_names_them(
    compute, tmp_path, capsys, impatient
):
    streams = [tallied(tmp_path / "made") >> compute for _ in range(2)]

    with pytest.raises(sky.errors.DeadlockError) as caught:
        add(1) >> compute

    assert str(caught.value).startswith(
        "add would wait for ever for a worker: streams that are not read hold all of them (tallied "
    )
    for place in ("tallied on node 0", "tallied on node 1", "close it", "sky.Worker(concurrency="):
        assert place in str(caught.value)
    assert "add waits for a worker: streams that are not read" in capsys.readouterr().err
    with pytest.raises(sky.errors.DeadlockError):
        (add(1) & add(2)) >> compute
    with pytest.raises(sky.errors.DeadlockError):
        list(compute.map(add, range(3), ordered=False))
    with pytest.raises(sky.errors.DeadlockError):
        (add(1) > compute).result()
    with pytest.raises(sky.errors.DeadlockError):
        compute.run(add(1), on=1)
    streams[0].close()
    assert add(1) >> compute == 2
    streams[1].close()


@only_in_all
def test_a_call_does_not_fail_because_of_streams_in_garbage(compute, tmp_path, impatient, request):
    gc.disable()
    request.addfinalizer(gc.enable)
    holders = [types.SimpleNamespace(items=tallied(tmp_path / "made") >> compute) for _ in range(2)]
    for holder in holders:
        holder.itself = holder
    del holder, holders

    assert add(1) >> compute == 2


def test_a_call_waits_for_streams_that_another_thread_may_read(
    compute, tmp_path, capsys, impatient, eventually
):
    streams = [tallied(tmp_path / "made") >> compute for _ in range(2)]

    def read_later():
        eventually(lambda: "add waits for a worker" in capsys.readouterr().err)
        streams[0].close()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_later)
        assert add(1) >> compute == 2
        reading.result()
    streams[1].close()


@other_case
def test_a_call_waits_for_a_stream_whose_time_will_be_over(compute, tmp_path, impatient):
    streams = [tallied.with_timeout(3)(tmp_path / "made") >> compute for _ in range(2)]

    assert add(1) >> compute == 2
    with pytest.raises(sky.TaskTimeoutError):
        list(streams[0])


def test_async_for_takes_the_items_of_a_stream_while_other_coroutines_run(compute, tmp_path):
    @sky.function
    def stepwise(gate):
        yield "first"
        wait_for(gate)
        yield "second"

    async def open_gate():
        (tmp_path / "gate").touch()

    async def main():
        taken = []
        async for item in stepwise(tmp_path / "gate") >> compute:
            taken.append(item)
            if item == "first":
                # Runs only while the loop waits for the second item.
                opening = asyncio.create_task(open_gate())
        await opening
        return taken, [item async for item in await (count(FAR) > compute)]

    assert asyncio.run(main()) == (["first", "second"], list(range(FAR)))


def test_async_for_takes_the_items_of_an_async_generator_and_raises_its_exception(compute):
    @sky.function
    async def awaited():
        yield 1
        raise LookupError("over")

    async def main():
        taken = []
        with pytest.raises(LookupError, match="over"):
            async for item in awaited() >> compute:
                taken.append(item)
        return taken

    assert asyncio.run(main()) == [1]


def test_async_for_takes_the_results_of_many_calls(compute):
    async def main():
        mapped = [item async for item in compute.map(add, range(FAR))]
        calls = sky.gather(*[add(number) for number in range(3)], stream=True, ordered=False)
        with pytest.raises(TypeError):
            [item async for item in compute.map(add, ["no number"])]
        return mapped, sorted([item async for item in calls >> compute])

    assert asyncio.run(main()) == (list(range(1, FAR + 1)), [1, 2, 3])


def test_a_cancelled_async_for_loses_no_item(compute, tmp_path):
    @sky.function
    def stepwise(gate):
        wait_for(gate)
        yield from range(3)

    async def main():
        items = stepwise(tmp_path / "gate") >> compute
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(items), 0.01)
        (tmp_path / "gate").touch()
        return [item async for item in items]

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_generator_starts_before_anything_is_taken(compute, tmp_path, eventually):
    values = tallied(tmp_path / "made") >> compute

    eventually(lambda: counted(tmp_path / "made") > 1)
    values.close()


def test_a_generator_runs_only_so_far_ahead_of_its_consumer(compute, tmp_path, eventually):
    values = compute.run(tallied(tmp_path / "made"), on=0)
    next(values)
    eventually(lambda: counted(tmp_path / "made") > 8)

    keep_busy(compute, on=1)

    assert counted(tmp_path / "made") < FAR
    for taken in range(1, 2000):
        assert next(values) == taken
        assert counted(tmp_path / "made") <= taken + FAR
    assert counted(tmp_path / "made") >= 2000
    values.close()


def test_an_exception_reaches_the_caller_after_the_values_before_it(compute):
    values = failing(3) >> compute

    assert [next(values) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError) as caught:
        next(values)
    assert caught.value.args == ("out of numbers", 3)
    assert "raised by failing on node" in caught.value.__notes__[0]
    assert 'raise LookupError("out of numbers", n)' in caught.value.__notes__[0]
    assert list(values) == []


def test_an_exception_before_the_first_value_reaches_the_caller(compute):
    with pytest.raises(LookupError, match="out of numbers"):
        list(failing(0) >> compute)


def test_a_value_that_cannot_travel_ends_the_stream_with_a_clear_error(compute, idle):
    @sky.function
    def locks():
        yield 1
        yield {"lock": threading.Lock()}

    values = locks() >> compute

    assert next(values) == 1
    with pytest.raises(sky.errors.SerializationError, match="lock"):
        next(values)
    idle()


def test_closing_stops_the_remote_generator_and_frees_its_slot(compute, tmp_path, eventually, idle):
    values = tallied(tmp_path / "made", tmp_path / "closed") >> compute
    next(values)

    values.close()

    eventually((tmp_path / "closed").exists)
    idle()
    assert list(values) == []
    values.close()
    assert add(0) @ compute == [1, 1]


def test_dropping_the_iterator_stops_the_remote_generator(compute, tmp_path, eventually, idle):
    values = tallied(tmp_path / "made", tmp_path / "closed") >> compute
    next(values)

    del values
    gc.collect()

    eventually((tmp_path / "closed").exists)
    idle()


def test_dropping_the_iterator_before_the_first_value_stops_the_generator(
    compute, tmp_path, eventually, idle
):
    tallied(tmp_path / "made", tmp_path / "closed") >> compute
    gc.collect()

    eventually((tmp_path / "closed").exists)
    idle()


def test_breaking_out_of_a_loop_stops_the_remote_generator(compute, tmp_path, eventually, idle):
    for value in tallied(tmp_path / "made", tmp_path / "closed") >> compute:
        if value == 40:
            break
    gc.collect()

    eventually((tmp_path / "closed").exists)
    idle()


def test_leaving_a_with_block_stops_the_remote_generator(compute, tmp_path, eventually, idle):
    with tallied(tmp_path / "made", tmp_path / "closed") >> compute as values:
        assert [next(values), next(values)] == [0, 1]

    eventually((tmp_path / "closed").exists)
    idle()
    assert list(values) == []


def test_closing_interrupts_a_generator_that_is_busy_between_values(
    compute, tmp_path, eventually, idle
):
    @sky.function
    def busy(stopped):
        try:
            yield 1
            wait_for("/nowhere", 60)
        finally:
            Path(stopped).touch()

    values = busy(tmp_path / "stopped") >> compute
    next(values)
    died = compute.stats().workers_died

    values.close()

    eventually((tmp_path / "stopped").exists)
    idle()
    assert compute.stats().workers_died == died


def test_a_timeout_counts_for_the_whole_stream(compute, tmp_path, eventually, idle, patient):
    @sky.function(timeout=1)
    def endless(closed):
        try:
            while True:
                yield 1
                time.sleep(0.01)
        finally:
            Path(closed).touch()

    with pytest.raises(sky.TaskTimeoutError, match="endless ran longer than its timeout"):
        for _ in endless(tmp_path / "closed") >> compute:
            pass

    eventually((tmp_path / "closed").exists)
    idle()


@pytest.mark.parametrize("executor", ["process", pytest.param("thread", marks=other_case)])
def test_a_generator_that_is_stopped_may_clean_up_in_peace(executor, tmp_path, eventually, patient):
    @sky.function(timeout=1)
    def endless(number):
        try:
            while True:
                yield 1
                time.sleep(0.01)
        finally:
            time.sleep(0.1)
            (tmp_path / str(number)).touch()

    worker = sky.Worker(concurrency=2, executor=executor)
    with sky.Compute(worker=worker) as compute:
        for number in range(2):
            with pytest.raises(sky.TaskTimeoutError):
                for _ in endless(number) >> compute:
                    pass
            eventually((tmp_path / str(number)).exists)


def test_a_stream_counts_as_what_became_of_it(compute, eventually):
    @sky.function
    def count(problem):
        yield from range(3)
        if problem:
            raise ValueError(problem)

    def are_over():
        """Whether all calls are counted: a stream that was closed ends a moment later."""
        now = compute.stats()
        return now.submitted == now.succeeded + now.failed + now.cancelled

    eventually(are_over, what="the end of streams that other tests have closed")
    before = compute.stats()
    assert list(count("") >> compute) == [0, 1, 2]
    with pytest.raises(ValueError, match="late"):
        list(count("late") >> compute)
    eventually(are_over, what="the end of both streams")
    after = compute.stats()

    assert after.submitted - before.submitted == 2
    assert after.succeeded - before.succeeded == 1
    assert after.failed - before.failed == 1


def test_a_stream_that_is_open_when_its_pool_closes_was_cancelled():
    with sky.Compute(options=sky.Options(console=False)) as compute:
        values = sky.function(lambda: (number for number in range(10**6)))() >> compute
        assert next(values) == 0

    stats = compute.stats()
    assert (stats.succeeded, stats.failed, stats.cancelled) == (0, 0, 1)


def test_stopping_a_stream_never_strikes_the_call_after_it(compute):
    short = sky.function(timeout=0.05)(lambda: (number for number in range(10**9)))
    work = sky.function(lambda: sum(number for number in range(300_000)))

    for _ in range(10):
        with pytest.raises(sky.TaskTimeoutError):
            for _ in compute.run(short(), on=0):
                pass
        assert compute.run(work(), on=0) == 44999850000


def test_a_stream_that_ends_in_time_does_not_time_out(compute):
    quick = sky.function(timeout=1)(lambda: (number for number in range(3)))
    values = quick() >> compute

    assert next(values) == 0
    time.sleep(1.1)  # the timeout passes, but the generator has long ended
    assert list(values) == [1, 2]


def test_a_worker_that_dies_ends_the_stream_with_an_error(compute):
    @sky.function
    def dying():
        yield 1
        os._exit(3)

    values = dying() >> compute

    assert next(values) == 1
    with pytest.raises(sky.WorkerDiedError, match="dying lost its worker on node"):
        next(values)


def test_a_stream_that_outlives_its_pool_ends_with_an_error():
    with sky.Compute(options=QUIET) as short_lived:
        values = count(10**6) >> short_lived
        assert next(values) == 0

    with pytest.raises(sky.errors.PoolClosedError, match="the pool closed before count was done"):
        list(values)


def test_a_stream_may_be_consumed_on_another_thread(compute):
    values = count(100) >> compute
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(list, values).result(100) == list(range(100))


def test_large_values_stream_and_stay_what_they_were(compute):
    @sky.function
    def arrays(n):
        buffer = np.zeros(1 << 17)
        for number in range(n):
            buffer[:] = number
            yield buffer

    values = list(arrays(40) >> compute)

    assert [float(value.max()) for value in values] == list(range(40))
    values[0][:] = -1
    assert [float(value.min()) for value in values] == [-1, *range(1, 40)]


def test_a_function_that_returns_a_generator_streams_too(compute):
    @sky.function
    def indirect(n):
        return (number**2 for number in range(n))

    assert list(indirect(4) >> compute) == [0, 1, 4, 9]


def test_an_async_generator_streams(compute, tmp_path, eventually, idle):
    @sky.function
    async def ticks(closed):
        try:
            for number in itertools.count():
                await asyncio.sleep(0)
                yield number
        finally:
            Path(closed).touch()

    with ticks(tmp_path / "closed") >> compute as values:
        assert [next(values) for _ in range(100)] == list(range(100))

    eventually((tmp_path / "closed").exists)
    idle()


def test_an_exception_in_an_async_generator_reaches_the_caller(compute):
    @sky.function
    async def broken():
        yield 1
        raise LookupError("async")

    values = broken() >> compute

    assert next(values) == 1
    with pytest.raises(LookupError, match="async"):
        next(values)


def test_a_future_of_a_generator_is_a_future_of_its_iterator(compute):
    values = (count(3) > compute).result(100)

    assert list(values) == [0, 1, 2]


def test_a_broadcast_generator_gives_one_iterator_per_worker(compute):
    @sky.function
    def ranked(n):
        for number in range(n):
            yield sky.instance_info().node, number

    assert [list(values) for values in ranked(2) @ compute] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]


def test_two_streams_run_side_by_side(compute):
    ones, twos = (count(100) & doubled(range(100))) >> compute

    assert list(zip(ones, twos, strict=True)) == [(n, 2 * n) for n in range(100)]


def test_more_short_streams_than_slots_can_be_gathered(compute):
    streams = sky.gather(*[count(8) for _ in range(10)]) >> compute

    assert [list(values) for values in streams] == [list(range(8))] * 10


def test_streams_nobody_will_take_are_stopped_when_their_group_fails(
    compute, tmp_path, eventually, idle
):
    @sky.function
    def fails_after(path):
        wait_for(path)
        raise LookupError("too late")

    with pytest.raises(LookupError, match="too late"):
        (
            tallied(tmp_path / "made", tmp_path / "closed") & fails_after(tmp_path / "made")
        ) >> compute

    eventually((tmp_path / "closed").exists)
    idle()


def test_a_stream_goes_on_while_other_calls_wait_behind_it():
    """Short calls are sent ahead of time; the worker must still hear that values were taken."""
    with sky.Compute(options=QUIET) as single:
        for number in range(200):
            add(number) >> single
        ahead = [add(number) > single for number in range(30)]
        values = count(1000) > single
        behind = [add(number) > single for number in range(30)]

        assert list(values.result(100)) == list(range(1000))
        assert [future.result(100) for future in ahead + behind] == [*range(1, 31)] * 2


def test_large_arguments_of_a_stream_are_let_go_when_it_ends(compute, idle):
    @sky.function
    def length(array):
        yield len(array)

    array = np.zeros(1 << 20)
    assert list(length(array) >> compute) == [1 << 20]
    idle()
    held = compute._fleet.dispatcher.packer.store._pins

    assert list(length(array) @ compute)
    idle()
    before = sum(held.values())
    for _ in range(5):
        assert [list(values) for values in length(array) @ compute] == [[1 << 20]] * 2
    idle()
    assert sum(held.values()) <= before


def test_locally_a_generator_is_just_a_generator():
    values = count.local(3)

    assert next(values) == 0
    assert list(values) == [1, 2]


# Arguments that stream.


def test_an_iterator_parameter_takes_any_iterable(compute):
    assert total([1, 2, 3]) >> compute == 6
    assert total(range(1000)) >> compute == 499500
    assert total(n for n in range(10)) >> compute == 45
    assert total(numbers=iter([4, 5])) >> compute == 9
    assert total([]) >> compute == 0
    assert total.local(iter([1, 2])) == 3


def test_the_function_gets_an_iterator_not_a_list(compute):
    @sky.function
    def probe(numbers: Iterator[int]):
        taken = next(numbers)
        rest = list(numbers)
        return iter(numbers) is numbers, taken, rest, next(numbers, "over")

    assert probe([1, 2, 3]) >> compute == (True, 1, [2, 3], "over")


def test_several_parameters_stream_at_once(compute):
    @sky.function
    def paired(left: Iterator[int], factor: int, *, right: "Iterator[int]"):
        return [factor * (a + b) for a, b in zip(left, right, strict=True)]

    assert paired(range(100), 2, right=(-n for n in range(100))) >> compute == [0] * 100


def test_an_iterator_parameter_may_be_left_out(compute):
    @sky.function
    def maybe(numbers: Iterator[int] | None = None):
        return numbers if numbers is None else list(numbers)

    assert maybe() >> compute is None
    assert maybe(None) >> compute is None
    assert maybe([1]) >> compute == [1]


def test_something_that_cannot_be_iterated_is_refused_at_once(compute):
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        total(5) >> compute


def test_items_are_sent_as_they_are_made(compute, tmp_path):
    @sky.function
    def acknowledge(numbers: Iterator[int], folder):
        for number in numbers:
            Path(folder, str(number)).touch()
        return "done"

    def acknowledged():
        for number in range(5):
            yield number
            wait_for(tmp_path / str(number))  # this one has arrived before the next is made

    assert acknowledge(acknowledged(), tmp_path) >> compute == "done"


def test_the_callers_iterator_runs_only_so_far_ahead_of_the_function(compute, tmp_path, eventually):
    @sky.function
    def hesitant(numbers: Iterator[int], gate):
        next(numbers)
        wait_for(gate)
        return sum(itertools.islice(numbers, 2000))

    pulled = 0

    def numbers():
        nonlocal pulled
        for _ in itertools.count():
            pulled += 1
            yield 1

    future = compute.submit(hesitant(numbers(), tmp_path / "gate"), on=0)
    eventually(lambda: pulled > 8)

    keep_busy(compute, on=1)

    assert pulled < FAR
    (tmp_path / "gate").touch()
    assert future.result(100) == 2000
    assert 2001 <= pulled < 2001 + FAR


@pytest.mark.parametrize("problem", [ValueError("bad item"), OSError("the disk is gone")])
def test_an_exception_in_the_callers_iterator_reaches_the_function(compute, problem):
    @sky.function
    def careful(numbers: Iterator[int]):
        seen = []
        try:
            for number in numbers:
                seen.append(number)
        except (ValueError, OSError) as caught:
            return seen, repr(caught)

    def numbers():
        yield from range(3)
        raise problem

    assert careful(numbers()) >> compute == ([0, 1, 2], repr(problem))


@pytest.mark.parametrize("problem", [ValueError("bad item"), OSError("the disk is gone")])
def test_an_exception_in_the_callers_iterator_comes_back_to_the_caller(compute, problem):
    def numbers():
        yield 1
        raise problem

    with pytest.raises(type(problem), match=str(problem)):
        total(numbers()) >> compute


def test_even_a_system_exit_in_the_callers_iterator_does_not_leave_the_function_waiting(compute):
    def numbers():
        yield 1
        raise SystemExit(3)

    with pytest.raises(sky.SkywardError, match=r"the argument stream failed: SystemExit\(3\)"):
        total(numbers()) >> compute


def test_an_item_that_cannot_travel_is_an_error_that_names_it(compute):
    with pytest.raises(sky.errors.SerializationError, match="lock"):
        total(iter([1, threading.Lock()])) >> compute


def test_a_function_that_returns_early_closes_the_callers_generator(compute):
    closed = threading.Event()

    def numbers():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    assert first(numbers(), 3) >> compute == [0, 1, 2]
    assert closed.wait(100)


def test_a_function_that_fails_closes_the_callers_generator(compute):
    closed = threading.Event()

    def numbers():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    @sky.function
    def picky(numbers: Iterator[int]):
        raise LookupError(next(numbers))

    with pytest.raises(LookupError):
        picky(numbers()) >> compute
    assert closed.wait(100)


def test_cancelling_a_function_that_waits_for_items_frees_its_slot(
    compute, tmp_path, eventually, idle
):
    def numbers():
        yield 1
        wait_for(tmp_path / "gate")

    future = total(numbers()) > compute
    eventually(future.running)

    assert future.cancel()

    idle()
    (tmp_path / "gate").touch()
    assert add(0) @ compute == [1, 1]


def test_large_items_stream(compute):
    @sky.function
    def sums(arrays: Iterator[np.ndarray]):
        return [float(array.sum()) for array in arrays]

    def arrays():
        buffer = np.zeros(1 << 16)
        for number in range(20):
            buffer[:] = number
            yield buffer

    assert sums(arrays()) >> compute == [number * (1 << 16) for number in range(20)]


def test_an_async_function_may_take_a_stream(compute):
    @sky.function
    async def later(numbers: Iterator[int]):
        await asyncio.sleep(0)
        return sum(numbers)

    assert later([1, 2]) >> compute == 3


# Both ways at once.


def test_values_flow_through_a_function_both_ways(compute):
    assert list(doubled(range(1000)) >> compute) == list(range(0, 2000, 2))


def test_each_value_can_depend_on_the_one_before(compute):
    """A conversation: the caller makes an item only after it has the answer to the last."""
    answers = []

    def questions():
        yield 1
        while answers[-1] < 100:
            yield answers[-1]

    talk = doubled(_patient(questions, answers)) >> compute
    for answer in talk:
        answers.append(answer)

    assert answers == [2, 4, 8, 16, 32, 64, 128]


def _patient(questions, answers):
    """Asks the next question only when the last one is answered."""
    for asked, question in enumerate(questions(), start=1):
        yield question
        deadline = time.monotonic() + 20
        while len(answers) < asked:
            if time.monotonic() > deadline:
                raise TimeoutError("no answer")
            time.sleep(0.002)


def test_an_endless_stream_through_a_function_is_held_back_at_both_ends(compute):
    pulled = 0

    def numbers():
        nonlocal pulled
        for number in itertools.count():
            pulled += 1
            yield number

    values = compute.run(doubled(numbers()), on=0)
    taken = [next(values) for _ in range(10)]

    keep_busy(compute, on=1)

    assert taken == list(range(0, 20, 2))
    assert pulled < 10 + FAR
    values.close()


def test_closing_a_stream_closes_the_callers_generator_behind_it(compute, idle):
    closed = threading.Event()

    def numbers():
        try:
            yield from itertools.count()
        finally:
            closed.set()

    values = doubled(numbers()) >> compute
    assert next(values) == 0

    values.close()

    assert closed.wait(100)
    idle()


def test_an_exception_in_the_callers_iterator_passes_through_a_generator(compute):
    def numbers():
        yield 1
        raise LookupError("upstream")

    values = doubled(numbers()) >> compute

    assert next(values) == 2
    with pytest.raises(LookupError, match="upstream"):
        next(values)


# Everywhere at once.


def test_a_broadcast_sends_a_list_to_every_worker(compute):
    assert total([1, 2, 3]) @ compute == [6, 6]
    assert [list(values) for values in doubled(range(3)) @ compute] == [[0, 2, 4]] * 2


def test_a_broadcast_reads_a_re_iterable_once_per_worker(compute):
    class Reopened:
        opened = 0

        def __iter__(self):
            self.opened += 1
            return iter(range(4))

    source = Reopened()

    assert total(source) @ compute == [6, 6]
    assert source.opened == 2


@pytest.mark.parametrize("call", [lambda s: total(s), lambda s: total(numbers=s)])
def test_a_broadcast_refuses_an_iterator_that_can_be_read_only_once(compute, call):
    with pytest.raises(sky.errors.ConfigurationError, match="'numbers' of total is an iterator"):
        call(iter([1, 2])) @ compute
