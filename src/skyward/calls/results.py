"""Results: what happens when tasks are done, on a thread of its own.

Futures get their values, and tasks whose arguments are futures are sent once these are done.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from skyward.calls.packer import Packer
from skyward.calls.task import Task
from skyward.errors import PoolClosedError, TaskCancelledError
from skyward.functions import Future
from skyward.objects.exceptions import add_note
from skyward.staff import Staff

_staff = Staff("skyward-arguments", 16)
"""Encodes and sends results that are arguments: large ones must not keep other results."""


class ResultThread:
    """The thread of a pool that uses results."""

    def __init__(self, packer: Packer, fail: Callable[[Task, BaseException | None], None]) -> None:
        """`fail` gives a task up: because of a problem, or without one since it is cancelled."""
        self._packer, self._fail = packer, fail
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._awaiting: set[Task] = set()
        """The tasks that wait for futures among their arguments."""

    @property
    def is_current(self) -> bool:
        """Whether this code runs on the thread."""
        return threading.current_thread() is self._thread

    def after(self, task: Task, action: Callable[[], None]) -> None:
        """Run an action when the task is done; call before `submit`."""
        self._begin()
        task.when_done(lambda _: self._actions.put(action))

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="skyward-results", daemon=True
                )
                self._thread.start()

    def _serve(self) -> None:
        while (action := self._actions.get()) is not None:
            action()
            # It has the result, which nobody may want any more when the next one comes.
            del action

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._actions.put(None)
            if not self.is_current:
                self._thread.join()

    # Tasks with futures as arguments.

    def submit_later(self, tasks: Sequence[Task], submit: Callable[[], None]) -> None:
        """Submit tasks once the futures among their arguments are done.

        At once if they are: a callback on this thread may wait for the result.
        """
        futures = {id(future): future for task in tasks for future in task.awaits}
        if all(future.done() for future in futures.values()):
            self._submit(tasks, submit)
            return
        with self._lock:
            self._awaiting.update(tasks)
        left = [len(futures)]

        def one_done(_: Any) -> None:
            with self._lock:
                left[0] -= 1
                last = not left[0]
            if last:
                _staff.run(functools.partial(self._submit, tasks, submit))

        for future in futures.values():
            future.add_done_callback(one_done)

    def _submit(self, tasks: Sequence[Task], submit: Callable[[], None]) -> None:
        with self._lock:
            self._awaiting.difference_update(tasks)
        wanted = [task for task in tasks if not task.done]
        try:
            for task in wanted:
                task.handles += [self._packer.handle(_done(each, task)) for each in task.awaits]
            for task in tasks:
                task.awaits = ()
            if wanted:
                submit()
        except BaseException as problem:
            for task in wanted:
                self._fail(task, problem)

    def give_up(self, why: str) -> None:
        """Fail the tasks that wait for futures: the pool ends."""
        with self._lock:
            awaiting, self._awaiting = self._awaiting, set()
        for task in awaiting:
            self._fail(task, PoolClosedError(f"{task.name} was not done: {why}"))


def _done(future: Future[Any], task: Task) -> Future[Any]:
    """A future that is done; raises its exception, with a note, if it has failed."""
    try:
        problem = future.exception()
    except CancelledError:
        raise TaskCancelledError(
            f"{task.name} was not run: an argument of it is the result of a call that was cancelled"
        ) from None
    if problem is not None:
        note = f"{task.name} was not run: this exception is that of a call whose result it needs"
        if note not in getattr(problem, "__notes__", ()):
            add_note(problem, note)
        raise problem
    return future
