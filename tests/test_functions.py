"""What to run: describing calls, and every way of carrying them out."""

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import gc
import inspect
import io
import itertools
import math
import operator
import os
import pickle
import queue
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import skyward as sky
from skyward.calls.lane import Timeouts
from skyward.calls.loop import Loop
from skyward.wire.frames import META_LIMIT

from .waiting import wait_for

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute(pool):
    return pool


@sky.function
def add(a, b=1):
    return a + b


@sky.function
def pid():
    return os.getpid()


@sky.function
def node():
    return sky.instance_info().node


@sky.function
def mark(path):
    Path(path).touch()


@sky.function
def wait_then(path, value):
    wait_for(path)
    return value


@sky.function
def meet(folder, mine, other):
    """Returns only if `other` runs at the same time."""
    Path(folder, mine).touch()
    wait_for(Path(folder, other))
    return mine


@sky.function
def fail(problem):
    raise problem


# Describing calls.


def test_calling_a_function_runs_nothing_anywhere(compute, tmp_path):
    before = compute.stats().submitted

    with pytest.warns(RuntimeWarning, match="never ran"):
        mark(tmp_path / "ran")

    assert compute.stats().submitted == before
    assert not (tmp_path / "ran").exists()


def test_a_call_that_is_a_statement_and_never_ran_warns_once_for_its_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(3):
            add(number)
        add(1) & node()
        [add(number) for number in range(2)]

    first, both, other, *last = caught
    assert str(first.message) == (
        "add(...) never ran: calling a @sky.function only describes a call; run it with add(...) "
        ">> compute, or here with add.local(...)"
    )
    assert (first.category, first.filename) == (RuntimeWarning, __file__)
    assert {str(each.message).partition("(")[0] for each in (both, other)} == {"add", "node"}
    # From Python 3.12 on, a list in a statement is made without a call.
    assert [each.lineno - first.lineno for each in (both, other, *last)] in ([1, 1, 2], [1, 1])


def test_a_call_used_as_its_result_says_that_it_has_not_run():
    with pytest.raises(
        AttributeError, match=r"add has not run, so it has no 'eval'; .* >> compute"
    ):
        add(1).eval()
    with pytest.raises(TypeError, match="a call of add has not run, so it has no items"):
        list(add(1))
    with pytest.raises(TypeError, match="'UnusedCall' and 'int'"):
        add(1) + 1


def test_a_call_that_somebody_may_still_use_does_not_warn(compute):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add(1) >> compute
        add(1) @ compute
        compute.submit(add(1)).result()
        sky.gather(add(1), add(2)) >> compute
        add.local(1)
        repr(add(1))
        pickle.dumps(add(1))
        calls = [add(1), add(2), pickle.loads(pickle.dumps(add(3)))]
        print(calls[0], calls[1] >> compute)
        while calls:
            calls.pop()
        for _ in [add(1), add(2)]:
            break
        with contextlib.suppress(ZeroDivisionError):
            call = add(1)
            1 / 0
            call >> compute
        call = add(2)
        del call


def test_a_call_is_immutable():
    call = add(1, b=2)

    with pytest.raises(AttributeError, match="immutable; call add again"):
        call.args = (2,)
    with pytest.raises(AttributeError, match="immutable"):
        del call.args
    with pytest.raises(AttributeError):
        call.other = 1


def test_a_call_shows_its_function_and_arguments():
    assert repr(add(1, b=[2])) == "<pending add(1, b=[2])>"
    assert len(repr(add("x" * 10_000))) < 100


def test_a_call_survives_pickling(compute):
    again = pickle.loads(pickle.dumps(add(1, b=2)))

    assert again.function is add
    assert (again.args, again.kwargs) == ((1,), {"b": 2})
    assert again >> compute == 3


def test_a_call_of_a_nested_function_survives_pickling(compute):
    offset = 40

    @sky.function(timeout=30, retries=2, name="shift", fail_fast=True)
    def nested(x):
        return x + offset

    again = pickle.loads(pickle.dumps(nested(2)))

    assert again >> compute == 42
    assert (again.function.timeout, again.function.retries) == (30, 2)
    assert (again.function.name, again.function.fail_fast) == ("shift", True)


def test_a_function_takes_its_options_with_or_without_a_decorator():
    def plain(x):
        return x

    for made in (
        sky.function(plain, timeout=1, retries=2, name="x"),
        sky.function(timeout=1, retries=2, name="x")(plain),
    ):
        assert (made.timeout, made.retries, made.name) == (1, 2, "x")
    with pytest.raises(sky.errors.ConfigurationError, match="timeout=-1"):
        sky.function(plain, timeout=-1)
    with pytest.raises(sky.errors.ConfigurationError, match="use with_timeout"):
        sky.function(add, timeout=1)
    assert sky.function(add) is add


def test_a_call_survives_cloudpickle(compute):
    assert cloudpickle.loads(cloudpickle.dumps(add(1, 2))) >> compute == 3


def test_a_call_can_be_sent_as_an_argument_and_back(compute):
    @sky.function
    def forward(call):
        return call, call.function.local(*call.args)

    call, value = forward(add(1, 2)) >> compute

    assert value == 3
    assert call >> compute == 3


def test_a_call_can_be_carried_out_any_number_of_times(compute):
    call = add(1, 2)

    assert [call >> compute, *(call @ compute), (call > compute).result()] == [3, 3, 3, 3]


def test_a_call_has_no_truth_value_because_it_has_not_run(compute):
    with pytest.raises(TypeError, match="add has not run, so it is neither true nor false"):
        bool(add(1))
    with pytest.raises(TypeError, match="use `>>`, `&` and parentheses"):
        add(1) and add(2)


