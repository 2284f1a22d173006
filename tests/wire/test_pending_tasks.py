"""Tasks begin in order, once everything they name is here, whatever becomes of their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skyward.objects import memory
from skyward.objects.encoding import encode
from skyward.objects.payloads import Pieces
from skyward.wire.messages import KNOWN, Buffer, Define, Evicted, Message, Missing, Payload, Run
from skyward.worker.arrivals import Arrival
from skyward.worker.inbox import Inbox
from skyward.worker.pending import PendingTasks

CODE = b"code"


class Setup:
    """Pending tasks with the inbox they use, and a client that only receives."""

    def __init__(self) -> None:
        self.inbox = Inbox(1 << 30)
        self.pending = PendingTasks(self.inbox, self._admit)
        self.admitted: list[int] = []
        self.sent: list[Message] = []
        self.channel: Any = self
        self.define(CODE)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def _admit(self, run: Run, pieces: Pieces) -> None:
        self.admitted.append(run.task)

    def define(self, key: bytes, *digests: bytes) -> None:
        pickle = bytes(encode(1).pieces[0])
        payload = Payload(len(pickle), [known(each) for each in digests], inline=len(pickle))
        self.pending.define(self.channel, Define(key, payload, False), bytearray(pickle))

    def receive(
        self, task: int, *digests: bytes, handles: tuple[bytes, ...] = (), again: bool = False
    ) -> None:
        payload = Payload(2, [known(each) for each in digests], inline=2)
        run = Run(task, "f", CODE, payload, list(handles), [], pending=again)
        self.pending.add(self.channel, run, bytearray(b"ok"))

    def expect(self, number: int = 0) -> list[Arrival]:
        return self.inbox.arrivals.expect([(DIGEST, len(DATA))], number)

    def arrive(self, arrivals: list[Arrival], *, complete: bool = True) -> None:
        arrivals[0].view[:] = DATA
        self.inbox.arrivals.settle(arrivals, complete=complete)

    def missing(self) -> list[Missing]:
        return [message for message in self.sent if isinstance(message, Missing)]


DATA = memoryview(np.arange(1 << 20, dtype=np.uint8))
(DIGEST,) = memory.digests([DATA])


def known(digest: bytes) -> Buffer:
    return Buffer(len(DATA), KNOWN, digest)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.inbox._cache.close()


def test_a_task_waits_for_its_buffers_and_others_wait_behind_it(setup: Setup) -> None:
    coming = setup.expect(1)
    setup.receive(1, DIGEST)
    setup.receive(2)
    assert setup.admitted == []
    assert setup.pending
    setup.arrive(coming)
    setup.pending.settle()
    assert setup.admitted == [1, 2]
    assert not setup.pending


def test_a_task_waits_for_the_buffers_of_its_handles(setup: Setup) -> None:
    coming = setup.expect(1)
    setup.define(b"data", DIGEST)
    setup.receive(1, handles=(b"data",))
    assert setup.admitted == []
    setup.arrive(coming)
    setup.pending.settle()
    assert setup.admitted == [1]
    assert setup.pending.resolve(b"data") == 1


def test_a_task_that_comes_again_after_it_was_given_back_holds_nobody_up(setup: Setup) -> None:
    """Another executor runs it by then, and the client would not send what it lacks."""
    setup.receive(1, DIGEST)
    assert setup.missing() == [Missing(1, [DIGEST], [], False)]
    assert setup.pending.clear() == [1]
    assert Evicted([DIGEST]) in setup.sent
    setup.receive(1, DIGEST, again=True)
    setup.receive(2)
    assert setup.admitted == [2]
    assert not setup.pending


def test_a_missing_buffer_is_sent_again_before_the_next_task_begins(setup: Setup) -> None:
    """Otherwise two broadcasts could begin in another order on another worker."""
    coming = setup.expect(1)
    setup.receive(1, DIGEST)
    setup.receive(2)
    setup.arrive(coming, complete=False)
    setup.pending.settle()
    assert setup.admitted == []
    assert setup.missing() == [Missing(1, [DIGEST], [], False)]
    setup.arrive(setup.expect())
    setup.receive(1, DIGEST, again=True)
    assert setup.admitted == [1, 2]


def test_a_missing_definition_is_sent_again(setup: Setup) -> None:
    coming = setup.expect(1)
    setup.define(b"data", DIGEST)
    setup.receive(1, handles=(b"data",))
    setup.arrive(coming, complete=False)
    setup.pending.settle()
    assert setup.missing() == [Missing(1, [], [b"data"], False)]
    setup.arrive(setup.expect())
    setup.define(b"data", DIGEST)
    setup.receive(1, handles=(b"data",))
    assert setup.admitted == [1]


def test_a_buffer_that_comes_twice_leaves_no_task_waiting(setup: Setup) -> None:
    """It is fetched from a peer, and the client sends it as well."""
    fetched = setup.expect(1)
    setup.receive(1, DIGEST)
    streamed = setup.expect()
    setup.arrive(fetched)
    setup.pending.settle()
    setup.arrive(streamed)
    setup.receive(2, DIGEST)
    assert setup.admitted == [1, 2]


def test_a_cancelled_task_holds_up_no_other(setup: Setup) -> None:
    setup.expect(1)
    setup.receive(1, DIGEST)
    setup.receive(2)
    setup.receive(3)
    setup.pending.cancel(2)
    setup.pending.cancel(1)
    assert setup.admitted == [3]


def test_tasks_that_the_client_takes_back_do_not_begin(setup: Setup) -> None:
    coming = setup.expect(1)
    setup.receive(1, DIGEST)
    setup.receive(2)
    assert setup.pending.clear() == [1, 2]
    setup.arrive(coming)
    setup.pending.settle()
    assert setup.admitted == []
