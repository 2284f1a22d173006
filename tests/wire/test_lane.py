"""A lane: what is sent to an executor, and what is not sent any more."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skyward.calls.dispatch import Dispatcher
from skyward.calls.lane import Lane
from skyward.calls.packer import NamedParcel, Packer, Parcel
from skyward.calls.relays import Neighbor, Relays
from skyward.calls.scheduler import Load, Prospects
from skyward.calls.task import Task
from skyward.errors import WorkerDiedError
from skyward.events import EventStream
from skyward.objects import memory
from skyward.objects.encoding import encode
from skyward.spec import Options
from skyward.wire.messages import KNOWN, STREAMED, Define, Fetch, Message, Run

MIB = 1 << 20


class Wire:
    """A channel over a network that notes what is sent."""

    shares_memory = False
    bytes_sent = bytes_received = 0

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


def lane(wire: Wire, relays: Relays | None = None) -> Lane:
    neighbor = Neighbor("tcp:127.0.0.1:1")
    store: Any = None  # for memory shared with an executor, which a network does not have
    owner: Any = None
    return Lane(Load(0, 0, 0, 4), wire, store, owner, neighbor=neighbor, relays=relays)  # type: ignore[arg-type]


def task(number: int, values: Any) -> Task:
    encoded = encode((values,))
    parcel = Parcel(encoded, digests=memory.digests(encoded.buffers), large=list(encoded.buffers))
    return Task(number, "f", NamedParcel(b"k", Parcel(encode(1)), False), parcel, [], [])


def test_a_call_given_up_before_its_bytes_leave_does_not_send_them_later() -> None:
    """The bytes are the caller's memory, which the caller may have changed by then."""
    wire = Wire()
    wire.go_on.clear()
    executor, call = lane(wire), task(1, np.zeros(2 * MIB, np.uint8))
    failures: list[BaseException] = []

    def send() -> None:
        try:
            executor.send(call)
        except OSError as problem:
            failures.append(problem)

    sending = threading.Thread(target=send)
    sending.start()
    assert wire.at_define.wait(100)
    call.done = True
    executor.stop(call)
    wire.go_on.set()
    sending.join(100)
    assert wire.aborted
    assert failures
    assert not wire.sent


def test_of_a_batch_that_was_all_cancelled_nothing_is_sent() -> None:
    """Over a link, a write of no bytes would be a record that ends it."""
    wire = Wire()
    executor, calls = lane(wire), [task(number, 1.5) for number in range(2)]
    for each in calls:
        each.done = True
    assert executor.send_small(calls) == calls
    assert not wire.sent


def test_what_several_tasks_lack_is_sent_again_once() -> None:
    wire = Wire()
    executor = lane(wire)
    values = np.zeros(2 * MIB, np.uint8)
    tasks = [task(number, values) for number in range(3)]
    for each in tasks:
        executor.send(each)
    assert wire.places() == [STREAMED, KNOWN, KNOWN]
    lacking = tasks[0].parcel.digests
    for each in tasks:
        executor.resend(each, lacking, [])
    assert wire.places()[3:] == [STREAMED, KNOWN, KNOWN]
    # And again, if the executor has lost it in the meantime.
    executor.resend(tasks[1], lacking, [])
    assert wire.places()[6:] == [STREAMED]


def test_code_that_several_tasks_lack_is_sent_again_once() -> None:
    wire = Wire()
    executor = lane(wire)
    tasks = [task(number, 1.5) for number in range(3)]
    for each in tasks:
        executor.send(each)
    for each in tasks:
        executor.resend(each, [], [b"k"])
    defined = [message for message, _ in wire.sent if isinstance(message, Define)]
    assert len(defined) == 2


def test_an_executor_out_of_reach_is_not_asked_to_pass_buffers_on() -> None:
    relays = Relays()
    wires = [Wire(), Wire(), Wire()]
    lanes = [lane(wire, relays) for wire in wires]
    values = np.zeros(2 * MIB, np.uint8)
    lanes[0].send(task(1, values))
    lanes[0].disconnected()
    lanes[1].send(task(2, values))
    assert not any(isinstance(message, Fetch) for message, _ in wires[1].sent)
    lanes[2].send(task(3, values))
    assert any(isinstance(message, Fetch) for message, _ in wires[2].sent)


def test_nothing_is_sent_to_an_executor_that_is_gone() -> None:
    executor = lane(Wire())
    executor.close()
    with pytest.raises(BrokenPipeError):
        executor.send(task(1, 1))


def a_dispatcher(packer: Packer) -> Dispatcher:
    loop: Any = SimpleNamespace(after_each_round=lambda action: None)
    console: Any = SimpleNamespace(note=print)
    prospects = Prospects(grouped=False)
    prospects.expect(0)
    nothing: Any = None
    return Dispatcher(
        loop,
        console,
        packer,
        prospects,
        EventStream(),
        Options(),
        nothing,
        nothing,
    )


def test_tasks_sent_ahead_to_an_executor_that_is_lost_keep_their_order() -> None:
    packer = Packer(encrypted=True, relayed=False)
    dispatcher = a_dispatcher(packer)
    lost, other = lane(Wire()), lane(Wire())
    tasks = [task(number, number) for number in range(8)]
    dispatcher.add(lost, usable=True)
    lost.tasks.update({each.id: each for each in tasks})

    dispatcher.lose(lost, lambda call: WorkerDiedError(f"{call.name} is gone"), all_read=True)

    assert [each.done for each in tasks] == [True] * 4 + [False] * 4
    dispatcher.add(other, usable=True)
    assert [dispatcher.lanes.assign_next(other) for _ in range(4)] == tasks[4:]
    packer.close()


def test_tasks_sent_ahead_to_an_executor_out_of_reach_run_again_only_if_they_may() -> None:
    """The executor may have run them: their results have not come, or were not read."""
    packer = Packer(encrypted=True, relayed=False)
    dispatcher = a_dispatcher(packer)
    lost = lane(Wire())
    tasks = [task(number, number) for number in range(8)]
    tasks[6].retries = 1
    dispatcher.add(lost, usable=True)
    lost.tasks.update({each.id: each for each in tasks})

    dispatcher.lose(lost, lambda call: WorkerDiedError(f"{call.name} is gone"))

    assert [each.id for each in tasks if not each.done] == [6]
    assert tasks[6].retries == 0
    packer.close()
