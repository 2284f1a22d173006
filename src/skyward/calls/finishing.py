"""Finishing: a task gets its answer, is counted once, and its memory is freed."""

from __future__ import annotations

from skyward.calls.answers import Answer, Failed, Streaming, Value
from skyward.calls.counts import Counts
from skyward.calls.packing import Packer
from skyward.calls.task import Task
from skyward.calls.telling import CallTeller


class Finisher:
    """Gives the tasks of a pool their answers."""

    def __init__(self, packer: Packer, counts: Counts, teller: CallTeller) -> None:
        self._packer, self._counts, self._teller = packer, counts, teller

    def finish(self, task: Task, answer: Answer) -> None:
        """Give a task its answer, and free its memory."""
        if task.finish(answer):
            if not isinstance(answer, Streaming):
                self._count(task, answer if isinstance(answer, Failed) else None)
        elif isinstance(answer, Value):
            answer.discard()
        if task.staying is not None and not isinstance(answer, Streaming):
            task.staying.discard()
        self.release(task)

    def fail(self, task: Task, problem: BaseException) -> None:
        """Give a task a failure of the client's as its answer, and end its stream if it has one."""
        self.end_stream(task, Failed.because(problem))
        self.finish(task, Failed.because(problem))

    def end_stream(self, task: Task, problem: Failed | None) -> None:
        """End the stream of a task, if the task is a stream."""
        if task.stream is not None:
            task.stream.end(problem)
            self._count(task, problem)

    def release(self, task: Task) -> None:
        """Free a task's memory if the task is done and no lane may still be sending it."""
        if task.done and not task.on_executor:
            self._packer.release(task.parcel)

    def _count(self, task: Task, failed: Failed | None) -> None:
        if task.counted:
            return
        task.counted = True
        if failed is None:
            self._counts.succeeded += 1
        elif task.cancelled:
            self._counts.cancelled += 1
        else:
            self._counts.failed += 1
        if self._teller.events.listened or task.trace is not None:
            self._teller.ended(task, failed)
