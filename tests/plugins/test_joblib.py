"""joblib on a pool: what `Parallel` does elsewhere it does here, in the pool's processes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import TimeoutError as JoblibTimeout

import pytest

import skyward as sky
from skyward.errors import PluginError, SerializationError

from ..conftest import only_in_all

joblib = pytest.importorskip("joblib")

from joblib import Parallel, delayed  # noqa: E402

QUIET = sky.Options(console=False)

Eventually = Callable[..., None]
Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes that joblib uses."""
    compute = sky.Compute(nodes=2, plugins=[sky.plugins.joblib()], options=QUIET)
    with sharing(compute):
        yield compute


@pytest.fixture(scope="module")
def workers(pool: sky.Compute) -> set[int]:
    """The processes of the pool."""
    return set(sky.function(os.getpid)() @ pool)


def where(i: int) -> tuple[int, int]:
    return i, os.getpid()


def slowly(i: int, seconds: float = 0.05) -> tuple[int, int]:
    time.sleep(seconds)
    return where(i)


def fails_at(i: int, bad: int) -> int:
    if i == bad:
        raise LookupError(f"no {i} here")
    time.sleep(0 if i < bad else 600)
    return i


def test_calls_run_in_the_pools_processes_and_come_back_in_order(workers: set[int]) -> None:
    done = Parallel(n_jobs=-1)(delayed(slowly)(i) for i in range(8))

    assert [i for i, _ in done] == list(range(8))
    assert {pid for _, pid in done} == workers
    assert len(workers) == 2


def test_minus_one_means_every_place_of_the_pool(pool: sky.Compute) -> None:
    assert joblib.effective_n_jobs(-1) == 2
    assert joblib.effective_n_jobs(100) == 2
    assert joblib.effective_n_jobs(1) == 1


@pytest.mark.parametrize("count", [1, None])
def test_one_job_runs_here_as_ever(pool: sky.Compute, count: int | None) -> None:
    assert Parallel(n_jobs=count)(delayed(where)(i) for i in range(2)) == [where(0), where(1)]


def test_no_jobs_has_no_meaning(pool: sky.Compute) -> None:
    with pytest.raises(ValueError, match="n_jobs == 0"):
        Parallel(n_jobs=0)(delayed(where)(i) for i in range(2))


def test_keyword_arguments_and_closures_travel(pool: sky.Compute) -> None:
    offset = 10

    assert Parallel(n_jobs=-1)(
        delayed(lambda i, times: i * times + offset)(i, times=2) for i in (1, 2, 3)
    ) == [12, 14, 16]


def test_small_calls_travel_in_batches(pool: sky.Compute) -> None:
    before = pool.stats().submitted

    assert Parallel(n_jobs=-1)(delayed(abs)(-i) for i in range(3_000)) == list(range(3_000))
    assert pool.stats().submitted - before < 600


def test_batches_are_as_large_as_asked(pool: sky.Compute) -> None:
    before = pool.stats().submitted

    Parallel(n_jobs=-1, batch_size=10, pre_dispatch="all")(delayed(abs)(-i) for i in range(100))

    assert pool.stats().submitted - before == 10


def test_an_exception_arrives_as_what_it_was_and_the_pool_goes_on(workers: set[int]) -> None:
    with pytest.raises(LookupError, match="no 1 here") as caught:
        Parallel(n_jobs=-1)(delayed(fails_at)(i, bad=1) for i in range(2))

    assert "fails_at" in caught.value.__notes__[0]
    assert {pid for _, pid in Parallel(n_jobs=-1)(delayed(slowly)(i) for i in range(4))} == workers


def test_an_exception_cancels_the_calls_that_are_under_way(pool: sky.Compute) -> None:
    with pytest.raises(LookupError):
        Parallel(n_jobs=-1)(delayed(fails_at)(i, bad=2) for i in range(20))
    Parallel(n_jobs=-1)(delayed(where)(i) for i in range(4))


def test_an_argument_that_cannot_travel_is_an_error_at_once(pool: sky.Compute) -> None:
    lock = threading.Lock()

    for bad in (0, 50):  # sent by the caller, and by the thread that sends what follows
        with pytest.raises(SerializationError, match="lock"):
            Parallel(n_jobs=-1, batch_size=1)(
                delayed(where)(i if i < bad else lock) for i in range(60)
            )


