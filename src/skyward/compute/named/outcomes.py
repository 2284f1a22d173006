"""What came of a call by name, as a file: written by the runner, read by any client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal

import msgspec

from skyward.calls.answers import Answer, Failed, Streaming, Value, cannot_rebuild, remote_failure
from skyward.calls.flow import not_the_end
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


@dataclass(slots=True)
class Settled:
    """The answer of one worker, complete."""

    node: int
    worker: int
    answer: Answer
    items: list[Pieces] | None = None
    """The items of a stream, whose end `answer` is."""


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


@dataclass(slots=True)
class _Partial:
    """The outcome of one worker while the file is read."""

    node: int
    worker: int
    answer: Answer | None = None
    items: list[Pieces] | None = None


def settled(node: int, worker: int, answer: Answer) -> Settled:
    """The answer of a worker, after all items of a stream have come."""
    if not isinstance(answer, Streaming):
        return Settled(node, worker, answer)
    stream = answer.get()
    items: list[Pieces] = []
    while isinstance(item := stream.next_item(), tuple):
        items.append(item[0])
    return Settled(node, worker, answer if item is None else item, items)


def write(file: IO[bytes], outcomes: list[Settled], *, everywhere: bool) -> None:
    """Write what came of a call, for each of its workers."""
    _append(file, Facts("call", everywhere=everywhere), _NOTHING)
    for each in outcomes:
        place = each.node, each.worker
        if each.items is not None:
            _append(file, Facts("stream", *place), _NOTHING)
            for item in each.items:
                _append(file, Facts("item", *place), item)
        if isinstance(each.answer, Failed):
            _write_failed(file, place, each.answer)
        elif isinstance(each.answer, Value):
            _append(file, Facts("value", *place, where=each.answer.place), each.answer.pieces)
        else:
            _append(file, Facts("end", *place), _NOTHING)


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


def read(block: memoryview) -> tuple[bool, list[Outcome]]:
    """Whether a call is a broadcast, and what came of it, for each of its workers."""
    found: list[_Partial] = []
    everywhere = False
    for told, pieces in stored.objects(block):
        facts = msgspec.convert(told, Facts)
        if facts.kind == "call":
            everywhere = facts.everywhere
            continue
        if facts.kind == "item":
            assert found[-1].items is not None
            found[-1].items.append(pieces)
            continue
        if not found or found[-1].answer is not None:
            found.append(_Partial(facts.node, facts.worker))
        if facts.kind == "stream":
            found[-1].items = []
        else:
            found[-1].answer = _answer(facts, pieces)
    return everywhere, [_outcome(each) for each in found]


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


def _outcome(found: _Partial) -> Outcome:
    assert found.answer is not None
    if found.items is not None:
        return Outcome(found.node, found.worker, _stream(found.items, found.answer))
    try:
        with encoding.own_classes():
            return Outcome(found.node, found.worker, found.answer.get())
    except Exception as problem:
        return Outcome(found.node, found.worker, error=not_the_end(problem))


def _stream(items: list[Pieces], end: Answer) -> Iterator[Any]:
    """The items of a generator, then its exception if it raised one."""
    for pieces in items:
        with encoding.own_classes():
            item = encoding.decode(*pieces)
        yield item
    if isinstance(end, Failed):
        with encoding.own_classes():
            end.get()
