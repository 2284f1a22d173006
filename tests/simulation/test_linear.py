"""The check of shared objects: it accepts what one after another gives, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from .linear import UNKNOWN, Operation, is_linear


def seen(what: str, *given: Any, at: tuple[float, float], result: Any = None) -> Operation:
    began, ended = at
    return Operation(what, given, began, "", ended, result)


@pytest.mark.parametrize(("first", "second", "fits"), [(1, 2, True), (2, 1, False), (1, 1, False)])
def test_one_after_another_counts_up(first: int, second: int, fits: bool) -> None:
    history = [
        seen("add", 1, at=(0, 1), result=first),
        seen("add", 1, at=(2, 3), result=second),
    ]
    assert is_linear("counter", history) is fits


@pytest.mark.parametrize(("first", "second", "fits"), [(1, 2, True), (2, 1, True), (2, 2, False)])
def test_at_the_same_time_any_of_them_may_be_first(first: int, second: int, fits: bool) -> None:
    history = [
        seen("add", 1, at=(0, 3), result=first),
        seen("add", 1, at=(1, 2), result=second),
    ]
    assert is_linear("counter", history) is fits


@pytest.mark.parametrize(("then", "fits"), [(1, True), (2, True), (3, False)])
def test_what_nobody_heard_of_has_happened_or_not(then: int, fits: bool) -> None:
    history = [
        seen("add", 1, at=(0, float("inf")), result=UNKNOWN),
        seen("add", 1, at=(5, 6), result=then),
    ]
    assert is_linear("counter", history) is fits


@pytest.mark.parametrize(
    ("results", "fits"), [(["a", "b"], True), (["b", "a"], False), (["a", "a"], False)]
)
def test_items_come_in_order_and_once(results: list[str], fits: bool) -> None:
    history = [seen("put", each, at=(at, at)) for at, each in enumerate("ab")]
    history += [seen("get", at=(5 + at, 5 + at), result=r) for at, r in enumerate(results)]
    assert is_linear("queue", history) is fits


def test_a_short_queue_is_full_with_two_items() -> None:
    puts = [seen("put_nowait", at, at=(at, at)) for at in range(3)]
    assert is_linear("short", puts) is False
    puts[2].result = "full"
    assert is_linear("short", puts) is True


def test_who_waits_goes_on_when_the_event_is_set() -> None:
    waited = seen("wait", at=(0, 3), result=True)
    assert is_linear("event", [waited, seen("set", at=(1, 2))]) is True
    assert is_linear("event", [waited, seen("set", at=(4, 5))]) is False


def test_a_deleted_object_begins_anew() -> None:
    history = [
        seen("add_new", "x", at=(0, 1), result=True),
        seen("delete", at=(2, 3)),
        seen("add_new", "x", at=(4, 5), result=True),
    ]
    assert is_linear("set", history) is True
    assert is_linear("set", [history[0], history[2]]) is False