def test_an_iterator_that_fails_says_so(pool: sky.Compute) -> None:
    def items() -> Iterator[int]:
        yield from range(30)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        Parallel(n_jobs=-1)(delayed(where)(i) for i in items())


def test_an_iterator_may_use_the_pool_itself(pool: sky.Compute) -> None:
    double = sky.function(lambda i: 2 * i)

    def items() -> Iterator[int]:
        for i in range(12):
            yield (double(i) > pool).result()

    results = Parallel(n_jobs=-1, batch_size=1)(delayed(abs)(i) for i in items())

    assert results == [2 * i for i in range(12)]


def test_a_generator_gives_results_as_they_come(pool: sky.Compute) -> None:
    calls = (delayed(time.sleep)(seconds) for seconds in (0, 0, 600))
    results = Parallel(n_jobs=-1, return_as="generator", batch_size=1)(calls)
    assert [next(results), next(results)] == [None, None]
    with pytest.warns(UserWarning, match="cancelled"):
        results.close()
    assert Parallel(n_jobs=-1)(delayed(abs)(i) for i in range(3)) == [0, 1, 2]


@only_in_all
def test_an_unordered_generator_gives_the_quick_ones_first(pool: sky.Compute) -> None:
    calls = (delayed(slowly)(i, 5.0 if i == 0 else 0.0) for i in range(4))

    found = Parallel(n_jobs=-1, return_as="generator_unordered", batch_size=1)(calls)

    assert [i for i, _ in found][-1] == 0


def test_to_give_one_generator_up_leaves_another_be(pool: sky.Compute) -> None:
    def start() -> Iterator[tuple[int, int]]:
        calls = (delayed(slowly)(i) for i in range(20))
        return Parallel(n_jobs=-1, return_as="generator", batch_size=1)(calls)  # type: ignore[no-any-return]

    given_up, kept = start(), start()
    next(given_up)
    with pytest.warns(UserWarning, match="cancelled"):
        given_up.close()  # type: ignore[attr-defined]

    assert [i for i, _ in kept] == list(range(20))


def test_a_timeout_gives_up_and_frees_the_workers(pool: sky.Compute) -> None:
    with pytest.raises(JoblibTimeout):
        Parallel(n_jobs=-1, timeout=0.3)(delayed(time.sleep)(600) for _ in range(4))
    Parallel(n_jobs=-1)(delayed(where)(i) for i in range(4))


def test_nested_calls_run_where_the_outer_one_runs(workers: set[int]) -> None:
    def outer(i: int) -> tuple[int, set[int]]:
        inner = Parallel(n_jobs=2)(delayed(where)(j) for j in range(3))
        return os.getpid(), {pid for _, pid in inner}

    for own, inner in Parallel(n_jobs=-1)(delayed(outer)(i) for i in range(4)):
        assert own in workers
        assert inner == {own}


def test_one_parallel_serves_many_calls(workers: set[int]) -> None:
    with Parallel(n_jobs=-1) as parallel:
        for _ in range(3):
            assert [i for i, _ in parallel(delayed(where)(i) for i in range(5))] == [0, 1, 2, 3, 4]
        with pytest.raises(LookupError):
            parallel(delayed(fails_at)(i, bad=0) for i in range(3))
        assert {pid for _, pid in parallel(delayed(slowly)(i) for i in range(6))} == workers


