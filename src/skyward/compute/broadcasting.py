"""A broadcast: one call on every worker of a pool at once."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from skyward.calls.answers import Answer, Failed
from skyward.calls.task import Task
from skyward.calls.timeouts import standing_at
from skyward.compute.hanging import failures_told, in_words, shortened
from skyward.errors import (
    BroadcastError,
    ConfigurationError,
    NodeLostError,
    Outcome,
    TaskCancelledError,
    WorkerDiedError,
)
from skyward.functions import Pending
from skyward.pool import Pool
from skyward.wire.messages import KEEPING_FRAMES

T = TypeVar("T")

DEATHS = (WorkerDiedError, NodeLostError)
TELL_SECONDS = 0.25
"""How long a failure is kept from the console: usually, the other ranks fail in the same way."""
LOOK_SECONDS = 1.5
"""How long the nodes have to say where ranks are that are about to be cancelled."""
STRANDED_SECONDS = 1.0
"""How often it is looked whether ranks of a group wait for each other in different groups."""


def broadcast(pool: Pool, pending: Pending[T], *, fail_fast: bool = False) -> list[T]:
    """Run a call on every worker and return the results; `BroadcastError` if any of them fails."""
    refuse_one_shot_streams(pending)
    function = pending.function
    fail_fast = fail_fast or function.fail_fast
    retries = whole_retries(pool, function.retries)
    tries = 0
    while True:
        workers, tasks = prepared(pool, pending)
        try:
            return outcomes_of(pool, function.name, workers, tasks, fail_fast=fail_fast)
        except BroadcastError as problem:
            if tries == retries or not isinstance(problem.exceptions[0], DEATHS):
                raise
            tries += 1
            pool.console.note(run_again(problem.exceptions[0], f"retry {tries} of {retries}"))
        pool.counts.retried += len(tasks)


def whole_retries(pool: Pool, retries: int) -> int:
    """How often a broadcast is run again as a whole; 0 where each worker is retried by itself."""
    return (retries or pool.spec.options.retries) if pool.group.together else 0


def run_again(problem: BaseException, which: str) -> str:
    """What the user is told when a broadcast of a group is run again."""
    return f"{shortened(problem)}; the workers form a new group, and all ranks run again ({which})"


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
    pool: Pool,
    name: str,
    workers: Sequence[tuple[int, int]],
    tasks: list[Task],
    *,
    fail_fast: bool = False,
) -> list[Any]:
    """Run tasks at once, each on its worker; their results, or `BroadcastError` if any fails."""
    outcomes = []
    with Ranks(pool, name, workers, tasks, pool.console.note, fail_fast=fail_fast) as ranks:
        pool.submit_all(tasks)
        ranks.wait()
        for (node, worker), task in zip(workers, tasks, strict=True):
            try:
                pool.flush_output(task)
                outcomes.append(Outcome(node, worker, task.wait().get()))
            except Exception as problem:
                outcomes.append(Outcome(node, worker, error=problem))
    return values_of(name, outcomes, first_failed([task.wait() for task in tasks]))


class Ranks:
    """The tasks of a broadcast, one for each rank: when one has failed, the others end, too.

    Ranks of a process group wait for each other, so one that has failed would keep the others
    waiting. They get some time to fail or to finish by themselves, and then they are cancelled.
    Without a group, the others are waited for, unless the user wants them cancelled at once.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        workers: Sequence[tuple[int, int]],
        tasks: Sequence[Task],
        note: Callable[[str], None],
        *,
        fail_fast: bool,
    ) -> None:
        """Before the tasks are submitted; `note` shows a line to the user."""
        pool.group.begin_broadcast()
        self._pool, self._name, self._note = pool, name, note
        self._workers, self._tasks = workers, tasks
        self._grouped = pool.group.together and len(tasks) > 1
        self._grace = 0.0 if fail_fast else None
        if self._grouped and not fail_fast:
            self._grace = pool.spec.options.fail_grace
        # Numbers, not tasks: these must not keep each other, and so their results, alive.
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._left = set(range(len(tasks)))
        self._failed: list[int] = []
        self._told = 0
        """How many failures the user has been told of."""
        for rank, task in enumerate(tasks):
            task.together = tasks
            task.when_done(functools.partial(_put, self._done, rank))
            if pool.group.together:
                # The group that the rank would return to is gone.
                task.retries = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for task in self._tasks:
                self._pool.cancel(task)
        for task in self._tasks:
            task.together = ()
        if self._grouped and (kind is not None or not self._in_step()):
            # A worker keeps the frames of a task that failed, for a debugger, until its next task.
            debugged = kind is None and any(t.debugged >= KEEPING_FRAMES for t in self._tasks)
            self._pool.group.regroup(at_next_broadcast=debugged)

    def wait(self) -> None:
        """Return when every rank is done, also those that had to be cancelled."""
        tell: float | None = None
        end: float | None = None
        while self._left:
            now = self._pool.timeouts.now()
            if tell is not None and now >= tell:
                self._tell()
                tell = None
            if end is not None and now >= end:
                self._cancel_rest()
                end = None
            moments = [each - now for each in (tell, end) if each is not None]
            rank = self._next(min(moments, default=None))
            if rank is None:
                continue
            self._left.discard(rank)
            if not isinstance(self._tasks[rank].answer, Failed):
                continue
            self._failed.append(rank)
            now = self._pool.timeouts.now()
            if len(self._failed) == 1 and self._grace is not None:
                end = now + self._grace
            if tell is None and self._grace != 0.0:
                tell = now + TELL_SECONDS

    def _next(self, seconds: float | None) -> int | None:
        """The next rank that is done; None after so many seconds, or a look at the group."""
        if self._grouped:
            seconds = min(STRANDED_SECONDS, STRANDED_SECONDS if seconds is None else seconds)
        with contextlib.suppress(queue.Empty):
            return self._done.get(timeout=None if seconds is None else max(0.0, seconds))
        for task in self._pool.group.stranded(self._tasks) if self._grouped else ():
            problem = WorkerDiedError(
                f"{task.name} cannot run in the group of the other ranks: a worker of that group "
                "was lost, or the number of nodes changed, before it began"
            )
            self._pool.cancel(task, problem)
        return None

    def _tell(self) -> None:
        """Say which ranks have failed, and what becomes of the others."""
        new, self._told = self._failed[self._told :], len(self._failed)
        if not new or not self._left:
            return
        answer = self._tasks[new[0]].answer
        assert isinstance(answer, Failed)
        why = answer.summary.partition("\n")[0]
        text = f"{self._name}: {self._place(new[0])} failed: {why}"
        if len(new) > 1:
            text += f" ({in_words(new[1:])} as well)"
        left = in_words(sorted(self._left))
        if self._grace is None:
            self._note(f"{text}; waiting for {left}")
        else:
            self._note(f"{text}; {left}: cancelled in {self._grace:g} s, unless done by then")

    def _cancel_rest(self) -> None:
        """Cancel the ranks that are left, after a look at where they are."""
        first = first_failed([task.answer for task in self._tasks])
        because = f"because {self._place(first)} failed" if first is not None else ""
        left = [self._tasks[rank] for rank in sorted(self._left)]
        self._pool.timeouts.look_at(left, LOOK_SECONDS)
        for task in left:
            if task.done:
                continue
            where = f" on {task.load.where}" if task.load is not None else " before it began"
            text = f"{task.name} was cancelled{where}, {because}"
            self._pool.cancel(task, standing_at(task, TaskCancelledError, text))

    def _place(self, rank: int) -> str:
        return f"rank {rank} (node {self._workers[rank][0]})"

    def _in_step(self) -> bool:
        """Whether the group can be used again: no rank may be in another collective than the rest.

        That is so if all ranks have returned, or raised the same exception by themselves.
        """
        answers = [task.answer for task in self._tasks]
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        told = [answer.raised.failure for answer in failed if answer.raised is not None]
        if len(told) < len(failed) or any(failure.cancelled for failure in told):
            return False
        if any(task.pinned is not None for task in self._tasks):
            # Objects would be lost with their workers, and all ranks have ended by themselves.
            return True
        kinds = {failure.type_name for failure in told}
        return not failed or (len(failed) == len(answers) and len(kinds) == 1)


def _put(done: queue.SimpleQueue[int], rank: int, _: Task) -> None:
    done.put(rank)


def first_failed(answers: Sequence[Answer | None]) -> int | None:
    """The rank that failed first.

    Of a process that died, the client may hear later than of the exceptions that its death raised
    in the others.
    """
    failed = [
        (not isinstance(answer.problem, DEATHS), answer.at, rank)
        for rank, answer in enumerate(answers)
        if isinstance(answer, Failed)
    ]
    return min(failed)[-1] if failed else None


def values_of(name: str, outcomes: Sequence[Outcome], first: int | None) -> list[Any]:
    """The values of a broadcast's workers, or `BroadcastError` if any of them failed.

    `first` is the rank that failed first.
    """
    failed = [rank for rank, outcome in enumerate(outcomes) if not outcome.ok]
    if failed:
        places = ", ".join(f"node {outcomes[rank].node}" for rank in failed)
        failed.sort(key=lambda rank: rank != first)
        errors = [outcomes[rank].error for rank in failed]
        raise BroadcastError(
            f"{name} failed on {len(failed)} of {len(outcomes)} workers "
            f"({places}){failures_told(outcomes, failed[0])}",
            [error for error in errors if isinstance(error, Exception)],
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
