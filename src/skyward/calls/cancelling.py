"""Cancelling: stops the remote work of a task, and kills its executor if necessary."""

from __future__ import annotations

from collections.abc import Callable

from skyward.calls.lane import Lane
from skyward.calls.loop import Loop
from skyward.calls.task import Task
from skyward.wire.messages import Credit

CANCEL_GRACE = 1.0
"""How long a cancelled task may take to end before its process is killed."""


class Canceller:
    """Stops tasks on their executors."""

    def __init__(
        self, loop: Loop, drain: Callable[[Lane], None], note: Callable[[str], None]
    ) -> None:
        """`drain` has an executor get no new tasks; `note` tells the user."""
        self._loop, self._drain, self._note = loop, drain, note

    def stop(self, lane: Lane, task: Task) -> None:
        """Have an executor stop a task; an executor that does not stop it is killed."""
        lane.stop(task)
        self._loop.later(CANCEL_GRACE, lambda: self._kill_if_running(lane, task))

    def _kill_if_running(self, lane: Lane, task: Task, *, told: bool = False) -> None:
        if task.id not in lane.tasks or lane.lost:
            return
        if not lane.connection.connected_for(CANCEL_GRACE):
            # The cancellation has not reached the executor, or reached it a moment ago.
            self._loop.later(CANCEL_GRACE, lambda: self._kill_if_running(lane, task, told=told))
            return
        others = [each for each in lane.load.started() if each is not task and _is_wanted(each)]
        if others:
            if not told:
                more = f" and {len(others) - 1} more" if len(others) > 1 else ""
                self._note(
                    f"{task.name} was cancelled and does not end; its process on {lane.where} "
                    f"stays, since {others[0].name}{more} runs there, too"
                )
                # Hearing of it again, the executor no longer counts the task among those that run.
                lane.stop(task)
            self._loop.later(CANCEL_GRACE, lambda: self._kill_if_running(lane, task, told=True))
        else:
            # The cancelled task may end before its executor does; another must not begin then.
            self._drain(lane)
            lane.kill(f"{task.name} was cancelled and did not end within {CANCEL_GRACE} s")

    def end_stream(self, lane: Lane, task: Task) -> None:
        """Have an executor end a stream that its consumer has closed."""
        lane.tell(Credit(task.id, -1, -1))
        self._loop.later(CANCEL_GRACE, lambda: self._stop_if_running(lane, task))

    def _stop_if_running(self, lane: Lane, task: Task) -> None:
        if task.id in lane.tasks and not lane.lost:
            task.cancelled = True
            self.stop(lane, task)


def _is_wanted(task: Task) -> bool:
    """Whether somebody waits for a task, or reads its stream."""
    return task.cancellable and not task.cancelled