def test_the_decorator_keeps_name_docstring_and_signature():
    @sky.function(timeout=5)
    def train(x: int, *, lr: float = 0.1) -> float:
        """Train."""
        return x * lr

    assert train.__name__ == "train"
    assert train.__doc__ == "Train."
    assert train.__module__ == __name__
    assert train.__qualname__.endswith("<locals>.train")
    assert str(inspect.signature(train)) == "(x: int, *, lr: float = 0.1) -> float"


def test_a_function_can_be_given_another_name(compute):
    renamed = sky.function(name="renamed")(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError) as caught:
        renamed() >> compute

    assert repr(renamed) == "<sky.function renamed>"
    assert "raised by renamed on node" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": -1}, "timeout=-1"),
        ({"retries": -1}, "retries=-1"),
        ({"retries": 1.5}, "retries=1.5"),
        ({"fail_fast": "yes"}, r"fail_fast='yes'\): give True or False"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options, message):
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        sky.function(**options)(lambda: None)


def test_only_a_callable_can_be_a_function():
    with pytest.raises(sky.errors.ConfigurationError, match="42: it is not callable"):
        sky.function(42)


def test_local_runs_here_and_now():
    assert pid.local() == os.getpid()
    assert add.local(1, b=5) == 6


def test_local_passes_the_functions_own_exception_on():
    with pytest.raises(KeyError, match="lost"):
        fail.local(KeyError("lost"))


def test_a_wrong_number_of_arguments_is_the_functions_own_type_error(compute):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        add() >> compute


# One call.


def test_rshift_runs_on_a_node_and_returns_the_value(compute):
    assert add(2, b=3) >> compute == 5
    assert pid() >> compute != os.getpid()


def test_gt_returns_at_once_with_a_future_of_the_standard_kind(compute, tmp_path):
    future = wait_then(tmp_path / "gate", "done") > compute

    assert isinstance(future, concurrent.futures.Future)
    assert not future.done()
    (tmp_path / "gate").touch()
    assert future.result(100) == "done"


def test_a_future_says_whether_it_runs(compute, tmp_path, eventually):
    future = wait_then(tmp_path / "gate", 1) > compute

    eventually(future.running)
    (tmp_path / "gate").touch()
    future.result(100)
    assert future.done()
    assert not future.running()


def test_a_future_holds_the_exception(compute):
    future = fail(KeyError("lost")) > compute

    assert isinstance(future.exception(20), KeyError)
    with pytest.raises(KeyError, match="lost"):
        future.result()


def test_futures_work_with_as_completed_and_wait(compute):
    futures = [add(number) > compute for number in range(20)]

    done = {future.result() for future in concurrent.futures.as_completed(futures, timeout=100)}

    assert done == set(range(1, 21))
    assert concurrent.futures.wait(futures, timeout=100).not_done == set()


def test_a_future_calls_back_when_it_is_done(compute):
    called = threading.Event()
    future = add(1) > compute
    future.add_done_callback(lambda finished: called.set() if finished is future else None)

    assert called.wait(100)


def test_a_future_can_be_awaited(compute):
    async def main():
        return await (add(1, 2) > compute)

    assert asyncio.run(main()) == 3


def test_a_result_that_is_not_there_in_time_is_a_timeout_error(compute, tmp_path):
    future = wait_then(tmp_path / "gate", 1) > compute

    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)
    (tmp_path / "gate").touch()
    assert future.result(100) == 1


def test_cancelling_a_future_stops_the_remote_work_and_frees_its_place(
    compute, tmp_path, eventually, patient
):
    @sky.function
    def stubborn(started, stopped):
        Path(started).touch()
        try:
            wait_for("/nowhere", 60)
        finally:
            Path(stopped).touch()

    future = stubborn(tmp_path / "started", tmp_path / "stopped") > compute
    eventually((tmp_path / "started").exists)

    assert future.cancel()

    assert future.cancelled()
    eventually((tmp_path / "stopped").exists)
    eventually(lambda: not any(view.running for view in compute.nodes))
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert add(0) @ compute == [1, 1]


def test_a_call_is_cancelled_though_others_wait_behind_it_on_its_worker(
    compute, tmp_path, eventually, patient
):
    """Short calls are sent ahead; the worker must hear of the cancellation all the same."""
    for number in range(200):
        add(number) >> compute
    ahead = [add(number) > compute for number in range(20)]
    slow = wait_then(tmp_path / "gate", 1) > compute
    behind = [add(number) > compute for number in range(20)]
    eventually(slow.running)
    died = compute.stats().workers_died

    slow.cancel()

    assert [future.result(100) for future in ahead + behind] == [*range(1, 21)] * 2
    eventually(lambda: not any(view.running for view in compute.nodes))
    assert compute.stats().workers_died == died


def test_a_slow_call_holds_up_nothing_that_another_worker_could_do(compute, tmp_path):
    for number in range(200):
        add(number) >> compute
    ahead = [add(number) > compute for number in range(20)]
    slow = wait_then(tmp_path / "gate", "slow") > compute
    behind = [add(number) > compute for number in range(100)]

    assert [future.result(100) for future in ahead + behind] == [*range(1, 21), *range(1, 101)]
    assert not slow.done()
    (tmp_path / "gate").touch()
    assert slow.result(100) == "slow"


def test_a_cancelled_future_counts_as_done_for_those_who_wait(compute, tmp_path):
    future = wait_then(tmp_path / "gate", 1) > compute
    future.cancel()

    assert concurrent.futures.wait([future], timeout=100).done == {future}
    assert list(concurrent.futures.as_completed([future], timeout=100)) == [future]


