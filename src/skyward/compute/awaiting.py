"""Awaiting: submits a task to a pool, and waits for its answer or makes it a future."""

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


def await_task(pool: Pool, task: Task) -> Any:
    """Submit a task and wait for its result; an exception meanwhile cancels the task."""
    try:
        answer = pool.run(task)
        pool.flush_output(task)
        return answer.get()
    except BaseException:
        if task.cancellable:
            pool.cancel(task)
        raise


def result_of(pool: Pool, task: Task) -> Any:
    """Wait for a task, until all that it printed has been shown; its result, or its exception."""
    outcome = task.wait()
    pool.flush_output(task)
    return outcome.get()


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
    pool.flush_output(task)
    try:
        value = finish(task.wait().get())
    except BaseException as problem:
        fail()
        problem = not_the_end(problem)
        with contextlib.suppress(Exception):  # cancelled in the meantime
            future.set_exception(problem)
        return
    with contextlib.suppress(Exception):  # likewise
        future.set_result(value)
