"""Calls of objects from tasks that do not end as they should."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward import handles
from skyward.compute import serving
from skyward.errors import StateLostError
from skyward.state.values import encode

from .conftest import Eventually


@sky.cls
class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def endless(self) -> Iterator[int]:
        yield from itertools.count()

    def waits(self, name: str) -> None:
        sky.event(name).set()
        sky.event(f"{name} on").wait(60)


@pytest.fixture
def counter(pool: sky.Compute) -> Iterator[Any]:
    """An object on node 0, closed afterwards; no test may leave its worker busy."""
    made: Any = pool.run(Counter(), on=0)
    made.__reduce__()
    yield made
    made.close()


def desk_of(instance: Any) -> serving.HandleDesk:
    """What takes the calls that tasks make of an object."""
    key = instance._residence.key
    return next(desk for desk in serving._desks.values() if key in desk._keys)


def test_a_task_that_is_killed_ends_its_generators(
    pool: sky.Compute, counter: Any, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def dies(counter: Any) -> None:
        next(counter.endless())
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(serving, "LOOK_SECONDS", 0.1)
    with pytest.raises(sky.WorkerDiedError):
        pool.run(dies(counter), on=1)
    assert counter.count.submit().result(30) == 1, "the generator still has the worker"
    eventually(lambda: not desk_of(counter)._callers)


def test_an_object_is_closed_from_its_own_process(
    pool: sky.Compute, counter: Any, eventually: Eventually
) -> None:
    @sky.function
    def closes(counter: Any) -> None:
        counter.close()

    key = counter._residence.key
    pool.submit(closes(counter), on=0).result(30)
    eventually(lambda: key not in handles.offered)
    with pytest.raises(sky.errors.InstanceLostError, match="this Counter was closed"):
        counter.count()


def test_a_call_from_a_task_can_be_cancelled(pool: sky.Compute, counter: Any) -> None:
    @sky.function
    def cancels(counter: Any) -> tuple[bool, bool]:
        future = counter.waits.submit("cancelled call")
        sky.event("cancelled call").wait(30)
        return future.cancel(), future.cancelled()

    assert pool.run(cancels(counter), on=1) == (True, True)
    try:
        assert counter.count.submit().result(100) == 1
    finally:
        sky.event("cancelled call on", on=pool).set()


def test_a_call_that_was_cancelled_before_it_began_is_not_made(counter: Any) -> None:
    payload = encode(((), {}), "arguments")
    desk_of(counter)._call("cancelled", counter._residence.key, "count", payload)
    assert counter.count() == 1


def test_a_result_that_cannot_be_encoded_is_an_error_in_the_task(
    pool: sky.Compute, counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def asks(counter: Any) -> str:
        try:
            return str(counter.count())
        except ValueError as problem:
            return str(problem)

    def refuse(value: Any, what: str) -> bytes:
        if value == 1:
            raise ValueError("not this one")
        return encode(value, what)

    monkeypatch.setattr(serving, "encode", refuse)
    assert pool.submit(asks(counter), on=1).result(30) == "not this one"


def test_a_handle_is_not_sent_while_the_shared_state_cannot_be_reached(
    counter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(desk: serving.HandleDesk) -> None:
        raise StateLostError("not there")

    monkeypatch.setattr(serving, "BEGIN_SECONDS", 0.1)
    monkeypatch.setattr(serving.HandleDesk, "_serve", lost)
    desk = serving.HandleDesk(desk_of(counter)._fleet)
    with pytest.raises(StateLostError, match=r"did not answer for 0\.1 s; send it again"):
        desk.offer(counter, "Counter other")
    desk._left = True
    assert "Counter other" not in handles.offered
