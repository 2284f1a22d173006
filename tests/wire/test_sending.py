"""The threads that send what is large: which sends wait for which."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from skyward.calls.lane import Sending


class Executor:
    """A lane, as far as sending knows it."""

    lost = False


def lanes(count: int) -> list[Any]:
    return [Executor() for _ in range(count)]


def begin(sending: Sending, lane: Any) -> threading.Event:
    """Begin a send that lasts until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def send() -> None:
        begun.set()
        over.wait(100)

    sending.run(lane, send)
    assert begun.wait(100)
    return over


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Sending:
    """Two threads that send to executors within reach."""
    monkeypatch.setattr("skyward.calls.lane.SENDS_AT_ONCE", 2)
    return Sending()


def test_sends_that_wait_for_the_end_of_an_outage_leave_the_others_their_threads(
    sending: Sending,
) -> None:
    *cut_off, sound = lanes(6)
    overs = []
    for lane in cut_off:
        overs.append(begin(sending, lane))
        sending.cut_off(lane)
    done = [sending.submit(sound, lambda: None) for _ in range(3)]
    for each in done:
        each.result(100)
    for over in overs:
        over.set()


def test_what_waits_for_a_thread_gets_that_of_a_send_that_is_cut_off(sending: Sending) -> None:
    one, other, sound = lanes(3)
    overs = [begin(sending, one), begin(sending, other)]
    waiting = sending.submit(sound, lambda: None)
    assert not waiting.done()
    sending.cut_off(one)
    waiting.result(100)
    for over in overs:
        over.set()


def test_a_lane_has_one_thread_at_a_time(sending: Sending) -> None:
    busy, other = lanes(2)
    over, sent = begin(sending, busy), []
    last = [sending.submit(busy, lambda n=n: sent.append(n)) for n in range(5)][-1]
    sending.submit(other, lambda: None).result(100)
    assert not sent
    over.set()
    last.result(100)
    assert sent == list(range(5))


@pytest.mark.parametrize("lost", [False, True])
def test_a_send_to_an_executor_that_is_cut_off_begins_when_that_is_over(
    sending: Sending, lost: bool
) -> None:
    lane, other = lanes(2)
    sending.cut_off(lane)
    waiting = sending.submit(lane, lambda: None)
    sending.submit(other, lambda: None).result(100)
    assert not waiting.done()
    lane.lost = lost
    sending.release(lane)
    waiting.result(100)
    # The news of an outage may come after that of the loss.
    sending.cut_off(lane)
    assert (lane in sending._queues) is not lost


def test_a_send_that_fails_does_not_stop_the_next(sending: Sending) -> None:
    (lane,) = lanes(1)
    failing = sending.submit(lane, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    sending.submit(lane, lambda: None).result(100)
    with pytest.raises(ZeroDivisionError):
        failing.result(100)


def test_nothing_is_kept_of_lanes_without_work(sending: Sending, eventually: Any) -> None:
    for lane in lanes(5):
        sending.submit(lane, lambda: None).result(100)
    eventually(lambda: not sending._queues)
