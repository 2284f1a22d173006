"""Tasks begin in order and when all they need is here, whatever becomes of their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skyward.wire import memory
from skyward.wire.messages import KNOWN, Buffer, Define, Message, Missing, Payload, Run
from skyward.wire.objects import encode
from skyward.worker.anteroom import Anteroom
from skyward.worker.arrivals import Arrival
from skyward.worker.definitions import Definitions
from skyward.worker.inbox import Inbox, Pieces

CODE = b"code"


class Room:
    """An anteroom with all around it, and a client that only listens."""

    def __init__(self) -> None:
        self.inbox = Inbox(1 << 30)
        self.definitions = Definitions(self.inbox)
        self.anteroom = Anteroom(self.inbox, self.definitions, self._admit)
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
        self.anteroom.define(self.channel, Define(key, payload, False), bytearray(pickle))

    def enter(self, task: int, *digests: bytes, handles: tuple[bytes, ...] = ()) -> None:
        payload = Payload(2, [known(each) for each in digests], inline=2)
        run = Run(task, "f", CODE, payload, list(handles), [])
        self.anteroom.enter(self.channel, run, bytearray(b"ok"))

    def expect(self, number: int = 0) -> list[Arrival]:
        return self.inbox.arrivals.expect([(DIGEST, len(DATA))], number)

    def come(self, arrivals: list[Arrival], *, complete: bool = True) -> None:
        arrivals[0].view[:] = DATA
        self.inbox.arrivals.settle(arrivals, complete=complete)

    def missing(self) -> list[Missing]:
        return [message for message in self.sent if isinstance(message, Missing)]


DATA = memoryview(np.arange(1 << 20, dtype=np.uint8))
(DIGEST,) = memory.digests([DATA])


def known(digest: bytes) -> Buffer:
    return Buffer(len(DATA), KNOWN, digest)


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.inbox._cache.close()


def test_a_task_waits_for_its_buffers_and_others_wait_behind_it(room: Room) -> None:
    coming = room.expect(1)
    room.enter(1, DIGEST)
    room.enter(2)
    assert room.admitted == []
    assert room.anteroom.occupied
    room.come(coming)
    room.anteroom.settle()
    assert room.admitted == [1, 2]
    assert not room.anteroom.occupied


def test_and_for_those_of_a_handle(room: Room) -> None:
    coming = room.expect(1)
    room.define(b"data", DIGEST)
    room.enter(1, handles=(b"data",))
    assert room.admitted == []
    room.come(coming)
    room.anteroom.settle()
    assert room.admitted == [1]
    assert room.definitions.resolve(b"data") == 1


def test_what_is_missing_is_sent_again_before_the_next_begins(room: Room) -> None:
    """Or two broadcasts could begin in another order on another worker."""
    coming = room.expect(1)
    room.enter(1, DIGEST)
    room.enter(2)
    room.come(coming, complete=False)
    room.anteroom.settle()
    assert room.admitted == []
    assert room.missing() == [Missing(1, [DIGEST], [], False)]
    room.come(room.expect())
    room.enter(1, DIGEST)
    assert room.admitted == [1, 2]


def test_so_is_a_definition(room: Room) -> None:
    coming = room.expect(1)
    room.define(b"data", DIGEST)
    room.enter(1, handles=(b"data",))
    room.come(coming, complete=False)
    room.anteroom.settle()
    assert room.missing() == [Missing(1, [], [b"data"], False)]
    room.come(room.expect())
    room.define(b"data", DIGEST)
    room.enter(1, handles=(b"data",))
    assert room.admitted == [1]


def test_a_buffer_that_comes_twice_leaves_nobody_waiting(room: Room) -> None:
    """One way it is fetched, and the other way the client sends it after all."""
    fetched = room.expect(1)
    room.enter(1, DIGEST)
    streamed = room.expect()
    room.come(fetched)
    room.anteroom.settle()
    room.come(streamed)
    room.enter(2, DIGEST)
    assert room.admitted == [1, 2]


def test_who_is_cancelled_holds_up_nobody(room: Room) -> None:
    room.expect(1)
    room.enter(1, DIGEST)
    room.enter(2)
    room.enter(3)
    room.anteroom.leave(2)
    room.anteroom.leave(1)
    assert room.admitted == [3]


def test_who_is_taken_back_is_gone(room: Room) -> None:
    coming = room.expect(1)
    room.enter(1, DIGEST)
    room.enter(2)
    assert room.anteroom.clear() == [1, 2]
    room.come(coming)
    room.anteroom.settle()
    assert room.admitted == []
