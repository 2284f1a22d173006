"""Timeouts: the error says where the task was, and which ranks of a broadcast wait for which."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.calls.task import Failed, Standing
from skyward.compute.broadcasts import Ranks, failures_told, first_failed
from skyward.errors import Outcome
from skyward.nodes.stacks import ProcessStacks, StackFrame, Stacks, ThreadStack, standing_of

torch = pytest.importorskip("torch")

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute(nodes=2, plugins=[sky.plugins.torch()], options=QUIET) as compute:
        yield compute


def rests() -> None:
    threading.Event().wait()


def test_a_timeout_says_where_the_task_was(pool: sky.Compute) -> None:
    with pytest.raises(sky.TaskTimeoutError) as caught:
        sky.function(timeout=1)(rests)() >> pool
    assert re.fullmatch(
        r"rests ran longer than its timeout of 1 s on node \d; the remote work was cancelled; "
        r'it was here:\n  File ".*test_hanging\.py", line \d+, in rests\n'
        r'    threading\.Event\(\)\.wait\(\)\n  File ".*threading.py", line \d+, in wait\n.*',
        str(caught.value),
    )
    assert caught.value.place.startswith("test_hanging.py:")
    assert caught.value.place.endswith("in rests: threading.Event().wait()")
    assert caught.value.collective == ""


@sky.function(timeout=5)
def trains() -> str:
    rank = torch.distributed.get_rank()
    if rank == 1:
        time.sleep(600)  # this rank hangs
    torch.distributed.recv(torch.zeros(1), src=1)
    return "done"


def test_a_broadcast_names_the_rank_that_hangs_and_the_ranks_that_wait_for_it(
    compute: sky.Compute,
) -> None:
    with pytest.raises(sky.BroadcastError) as caught:
        trains() @ compute
    text = str(caught.value)
    hung = r"rank 1 \(node 1\) did not answer in time: it was at test_hanging\.py:\d+ in trains: "
    assert re.search(hung + r"time\.sleep\(600\)", text), text
    assert re.search(r"rank 0 waited in the collective recv, at test_hanging\.py:\d+ in ", text)


def test_a_timeout_in_c_code_that_holds_the_interpreter_says_where_too(pool: sky.Compute) -> None:
    @sky.function(timeout=1)
    def holds() -> None:
        ctypes.PyDLL(None).sleep(600)

    with pytest.raises(sky.TaskTimeoutError, match="in C code that holds the interpreter") as error:
        holds() >> pool
    assert "ctypes.PyDLL(None).sleep(600)" in error.value.place


def test_ranks_are_told_in_ranges() -> None:
    def at(
        kind: type[sky.errors.TaskError], place: str, collective: str = ""
    ) -> sky.errors.TaskError:
        error = kind("told")
        error.place, error.collective = place, collective
        return error

    late, ended = sky.TaskTimeoutError, sky.errors.TaskCancelledError
    errors: list[Exception] = [at(late, "a.py:1 in f", "all_reduce")] * 3
    errors += [at(late, "b.py:2 in g"), at(late, ""), ValueError()]
    outcomes = [Outcome(node, 0, error=error) for node, error in enumerate(errors)]
    assert failures_told([*outcomes, Outcome(6, 0, 1)], 0).splitlines() == [
        ":",
        "  rank 3 (node 3) did not answer in time: it was at b.py:2 in g",
        "  rank 4 (node 4) did not answer in time: where it was is not known",
        "  ranks 0-2 waited in the collective all_reduce, at a.py:1 in f",
        "  rank 6 returned",
        "  rank 5 failed, too",
    ]
    errors = [at(ended, "a.py:1 in f", "recv")] * 2 + [ValueError("x"), at(ended, "")]
    outcomes = [Outcome(node, 0, error=error) for node, error in enumerate(errors)]
    assert failures_told(outcomes, 2).splitlines() == [
        ":",
        "  rank 2 (node 2) failed first: ValueError: x",
        "  cancelled: ranks 0-1 waited in the collective recv, at a.py:1 in f",
        "  cancelled: rank 3, where is not known",
    ]
    assert failures_told([Outcome(0, 0, error=ValueError())], 0) == ""


def test_an_exception_without_a_text_is_told_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    outcomes = [Outcome(0, 0, error=Mute()), Outcome(1, 0, 1)]
    assert "failed first: Mute: <its str() failed: RuntimeError>" in failures_told(outcomes, 0)


def failed(problem: Exception, at: float) -> Failed:
    answer = Failed.because(problem)
    answer.at = at
    return answer


def test_a_death_came_first_only_if_it_may_have_caused_the_other_failures() -> None:
    died, lost = sky.WorkerDiedError("x"), sky.NodeLostError("x")
    assert first_failed([failed(ValueError(), 5.0), failed(died, 5.1)]) == 1
    assert first_failed([failed(ValueError(), 5.0), failed(lost, 15.0)]) == 1
    assert first_failed([failed(ValueError(), 5.0), failed(died, 8.0)]) == 0
    assert first_failed([None, failed(ValueError(), 6.0), failed(ValueError(), 5.0)]) == 2
    assert first_failed([None, None]) is None


def test_a_later_failure_is_told_with_the_time_that_is_left() -> None:
    told: list[str] = []
    now = [10.0]
    fleet: Any = SimpleNamespace(
        preparer=SimpleNamespace(together=True, begin_broadcast=lambda: False),
        spec=SimpleNamespace(options=SimpleNamespace(fail_grace=3.0)),
        dispatcher=SimpleNamespace(timeouts=SimpleNamespace(now=lambda: now[0])),
    )
    tasks: Any = [
        SimpleNamespace(answer=None, stream=None, done=False, when_done=lambda action: None)
        for _ in range(3)
    ]
    ranks = Ranks(fleet, "f", [(0, 0), (1, 0), (2, 0)], tasks, told.append, fail_fast=False)
    for rank, seconds in ((0, 0.5), (1, 1.5)):
        tasks[rank].answer, tasks[rank].done = Failed.because(ValueError("x")), True
        ranks._take(rank)
        now[0] += seconds
        ranks._tell(now[0])
    assert [line.rpartition("; ")[2] for line in told] == [
        "ranks 1-2: cancelled in 2.5 s, unless done by then",
        "rank 2: cancelled in 1 s, unless done by then",
    ]


def test_a_task_that_has_not_begun_or_whose_node_is_silent_is_told_so() -> None:
    frame = StackFrame("/home/me/a.py", 7, "f", "", False)
    thread = ThreadStack("MainThread", 1, "other", 2.0, (frame,))
    process = ProcessStacks(0, 0, 0, "executor", 11, ((1, "other", 2.0),), (thread,), True, "")
    assert standing_of(1, 11, Stacks([process])).place == "a.py:7 in f"
    waiting = standing_of(2, 11, Stacks([process]))
    assert waiting == Standing("it had not begun: its worker runs other")
    silent = ProcessStacks(0, None, 0, "node", 0, (), (), False, "its agent did not answer")
    assert standing_of(1, 11, Stacks([silent])).text == (
        "where it was is not known: its agent did not answer"
    )
