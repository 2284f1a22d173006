"""Changes: a child wakes those who look at its node, once, and all of them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from skyward.wire.messages import Result
from skyward.worker.changes import ChangeListener, Changes, tell
from skyward.worker.task_board import TaskBoard, board_file


@pytest.fixture
def changes() -> Iterator[Changes]:
    made = Changes()
    if made.descriptor < 0:
        pytest.skip("nobody can be woken here")
    yield made
    made.close()


def is_told(listener: ChangeListener) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def test_every_listener_hears_every_change(changes: Changes) -> None:
    with changes.listen() as one, changes.listen() as other:  # type: ignore[union-attr]
        for _ in range(2):
            changes.tell()
            assert is_told(one)
            assert is_told(other)
            one.clear()
            assert not is_told(one)
            assert is_told(other)
            other.clear()
        changes.close()
        changes.tell()
        assert not is_told(one)


def test_a_child_tells_once_after_it_was_asked(changes: Changes) -> None:
    descriptor = board_file(2)
    child, agent = TaskBoard(descriptor, 2, changes.descriptor), TaskBoard(descriptor, 2)
    os.close(descriptor)
    with changes.listen() as listener:  # type: ignore[union-attr]
        child.rings[0].begin(1, "f")
        assert not is_told(listener), "nobody has asked"
        for change in (
            lambda: child.rings[0].end(Result(1, 0.0, None)),
            lambda: child.rings[1].begin(2, "g"),
            child.rings[0].wrote,
        ):
            agent.await_change()
            change()
            assert is_told(listener)
            listener.clear()
        child.rings[0].wrote()
        assert not is_told(listener)
    assert agent.rings[0].written == 2
    child.close()
    agent.close()


def test_a_child_that_has_closed_everything_tells_nobody(changes: Changes) -> None:
    tell(-1)
    closed = os.dup(changes.descriptor)
    os.close(closed)
    tell(closed)


def test_where_nobody_can_be_woken_a_child_that_was_asked_goes_on() -> None:
    descriptor = board_file(1)
    child, agent = TaskBoard(descriptor, 1), TaskBoard(descriptor, 1)
    os.close(descriptor)
    agent.await_change()
    child.rings[0].begin(1, "f")
    assert [task.name for task in agent.running()] == ["f"]
    child.close()
    agent.close()