def test_other_threads_use_the_pool_too(workers: set[int]) -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        found.extend(Parallel(n_jobs=-1)(delayed(slowly)(i) for i in range(4)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert {pid for _, pid in found} == workers


def test_a_hint_for_threads_does_not_keep_it_here(workers: set[int]) -> None:
    calls = (delayed(slowly)(i) for i in range(4))

    assert {pid for _, pid in Parallel(n_jobs=-1, prefer="threads")(calls)} == workers


def test_what_needs_shared_memory_stays_here(pool: sky.Compute) -> None:
    found: list[int] = []

    Parallel(n_jobs=2, require="sharedmem")(delayed(found.append)(i) for i in range(4))

    assert sorted(found) == [0, 1, 2, 3]


def test_another_backend_can_be_asked_for_and_this_one_by_name(workers: set[int]) -> None:
    here = Parallel(n_jobs=2, backend="threading")(delayed(where)(i) for i in range(2))
    there = Parallel(n_jobs=2, backend="skyward")(delayed(slowly)(i) for i in range(4))

    assert {pid for _, pid in here} == {os.getpid()}
    assert {pid for _, pid in there} == workers


def test_a_pool_of_one_worker_is_used_all_the_same() -> None:
    with sky.Compute(plugins=[sky.plugins.joblib()], options=QUIET):
        done = Parallel(n_jobs=-1)(delayed(where)(i) for i in range(3))

    assert {pid for _, pid in done} != {os.getpid()}


def test_no_more_run_at_once_than_jobs_were_asked_for() -> None:
    def crowd(i: int) -> int:
        import builtins

        lock = builtins.__dict__.setdefault("_test_lock", threading.Lock())
        with lock:
            builtins._test_now = getattr(builtins, "_test_now", 0) + 1  # type: ignore[attr-defined]
            seen = int(builtins._test_now)  # type: ignore[attr-defined]
        time.sleep(0.3)
        with lock:
            builtins._test_now -= 1  # type: ignore[attr-defined]
        return seen

    threads = sky.Worker(concurrency=4, executor="thread")
    with sky.Compute(plugins=[sky.plugins.joblib()], worker=threads, options=QUIET):
        assert joblib.effective_n_jobs(-1) == 4
        calls = [delayed(crowd)(i) for i in range(12)]
        assert max(Parallel(n_jobs=2, batch_size=1, pre_dispatch="all")(calls)) == 2
        assert max(Parallel(n_jobs=-1, batch_size=1)(calls)) > 2


@only_in_all
def test_the_innermost_pool_is_used_and_after_it_whatever_was_before(workers: set[int]) -> None:
    def pids() -> set[int]:
        return {pid for _, pid in Parallel(n_jobs=-1)(delayed(slowly)(i) for i in range(6))}

    with sky.Compute(nodes=2, plugins=[sky.plugins.joblib()], options=QUIET):
        assert not pids() & workers
    assert pids() == workers


def test_it_works_from_an_event_loop() -> None:
    async def main() -> set[int]:
        async with sky.Compute(plugins=[sky.plugins.joblib()], options=QUIET):
            calls = (delayed(where)(i) for i in range(3))
            return {pid for _, pid in Parallel(n_jobs=-1)(calls)}

    assert os.getpid() not in asyncio.run(main())


def test_outside_of_the_block_joblib_is_as_it_was() -> None:
    """In a process of its own, as this one has a pool that joblib uses."""
    script = """if True:
        import joblib, skyward as sky
        from joblib import parallel
        before = parallel.DEFAULT_BACKEND, dict(parallel.BACKENDS)
        with sky.Compute(plugins=[sky.plugins.joblib()], options=sky.Options(console=False)):
            inside = type(parallel.get_active_backend()[0]).__name__
        after = parallel.DEFAULT_BACKEND, dict(parallel.BACKENDS)
        threads = type(parallel.get_active_backend(prefer="threads")[0]).__name__
        print(before == after, inside, type(parallel.get_active_backend()[0]).__name__, threads)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.stdout.split() == ["True", "PoolBackend", "LokyBackend", "ThreadingBackend"]


def test_an_interrupt_cancels_the_calls(pool: sky.Compute, eventually: Eventually) -> None:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        Parallel(n_jobs=-1)(delayed(time.sleep)(60) for _ in range(4))

    eventually(lambda: not any(node.running for node in pool.nodes), 60, "the end of the calls")
    assert Parallel(n_jobs=-1)(delayed(abs)(i) for i in range(3)) == [0, 1, 2]


def test_a_client_without_joblib_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "joblib" else find(n))

    with pytest.raises(PluginError, match=r"around_client failed: .* joblib is not installed for"):
        with sky.Compute(plugins=[sky.plugins.joblib()], options=QUIET):
            pass


def test_the_image_gets_joblib() -> None:
    compute = sky.Compute(plugins=[sky.plugins.joblib()])

    assert compute._spec.request.image.pip == ("joblib",)
