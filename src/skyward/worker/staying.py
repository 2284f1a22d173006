"""Results that stay: an executor copies their tensors to memory of its node's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyward.objects import encoding, references
from skyward.objects.encoding import Encoded
from skyward.objects.staying import StayingBook
from skyward.wire.messages import Message, Room
from skyward.worker.interrupts import Interrupted
from skyward.worker.places import ReadyTask


def encode(
    job: ReadyTask,
    value: Any,
    what: str,
    send: Callable[[Message], None],
    hurry: Callable[[], None],
) -> Encoded:
    """Encode a result and leave its tensors on the device; if that cannot be, send their bytes."""
    book = StayingBook(job.opened)
    encoded = encoding.encode(value, what=what, stays=book)
    if not any(last for _, last in book.spans):
        return encoded
    send(Room(job.run.task, book.spans))
    hurry()
    assert job.places is not None
    room = job.places.get()
    if room is None:
        raise Interrupted
    if room.pieces:
        try:
            book.fill(room.pieces, room.places)
            return encoded
        except references.CannotOpenError:
            pass
    return encoding.encode(value, what=what, stays=StayingBook(job.opened, by_value=True))
