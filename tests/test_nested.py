"""Tasks that start tasks: on their own pool, without waiting for their own places."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward import context, functions
from skyward.calls.lane import Lanes
from skyward.calls.nested import NestedCall, NestedCalls
from skyward.calls.scheduler import Load, Scheduler
from skyward.calls.task import Failed
from skyward.objects import encoding
from skyward.wire.messages import Define, Payload, Start
from skyward.worker.nested import NestedFuture, NestedPool
from skyward.worker.places import ReadyTask, TaskPlaces

from .conftest import ALL, Eventually
from .waiting import wait_for


@sky.function
def plus_one(number: int) -> int:
    return number + 1


@sky.function
def through_another(number: int) -> int:
    return plus_one(number) >> sky


@sky.function
def sum_through_others(count: int) -> int:
    return sum(sky.gather(*[through_another(number) for number in range(count)]) >> sky)


@sky.function
def fibonacci(number: int) -> int:
    if number < 2:
        return number
    one, other = sky.gather(fibonacci(number - 1), fibonacci(number - 2)) >> sky
    return one + other


@sky.function
def depth(below: int) -> int:
    return 1 + (depth(below - 1) >> sky) if below else 0


@sky.function
def waits_for_a_file(begun: Path, path: Path) -> str:
    begun.touch()
    wait_for(path)
    return "found"


@sky.function
def waits_for_a_task(begun: Path, path: Path) -> str:
    return waits_for_a_file(begun, path) >> sky


@sky.function
def counts_up(count: int) -> Iterator[int]:
    yield from range(count)


@sky.function
def fails(text: str) -> None:
    raise KeyError(text)


def test_a_task_runs_another_on_its_own_pool(pool: sky.Compute) -> None:
    assert through_another(1) >> pool == 2


def test_more_tasks_wait_than_there_are_workers(pool: sky.Compute) -> None:
    assert sum_through_others(40) >> pool == sum(range(1, 41))
    assert sky.gather(*[sum_through_others(4) for _ in range(8)]) >> pool == [10] * 8


class Lane(SimpleNamespace):
    """An executor, as far as a test needs one."""

    __hash__ = object.__hash__


def work(number: int, *, depth: int = 0, apart: str = "") -> Any:
    """A task, as the scheduler sees it."""
    facts: dict[str, Any] = {"on": None, "worker": None, "pinned": None, "done": False}
    return SimpleNamespace(id=number, waiting=True, depth=depth, apart=apart, **facts)


def test_a_place_that_is_given_up_goes_to_one_task_or_to_any_number_of_nested_ones() -> None:
    scheduler: Scheduler[Any] = Scheduler()
    load: Load[Any] = Load(0, 0, 0)
    scheduler.add(load)
    for number in (1, 2):
        assert scheduler.pick(work(number)) is load
        scheduler.begin(load, work(number))
        scheduler.lend(load, number)
    assert scheduler.pick(work(3)) is None, "every task that waits would let another one begin"
    assert scheduler.pick(work(4, depth=1)) is load
    scheduler.queue(work(3))
    assert scheduler.next_for(load) is None
    scheduler.queue(nested := work(5, depth=1))
    assert scheduler.next_for(load) is nested
    scheduler.begin(load, nested)
    assert [task.id for task in load.started()] == [1, 2, 5]
    load.take_back(1)
    assert [task.id for task in load.started()] == [1, 2, 5], "the others have begun, too"
    scheduler.begin(load, work(6, apart="progress"))
    for number in (2, 5, 6, 1):
        assert load.capacity > load.slots or number == 1
        scheduler.end(load, number)
    assert (load.capacity, load.common, load.window, load.waiting) == (1, 1, 1, set())


def test_of_nested_tasks_the_deepest_come_first_and_then_the_oldest() -> None:
    scheduler: Scheduler[Any] = Scheduler()
    load: Load[Any] = Load(0, 0, 0)
    scheduler.add(load)
    for number, depth in enumerate([0, 1, 1, 2, 2, 1]):
        scheduler.queue(work(number, depth=depth))
    assert [task.id for task in scheduler.queued()][:-1] == [3, 4, 1, 2, 5]
    taken = []
    while (task := scheduler.next_for(load)) is not None:
        taken.append(task.id)
    assert taken == [3, 4, 1, 2, 5, 0]


def test_tasks_that_are_dropped_leave_the_queue_also_when_no_executor_ever_comes() -> None:
    scheduler: Scheduler[Any] = Scheduler()
    tasks = []
    for number in range(300):
        tasks.append(each := work(number, depth=number % 3 == 1))
        each.on = 4 if number % 3 == 2 else None
        scheduler.queue(each)
    for count, each in enumerate(tasks[:200], 1):
        scheduler.drop([each])
        scheduler.drop([each])
        assert scheduler.backlog == 300 - count
        there = len(scheduler._queue) + len(scheduler._nested) + len(scheduler._aimed[4])
        assert there <= 2 * scheduler.backlog, "at most as many as wait"
    scheduler.drop(tasks[200:299])
    assert scheduler.queued() == tasks[299:]
    load: Load[Any] = Load(4, 0, 0)
    scheduler.add(load)
    assert scheduler.next_for(load) is tasks[299]
    assert (scheduler.backlog, scheduler.may_have_queued) == (0, True)
    scheduler.tidy()
    assert not scheduler.may_have_queued


def test_tasks_of_objects_with_their_own_places_count_as_begun_and_take_turns() -> None:
    scheduler: Scheduler[Any] = Scheduler()
    loads: list[Load[Any]] = [Load(node, 0, 0) for node in range(3)]
    for load in loads:
        scheduler.add(load)
    objects = [work(number, apart=f"object {number}") for number in range(3)]
    picked = [scheduler.pick(task) for task in objects]
    assert [load.node for load in picked if load is not None] == [0, 1, 2]
    first = loads[0]
    for task in (work(4), work(5), work(6, apart="progress")):
        scheduler.begin(first, task)
    assert [task.id for task in first.started()] == [4, 6]
    assert [task.id for task in first.unstarted()] == [5], "it was sent ahead"
    scheduler.end(first, 6)
    assert first.overfull


def test_a_task_sent_into_a_place_that_is_taken_back_is_called_back() -> None:
    lanes = Lanes()
    lane: Any = Lane(load=(load := Load(0, 0, 0)), tasks=load.tasks)
    lanes.add(lane, usable=True)
    with lanes.lock:
        lanes.assign(work(1))
        lanes.lend(lane, 1)
        lanes.queue_nested(work(2, depth=1))
        assert lanes.assign_next(lane) is not None
    assert not lanes.take_stuck()
    lanes.go_on(lane, 1)
    assert lanes.take_stuck() == [lane]
    lanes.recalled(lane, [2])
    assert not lanes.take_stuck(), "it is asked once"
    assert (list(load.tasks), load.capacity, lanes.backlog) == ([1], 1, 1)


def test_an_executor_that_will_be_replaced_takes_only_what_its_own_tasks_need() -> None:
    scheduler: Scheduler[Any] = Scheduler()
    load: Load[Any] = Load(0, 0, 0)
    scheduler.add(load)
    scheduler.begin(load, work(1))
    scheduler.remove(load)
    load.nested_only = True
    scheduler.queue(work(2))
    scheduler.queue(nested := work(3, depth=1))
    assert scheduler.next_for(load) is None
    scheduler.lend(load, 1)
    assert scheduler.pick(work(4, depth=1)) is load
    assert scheduler.pick(work(5)) is None
    assert scheduler.next_for(load) is nested
    scheduler.begin(load, nested)
    assert scheduler.next_for(load) is None
    progress = work(6, apart="progress")
    assert scheduler.pick(progress) is None
    progress.pinned = load
    assert scheduler.pick(progress) is load


def test_a_recursion_ends(pool: sky.Compute) -> None:
    assert fibonacci(9) >> pool == 34


def test_thousands_of_tasks_of_one_task(pool: sky.Compute, eventually: Eventually) -> None:
    @sky.function
    def starts(count: int) -> tuple[int, int]:
        futures = [plus_one(number) > sky for number in range(count)]
        return sum(future.result() for future in futures), threading.active_count()

    # The tasks of other tests waited on threads, which end when they have had no work for a second.
    eventually(lambda: max(sky.remote(threading.active_count)() @ pool) < 20)
    count = 10_000 if ALL else 1_000
    total, threads = starts(count) >> pool
    assert total == sum(range(1, count + 1))
    assert threads < 100, "a task that does not wait needs no thread"


def test_a_chain_is_deeper_than_pythons_own_recursion_of_tasks(pool: sky.Compute) -> None:
    assert depth(200) >> pool == 200


def test_tasks_on_threads_start_others(threads: sky.Compute) -> None:
    assert sum_through_others(20) >> threads == sum(range(1, 21))
    assert depth(20) >> threads == 20


def test_all_operators_work_in_a_task(pool: sky.Compute) -> None:
    @sky.function
    def uses_all() -> tuple[Any, ...]:
        one, other = (plus_one(1) & plus_one(2)) >> sky
        streamed = sky.gather(plus_one(3), plus_one(4), stream=True, ordered=False) >> sky
        return one, other, sorted(streamed), list(counts_up(40) >> sky), node() @ sky

    @sky.function
    def node() -> int:
        return sky.instance_info().node

    assert uses_all() >> pool == (2, 3, [4, 5], list(range(40)), [0, 1])


def test_fail_fast_holds_in_a_task(pool: sky.Compute, tmp_path: Path) -> None:
    @sky.function(fail_fast=True)
    def one_fails() -> None:
        if sky.instance_info().node == 1:
            raise KeyError("on purpose")
        wait_for(tmp_path / "never")

    @sky.function
    def asks() -> list[str]:
        try:
            one_fails() @ sky
        except sky.BroadcastError as problem:
            return [type(each).__name__ for each in problem.exceptions]
        return []

    assert asks() >> pool == ["KeyError", "TaskCancelledError"]


def test_a_task_waits_for_several_as_any_program_does(pool: sky.Compute) -> None:
    @sky.function
    def waits() -> list[int]:
        futures = [through_another(number) > sky for number in range(6)]
        concurrent.futures.wait(futures[:3])
        done = concurrent.futures.as_completed(futures)
        return sorted(future.result() for future in done)

    @sky.function
    async def awaits() -> list[int]:
        async def one(number: int) -> int:
            return await (through_another(number) > sky)

        return await asyncio.gather(*[one(number) for number in range(6)])

    assert waits() >> pool == list(range(1, 7))
    assert awaits() >> pool == list(range(1, 7))


def test_threads_of_tasks_start_others(pool: sky.Compute) -> None:
    @sky.function
    def deep(below: int) -> int:
        if not below:
            return 0
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            return 1 + threads.submit(lambda: deep(below - 1) >> sky).result()

    assert deep(6) >> pool == 6


def test_an_object_waits_for_what_an_earlier_call_has_started(pool: sky.Compute) -> None:
    @sky.cls
    class Keeps:
        def start(self) -> None:
            self.future = depth(3) > sky

        def finish(self) -> int:
            return self.future.result()

    with Keeps() >> pool as keeps:
        keeps.start()
        assert keeps.finish.submit().result(60) == 3


def nested_pool(hurry: Any = lambda: None) -> tuple[NestedPool, TaskPlaces]:
    """What tasks use, without a client, and the tasks of the executor."""
    places = TaskPlaces(1, lambda message: None, lambda job: None)
    nobody: Any = None
    return NestedPool(nobody, places, lambda: None, hurry), places


def job(number: int, apart: str = "") -> ReadyTask:
    run: Any = SimpleNamespace(task=number, apart=apart, name=f"task {number}")
    return ReadyTask(run, (memoryview(b""), [], []), [])


@pytest.mark.parametrize(
    "wait",
    [
        lambda future: future.result(60),
        lambda future: concurrent.futures.wait([future], 60),
        lambda future: list(concurrent.futures.as_completed([future], 60)),
    ],
)
def test_whoever_waits_gives_a_place_up_and_has_the_answer_read(wait: Any) -> None:
    seen = []

    def hurry() -> None:
        seen.append((running.waits, places._given_up.copy()))
        future.set_result(None)

    pool, places = nested_pool(hurry)
    places.add(running := job(1))
    assert places.begin_next() is running
    future = NestedFuture(pool, -1, None)
    wait(future)
    assert seen == [(1, {1})], "an unknown thread waits, for the job that runs"
    assert (running.waits, places._given_up) == (0, set())


class SlowToOpen:
    """Takes its time to be decoded: until the other thread asks, too."""

    opening = threading.Barrier(2)

    def __reduce__(self) -> Any:
        return SlowToOpen.open, ()

    @staticmethod
    def open() -> str:
        with contextlib.suppress(threading.BrokenBarrierError):
            SlowToOpen.opening.wait(0.1)
        return "value"


def test_two_threads_get_one_result() -> None:
    encoded = encoding.encode([SlowToOpen()])
    future = NestedFuture(nested_pool()[0], -1, None)
    future.arrived((memoryview(b"".join(encoded.pieces)), [], []))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        one, other = (each.result(60) for each in [threads.submit(future.result) for _ in "12"])
    assert one == ["value"]
    assert one is other


def test_a_timeout_of_a_wait_leaves_nothing_behind() -> None:
    future = NestedFuture(nested_pool()[0], -1, None)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.result(0)
    assert not future._done_callbacks


def test_an_object_with_its_own_place_needs_no_helper_for_other_tasks() -> None:
    _, places = nested_pool()
    gate, begun = threading.Event(), threading.Event()

    def run(job: ReadyTask) -> None:
        begun.set()
        gate.wait()
        places.free(job)

    places._run = run
    places.add_apart(job(1, "progress"))
    begun.wait()
    assert not places.add(other := job(2)), "the main thread runs nothing"
    assert places.begin_next() is other
    assert not places.add(job(3)), "nor is its place given up"
    assert places.begin_next(waits=False) is None
    gate.set()


def test_the_thread_of_an_object_ends_with_the_object(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    _, places = nested_pool()
    ran = threading.Event()
    places._run = lambda job: ran.set()
    monkeypatch.setattr("skyward.instances.has", lambda key: True)
    places.add_apart(job(1, "progress"))
    assert ran.wait(60)
    assert places._apart
    monkeypatch.setattr("skyward.instances.has", lambda key: False)
    places.objects_freed()
    eventually(lambda: not places._apart)


def test_a_thread_that_waits_for_a_place_hears_of_it(eventually: Eventually) -> None:
    _, places = nested_pool()
    places.add(first := job(1))
    places.begin_next()
    places.add(second := job(2))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        begun = threads.submit(places.begin_next)
        eventually(lambda: places.awaited)
        places.free(first)
        assert begun.result(60) is second
    assert not places.awaited


def test_a_generator_that_is_not_read_to_its_end_stops(
    pool: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def endless(path: Path) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            path.touch()

    @sky.function
    def takes_one(path: Path) -> int:
        return next(endless(path) >> sky)

    assert takes_one(tmp_path / "stopped") >> pool == 1
    eventually((tmp_path / "stopped").exists)


def test_an_exception_of_a_nested_task_keeps_its_type(pool: sky.Compute) -> None:
    @sky.function
    def catches() -> tuple[str, str]:
        try:
            fails("inner") >> sky
        except KeyError as problem:
            return problem.args[0], problem.__notes__[0]
        return "", ""

    text, note = catches() >> pool
    assert text == "inner"
    assert note.startswith("raised by fails on node ")


def test_large_values_go_both_ways(pool: sky.Compute) -> None:
    @sky.function
    def length(data: bytes) -> tuple[int, bytes]:
        return len(data), data

    @sky.function
    def passes(count: int) -> tuple[int, bool]:
        data = os.urandom(count)
        size, back = length(data) >> sky
        return size, back == data

    assert passes(20 << 20) >> pool == (20 << 20, True)


def test_output_is_that_of_the_task_that_wrote_it(
    pool: sky.Compute, printed: list[sky.Output]
) -> None:
    @sky.function
    def says(text: str) -> None:
        print(text, end="")

    @sky.function
    def says_around(text: str) -> None:
        print(f"{text} begins")
        says(f"{text} inner") >> sky
        print(f"{text} ends")

    sky.gather(*[says_around(str(number)) for number in range(4)]) >> pool
    named = sorted((line.task, str(line)) for line in printed)
    inner = [("says", f"{number} inner") for number in range(4)]
    outer = [
        ("says_around", f"{number} {what}") for number in range(4) for what in ("begins", "ends")
    ]
    assert [(task.rpartition(".")[2], text) for task, text in named] == inner + outer


@pytest.mark.parametrize("where", ["pool", "threads"])
def test_cancelling_a_task_cancels_those_it_waits_for(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, eventually: Eventually
) -> None:
    compute: sky.Compute = request.getfixturevalue(where)
    future = waits_for_a_task(tmp_path / "begun", tmp_path / "never") > compute
    eventually((tmp_path / "begun").exists)
    cancelled, died = compute.stats().cancelled, compute.stats().workers_died
    future.cancel()
    eventually(lambda: not any(lane.tasks for lane in compute._open_fleet.dispatcher.lanes))
    eventually(lambda: compute.stats().cancelled == cancelled + 2)
    assert compute.stats().workers_died == died, "a wait did not end by itself"
    assert through_another(1) >> compute == 2


@pytest.mark.parametrize("where", ["pool", "threads"])
def test_cancelling_a_task_ends_the_generator_that_it_reads(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def yields_one(never: Path) -> Iterator[int]:
        yield 1
        wait_for(never)

    @sky.function
    def reads(begun: Path, never: Path, ended: Path) -> None:
        for _ in yields_one(never) >> sky:
            begun.touch()
        ended.touch()

    compute: sky.Compute = request.getfixturevalue(where)
    future = reads(tmp_path / "begun", tmp_path / "never", tmp_path / "ended") > compute
    wait_for(tmp_path / "begun")
    died = compute.stats().workers_died
    future.cancel()
    eventually(lambda: not any(lane.tasks for lane in compute._open_fleet.dispatcher.lanes))
    assert not (tmp_path / "ended").exists(), "the task saw a stream that ended by itself"
    assert compute.stats().workers_died == died


def test_a_task_that_computes_between_two_results_can_be_cancelled(
    threads: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def computes(begun: Path, other: Path, never: Path) -> None:
        futures = [plus_one(1) > sky, waits_for_a_file(other, never) > sky]
        for future in concurrent.futures.as_completed(futures):
            future.result()
            begun.touch()
            while True:
                time.sleep(0.001)

    begun, other, never = (tmp_path / name for name in ("begun", "other", "never"))
    future = computes(begun, other, never) > threads
    wait_for(begun)
    died = threads.stats().workers_died
    future.cancel()
    eventually(lambda: not any(lane.tasks for lane in threads._open_fleet.dispatcher.lanes))
    assert threads.stats().workers_died == died


def test_cancelling_a_task_that_cannot_be_interrupted_lets_the_others_of_its_process_go_on(
    pool: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def opens(begun: Path, pipe: Path) -> None:
        begun.touch()
        pipe.read_text()  # waits in C until another opens it

    @sky.function
    def cancels(begun: Path, pipe: Path) -> int:
        future = opens(begun, pipe) > sky
        while not begun.exists():
            with contextlib.suppress(TimeoutError):
                future.result(0.01)
        future.cancel()
        found = plus_one(1) >> sky
        pipe.write_text("")
        return found

    monkeypatch.setattr("skyward.calls.dispatch.CANCEL_GRACE", 0.05)
    os.mkfifo(tmp_path / "pipe")
    died = pool.stats().workers_died
    busy = pool.submit(waits_for_a_file(tmp_path / "busy", tmp_path / "go"), on=1)
    wait_for(tmp_path / "busy")
    assert pool.run(cancels(tmp_path / "begun", tmp_path / "pipe"), on=0) == 2
    (tmp_path / "go").touch()
    assert busy.result(60) == "found"
    assert pool.stats().workers_died == died


def test_a_task_that_opens_more_generators_than_there_are_workers_fails(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    @sky.function
    def opens(count: int) -> int:
        return len([counts_up(1000) >> sky for _ in range(count)])

    # A store has an event loop on a thread of its own, which never reads a generator.
    with contextlib.suppress(ImportError):
        importlib.import_module("fsspec.asyn").get_loop()
    monkeypatch.setattr("skyward.calls.dispatch.ENDLESS_SECONDS", 0.0)
    with pytest.raises(
        sky.errors.DeadlockError, match="counts_up would wait for ever for a worker"
    ):
        opens(4) >> pool
    eventually(lambda: not any(lane.tasks for lane in pool._open_fleet.dispatcher.lanes))


def test_broadcasts_of_tasks_do_not_keep_failures_from_them() -> None:
    gate, told = threading.Event(), threading.Event()

    def broadcast(*_: Any) -> list[Any]:
        gate.wait()
        return []

    nobody: Any = None
    nested = NestedCalls(nobody, broadcast)
    lane: Any = Lane(
        lost=False,
        tasks={},
        preparation=SimpleNamespace(replaced=False),
        channel=SimpleNamespace(send=lambda message, body: told.set()),
        connection=SimpleNamespace(when_free=lambda send: send()),
    )
    nothing = (memoryview(b""), [], [])
    nested.define(lane, Define(b"code", Payload(0), False), nothing)
    for number in range(1, 67):
        nested.start(lane, Start(-number, 0, "all", b"code", Payload(0), [], True), nothing)
    failed: Any = SimpleNamespace(answer=Failed.because(KeyError("x")))
    nested._done(NestedCall(lane, -100, 1), failed)
    assert told.wait(60)
    gate.set()


def test_a_task_uses_its_own_pool_while_another_of_its_process_has_entered_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, own = SimpleNamespace(), SimpleNamespace()
    monkeypatch.setattr(functions, "active", [entered])
    assert contextvars.Context().run(functions.call_target, sky) is entered
    monkeypatch.setattr(context, "own_pool", lambda: own)
    assert contextvars.Context().run(functions.call_target, sky) is own


def test_a_timeout_ends_a_task_that_waits(pool: sky.Compute, tmp_path: Path) -> None:
    future = waits_for_a_task(tmp_path / "begun", tmp_path / "never").with_timeout(2.0) > pool
    wait_for(tmp_path / "begun")
    with pytest.raises(sky.TaskTimeoutError):
        future.result(60)
    assert through_another(1) >> pool == 2


def test_a_task_that_dies_leaves_no_task_behind(
    pool: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def dies(begun: Path, path: Path) -> None:
        _ = waits_for_a_file(begun, path) > sky
        wait_for(begun)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(sky.WorkerDiedError):
        dies(tmp_path / "begun", tmp_path / "never") >> pool
    eventually(lambda: not any(lane.tasks for lane in pool._open_fleet.dispatcher.lanes))


def test_a_task_that_returns_lets_others_go_on(pool: sky.Compute, tmp_path: Path) -> None:
    @sky.function
    def starts(begun: Path, path: Path, done: Path) -> None:
        _ = finishes(begun, path, done) > sky

    @sky.function
    def finishes(begun: Path, path: Path, done: Path) -> None:
        begun.touch()
        wait_for(path)
        done.touch()

    starts(tmp_path / "begun", tmp_path / "go", tmp_path / "done") >> pool
    wait_for(tmp_path / "begun")
    (tmp_path / "go").touch()
    wait_for(tmp_path / "done")


def test_what_only_the_client_can_do_is_refused_in_a_task(
    pool: sky.Compute, tmp_path: Path
) -> None:
    @sky.cls
    class Thing:
        pass

    @sky.function
    def makes() -> None:
        Thing() >> sky

    @sky.function
    def forks(begun: Path, path: Path) -> tuple[list[str], str, int]:
        def ask(answers: Any) -> None:
            for use in (lambda: plus_one(1) >> sky, future.result, stream.__next__):
                try:
                    use()
                except sky.errors.PoolClosedError as problem:
                    answers.put(str(problem))
            future.cancel()
            stream.close()
            answers.put("")

        future, stream = waits_for_a_file(begun, path) > sky, counts_up(100) >> sky
        forking = multiprocessing.get_context("fork")
        answers = forking.SimpleQueue()
        child = forking.Process(target=ask, args=(answers,))
        child.start()
        said = list(iter(answers.get, ""))
        child.join()
        path.touch()
        return said, future.result(), sum(stream)

    with pytest.raises(sky.errors.ConfigurationError, match="make it on the client, and pass it"):
        makes() >> pool
    said, found, total = forks(tmp_path / "begun", tmp_path / "go") >> pool
    assert len(said) == 3
    assert all("cannot use the task's pool" in each for each in said)
    assert (found, total) == ("found", sum(range(100))), "the child has ended the task's calls"


# Futures as arguments.


@sky.function
def add(one: int, other: int) -> int:
    return one + other


def test_a_future_is_an_argument(pool: sky.Compute, tmp_path: Path) -> None:
    @sky.function
    def length(text: str) -> int:
        return len(text)

    text = waits_for_a_file(tmp_path / "begun", tmp_path / "go") > pool
    counted = length(text.as_argument()) > pool
    both = add(counted.as_argument(), other=(plus_one(1) > pool).as_argument()) > pool
    wait_for(tmp_path / "begun")
    assert not counted.running()
    assert not both.running()
    (tmp_path / "go").touch()
    assert both.result(60) == len("found") + 2


def test_a_callback_passes_its_future_on(pool: sky.Compute) -> None:
    found: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = plus_one(1) > pool
    future.add_done_callback(lambda done: found.set_result(add(done, 1) >> pool))
    assert found.result(60) == 3


def test_futures_are_found_in_lists_and_at_every_operator(pool: sky.Compute) -> None:
    @sky.function
    def total(numbers: dict[str, list[int]]) -> int:
        return sum(sum(each) for each in numbers.values())

    futures: Any = {"a": [plus_one(1) > pool, 5], "b": [plus_one(2) > pool]}
    assert total(futures) >> pool == 10
    assert total(futures) @ pool == [10, 10]
    assert sky.gather(total(futures), total(futures)) >> pool == [10, 10]
    assert list(pool.map(total, [futures])) == [10]
    assert total.local(futures) == 10


def test_a_call_with_a_future_has_the_other_arguments_of_its_time(
    pool: sky.Compute, tmp_path: Path
) -> None:
    @sky.function
    def joined(text: str, items: list[int]) -> list[int]:
        return items

    items = [1]
    text = waits_for_a_file(tmp_path / "begun", tmp_path / "go") > pool
    result = joined(text.as_argument(), items) > pool
    items.append(2)
    (tmp_path / "go").touch()
    assert result.result(60) == [1]


def test_each_task_has_a_result_of_its_own(pool: sky.Compute) -> None:
    @sky.function
    def changes(data: bytearray, items: list[int]) -> tuple[int, int]:
        data[0] += 1
        items.append(1)
        return data[0], len(items)

    @sky.function
    def make() -> bytearray:
        return bytearray(1 << 20)

    @sky.function
    def empty() -> list[int]:
        return []

    data, items = (make() > pool).as_argument(), (empty() > pool).as_argument()
    assert {pool.run(changes(data, items), on=0) for _ in range(3)} == {(1, 1)}


def test_a_call_fails_with_the_exception_of_its_argument(pool: sky.Compute) -> None:
    failed: Any = fails("first") > pool
    with pytest.raises(KeyError, match="first") as caught:
        add(failed, 1) >> pool
    assert any(note.startswith("add was not run") for note in caught.value.__notes__)


def test_a_call_is_cancelled_with_its_argument_and_without_it(
    pool: sky.Compute, tmp_path: Path
) -> None:
    argument: Any = waits_for_a_file(tmp_path / "begun", tmp_path / "never") > pool
    first, other = add(argument, 1) > pool, add(argument, 2) > pool
    assert first.cancel()
    assert argument.cancel()
    with pytest.raises(sky.errors.TaskCancelledError, match="add was not run"):
        other.result(60)


def test_a_future_of_another_pool_is_an_argument(pool: sky.Compute, threads: sky.Compute) -> None:
    assert add((plus_one(1) > threads).as_argument(), 1) >> pool == 3


def test_a_future_of_a_task_does_not_leave_it(pool: sky.Compute) -> None:
    @sky.function
    def returns_it() -> Any:
        return plus_one(1) > sky

    @sky.function
    def uses_it_by_name() -> Any:
        future = plus_one(1) > sky

        @sky.function
        def uses() -> Any:
            return future

        return uses() >> sky

    for call in (returns_it(), uses_it_by_name()):
        with pytest.raises(sky.errors.SerializationError, match=r"use its result\(\), or pass it"):
            call >> pool


def test_a_future_is_an_argument_in_a_task(pool: sky.Compute, tmp_path: Path) -> None:
    @sky.function
    def chains(count: int) -> int:
        future = plus_one(0) > sky
        for _ in range(count):
            future = add(future.as_argument(), 1) > sky
        return future.result()

    @sky.function
    def waits_for_an_argument(begun: Path, path: Path) -> tuple[bool, bool]:
        argument: Any = waits_for_a_file(begun, path) > sky
        future = plus_one(argument) > sky
        running = argument.running(), future.running()
        path.touch()
        return running

    @sky.function
    def chains_a_failure() -> str:
        failed: Any = fails("first") > sky
        try:
            add(failed, 1) >> sky
        except KeyError as problem:
            return str(problem)
        return ""

    assert chains(10) >> pool == 11
    assert chains_a_failure() >> pool == "'first'"
    running = waits_for_an_argument(tmp_path / "begun", tmp_path / "go") >> pool
    assert running == (True, False)


# Objects with places of their own.


@sky.cls(resources="own")
class Progress:
    """Counts, and says on which thread."""

    def __init__(self) -> None:
        self.made_on = threading.get_ident()
        self.count = 0

    def step(self) -> int:
        self.count += 1
        return self.count

    def where(self) -> bool:
        return threading.get_ident() == self.made_on

    def waits(self, begun: Path, path: Path) -> str:
        begun.touch()
        wait_for(path)
        return "done"

    def starts_a_task(self, number: int) -> int:
        return plus_one(number) >> sky


def test_an_object_with_its_own_place_answers_while_all_workers_are_busy(
    pool: sky.Compute, tmp_path: Path
) -> None:
    @sky.function
    def reports(progress: Any, begun: Path, path: Path) -> None:
        progress.step()
        begun.touch()
        wait_for(path)

    early: Any = Progress() >> pool
    busy = [
        pool.submit(reports(early, tmp_path / f"begun {node}", tmp_path / "go"), on=node)
        for node in range(2)
    ]
    for node in range(2):
        wait_for(tmp_path / f"begun {node}")
    assert early.step() == 3, "both tasks have reported"
    with Progress() >> pool as late:
        assert late.step() == 1, "it was made while all workers were busy"
        assert late.where(), "an object has one thread for all its calls"
        assert late.starts_a_task.submit(1).cancel()
    assert not any(each.done() for each in busy)
    (tmp_path / "go").touch()
    for each in busy:
        each.result(60)
    assert early.starts_a_task(1) == 2


def test_calls_of_an_object_with_its_own_place_run_one_by_one(
    pool: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    progress: Any = Progress() >> pool
    first = progress.waits.submit(tmp_path / "begun", tmp_path / "go")
    wait_for(tmp_path / "begun")
    second, third = progress.step.submit(), progress.step.submit()
    assert third.cancel()
    # Until the executor has answered: it would be too late after the end of the others.
    loads = pool._open_fleet.dispatcher.lanes._by_load
    eventually(lambda: sum(len(load.tasks) for load in loads) == 2)
    assert not second.done()
    (tmp_path / "go").touch()
    assert (first.result(60), second.result(60)) == ("done", 1)
    assert progress.step() == 2
    assert (plus_one(1) @ pool) == [2, 2]
    stuck = progress.waits.submit(tmp_path / "begun again", tmp_path / "never")
    wait_for(tmp_path / "begun again")
    stuck.cancel()
    eventually(lambda: not any(lane.tasks for lane in pool._open_fleet.dispatcher.lanes))


def test_one_object_with_its_own_place_in_every_worker(pool: sky.Compute) -> None:
    group = Progress() @ pool
    assert group.step() == [1, 1]
    group.close()


def test_resources_are_checked() -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=r"give 'worker', .* or 'own'"):
        sky.cls(resources="gpu")(Progress.kind)  # type: ignore[call-overload]
