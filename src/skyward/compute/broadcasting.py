"""A broadcast: one call on every worker of a pool at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from skyward.calls.task import Task
from skyward.compute.hanging import timeouts_told
from skyward.errors import BroadcastError, ConfigurationError, Outcome
from skyward.functions import Pending
from skyward.pool import Pool

T = TypeVar("T")


def broadcast(pool: Pool, pending: Pending[T]) -> list[T]:
    """Run a call on every worker and return the results; `BroadcastError` if any of them fails."""
    refuse_one_shot_streams(pending)
    workers, tasks = prepared(pool, pending)
    return outcomes_of(pool, pending.function.name, workers, tasks)


def prepared(pool: Pool, pending: Pending[Any]) -> tuple[list[tuple[int, int]], list[Task]]:
    """The workers of a pool, and a task of the call for each."""
    pool.wake()
    workers = pool.workers()
    tasks: list[Task] = []
    like: Task | None = None
    copies = pool.copies(workers)
    for place in workers:
        before = None if copies.waits_for(place) else like
        task = pool.prepare(pending, worker=place, keep=False, like=before, copies=copies)
        if not task.parcel.encoded.referred:
            like = task
        tasks.append(task)
    return workers, tasks


def outcomes_of(
    pool: Pool, name: str, workers: Sequence[tuple[int, int]], tasks: list[Task]
) -> list[Any]:
    """Run tasks at once, each on its worker; their results, or `BroadcastError` if any fails."""
    outcomes = []
    try:
        for task in tasks:
            task.together = tasks
        pool.submit_all(tasks)
        for (node, worker), task in zip(workers, tasks, strict=True):
            try:
                task.wait()
                pool.flush_output(task)
                outcomes.append(Outcome(node, worker, task.wait().get()))
            except Exception as problem:
                outcomes.append(Outcome(node, worker, error=problem))
    except BaseException:
        for task in tasks:
            pool.cancel(task)
        raise
    finally:
        # The tasks must not keep each other, and so their results, alive.
        for task in tasks:
            task.together = ()
    return values_of(name, outcomes)


def values_of(name: str, outcomes: Sequence[Outcome]) -> list[Any]:
    """The values of a broadcast's workers, or `BroadcastError` if any of them failed."""
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        places = ", ".join(f"node {o.node}" for o in failed)
        raise BroadcastError(
            f"{name} failed on {len(failed)} of {len(outcomes)} workers "
            f"({places}){timeouts_told(outcomes)}",
            [o.error for o in failed if isinstance(o.error, Exception)],
            outcomes,
        )
    return [outcome.value for outcome in outcomes]


def refuse_one_shot_streams(pending: Pending[Any]) -> None:
    names = pending.function.parameter_names
    given = {**dict(zip(names, pending.args, strict=False)), **pending.kwargs}
    for name in pending.function.streamed_parameters:
        if isinstance(given.get(name), Iterator):
            raise ConfigurationError(
                f"the argument {name!r} of {pending.function.name} is an iterator, which can be "
                "read once, but a broadcast sends it to every worker; pass a list instead"
            )
