"""Many things at once, given up half way: nothing is mixed up, no place is lost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import skyward as sky

from ..conftest import PATIENCE, only_in_all, other_case

SOON = 60.0
"""At once by design; the rest is for a busy machine."""

Eventually = Callable[..., None]


@sky.function
def echo(value: int) -> int:
    return value


@sky.function
def process_id() -> int:
    return os.getpid()


@sky.function
def rests(path: str) -> None:
    """Until it is stopped; the file is there while it runs."""
    Path(path).touch()
    try:
        time.sleep(600)
    finally:
        Path(path).unlink()


@sky.function
def stubborn(path: str) -> None:
    """Does not heed an interrupt."""
    Path(path).touch()
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(600)


@sky.function
def deaf(path: str) -> None:
    """Sits in C code that holds the interpreter's lock, where no interrupt arrives."""
    import ctypes

    Path(path).touch()
    ctypes.PyDLL(None).sleep(600)


@pytest.fixture
def one() -> Iterator[sky.Compute]:
    """One node with one place."""
    with sky.Compute(options=sky.Options(console=False)) as compute:
        yield compute


# Broadcasts.


def test_a_broadcast_with_one_failing_node_holds_every_outcome(pool: sky.Compute) -> None:
    @sky.function
    def only_the_head() -> str:
        info = sky.instance_info()
        if not info.is_head:
            raise LookupError(f"not on node {info.node}")
        return "head"

    with pytest.raises(sky.BroadcastError) as caught:
        only_the_head() @ pool
    group = caught.value
    assert "only_the_head failed on 1 of 2 workers (node 1)" in str(group)
    assert isinstance(group, ExceptionGroup)
    assert isinstance(group, sky.SkywardError)
    (problem,) = group.exceptions
    assert isinstance(problem, LookupError)
    assert problem.args == ("not on node 1",)
    assert any("only_the_head on node 1" in note for note in problem.__notes__)
    assert [(o.node, o.worker, o.ok, o.value) for o in group.outcomes] == [
        (0, 0, True, "head"),
        (1, 0, False, None),
    ]
    assert group.outcomes[1].error is problem


def test_a_failed_broadcast_is_handled_by_kind_with_except_star(pool: sky.Compute) -> None:
    @sky.function
    def differs() -> None:
        raise [ValueError("on 0"), LookupError("on 1")][sky.instance_info().node]

    seen: list[tuple[type, int, str]] = []
    try:
        differs() @ pool
    except* ValueError as group:
        seen += [(type(group), len(group.outcomes), str(each)) for each in group.exceptions]
    except* LookupError as group:
        seen += [(type(group), len(group.outcomes), str(each)) for each in group.exceptions]
    assert seen == [(sky.BroadcastError, 2, "on 0"), (sky.BroadcastError, 2, "on 1")]