def test_a_call_cancelled_before_it_starts_never_runs(compute, tmp_path):
    blockers = [wait_then(tmp_path / "gate", 1) > compute for _ in range(2)]
    queued = mark(tmp_path / "ran") > compute

    assert queued.cancel()
    (tmp_path / "gate").touch()

    assert [blocker.result(100) for blocker in blockers] == [1, 1]
    assert add(0) @ compute == [1, 1]
    assert not (tmp_path / "ran").exists()


def test_a_future_that_is_done_cannot_be_cancelled(compute):
    future = add(1) > compute
    future.result(100)

    assert not future.cancel()


def test_arguments_are_taken_as_they_are_when_the_call_is_submitted(compute, tmp_path):
    """What the caller does to them afterwards is not seen, large or small."""
    blockers = [wait_then(tmp_path / "gate", 1) > compute for _ in range(2)]
    small, large = [1], np.ones(1 << 20)
    total = sky.function(lambda xs, ys: (sum(xs), ys.sum()))
    future = total(small, large) > compute
    small.append(100)
    large[:] = 7

    (tmp_path / "gate").touch()

    assert future.result(100) == (1, 1 << 20)
    assert all(blocker.result(100) for blocker in blockers)


# Every worker.


def test_matmul_runs_on_every_worker_in_rank_order(compute):
    assert node() @ compute == [0, 1]


def test_a_broadcast_runs_everywhere_at_once_and_keeps_rank_order(compute, tmp_path):
    @sky.function
    def wait_for_the_next_rank(folder):
        rank = sky.instance_info().node
        if rank == 0:
            wait_for(Path(folder, "1"))
        Path(folder, str(rank)).touch()
        return rank

    assert wait_for_the_next_rank(tmp_path) @ compute == [0, 1]


def test_a_broadcast_and_a_call_in_flight_together_keep_their_own_results(compute):
    calls = [add(number) > compute for number in range(50)]

    ranks = [node() @ compute for _ in range(10)]

    assert ranks == [[0, 1]] * 10
    assert [call.result(100) for call in calls] == list(range(1, 51))


def test_one_failure_in_a_broadcast_raises_with_every_outcome(compute):
    @sky.function
    def only_the_head_works():
        if not sky.instance_info().is_head:
            raise ValueError("not the head")
        return "fine"

    with pytest.raises(sky.BroadcastError, match=r"failed on 1 of 2 workers \(node 1\)") as caught:
        only_the_head_works() @ compute

    good, bad = caught.value.outcomes
    assert isinstance(caught.value, ExceptionGroup)
    assert (good.node, good.ok, good.value) == (0, True, "fine")
    assert (bad.node, bad.ok) == (1, False)
    assert isinstance(bad.error, ValueError)
    assert caught.value.exceptions == (bad.error,)
    assert "rank 1 (node 1) failed first: ValueError: not the head" in str(caught.value)


def _rank_1_fails(folder):
    if sky.instance_info().node == 1:
        wait_for(folder / "begun")
        raise ValueError("on purpose")
    (folder / "begun").touch()
    wait_for(folder / "gate")
    return "through the gate"


@pytest.mark.parametrize("asked", ["of the broadcast", "of the function"])
def test_fail_fast_cancels_the_other_workers_of_a_broadcast(compute, tmp_path, asked, monkeypatch):
    monkeypatch.setattr("skyward.compute.broadcasts.LOOK_SECONDS", 60.0)
    decorated = sky.function(fail_fast=asked == "of the function")(_rank_1_fails)

    with pytest.raises(sky.BroadcastError) as caught:
        if asked == "of the function":
            decorated(tmp_path) @ compute
        else:
            compute.broadcast(decorated(tmp_path), fail_fast=True)

    first, cancelled = caught.value.exceptions
    assert isinstance(first, ValueError)
    assert isinstance(cancelled, sky.errors.TaskCancelledError)
    assert f"cancelled: rank 0 at {cancelled.place}" in str(caught.value)
    assert cancelled.place


def test_without_fail_fast_the_console_says_at_once_who_failed_and_who_is_waited_for(
    compute, tmp_path, monkeypatch
):
    told = "rank 1 (node 1) failed: ValueError: on purpose; waiting for rank 0\n"

    class Watched(io.StringIO):
        def write(self, text):
            if told in text:
                (tmp_path / "gate").touch()
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", Watched())
    with pytest.raises(sky.BroadcastError) as caught:
        sky.function(_rank_1_fails)(tmp_path) @ compute

    assert [outcome.value for outcome in caught.value.outcomes] == ["through the gate", None]


# Different calls.


def test_and_returns_a_tuple_in_the_order_written(compute):
    assert (add(1) & sky.function(str)(5)) >> compute == (2, "5")
    assert (add(1) & add(2) & add(3)) >> compute == (2, 3, 4)
    assert ((add(1) & add(2)) & (add(3) & add(4))) >> compute == (2, 3, 4, 5)
    assert (add(1) & (add(2) & add(3))) >> compute == (2, 3, 4)


def test_and_runs_its_calls_in_parallel(compute, tmp_path):
    group = meet(tmp_path, "a", "b") & meet(tmp_path, "b", "a")

    assert group >> compute == ("a", "b")


def test_a_group_can_be_submitted_without_waiting(compute):
    first, second = (add(1) & add(2)) > compute

    assert (first.result(100), second.result(100)) == (2, 3)


def test_a_failure_in_a_group_is_raised_without_waiting_for_the_rest(compute, tmp_path):
    started = time.monotonic()

    with pytest.raises(ValueError, match="first"):
        (wait_then(tmp_path / "gate", 1) & fail(ValueError("first"))) >> compute

    assert time.monotonic() - started < 60, "not as long as the other one waits"
    assert add(0) @ compute == [1, 1]


