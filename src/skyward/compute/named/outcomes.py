"""What came of a call by name, as files: written by the runner, read by any client.

One file has the answers of all workers. Each generator has another, to which its items are written
as they come, so that clients can read them meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

import msgspec

from skyward.calls.streams import RemoteIterator
from skyward.calls.task import (
    Answer,
    Failed,
    Streaming,
    Value,
    cannot_rebuild,
    not_the_end,
    remote_failure,
)
from skyward.errors import Outcome, RemoteError, SkywardError
from skyward.objects import encoding, stored
from skyward.objects.payloads import Pieces
from skyward.wire.messages import Failure
from skyward.worker.failures import CHAIN_DEPTH, portable, text, type_name

Kind = Literal["call", "value", "stream", "item", "end", "raised", "problem"]
_NOTHING: Pieces = (memoryview(b""), [], [])


class Facts(msgspec.Struct):
    """What an object of the file is."""

    kind: Kind
    node: int = 0
    worker: int = 0
    name: str = ""
    where: str = ""
    failure: Failure | None = None
    text: str = ""
    everywhere: bool = False
    """Whether the call is a broadcast."""
    first: int | None = None
    """The rank of a broadcast that failed first."""
    stream: int = 0
    """Which of the call's streams has the items."""


@dataclass(slots=True)
class Settled:
    """The answer of one worker; the items of a stream are not in it."""

    node: int
    worker: int
    answer: Answer


class FoundValue(Answer):
    """The value of a call, as the pool has kept it."""

    __slots__ = ("_pieces", "_place")

    def __init__(self, pieces: Pieces, place: str) -> None:
        self._pieces, self._place = pieces, place

    def get(self) -> Any:
        """Decode the value."""
        try:
            return encoding.decode(*self._pieces)
        except SkywardError:
            raise
        except Exception as problem:
            raise cannot_rebuild(self._place, problem) from problem


def write(file: IO[bytes], outcomes: list[Settled], *, everywhere: bool, first: int | None) -> None:
    """Write what came of a call, for each of its workers; streams by their numbers.

    `first` is the rank of a broadcast that failed first.
    """
    _append(file, Facts("call", everywhere=everywhere, first=first), _NOTHING)
    for number, each in enumerate(outcomes):
        place = each.node, each.worker
        if isinstance(each.answer, Failed):
            _write_failed(file, place, each.answer)
        elif isinstance(each.answer, Value):
            _append(file, Facts("value", *place, where=each.answer.place), each.answer.pieces)
        elif isinstance(each.answer, Streaming):
            _append(file, Facts("stream", *place, stream=number), _NOTHING)
        else:
            _append(file, Facts("end", *place), _NOTHING)


def write_items(file: IO[bytes], stream: RemoteIterator) -> Failed | None:
    """Write the items of a stream as they come, then its end; returns how it failed, if it did."""
    while isinstance(item := stream.next_item(), tuple):
        _append(file, Facts("item"), item[0])
        file.flush()
    if not isinstance(item, Failed):
        _append(file, Facts("end"), _NOTHING)
        return None
    _write_failed(file, (0, 0), item)
    return item


def _write_failed(file: IO[bytes], place: tuple[int, int], failed: Failed) -> None:
    raised = failed.raised
    if raised is not None:
        told = msgspec.structs.replace(raised.failure, payload=None)
        facts = Facts("raised", *place, name=raised.name, where=raised.where, failure=told)
        _append(file, facts, raised.pieces or _NOTHING)
        return
    try:
        failed.get()
    except BaseException as problem:
        facts = Facts("problem", *place, name=type_name(problem), text=text(problem))
        _append(file, facts, _encoded(problem))


def _encoded(problem: BaseException) -> Pieces:
    """An exception of ours, with its causes if they can be sent."""
    if isinstance(problem, Exception):
        for depth in (0, CHAIN_DEPTH):
            with contextlib.suppress(Exception):
                found = encoding.encode(portable(problem, depth), own_modules=True)
                return memoryview(b"".join(found.pieces)), found.buffers, found.storages
    return _NOTHING


def _append(file: IO[bytes], facts: Facts, pieces: Pieces) -> None:
    pickle, buffers, storages = pieces
    stored.append(file, [pickle], buffers, storages, msgspec.to_builtins(facts))


def read(
    block: memoryview, items_of: Callable[[int], Iterator[Any]]
) -> tuple[bool, list[Outcome], int | None]:
    """Whether a call is a broadcast, what came of it for each worker, and which rank failed first.

    `items_of` has the items of a stream of that number.
    """
    found: list[Outcome] = []
    everywhere, first = False, None
    for told, pieces in stored.objects(block):
        facts = msgspec.convert(told, Facts)
        if facts.kind == "call":
            everywhere, first = facts.everywhere, facts.first
        elif facts.kind == "stream":
            found.append(Outcome(facts.node, facts.worker, items_of(facts.stream)))
        else:
            found.append(_outcome(facts, pieces))
    return everywhere, found, first


def read_item(told: Any, pieces: Pieces) -> tuple[bool, Any]:
    """Whether an object of a stream is an item, and the item; raises what ended the stream."""
    facts = msgspec.convert(told, Facts)
    with encoding.own_classes():
        if facts.kind == "item":
            return True, encoding.decode(*pieces)
        answer = _answer(facts, pieces)
        if isinstance(answer, Failed):
            answer.get()
    return False, None


def _answer(facts: Facts, pieces: Pieces) -> Answer:
    has_object = len(pieces[0]) > 0
    if facts.kind == "value":
        return FoundValue(pieces, facts.where)
    if facts.kind == "raised":
        assert facts.failure is not None
        given = pieces if has_object else None
        return remote_failure(facts.failure, given, facts.name, facts.where)
    if facts.kind == "problem":
        return Failed.because(_problem(facts, pieces if has_object else None))
    return Answer()


def _problem(facts: Facts, pieces: Pieces | None) -> BaseException:
    if pieces is not None:
        with contextlib.suppress(Exception):
            rebuilt: BaseException = encoding.decode(*pieces).rebuild()
            return rebuilt
    return RemoteError(f"{facts.name}: {facts.text}", type_name=facts.name)


def _outcome(facts: Facts, pieces: Pieces) -> Outcome:
    try:
        with encoding.own_classes():
            return Outcome(facts.node, facts.worker, _answer(facts, pieces).get())
    except Exception as problem:
        return Outcome(facts.node, facts.worker, error=not_the_end(problem))
