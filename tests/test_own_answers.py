"""A caller that waits reads its own answer, and nobody notices but for the time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.calls.dispatch import Dispatcher
from skyward.calls.loop import Borrower
from skyward.calls.task import Task
from skyward.wire.channel import Channel
from skyward.wire.messages import Payload, Result, Written

STEPS = 150
"""More than a call has at which Python may run a handler of a signal."""


@sky.function
def double(number: int) -> int:
    return 2 * number


@sky.function
def tell(text: str, pid: int, number: signal.Signals) -> int:
    """Print, and send this test's process a signal; so the caller has more to read."""
    print(text)
    os.kill(pid, number)
    return len(text)


@sky.function
def wait_for(mark: str) -> int:
    """Return when there is a file."""
    while not os.path.exists(mark):
        time.sleep(0.01)
    return 4


@pytest.fixture(scope="module")
def alone(sharing: Any) -> Iterator[sky.Compute]:
    """One node that runs one call at a time."""
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        yield compute


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tasks whose callers have read their own answers."""
    found: list[int] = []
    take = Channel.take_result

    def noted(self: Channel, task: int) -> Any:
        result = take(self, task)
        if result is not None:
            found.append(task)
        return result

    monkeypatch.setattr(Channel, "take_result", noted)
    return found


def pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def result(task: int, body: bytes = b"value") -> tuple[Result, list[bytes]]:
    return Result(task, 0.0, Payload(len(body), inline=len(body))), [body]


def test_a_result_is_taken_by_the_call_that_waits_for_it_and_by_no_other() -> None:
    ours, theirs = pair()
    theirs.send(*result(7))
    theirs.send(*result(8, b"next"))
    assert ours.take_result(8) is None
    taken = ours.take_result(7)
    assert taken is not None
    assert bytes(taken[1]) == b"value"
    assert ours.take_result(7) is None
    assert [frame.body for frame in ours.poll()] == [b"next"]
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "first",
    [
        (Written(7, "stdout", "text\n", False), []),
        (Result(7, 0.0, None), []),
        result(7, bytes(1 << 16)),
        (Result(7, 0.0, Payload(5, inline=4)), [b"valu"]),
    ],
    ids=["output", "stream", "large", "malformed"],
)
def test_what_is_not_a_plain_result_stays_for_the_loop(first: tuple[Any, list[bytes]]) -> None:
    ours, theirs = pair()
    theirs.send(*first)
    theirs.send(*result(7))
    assert ours.take_result(7) is None
    received = [ours.receive(), ours.receive()]
    assert [frame.kind for frame in received] == [first[0].KIND, Result.KIND]
    ours.close()
    theirs.close()


def test_a_result_behind_the_beginning_of_another_frame_is_not_taken() -> None:
    ours, theirs = pair()
    sender, _ = theirs.detach()
    ours_read, _ = ours.detach()
    theirs.send(*result(6))
    begun = ours_read.recv(20)
    ours._decoder.feed(begun)
    assert ours.take_result(6) is None
    assert ours.receive().body == b"value"
    sender.close()
    ours.close()


def test_callers_read_their_own_answers(pool: sky.Compute, taken: list[int]) -> None:
    double(0) >> pool
    taken.clear()
    for number in range(20):
        assert double(number) >> pool == 2 * number
    # Now and then the loop's thread reads one.
    assert len(taken) > 10


def test_answers_reach_many_callers_of_one_process(threads: sky.Compute) -> None:
    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(lambda n: double(n) >> threads, range(200))) == [
            2 * number for number in range(200)
        ]


def test_what_a_function_prints_is_shown_before_its_result_is_there(
    pool: sky.Compute, printed: list[sky.Output]
) -> None:
    for number in range(5):
        assert tell(f"line {number}", os.getpid(), signal.SIGCONT) >> pool == 6
        assert printed[-1] == f"line {number}"


def test_a_handler_of_a_signal_makes_a_call_while_another_one_waits(
    alone: sky.Compute, tmp_path: Path
) -> None:
    answers: list[int] = []
    mark, caller = tmp_path / "handled", threading.main_thread().ident

    def handle(*_: object) -> None:
        mark.touch()
        answers.append(double(21) >> alone)

    def strike() -> None:
        # Mostly the caller reads its own answer; another thread may just have that to do.
        waits = Borrower.wait.__code__, Task.wait.__code__
        while caller and sys._current_frames()[caller].f_code not in waits:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    striking = threading.Thread(target=strike)
    try:
        striking.start()
        assert wait_for(str(mark)) >> alone == 4
    finally:
        striking.join()
        signal.signal(signal.SIGUSR1, before)
    assert answers == [42]


def interrupt(strike: int, handler: Callable[[], None]) -> Callable[..., None]:
    """A profile function that runs a handler at one of the steps at which Python does that."""
    inside = count = 0

    def step(frame: types.FrameType, event: str, argument: Any) -> None:
        nonlocal inside, count
        if frame.f_code is Dispatcher._hand_over.__code__:
            inside += (event == "call") - (event == "return")
        if inside and event in ("call", "c_return"):
            count += 1
            if count == strike:
                handler()

    return step


def stop() -> None:
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_ctrl_c_at_any_step_of_reading_an_answer_harms_no_other_call(alone: sky.Compute) -> None:
    before, interrupted = sys.getprofile(), 0
    for strike in range(1, STEPS):
        sys.setprofile(interrupt(strike, stop))
        try:
            double(strike) >> alone
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.setprofile(before)
        assert double(strike) >> alone == 2 * strike
    assert interrupted > 20
    assert alone.stats().workers_died == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_call_of_a_handler_never_waits_for_the_call_that_it_interrupts(
    alone: sky.Compute,
) -> None:
    """It gets its answer while the other one waits, and is refused at every other step."""
    before, refused = sys.getprofile(), 0
    answers: list[int] = []

    def call() -> None:
        answers.append(double(21) >> alone)

    for strike in range(1, STEPS):
        sys.setprofile(interrupt(strike, call))
        try:
            assert double(strike) >> alone == 2 * strike
        except RuntimeError as problem:
            assert "a handler of a signal has called double" in str(problem)  # noqa: PT017
            refused += 1
        finally:
            sys.setprofile(before)
        assert double(strike) >> alone == 2 * strike
    assert refused > 20
    assert answers.count(42) == len(answers) > 0
    assert alone.stats().workers_died == 0
