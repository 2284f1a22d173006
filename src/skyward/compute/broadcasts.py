"""A broadcast: one call on every worker of a pool at once."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from skyward.calls.nested import group_is_over
from skyward.calls.task import Answer, Failed, Streaming, Task, standing_at
from skyward.errors import (
    BroadcastError,
    ConfigurationError,
    NodeLostError,
    Outcome,
    PoolClosedError,
    SkywardError,
    TaskCancelledError,
    TaskError,
    TaskTimeoutError,
    WorkerDiedError,
)
from skyward.functions import Pending, taken
from skyward.nodes.fleet import Fleet
from skyward.nodes.node import LOST_SECONDS
from skyward.wire.messages import KEEPING_FRAMES
from skyward.worker import failures

T = TypeVar("T")
R = TypeVar("R")

DEATHS = (WorkerDiedError, NodeLostError)
NOTICE_SECONDS = {WorkerDiedError: 2.0, NodeLostError: LOST_SECONDS}
"""How long a death may take to be noticed."""
TELL_SECONDS = 0.25
"""How long a failure is kept from the console: usually, the other ranks fail in the same way."""
LOOK_SECONDS = 1.5
"""How long the nodes have to say where ranks are that are about to be cancelled."""
STRANDED_SECONDS = 1.0
"""How often it is looked whether ranks of a group wait for each other in different groups."""


def broadcast(
    fleet: Fleet,
    pending: Pending[T],
    begun: Callable[[list[Task]], None] = lambda tasks: None,
    *,
    fail_fast: bool = False,
) -> list[T]:
    """Run a call on every worker and return the results; `BroadcastError` if any of them fails.

    `begun` is told of the tasks before they go out.
    """
    refuse_one_shot_streams(pending)
    function = pending.function
    fast = fail_fast or function.fail_fast

    def run(ranks: Ranks) -> tuple[list[Outcome], int | None]:
        begun(ranks.tasks)
        return ranks.outcomes()

    outcomes, first = run_ranks(fleet, pending, run, fleet.console.note, fail_fast=fast)
    return values_of(function.name, outcomes, first)


def outcomes_of(
    fleet: Fleet,
    name: str,
    workers: Sequence[tuple[int, int]],
    tasks: list[Task],
    *,
    fail_fast: bool = False,
) -> list[Any]:
    """Run tasks at once, each on its worker; their results, or `BroadcastError` if any fails."""
    with Ranks(fleet, name, workers, tasks, fleet.console.note, fail_fast=fail_fast) as ranks:
        found = ranks.outcomes()
    return values_of(name, *found)


def run_ranks(
    fleet: Fleet,
    pending: Pending[Any],
    run: Callable[[Ranks], R],
    note: Callable[[str], None],
    *,
    fail_fast: bool,
) -> R:
    """Run a call on every worker; what `run` has made of the ranks.

    When a rank of a group has died, all of them run again, as often as the call is to be retried.
    Without a group, each worker is retried by itself.
    """
    function, retries = pending.function, 0
    if fleet.preparer.together:
        retries = function.retries or fleet.spec.options.retries
    tries = 0
    while True:
        workers, tasks = prepared(fleet, pending)
        left = retries - tries
        with Ranks(
            fleet, function.name, workers, tasks, note, fail_fast=fail_fast, retries=left
        ) as ranks:
            found = run(ranks)
        problem = ranks.why_again()
        if problem is None:
            return found
        tries += 1
        which = f"retry {tries} of {retries}"
        again = "the workers form a new group, and all ranks run again"
        note(f"{shortened(problem)}; {again} ({which})")
        fleet.dispatcher.counts.retried += len(tasks)


def prepared(fleet: Fleet, pending: Pending[Any]) -> tuple[list[tuple[int, int]], list[Task]]:
    """The workers of a pool, and a task of the call for each."""
    fleet.wake()
    workers, calls = fleet.workers(), fleet.dispatcher
    tasks: list[Task] = []
    like: Task | None = None
    copies = calls.copies(workers)
    for place in workers:
        before = None if copies.waits_for(place) else like
        task = calls.prepare(pending, worker=place, keep=False, like=before, copies=copies)
        if not task.parcel.encoded.referred:
            like = task
        tasks.append(task)
    return workers, tasks


class Ranks:
    """The tasks of a broadcast, one for each rank: when one has failed, the others end, too.

    Ranks of a process group wait for each other, so one that has failed would keep the others
    waiting. They get some time to fail or to finish by themselves, and then they are cancelled.
    Without a group, the others are waited for, unless the user wants them cancelled at once.

    Generators are looked after until all of them have ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        workers: Sequence[tuple[int, int]],
        tasks: list[Task],
        note: Callable[[str], None],
        *,
        fail_fast: bool,
        retries: int = 0,
    ) -> None:
        """Before the tasks are submitted; `note` shows a line to the user.

        `retries` is how often all ranks of a group may run again.
        """
        self.workers, self.tasks = workers, tasks
        self._dispatcher, self._group = fleet.dispatcher, fleet.preparer
        self._name, self._note, self._retries = name, note, retries
        self._grouped = fleet.preparer.together and len(tasks) > 1
        self._grace = 0.0 if fail_fast else None
        if self._grouped and not fail_fast:
            self._grace = fleet.spec.options.fail_grace
        # Numbers, not tasks: these must not keep each other, and so their results, alive.
        self._heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        """The ranks that have answered, and once more those whose streams have ended."""
        self._unanswered = set(range(len(tasks)))
        self._left = set(range(len(tasks)))
        """The ranks that have not ended: they have not answered, or their streams go on."""
        self._failed: list[int] = []
        self._told = 0
        """How many failures the user has been told of."""
        self._tell_at: float | None = None
        self._cancel_at: float | None = None
        if fleet.preparer.begin_broadcast():
            self._tell_regrouped()
        for rank, task in enumerate(tasks):
            task.together = tasks
            task.when_done(functools.partial(_hear, self._heard, rank))
            if fleet.preparer.together:
                # The group that the rank would return to is gone.
                task.retries = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        streams = self._left - self._unanswered
        if kind is None and streams and (self._grouped or self._grace is not None):
            threading.Thread(target=self._end_streams, name="skyward-ranks", daemon=True).start()
        else:
            self._end(interrupted=kind is not None)

    def _end_streams(self) -> None:
        self.wait(streams=True)
        self._end(interrupted=False)

    def _end(self, *, interrupted: bool) -> None:
        if interrupted:
            for task in self.tasks:
                self._dispatcher.cancel(task)
        for task in self.tasks:
            task.together = ()
        if self._grouped and (interrupted or not self._in_step()):
            # A worker keeps the frames of a task that failed, for a debugger, until its next task.
            debugged = not interrupted and any(t.debugged >= KEEPING_FRAMES for t in self.tasks)
            ends = self._group.leave(self.tasks, at_next_broadcast=debugged)
            # A worker that has died has ended the group already.
            died = any(isinstance(_problem(task), DEATHS) for task in self.tasks)
            if (ends or died) and not debugged and self.why_again() is None:
                self._tell_regrouped()

    def _tell_regrouped(self) -> None:
        self._note(
            f"{self._name}: after a failure, all workers are started again, as a new group: "
            "objects in them, and what else they held, are gone"
        )

    def outcomes(self) -> tuple[list[Outcome], int | None]:
        """Run the tasks: what came of each, and which failed first."""
        self._dispatcher.submit_all(self.tasks)
        self.wait()
        answers = [task.wait() for task in self.tasks]
        first = first_failed(answers)
        found = []
        for (node, worker), task, answer in zip(self.workers, self.tasks, answers, strict=True):
            if first is not None and task.stream is not None:
                answer = task.stream.problem or answer
            try:
                self._dispatcher.flush_output(task)
                found.append(Outcome(node, worker, answer.get()))
            except Exception as problem:
                found.append(Outcome(node, worker, error=problem))
        return found, first

    def why_again(self) -> BaseException | None:
        """Why all ranks run again, in a new group, after each has answered; None if they do not."""
        answers = [task.answer for task in self.tasks]
        first = first_failed(answers)
        # The task that has asked for a broadcast is in the former group.
        if first is None or self._retries < 1 or self.tasks[first].depth:
            return None
        answer = answers[first]
        assert isinstance(answer, Failed)
        # Not an exception of the function, which may be that of another call's worker.
        return answer.problem if isinstance(answer.problem, DEATHS) else None

    def wait(self, *, streams: bool = False) -> None:
        """Return when every rank has answered, also those that had to be cancelled.

        With `streams`, all streams have ended as well. So they have if a rank has failed and the
        others are cancelled: then nobody gets the streams.
        """
        while self._unanswered or (self._left and (streams or self._is_in_vain())):
            now = self._dispatcher.timeouts.now()
            if self._tell_at is not None and now >= self._tell_at:
                self._tell_at = None
                self._tell(now)
            if self._cancel_at is not None and now >= self._cancel_at:
                self._cancel_at = None
                self._cancel_rest()
            moments = [each - now for each in (self._tell_at, self._cancel_at) if each is not None]
            rank = self._next(min(moments, default=None))
            if rank is not None:
                self._take(rank)

    def _is_in_vain(self) -> bool:
        return self._grace is not None and any(isinstance(t.answer, Failed) for t in self.tasks)

    def _take(self, rank: int) -> None:
        """Note that a rank has answered, or that its stream has ended."""
        self._unanswered.discard(rank)
        if rank not in self._left or not _has_ended(self.tasks[rank]):
            return
        self._left.discard(rank)
        if self._failure(rank) is None:
            return
        self._failed.append(rank)
        now = self._dispatcher.timeouts.now()
        if len(self._failed) == 1 and self._grace is not None:
            self._cancel_at = now + self._grace
        if self._tell_at is None and self._grace != 0.0:
            self._tell_at = now + TELL_SECONDS

    def _failure(self, rank: int) -> Failed | None:
        """How a rank has failed; a stream that was closed has not."""
        task = self.tasks[rank]
        answer, stream = task.answer, task.stream
        if isinstance(answer, Streaming) and stream is not None:
            answer = None if stream.closed else stream.problem
        return answer if isinstance(answer, Failed) else None

    def _next(self, seconds: float | None) -> int | None:
        """The next rank that is heard of; None after so many seconds, or a look at the group."""
        together = self._group.together
        if together:
            seconds = min(STRANDED_SECONDS, STRANDED_SECONDS if seconds is None else seconds)
        if seconds is None:
            return taken(self._heard)
        with contextlib.suppress(queue.Empty):
            return self._heard.get(timeout=max(0.0, seconds))
        for task in self._group.stranded(self.tasks) if together else ():
            problem: SkywardError = WorkerDiedError(
                f"{task.name} cannot run in the group of the other ranks: a worker of that group "
                "was lost, or the number of nodes changed, before it began"
            )
            if task.depth:
                problem = group_is_over(task.name)
            self._dispatcher.cancel(task, problem)
        return None

    def _tell(self, now: float) -> None:
        """Say which ranks have failed, and what becomes of the others."""
        new, self._told = self._failed[self._told :], len(self._failed)
        if not new or not self._left:
            return
        text = f"{self._name}: {self._place(new[0])} failed: {self._why(new[0])}"
        if len(new) > 1:
            text += f" ({in_words(new[1:])} as well)"
        left = in_words(sorted(self._left))
        if self._grace is None:
            self._note(f"{text}; waiting for {left}")
        elif self._cancel_at is not None:
            seconds = round(max(0.0, self._cancel_at - now), 1)
            self._note(f"{text}; {left}: cancelled in {seconds:g} s, unless done by then")

    def _cancel_rest(self) -> None:
        """Cancel the ranks that are left, after a look at where they are."""
        first = first_failed([self._failure(rank) for rank in range(len(self.tasks))])
        because = ""
        if first is not None:
            because = f", because {self._place(first)} failed: {self._why(first)}"
        left = [self.tasks[rank] for rank in sorted(self._left)]
        self._dispatcher.timeouts.look_at(left, LOOK_SECONDS)
        for task in left:
            if _has_ended(task):
                continue
            where = f" on {task.load.where}" if task.load is not None else " before it began"
            text = f"{task.name} was cancelled{where}{because}"
            self._dispatcher.cancel(task, standing_at(task, TaskCancelledError, text))

    def _place(self, rank: int) -> str:
        return f"rank {rank} (node {self.workers[rank][0]})"

    def _why(self, rank: int) -> str:
        failure = self._failure(rank)
        return "" if failure is None else failure.summary.partition("\n")[0]

    def _in_step(self) -> bool:
        """Whether the group can be used again: no rank may be in another collective than the rest.

        That is so if all ranks have returned, or raised the same exception by themselves.
        """
        answers = list(map(_end_of, self.tasks))
        failed = [answer for answer in answers if isinstance(answer, Failed)]
        if any(isinstance(answer.problem, PoolClosedError) for answer in failed):
            # It is of no use any more.
            return True
        told = [answer.raised.failure for answer in failed if answer.raised is not None]
        if len(told) < len(failed) or any(failure.cancelled for failure in told):
            return False
        if any(task.pinned is not None for task in self.tasks):
            # Objects would be lost with their workers, and all ranks have ended by themselves.
            return True
        kinds = {failure.type_name for failure in told}
        return not failed or (len(failed) == len(answers) and len(kinds) == 1)


