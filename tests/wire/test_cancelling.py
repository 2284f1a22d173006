"""What happens to an executor whose cancelled task does not end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.calls.dispatch import Dispatcher


def a_task(number: int, name: str, **facts: Any) -> Any:
    return SimpleNamespace(id=number, name=name, cancellable=True, cancelled=False, **facts)


def a_lane(tasks: list[Any], done: list[str]) -> Any:
    return SimpleNamespace(
        tasks={task.id: task for task in tasks},
        load=SimpleNamespace(started=lambda: tasks),
        lost=False,
        where="node 0",
        stop=lambda _: done.append("stopped"),
        kill=lambda reason: done.append(reason),
        connection=SimpleNamespace(connected_for=lambda _: True),
    )


def dispatcher(loop: Any, done: list[str]) -> Any:
    made: Any = object.__new__(Dispatcher)
    made._loop, made._console = loop, SimpleNamespace(note=done.append)
    made.lanes = SimpleNamespace(drain=lambda _: done.append("drained"))
    return made


@pytest.mark.parametrize("ends", [True, False])
def test_an_executor_that_is_to_be_killed_gets_no_other_task(ends: bool) -> None:
    timers: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(later=lambda _, action: timers.append(action))
    done: list[str] = []
    task = a_task(7, "train")
    lane = a_lane([task], done)
    dispatcher(loop, done)._stop(lane, task)
    if ends:
        lane.tasks.clear()
    (timer,) = timers
    timer()
    killed = ["drained", "train was cancelled and did not end within 1.0 s"]
    assert done == ["stopped", *([] if ends else killed)]


def test_an_executor_with_tasks_of_others_is_not_killed() -> None:
    timers: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(later=lambda _, action: timers.append(action))
    done: list[str] = []
    task, parent = a_task(7, "naps"), a_task(6, "parent")
    lane = a_lane([parent, task], done)
    dispatcher(loop, done)._stop(lane, task)
    timers.pop()()
    assert done == [
        "stopped",
        "naps was cancelled and does not end; its process on node 0 stays, since parent runs "
        "there, too",
        "stopped",
    ]
    timers.pop()()
    assert len(done) == 3, "it is told once"
    parent.cancelled = True
    timers.pop()()
    assert done[3:] == ["drained", "naps was cancelled and did not end within 1.0 s"]
