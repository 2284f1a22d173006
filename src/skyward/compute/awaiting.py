"""Awaiting: submits a task to a pool, and makes its result a future."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from skyward.calls.flow import not_the_end
from skyward.calls.task import Task
from skyward.future import Future
from skyward.pool import Pool

Finish = Callable[[Any], Any]
"""Makes what the caller gets of what the function returned."""


def _as_it_is(value: Any) -> Any:
    return value


def _nothing() -> None:
    pass


def future_of(
    pool: Pool,
    task: Task,
    finish: Finish = _as_it_is,
    fail: Callable[[], None] = _nothing,
) -> Future[Any]:
    """Submit a task; its result comes with the future. `fail` is called if there will be none."""
    future: Future[Any] = Future()
    future._bind(lambda: pool.cancel(task), lambda: task.assigned)
    pool.after(task, functools.partial(_settle, pool, task, future, finish, fail))
    try:
        pool.submit(task)
    except BaseException:
        pool.cancel(task)
        raise
    return future


def _settle(
    pool: Pool, task: Task, future: Future[Any], finish: Finish, fail: Callable[[], None]
) -> None:
    if future.cancelled():
        fail()
        return
    try:
        value = finish(pool.result(task))
    except BaseException as problem:
        fail()
        problem = not_the_end(problem)
        with contextlib.suppress(Exception):  # cancelled in the meantime
            future.set_exception(problem)
        return
    with contextlib.suppress(Exception):  # likewise
        future.set_result(value)