def test_a_broadcast_and_calls_in_flight_together_are_not_mixed_up(pool: sky.Compute) -> None:
    @sky.function
    def tagged(kind: str, number: int) -> tuple[str, int, int]:
        time.sleep(random.random() / 500)
        return kind, number, sky.instance_info().node

    wrong: list[object] = []

    def broadcasts() -> None:
        for number in range(60):
            expected = [("all", number, node) for node in range(2)]
            got = tagged("all", number) @ pool
            if got != expected:
                wrong.append((expected, got))

    def calls(start: int) -> None:
        for number in range(start, start + 100):
            got = tagged("one", number) >> pool
            if got[:2] != ("one", number):
                wrong.append((number, got))

    threads = [threading.Thread(target=broadcasts) for _ in range(2)]
    threads += [threading.Thread(target=calls, args=(start,)) for start in (1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []


def test_two_broadcasts_from_two_threads_run_in_the_same_order_everywhere(
    pool: sky.Compute, tmp_path: Path
) -> None:
    """Else two collective operations would wait for each other for ever."""

    @sky.function
    def notes(folder: str, name: str) -> None:
        with open(os.path.join(folder, str(sky.instance_info().node)), "a") as log:
            log.write(f"{name}\n")

    def several(kind: str) -> None:
        for number in range(50):
            notes(str(tmp_path), f"{kind}{number}") @ pool

    threads = [threading.Thread(target=several, args=(kind,)) for kind in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    orders = [(tmp_path / str(node)).read_text().split() for node in range(2)]
    assert len(orders[0]) == 150
    assert orders[0] == orders[1]


# Many.


def test_five_thousand_tiny_tasks_come_back_in_order(pool: sky.Compute) -> None:
    before = pool.stats()
    assert sky.gather(*[echo(number) for number in range(5000)]) >> pool == list(range(5000))
    after = pool.stats()
    assert after.succeeded - before.succeeded == 5000
    assert (after.failed, after.cancelled) == (before.failed, before.cancelled)
    assert all(not node.running for node in pool.nodes)


def test_thousands_of_tiny_tasks_from_many_threads_each_find_their_caller(
    pool: sky.Compute,
) -> None:
    wrong: list[tuple[int, int]] = []

    def calls(start: int) -> None:
        for number in range(start, start + 150):
            if (got := echo(number) >> pool) != number:
                wrong.append((number, got))

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        list(threads.map(calls, range(0, 16000, 1000)))
    assert wrong == []


# Timeouts.


def test_a_timeout_names_itself_cancels_the_work_and_frees_the_place_at_once(
    one: sky.Compute, tmp_path: Path, eventually: Eventually, patient: None
) -> None:
    path = tmp_path / "running"
    slow = sky.function(timeout=0.3)(rests.body)
    pid = process_id() >> one
    began = time.monotonic()
    with pytest.raises(sky.TaskTimeoutError) as caught:
        slow(str(path)) >> one
    assert 0.25 < time.monotonic() - began < SOON
    message = str(caught.value)
    assert "rests ran longer than its timeout of 0.3 s on node 0" in message
    assert "the remote work was cancelled" in message
    assert isinstance(caught.value, TimeoutError)
    assert process_id() >> one == pid, "the place must be free before any process is killed"
    eventually(lambda: not path.exists(), what="the end of the remote work")


@pytest.mark.parametrize(
    "ignores",
    [
        pytest.param(stubborn, id="swallows-it", marks=other_case),
        pytest.param(deaf, id="in-C-code"),
    ],
)
def test_a_task_that_ignores_its_interrupt_is_killed_and_its_place_comes_back(
    one: sky.Compute, tmp_path: Path, ignores: sky.Function[[str], None], eventually: Eventually
) -> None:
    pid = process_id() >> one
    future = ignores(str(tmp_path / "running")) > one
    eventually(lambda: (tmp_path / "running").exists())
    began = time.monotonic()
    assert future.cancel()
    assert process_id() >> one != pid
    assert time.monotonic() - began < SOON
    stats = one.stats()
    assert stats.cancelled == 1
    assert stats.failed == 0


@only_in_all
def test_a_task_that_neither_reads_nor_ends_is_killed_while_it_is_fed(one: sky.Compute) -> None:
    """Whoever feeds it waits for it to read, with the lock on what is sent to it."""

    @sky.function(timeout=1)
    def deaf_eater(items: Iterator[bytes]) -> None:
        import ctypes

        next(items)
        ctypes.PyDLL(None).sleep(600)  # without letting go of the interpreter

    pid = process_id() >> one
    with pytest.raises(sky.TaskTimeoutError):
        deaf_eater(iter([bytes(8 << 20)] * 10)) >> one
    assert (process_id() > one).result(60) != pid


def test_the_pools_default_timeout_holds_where_a_function_has_none(tmp_path: Path) -> None:
    options = sky.Options(console=False, default_timeout=0.3)
    with sky.Compute(options=options) as compute:
        with pytest.raises(sky.TaskTimeoutError, match=r"timeout of 0\.3 s"):
            rests(str(tmp_path / "running")) >> compute
        assert sky.function(timeout=200)(echo.body)(1) >> compute == 1


@only_in_all
def test_a_timeout_during_a_large_transfer_never_poisons_what_the_worker_keeps(
    tmp_path: Path, eventually: Eventually
) -> None:
    """The caller has its memory back and writes to it while the old contents are on their way."""

    @sky.function
    def until(path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)

    @sky.function(timeout=0.02)
    def hasty(array: np.ndarray) -> int:
        return int(array[0])

    @sky.function
    def total(array: np.ndarray) -> int:
        return int(array.sum(dtype=np.int64))

    array = np.zeros(128 << 20, np.uint8)
    with sky.Compute(sky.Local(transport="tcp"), options=sky.Options(console=False)) as compute:
        for value in (1, 2):
            array[:] = value
            # Behind another call, so that it is sent from a thread that is not the caller's.
            first = until(str(tmp_path / str(value))) > compute
            timer = threading.Timer(0.5, (tmp_path / str(value)).touch)
            timer.start()
            with pytest.raises(sky.TaskTimeoutError):
                hasty(array) >> compute
            array[::4096] = 99
            first.result(PATIENCE)
            timer.join()
            array[:] = value
            assert total(array) >> compute == value * len(array)


# Cancelling.


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_cancelling_a_future_stops_the_work_and_frees_the_place(
    tmp_path: Path, eventually: Eventually, worker: str, patient: None
) -> None:
    path = tmp_path / "running"

    @sky.function
    def spins(path: str) -> None:
        Path(path).touch()
        try:
            while True:
                time.sleep(0.01)
        finally:
            Path(path).unlink()

    kind = sky.Worker(executor=worker)  # type: ignore[arg-type]
    with sky.Compute(worker=kind, options=sky.Options(console=False)) as compute:
        pid = process_id() >> compute
        future = spins(str(path)) > compute
        eventually(path.exists)
        assert future.running()
        assert future.cancel()
        assert future.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()
        assert process_id() >> compute == pid
        eventually(lambda: not path.exists(), what="the end of the remote work")
        assert compute.stats().cancelled == 1


def test_cancelling_at_any_moment_leaves_the_process_fit_for_more(
    one: sky.Compute, patient: None
) -> None:
    """It prints, frees shared memory and streams while the interrupt comes."""

    @sky.function
    def busy(array: np.ndarray) -> Iterator[int]:
        while True:
            print("a line", end="\n")
            yield int((array + 1)[0])

    pid = process_id() >> one
    chance = random.Random(7)
    with sky.redirect_output(lambda line: None):
        for number in range(120):
            array = np.full(300_000, number % 250, np.uint8)
            future = busy(array) > one
            time.sleep(chance.random() * 0.006)
            if not future.cancel():
                stream = future.result()
                assert next(stream) == number % 250 + 1
                stream.close()
    assert process_id() >> one == pid
    assert one.stats().workers_died == 0


def test_a_cancelled_await_cancels_the_call(
    one: sky.Compute, tmp_path: Path, eventually: Eventually, patient: None
) -> None:
    path = tmp_path / "running"

    async def impatient() -> None:
        async with asyncio.timeout(0.3):
            await (rests(str(path)) > one)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert echo(1) >> one == 1
    eventually(lambda: not path.exists(), what="the end of the remote work")


# Closing.


def test_closing_the_pool_tells_everyone_who_still_waits(
    tmp_path: Path, eventually: Eventually
) -> None:
    told: dict[str, BaseException] = {}

    @sky.function
    def slowly(path: str) -> Iterator[int]:
        yield 1
        Path(path).touch()
        time.sleep(600)
        yield 2

    def waits(name: str, action: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                action()
            except BaseException as problem:
                told[name] = problem

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    with sky.Compute(nodes=3, options=sky.Options(console=False)) as compute:
        running = compute.submit(rests(str(tmp_path / "running")), on=0)
        eventually((tmp_path / "running").exists)
        queued = compute.submit(echo(1), on=0)
        threads = [
            waits("call", lambda: compute.run(rests(str(tmp_path / "called")), on=1)),
            waits("queued call", lambda: compute.run(echo(1), on=0)),
            waits("broadcast", lambda: echo(1) @ compute),
            waits("stream", lambda: list(compute.run(slowly(str(tmp_path / "streams")), on=2))),
            waits("map", lambda: list(compute.map(echo, range(10)))),
        ]
        eventually((tmp_path / "called").exists)
        eventually((tmp_path / "streams").exists)
        began = time.monotonic()
    assert time.monotonic() - began < SOON
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for name, future in (("running", running), ("queued", queued)):
        told[name] = future.exception(PATIENCE)  # type: ignore[assignment]
    problem = told.pop("broadcast")
    assert isinstance(problem, sky.BroadcastError)
    told |= {f"broadcast {i}": error for i, error in enumerate(problem.exceptions)}
    for name, problem in told.items():
        assert isinstance(problem, sky.errors.PoolClosedError), (name, problem)
    assert "the pool closed before rests was done" in str(told["running"])
    assert "the pool closed before echo was done" in str(told["queued"])
    with pytest.raises(
        sky.errors.PoolClosedError, match="this pool is closed; run functions inside"
    ):
        echo(1) >> compute


def test_a_closed_or_unentered_pool_says_so() -> None:
    compute = sky.Compute(options=sky.Options(console=False))
    with pytest.raises(sky.errors.PoolClosedError, match="has not been entered; write `with sky"):
        echo(1) >> compute
    with compute:
        with pytest.raises(
            sky.errors.PoolClosedError, match="is already entered; make another Compute"
        ):
            compute.__enter__()
        assert echo(1) >> compute == 1
    compute.close()


def test_a_call_aimed_at_a_node_that_leaves_is_told(tmp_path: Path, eventually: Eventually) -> None:
    """Behind one that finishes, one that is cancelled and does not end, and one that dies."""
    with sky.Compute(nodes=4, options=sky.Options(console=False)) as compute:

        @sky.function
        def until(path: str) -> str:
            while not os.path.exists(path):
                time.sleep(0.01)
            return "finished"

        @sky.function(retries=3)
        def dies(path: str) -> None:
            until.local(path)
            os._exit(3)

        go = str(tmp_path / "go")
        running = compute.submit(until(go), on=1)
        cancelled = compute.submit(deaf(str(tmp_path / "deaf")), on=2)
        retried = compute.submit(dies(go), on=3)
        eventually(lambda: running.running() and retried.running())
        eventually((tmp_path / "deaf").exists)
        told = [compute.submit(echo(1), on=node) for node in (1, 2, 2, 3)]
        cancelled.cancel()
        resizing = threading.Thread(target=compute.resize, args=(1,))
        resizing.start()
        eventually(lambda: {node.state for node in compute.nodes[1:]} <= {"draining"})
        (tmp_path / "go").touch()
        assert running.result(PATIENCE) == "finished"
        resizing.join(PATIENCE)
        assert not resizing.is_alive()
        for future in (*told, retried):
            problem = future.exception(PATIENCE)
            assert isinstance(problem, sky.NodeLostError)
            assert re.search(r"nowhere to run: node \d has left the pool; run it on", str(problem))
        assert echo(1) @ compute == [1]