def test_only_calls_can_be_joined():
    with pytest.raises(TypeError, match=r"42 is not a call of a @sky.function; write f\(x\)"):
        add(1) & 42
    with pytest.raises(TypeError, match="is not a call"):
        sky.gather(add(1), add)


# Any number of calls.


def test_gather_returns_a_list_in_the_order_given(compute):
    assert sky.gather(*[add(number) for number in range(200)]) >> compute == list(range(1, 201))


def test_gather_of_nothing_is_an_empty_list(compute):
    assert sky.gather() >> compute == []
    assert list(sky.gather(stream=True) >> compute) == []
    assert list(sky.gather(stream=True, ordered=False) >> compute) == []


def test_a_streamed_gather_yields_results_before_all_are_there(compute, tmp_path):
    calls = [add(0), add(1), wait_then(tmp_path / "gate", "last")]

    results = sky.gather(*calls, stream=True) >> compute

    assert [next(results), next(results)] == [1, 2]
    (tmp_path / "gate").touch()
    assert list(results) == ["last"]


def test_a_streamed_gather_keeps_the_order_given(compute, tmp_path):
    calls = [wait_then(tmp_path / "gate", "first"), mark(tmp_path / "gate")]

    assert list(sky.gather(*calls, stream=True) >> compute) == ["first", None]


def test_an_unordered_gather_yields_what_is_there_first(compute, tmp_path):
    calls = [wait_then(tmp_path / "gate", "slow"), add(0), add(1)]

    results = sky.gather(*calls, stream=True, ordered=False) >> compute

    assert {next(results), next(results)} == {1, 2}
    (tmp_path / "gate").touch()
    assert list(results) == ["slow"]


def test_an_unordered_gather_without_streaming_is_a_list_of_all(compute):
    results = sky.gather(*[add(number) for number in range(20)], ordered=False) >> compute

    assert isinstance(results, list)
    assert sorted(results) == list(range(1, 21))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failure_in_a_streamed_gather_reaches_the_consumer(compute, ordered):
    results = sky.gather(add(0), fail(KeyError("lost")), stream=True, ordered=ordered) >> compute

    with pytest.raises(KeyError, match="lost"):
        list(results)
    assert list(results) == []


@pytest.mark.parametrize("ordered", [True, False])
def test_dropping_a_streamed_gather_cancels_what_is_left(compute, tmp_path, eventually, ordered):
    calls = [add(0)] + [wait_then(tmp_path / "gate", number) for number in range(30)]
    results = sky.gather(*calls, stream=True, ordered=ordered) >> compute
    assert next(results) == 1

    del results
    gc.collect()

    eventually(lambda: not any(view.running for view in compute.nodes))
    assert add(0) @ compute == [1, 1]


def test_a_failing_gather_cancels_the_calls_that_have_not_run(compute, tmp_path):
    calls = [fail(KeyError("lost"))] + [wait_then(tmp_path / "gate", 1) for _ in range(20)]

    with pytest.raises(KeyError, match="lost"):
        sky.gather(*calls) >> compute

    assert add(0) @ compute == [1, 1]


# One call per item.


def test_map_calls_once_per_item_in_order(compute):
    assert list(compute.map(add, range(100))) == list(range(1, 101))


def test_map_takes_several_iterables_and_stops_with_the_shortest(compute):
    assert list(compute.map(add, [1, 2, 3], [10, 20])) == [11, 22]


def test_map_takes_a_plain_function(compute):
    assert list(compute.map(math.sqrt, [1, 4, 9])) == [1, 2, 3]
    assert list(compute.map(lambda x: 2 * x, [1, 2])) == [2, 4]


def test_map_of_nothing_yields_nothing(compute):
    assert list(compute.map(add, [])) == []


def test_map_without_an_iterable_is_refused(compute):
    with pytest.raises(sky.errors.ConfigurationError, match="at least one iterable"):
        compute.map(add)


def test_an_unordered_map_yields_what_is_there_first(compute, tmp_path):
    @sky.function
    def slow_zero(number, gate):
        if number == 0:
            wait_for(gate)
        return number

    results = compute.map(slow_zero, range(5), itertools.repeat(tmp_path / "gate"), ordered=False)

    assert {next(results) for _ in range(4)} == {1, 2, 3, 4}
    (tmp_path / "gate").touch()
    assert list(results) == [0]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_consumer_of_map_that_stops_taking_stops_the_submissions(compute, eventually, ordered):
    pulled = 0

    def numbers():
        nonlocal pulled
        for number in itertools.count():
            pulled += 1
            yield number

    before = compute.stats()
    results = compute.map(add, numbers(), ordered=ordered)
    next(results)
    eventually(lambda: compute.stats().succeeded - before.succeeded == pulled)
    stalled = pulled

    add(0) @ compute  # the pool itself goes on

    assert pulled == stalled < 100
    for _ in range(200):
        next(results)
    assert stalled < pulled <= stalled + 200
    results.close()