def _hear(heard: queue.SimpleQueue[int], rank: int, task: Task) -> None:
    """Put a rank that has answered, and put it again when its stream has ended."""
    heard.put(rank)
    if task.stream is not None:
        task.stream.when_ended(functools.partial(heard.put, rank))


def _end_of(task: Task) -> Answer | None:
    """What a task has answered, or the exception that has ended its stream."""
    return task.answer if task.stream is None else task.stream.problem


def _problem(task: Task) -> BaseException | None:
    """The exception of the client's that a task has ended with."""
    end = _end_of(task)
    return end.problem if isinstance(end, Failed) else None


def _has_ended(task: Task) -> bool:
    """Whether a task has answered, and its stream, if it is one, is over."""
    return task.done and (task.stream is None or task.stream.ended)


def first_failed(answers: Sequence[Answer | None]) -> int | None:
    """The rank that failed first.

    Of a process that died, the client may hear later than of the exceptions that its death raised
    in the others.
    """
    failed = [
        (answer.at - _notice_seconds(answer.problem), rank)
        for rank, answer in enumerate(answers)
        if isinstance(answer, Failed)
    ]
    return min(failed)[-1] if failed else None


def _notice_seconds(problem: BaseException | None) -> float:
    return next((NOTICE_SECONDS[each] for each in DEATHS if isinstance(problem, each)), 0.0)


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


