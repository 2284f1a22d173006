"""What happens to an executor whose cancelled task does not end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.calls.cancelling import Canceller


@pytest.mark.parametrize("ends", [True, False])
def test_an_executor_that_is_to_be_killed_gets_no_other_task(ends: bool) -> None:
    timers: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(later=lambda _, action: timers.append(action))
    done: list[str] = []
    lane: Any = SimpleNamespace(
        tasks={7: "the task"},
        lost=False,
        stop=lambda _: done.append("stopped"),
        kill=lambda reason: done.append(reason),
        connection=SimpleNamespace(connected_for=lambda _: True),
    )
    task: Any = SimpleNamespace(id=7, name="train")
    Canceller(loop, lambda _: done.append("drained")).stop(lane, task)
    if ends:
        lane.tasks.clear()
    (timer,) = timers
    timer()
    killed = ["drained", "train was cancelled and did not end within 1.0 s"]
    assert done == ["stopped", *([] if ends else killed)]