def test_an_exception_in_a_mapped_call_reaches_the_consumer(compute):
    @sky.function
    def invert(x):
        return 1 / x

    results = compute.map(invert, [1, 2, 0, 4])

    assert [next(results), next(results)] == [1, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []


def test_an_exception_in_the_mapped_iterable_reaches_the_consumer(compute, eventually):
    def numbers():
        yield from range(3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(compute.map(add, numbers()))

    eventually(lambda: not any(view.running for view in compute.nodes))
    assert add(0) @ compute == [1, 1]


# By name, and where.


def test_run_submit_and_broadcast_are_the_operators_by_name(compute):
    assert compute.run(add(1)) == 2
    assert compute.submit(add(1)).result(100) == 2
    assert compute.broadcast(add(1)) == [2, 2]


@pytest.mark.parametrize(("on", "expected"), [(0, 0), (1, 1), ("head", 0)])
def test_on_picks_the_node(compute, on, expected):
    assert {compute.run(node(), on=on) for _ in range(4)} == {expected}
    assert compute.submit(node(), on=on).result(100) == expected


def test_a_call_for_a_busy_node_waits_though_another_is_free(compute, tmp_path):
    busy = compute.submit(wait_then(tmp_path / "go", 1), on=1)
    waiting = compute.submit(node(), on=1)
    # A node asks for what waits when it has finished something.
    assert {compute.run(node(), on=0) for _ in range(4)} == {0}
    (tmp_path / "go").touch()
    assert busy.result(100) == waiting.result(100) == 1


@pytest.mark.parametrize("on", [2, -1, "tail", 1.0, True])
def test_a_node_that_is_not_there_is_refused_at_once(compute, on):
    with pytest.raises(sky.errors.ConfigurationError, match="give 'head' or a node from 0 to 1"):
        compute.run(add(1), on=on)


def test_a_broadcast_to_one_node_is_refused(compute):
    with pytest.raises(sky.errors.ConfigurationError, match="a broadcast runs everywhere; use run"):
        compute.broadcast(add(1), on=1)


@pytest.mark.parametrize("run", [operator.rshift, operator.gt, operator.matmul])
def test_only_a_compute_can_run_functions(run):
    with pytest.raises(TypeError, match=r"42 cannot run functions; use a sky\.Compute"):
        run(add(1), 42)
    with pytest.raises(TypeError, match="the module 'os' cannot run functions"):
        run(add(1), os)


def test_a_function_that_was_not_called_is_not_run_by_mistake(compute):
    with pytest.raises(TypeError):
        add >> compute
    with pytest.raises(TypeError, match=r"is not a call of a @sky.function; write f\(x\), not f"):
        compute.run(add)


# The module as a target.


def test_inside_a_block_the_module_itself_is_a_target(compute):
    assert add(1) >> sky == 2
    assert (add(1) > sky).result(100) == 2
    assert node() @ sky == [0, 1]
    assert (add(1) & add(2)) >> sky == (2, 3)
    assert sky.gather(add(1), add(2)) >> sky == [2, 3]


def test_the_module_means_the_innermost_block(compute):
    job = sky.function(lambda: sky.instance_info().job_id)
    outer = job() >> compute

    with sky.Compute(options=QUIET) as inner:
        assert job() >> sky == job() >> inner != outer

    assert job() >> sky == outer


def test_threads_started_inside_a_block_use_its_pool(compute):
    results = []
    threads = [threading.Thread(target=lambda: results.append(add(1) >> sky)) for _ in range(4)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [2] * 4


def test_one_pool_serves_many_threads(compute):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: add(number) >> compute, range(100)))

    assert results == list(range(1, 101))


# What a function may be.


class Scaler:
    """A class of the test module, which no worker can import."""

    kind = "scaler"

    def __init__(self, factor):
        self.factor = factor

    @sky.function
    def scale(self, x):
        """Multiply."""
        return self.factor * x

    @staticmethod
    @sky.function
    def double(x):
        return 2 * x

    @classmethod
    @sky.function
    def name(cls):
        return cls.kind

    def __call__(self, x):
        return self.factor * x


def test_a_method_takes_its_instance_along(compute):
    scaler = Scaler(3)

    assert scaler.scale(2) >> compute == 6
    assert Scaler.scale(scaler, 2) >> compute == 6
    assert scaler.scale(2) @ compute == [6, 6]


def test_a_method_runs_locally_too():
    assert Scaler(3).scale.local(2) == 6
    assert Scaler.scale.local(Scaler(3), 2) == 6


def test_a_bound_method_keeps_docstring_and_signature():
    assert Scaler(3).scale.__doc__ == "Multiply."
    assert str(inspect.signature(Scaler(3).scale)) == "(x)"


def test_static_and_class_methods_work(compute):
    assert Scaler.double(2) >> compute == 4
    assert Scaler.name() >> compute == "scaler"


def test_a_callable_object_can_be_a_function(compute):
    assert sky.function(Scaler(3))(2) >> compute == 6
    assert sky.function(functools.partial(operator.mul, 3))(2) >> compute == 6


def test_builtin_and_library_functions_can_be_functions(compute):
    assert sky.function(math.hypot)(3, 4) >> compute == 5
    assert sky.function(len)([1, 2]) >> compute == 2
    assert sky.function(np.sum)(np.arange(4)) >> compute == 6


def test_lambdas_and_closures_travel(compute):
    def make(offset):
        def shift(x):
            return helper(x) + offset

        def helper(x):
            return 10 * x

        return sky.function(shift)

    assert make(1)(2) >> compute == 21
    assert make(5)(2) >> compute == 25
    assert sky.function(lambda *args, **kwargs: (args, kwargs))(1, b=2) >> compute == (
        (1,),
        {"b": 2},
    )


def test_a_recursive_closure_travels(compute):
    @sky.function
    def factorial(n):
        return 1 if n < 2 else n * factorial.local(n - 1)

    assert factorial(10) >> compute == 3628800


def test_a_function_calls_other_functions_through_local(compute):
    @sky.function
    def outer(x):
        return add.local(x, 10), pid.local() == os.getpid()

    assert outer(1) >> compute == (11, True)


def test_an_async_function_runs_to_its_end(compute):
    @sky.function
    async def late(x):
        await asyncio.sleep(0)
        return await asyncio.to_thread(lambda: x + 1)

    assert late(1) >> compute == 2
    assert late(1) @ compute == [2, 2]
    assert asyncio.run(late.local(1)) == 2


LIMIT = 1
TABLE = {"rate": 1}


@sky.function
def read_globals():
    return LIMIT, dict(TABLE)


def test_a_global_is_sent_with_the_value_it_has_at_the_call(compute, monkeypatch):
    assert read_globals() >> compute == (1, {"rate": 1})

    monkeypatch.setattr(sys.modules[__name__], "LIMIT", 2)
    monkeypatch.setitem(TABLE, "rate", 2)

    assert read_globals() @ compute == [(2, {"rate": 2})] * 2


def test_a_helper_that_is_redefined_is_sent_anew(compute):
    helper = lambda: "old"
    call = sky.function(lambda: helper())
    assert call() >> compute == "old"

    helper = lambda: "new"

    assert call() >> compute == "new"


def test_a_default_that_is_changed_in_place_is_sent_anew(compute):
    seen = []
    call = sky.function(lambda known=seen: list(known))

    assert call() >> compute == []
    seen.append(1)
    assert call() >> compute == [1]


@dataclass
class Point:
    x: int
    y: int


def test_an_instance_of_my_own_class_comes_back_as_one(compute):
    @sky.function
    def mirror(point):
        return Point(point.y, point.x)

    assert mirror(Point(1, 2)) >> compute == Point(2, 1)
    assert type(mirror(Point(1, 2)) >> compute) is Point


def test_helper_modules_beside_the_script_travel_by_value(tmp_path):
    """What no worker can import: the folder is not on the worker's path."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "recipes.py").write_text(
        "import recipe_parts\ndef cook(x):\n    return recipe_parts.PREFIX + x\n"
    )
    (tmp_path / "elsewhere" / "recipe_parts.py").write_text("PREFIX = 'cooked '\n")
    script = """
        import sys
        import skyward as sky

        with sky.Compute(options=sky.Options(console=False)) as compute:
            sys.path.insert(0, sys.argv[1])
            import recipes

            @sky.function
            def run(x):
                return recipes.cook(x)

            print(run("rice") >> compute)
    """

    done = python(script, tmp_path / "elsewhere")

    assert done.stdout == "cooked rice\n", done.stderr


def python(script, *args):
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


MAIN_SCRIPT = """
import pickle
import queue
import skyward as sky

LIMIT = 7

class Shape:
    def __init__(self, sides):
        self.sides = sides

def helper(x):
    return x + LIMIT

@sky.function
def grow(shape):
    return Shape(helper(shape.sides))

@sky.function
def plus(x):
    return helper(x)

try:
    plus(1) >> sky
except sky.errors.PoolClosedError as problem:
    print("outside:", problem)
with sky.Compute(options=sky.Options(console=False)) as compute:
    grown = grow(Shape(3)) >> compute
    print("main:", plus(1) >> sky, type(grown) is Shape, grown.sides)
    print("pickled:", pickle.loads(pickle.dumps(plus(1))) >> compute)
try:
    plus(1) >> sky
except sky.errors.PoolClosedError as problem:
    print("after:", problem)
try:
    plus(1) >> compute
except sky.errors.PoolClosedError as problem:
    print("left:", problem)
"""


@pytest.fixture(scope="module")
def script_output(tmp_path_factory):
    script = tmp_path_factory.mktemp("main") / "script.py"
    script.write_text(MAIN_SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_functions_and_classes_of_a_script_travel(script_output):
    assert script_output["main"] == "8 True 10"


def test_a_call_made_in_a_script_survives_pickling(script_output):
    assert script_output["pickled"] == "8"


@pytest.mark.parametrize("when", ["outside", "after"])
def test_the_module_is_no_target_outside_of_a_block(script_output, when):
    assert script_output[when] == (
        "no Compute is active here: `>> sky` works inside a `with sky.Compute()` block, and in "
        "scripts that `sky run` runs"
    )


def test_a_pool_that_was_left_says_so(script_output):
    assert script_output["left"].startswith("this pool is closed; run functions inside its")


# Frozen data.


class Marker:
    """Something to look for in a worker's memory."""

    def __init__(self, text):
        self.text = text


@sky.function
def type_and_size(data):
    return type(data).__name__, len(data)


@sky.function
def markers(name):
    return sum(type(found).__name__ == name for found in gc.get_objects())


def test_a_function_sees_the_object_behind_a_handle(compute):
    handle = sky.put([1, 2, 3])

    assert type_and_size(handle) >> compute == ("list", 3)
    assert type_and_size(data=handle) @ compute == [("list", 3)] * 2
    assert type_and_size.local(handle) == ("list", 3)


def test_put_data_is_sent_once_per_node(compute):
    payload = os.urandom(200_000)
    handle = sky.put(payload)
    before = compute.stats().bytes_sent

    for _ in range(5):
        type_and_size(handle) @ compute
    sky.gather(*[type_and_size(handle) for _ in range(20)]) >> compute

    sent = compute.stats().bytes_sent - before
    assert 2 * len(payload) <= sent < 2.2 * len(payload)


def test_large_put_data_is_sent_once_over_a_network_too():
    with sky.Compute(sky.Local(transport="tcp"), options=QUIET) as remote:
        array = np.random.default_rng(0).random(1 << 17)
        handle = sky.put(array)
        total = sky.function(lambda xs: float(xs.sum()))

        results = [total(handle) >> remote for _ in range(5)]

        assert results == [float(array.sum())] * 5
        assert array.nbytes <= remote.stats().bytes_sent < 1.2 * array.nbytes


def test_a_handle_may_be_anywhere_in_the_arguments(compute):
    @sky.function
    def sizes(nested, *, options):
        return [len(data) for data in nested["parts"]], len(options.x), type(options.x).__name__

    handle = sky.put((1, 2, 3))

    arguments = {"parts": [handle, [handle, handle], ()]}
    assert sizes(arguments, options=Point(handle, 0)) >> compute == ([3, 2, 0], 3, "tuple")


def test_a_handle_may_be_a_global_or_in_a_closure(compute):
    handle = sky.put([1, 2, 3])

    assert sky.function(lambda: len(handle))() >> compute == 3


def test_the_same_handle_is_the_same_object_within_a_call(compute):
    handle = sky.put([1])

    assert sky.function(lambda a, b: a is b)(handle, [handle][0]) >> compute


@pytest.mark.parametrize("size", [10, 1 << 18], ids=["small", "large"])
def test_numpy_data_behind_a_handle_cannot_be_written_to(compute, size):
    @sky.function
    def write(array):
        with contextlib.suppress(ValueError):
            array[0] = 1
        return array.flags.writeable, float(array[0])

    assert write(sky.put(np.zeros(size))) >> compute == (False, 0.0)


def test_put_data_is_freed_everywhere_when_the_handle_dies(compute, eventually):
    marker = Marker("here")
    here = weakref.ref(marker)
    handle = sky.put([marker, os.urandom(100_000)])
    del marker
    type_and_size(handle) @ compute
    assert markers("Marker") @ compute == [1, 1]

    del handle
    gc.collect()

    assert here() is None
    eventually(lambda: markers("Marker") @ compute == [0, 0])


def test_put_data_stays_while_a_call_still_needs_it(compute, tmp_path):
    @sky.function
    def late_length(data, gate):
        wait_for(gate)
        return len(data)

    blockers = [wait_then(tmp_path / "gate", 0) > compute for _ in range(2)]
    queued = late_length(sky.put([1, 2, 3]), tmp_path / "gate") > compute
    gc.collect()
    (tmp_path / "gate").touch()

    assert queued.result(100) == 3
    assert [blocker.result(100) for blocker in blockers] == [0, 0]


def test_putting_a_handle_again_gives_the_same_handle():
    handle = sky.put([1])

    assert sky.put(handle) is handle
    assert repr(handle) == "<sky.put [1]>"
    assert handle.value == [1]


def test_a_call_with_a_handle_survives_pickling(compute):
    call = type_and_size(sky.put(np.arange(4)))

    assert pickle.loads(pickle.dumps(call)) >> compute == ("ndarray", 4)


def test_data_that_cannot_travel_is_refused_when_it_is_put():
    with pytest.raises(sky.errors.SerializationError, match="lock"):
        sky.put({"lock": threading.Lock()})


def test_a_handle_works_in_two_pools(compute):
    handle = sky.put([1, 2])

    with sky.Compute(options=QUIET) as other:
        assert type_and_size(handle) >> other == type_and_size(handle) >> compute == ("list", 2)
    assert type_and_size(handle) >> compute == ("list", 2)


# What comes back when it goes wrong.


class Custom(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint

    def __reduce__(self):
        return functools.partial(type(self), hint=self.hint), (self.code,)


class Rewritten(Exception):
    """Gives its base something else than what it takes."""

    def __init__(self, code, detail):
        super().__init__(f"custom {code}")
        self.code, self.detail = code, detail


class ByKeyword(OSError):
    def __init__(self, *, path):
        super().__init__(errno.ENOENT, "not there", path)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class WithState(Exception):
    """Leaves out what cannot be sent."""

    def __init__(self, *, code):
        super().__init__(f"custom {code}")
        self.code, self.lock = code, threading.Lock()

    def __getstate__(self):
        return {"code": self.code}


class Slotted(Exception):
    """As attrs makes classes."""

    __slots__ = ("code",)

    def __init__(self, *, code):
        self.code = code

    def __getstate__(self):
        return (self.code,)

    def __setstate__(self, state):
        (self.code,) = state


def test_an_exception_arrives_as_what_it_was(compute):
    @sky.function
    def broken():
        problem = Custom(7, hint="again")
        problem.extra = [1, 2]
        raise problem from KeyError("cause")

    with pytest.raises(Custom, match="code 7") as caught:
        broken() >> compute

    assert (caught.value.code, caught.value.hint) == (7, "again")
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_exception_shows_where_it_was_raised_with_source_lines(compute):
    @sky.function
    def broken(x):
        return 1 / x  # the guilty line

    with pytest.raises(ZeroDivisionError) as caught:
        broken(0) >> compute

    note = "\n".join(caught.value.__notes__)
    assert "on node" in note
    assert "return 1 / x  # the guilty line" in note
    assert "test_functions.py" in note


def test_an_exception_keeps_its_type_whatever_its_class_takes(compute):
    @sky.function
    def broken():
        problem = Rewritten(7, detail={"hint": "again"})
        problem.add_note("a note")
        raise problem from ByKeyword(path="/nowhere")

    with pytest.raises(sky.BroadcastError) as everywhere:
        broken() @ compute
    with pytest.raises(Rewritten) as caught:
        broken() >> compute

    for problem in (caught.value, *everywhere.value.exceptions):
        assert type(problem) is Rewritten
        assert problem.args == ("custom 7",)
        assert (problem.code, problem.detail) == (7, {"hint": "again"})
        assert problem.__notes__[0] == "a note"
        assert type(problem.__cause__) is ByKeyword
        assert problem.__cause__.filename == "/nowhere"
        assert str(problem.__cause__) == "[Errno 2] not there: '/nowhere'"


@pytest.mark.parametrize("kind", [Frozen, WithState, Slotted])
def test_an_exception_keeps_its_state_however_its_class_holds_it(compute, kind):
    @sky.function
    def broken():
        raise kind(code=7) from Frozen(8)

    with pytest.raises(kind) as caught:
        broken() >> compute

    assert type(caught.value) is kind
    assert caught.value.code == 7
    assert caught.value.__cause__ == Frozen(8)
    assert "raise kind(code=7)" in caught.value.__notes__[0]


def test_an_exception_of_a_class_in_c_arrives_as_pickle_has_it(compute):
    core = pytest.importorskip("pydantic_core")
    with pytest.raises(core.PydanticKnownError) as caught:
        fail(core.PydanticKnownError("missing")) >> compute

    assert caught.value.type == "missing"


def test_an_exception_of_a_class_that_is_not_here_arrives_as_a_remote_error(compute):
    @sky.function
    def broken():
        module = sys.modules["only_there"] = type(sys)("only_there")
        exec("class Odd(Exception): pass", vars(module))
        raise module.Odd("code 7")

    with pytest.raises(sky.RemoteError, match=r"only_there\.Odd: code 7") as caught:
        broken() >> compute

    assert caught.value.type_name == "only_there.Odd"
    assert 'raise module.Odd("code 7")' in caught.value.remote_traceback
    assert "cannot be rebuilt here: ModuleNotFoundError: No module named 'only_there'" in str(
        caught.value
    )


def test_an_exception_that_cannot_be_sent_arrives_as_a_remote_error(compute):
    @sky.function
    def broken():
        problem = Rewritten(7, detail=1)
        problem.lock = threading.Lock()
        raise problem

    with pytest.raises(sky.RemoteError, match=r"Rewritten: custom 7 \(.* cannot be sent: .*\.lock"):
        broken() >> compute


def test_an_exception_with_a_message_longer_than_a_frame_arrives(compute):
    with pytest.raises(ValueError) as caught:
        fail(ValueError("x" * META_LIMIT)) >> compute

    assert len(caught.value.args[0]) == META_LIMIT


def test_a_timeout_raises_and_cancels_the_remote_work(compute, tmp_path, eventually, patient):
    @sky.function(timeout=3)
    def endless(stopped):
        try:
            wait_for("/nowhere", 60)
        finally:
            Path(stopped).touch()

    with pytest.raises(sky.TaskTimeoutError, match="endless ran longer than its timeout"):
        endless(tmp_path / "stopped") >> compute

    eventually((tmp_path / "stopped").exists)
    assert add(0) @ compute == [1, 1]


def test_a_timeout_may_be_years():
    loop, ran = Loop(), queue.SimpleQueue()
    try:
        timer = loop.later(1e9, lambda: ran.put("late"))
        for number in range(3):
            loop.call_soon(lambda number=number: ran.put(number))
            assert ran.get(timeout=100) == number
        timer.cancel()
    finally:
        loop.stop()


def test_a_timeout_counts_from_dispatch_not_from_submission(compute, tmp_path, monkeypatch):
    start, counted = Timeouts.start, []

    def started(timeouts, task):
        if task.timeout is not None:
            counted.append(task.timeout)
        start(timeouts, task)

    monkeypatch.setattr(Timeouts, "start", started)
    blockers = [wait_then(tmp_path / "gate", 1) > compute for _ in range(2)]
    quick = sky.function(timeout=200)(lambda: "ran")() > compute

    with pytest.raises(concurrent.futures.TimeoutError):
        quick.result(0.2)
    assert counted == []
    (tmp_path / "gate").touch()
    assert quick.result(100) == "ran"
    assert [blocker.result(100) for blocker in blockers] == [1, 1]
    assert counted == [200]


def test_retries_run_again_when_a_worker_dies(compute, tmp_path):
    @sky.function(retries=2)
    def dies_once(path):
        if not os.path.exists(path):
            Path(path).touch()
            os._exit(3)
        return "survived"

    before = compute.stats().retried

    assert dies_once(tmp_path / "died") >> compute == "survived"
    assert compute.stats().retried == before + 1


def test_retries_never_repeat_the_users_own_exception(compute, tmp_path):
    @sky.function(retries=3)
    def fails(path):
        with open(path, "a") as tally:
            tally.write("x")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fails(tmp_path / "tally") >> compute

    assert (tmp_path / "tally").read_text() == "x"


def test_an_argument_that_cannot_travel_is_named_with_the_path_to_it(compute):
    with pytest.raises(
        sky.errors.SerializationError,
        match=r"argument 'a' of add at \['locks'\]\[1\] cannot be sent",
    ):
        add({"locks": [1, threading.Lock()]}) >> compute


def test_a_result_that_cannot_travel_is_an_error_at_once(compute):
    with pytest.raises(sky.errors.SerializationError, match=r"\['lock'\]"):
        sky.function(lambda: {"lock": threading.Lock()})() >> compute
    assert add(1) >> compute == 2


def test_an_undefined_global_is_named_before_anything_is_sent(compute):
    before = compute.stats().submitted

    with pytest.raises(
        sky.errors.SerializationError, match="uses 'no_such_name', which is not defined"
    ):
        sky.function(lambda: no_such_name)() >> compute  # noqa: F821

    assert compute.stats().submitted == before


def test_a_module_missing_on_the_worker_is_named_with_the_fix(compute):
    @sky.function
    def imports():
        import no_such_module_anywhere  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere") as caught:
        imports() >> compute

    assert any("sky.Image(pip=['no_such_module_anywhere'])" in n for n in caught.value.__notes__)