def failures_told(outcomes: Sequence[Outcome], first: int) -> str:
    """Lines for the error of a broadcast: which rank failed first, and where each of them was."""
    if len(outcomes) == 1:
        return ""
    late: dict[int, TaskError] = {}
    cancelled: dict[int, TaskError] = {}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome.error, TaskTimeoutError):
            late[rank] = outcome.error
        elif isinstance(outcome.error, TaskCancelledError):
            cancelled[rank] = outcome.error
    lines = []
    error = outcomes[first].error
    if error is not None and first not in late and first not in cancelled:
        what = shortened(error)
        lines.append(f"rank {first} (node {outcomes[first].node}) failed first: {what}")
    lines += [
        f"rank {rank} (node {outcomes[rank].node}) did not answer in time: "
        + (f"it was at {error.place}" if error.place else "where it was is not known")
        for rank, error in late.items()
        if not error.collective
    ]
    waiting = {rank: error for rank, error in late.items() if error.collective}
    lines += [f"{ranks}{where}" for ranks, where in _by_place(waiting)]
    lines += [f"cancelled: {ranks}{where}" for ranks, where in _by_place(cancelled)]
    done = [rank for rank, outcome in enumerate(outcomes) if outcome.ok]
    known = {first, *late, *cancelled, *done}
    failed = [rank for rank in range(len(outcomes)) if rank not in known]
    lines += [f"{in_words(done)} returned"] if done else []
    lines += [f"{in_words(failed)} failed, too"] if failed else []
    return ":\n" + "\n".join(f"  {line}" for line in lines)


def _by_place(errors: dict[int, TaskError]) -> list[tuple[str, str]]:
    """The ranks that were at the same place, and what they did there, in words."""
    places: dict[str, list[int]] = {}
    for rank, error in errors.items():
        where = f" at {error.place}" if error.place else ", where is not known"
        if error.collective:
            where = f" waited in the collective {error.collective},{where}"
        places.setdefault(where, []).append(rank)
    return [(in_words(ranks), where) for where, ranks in places.items()]


def shortened(problem: BaseException) -> str:
    """An error in one line."""
    return f"{type(problem).__name__}: {failures.text(problem)}".partition("\n")[0]


def in_words(ranks: Sequence[int]) -> str:
    """Ranks in words, with ranges: "ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    text = ", ".join("-".join(map(str, part)) for part in parts)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
