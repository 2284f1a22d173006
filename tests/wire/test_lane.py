"""A lane: what is sent to an executor, and what is not sent any more."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from skyward.pool.lane import Lane
from skyward.pool.relays import Relays
from skyward.pool.task import Definition, Parcel, Task
from skyward.wire import memory
from skyward.wire.messages import KNOWN, STREAMED, Define, Fetch, Message, Run
from skyward.wire.objects import encode

MIB = 1 << 20


class Wire:
    """A channel over a network that notes what is sent."""

    shares_memory = False

    def __init__(self) -> None:
        self.aborted = False
        self.sent: list[tuple[Message, int]] = []
        self.at_define = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def send(self, message: Message, body: Any = (), descriptors: Any = ()) -> None:
        if isinstance(message, Define):
            self.at_define.set()
            self.go_on.wait(60)
        if self.aborted:
            raise BrokenPipeError
        self.sent.append((message, sum(map(len, body))))

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.aborted = True

    def places(self) -> list[int]:
        """Where the large buffer of each task was said to be."""
        runs = [message for message, _ in self.sent if isinstance(message, Run)]
        return [ref.where for run in runs for ref in run.payload.buffers]


def lane(wire: Wire, **details: Any) -> Lane:
    return Lane(node=0, worker=0, slot=0, capacity=4, window=4, channel=wire, **details)  # type: ignore[arg-type]


def task(number: int, values: Any) -> Task:
    encoded = encode((values,))
    parcel = Parcel(encoded, digests=memory.digests(encoded.buffers), large=list(encoded.buffers))
    return Task(number, "f", Definition(b"k", Parcel(encode(1)), False), parcel, [], [])


def test_a_call_given_up_before_its_bytes_leave_does_not_send_them_later() -> None:
    """They are the caller's again, and may be others by then."""
    wire = Wire()
    wire.go_on.clear()
    place, call = lane(wire), task(1, np.zeros(2 * MIB, np.uint8))
    failures: list[BaseException] = []

    def send() -> None:
        try:
            place.send(call)
        except OSError as problem:
            failures.append(problem)

    sending = threading.Thread(target=send)
    sending.start()
    assert wire.at_define.wait(30)
    call.done = True
    place.stop(call)
    wire.go_on.set()
    sending.join(30)
    assert wire.aborted
    assert failures
    assert not wire.sent


def test_what_several_tasks_lack_is_sent_again_once() -> None:
    wire = Wire()
    place = lane(wire)
    values = np.zeros(2 * MIB, np.uint8)
    tasks = [task(number, values) for number in range(3)]
    for each in tasks:
        place.send(each)
    assert wire.places() == [STREAMED, KNOWN, KNOWN]
    lacking = tasks[0].parcel.digests
    for each in tasks:
        place.resend(each, lacking, [])
    assert wire.places()[3:] == [STREAMED, KNOWN, KNOWN]
    # And again, if the executor has lost it in the meantime.
    place.resend(tasks[1], lacking, [])
    assert wire.places()[6:] == [STREAMED]


def test_so_is_a_definition() -> None:
    wire = Wire()
    place = lane(wire)
    tasks = [task(number, 1.5) for number in range(3)]
    for each in tasks:
        place.send(each)
    for each in tasks:
        place.resend(each, [], [b"k"])
    defined = [message for message, _ in wire.sent if isinstance(message, Define)]
    assert len(defined) == 2


def test_who_is_cut_off_is_not_asked_to_pass_anything_on() -> None:
    relays = Relays()
    wires = [Wire(), Wire(), Wire()]
    lanes = [lane(wire, relays=relays, peer="tcp:127.0.0.1:1") for wire in wires]
    values = np.zeros(2 * MIB, np.uint8)
    lanes[0].send(task(1, values))
    lanes[0].paused = True
    lanes[1].send(task(2, values))
    assert not any(isinstance(message, Fetch) for message, _ in wires[1].sent)
    lanes[2].send(task(3, values))
    assert any(isinstance(message, Fetch) for message, _ in wires[2].sent)


def test_nothing_is_sent_to_an_executor_that_is_gone() -> None:
    place = lane(Wire())
    place.close()
    with pytest.raises(BrokenPipeError):
        place.send(task(1, 1))
