"""The teller: the events of a pool's calls, for its listeners and traces."""

from __future__ import annotations

import time
from typing import Any

from skyward.calls.lane import Lane
from skyward.calls.packer import HEAVY_BYTES
from skyward.calls.task import Failed, Task
from skyward.curves import Curves, Place
from skyward.events import (
    CallCancelled,
    CallFailed,
    CallFinished,
    CallRetried,
    CallStarted,
    CallSubmitted,
    EventStream,
    NumbersLogged,
    OutputWritten,
    Transferred,
)
from skyward.listeners import Tracking
from skyward.wire.messages import Logged, Written


class CallTeller:
    """Makes events of what becomes of calls, if anybody listens."""

    def __init__(self, events: EventStream, tracking: Tracking) -> None:
        self.events = events
        """For those who hurry: they look whether anybody listens before they tell something."""
        self.tracking = tracking
        self.curves = Curves()
        """What was logged, for a page that is opened later."""

    def submitted(self, task: Task) -> None:
        """Tell that a call waits for a worker, or is about to be sent."""
        if self.events.listened:
            self.events.emit(CallSubmitted, task.id, task.name)

    def started(self, lane: Lane, task: Task) -> None:
        """Tell that a worker was given a call."""
        if self.events.listened:
            task.given = time.monotonic()
            self.events.emit(CallStarted, task.id, task.name, lane.node, lane.worker)
        if task.trace is not None:
            task.trace.given(lane.node, lane.worker)

    def transferred(self, lane: Lane, task: Task, direction: str, size: int) -> None:
        """Tell how many bytes of a call were "sent" or "received", if they are many."""
        if self.events.listened and size > HEAVY_BYTES:
            self.events.emit(
                Transferred, task.id, task.name, lane.node, lane.worker, direction, size
            )

    def retried(self, task: Task, why: str) -> None:
        """Tell that a call runs again."""
        if self.events.listened:
            self.events.emit(CallRetried, task.id, task.name, why)

    def ended(self, task: Task, failed: Failed | None) -> None:
        """Tell that a call has its result, or failed, or was cancelled."""
        if self.events.listened:
            load, emit = task.load, self.events.emit
            node, worker = (None, None) if load is None else (load.node, load.worker)
            if failed is None:
                emit(CallFinished, task.id, task.name, node, worker, task.ran)
            elif task.cancelled:
                emit(CallCancelled, task.id, task.name, node, worker)
            else:
                emit(CallFailed, task.id, task.name, node, worker, task.ran, failed.summary)
        if task.trace is not None:
            task.trace.end(task.ran, "" if failed is None else failed.summary)

    def logged(self, message: Logged, lane: Lane) -> None:
        """Take the numbers that tasks of a worker have logged."""
        known: dict[int, tuple[str, int | None]] = {}
        place, taken = (lane.node, lane.worker), []
        for number, step, values in message.rows:
            if number not in known:
                task = lane.tasks.get(number)
                name = "" if task is None else task.name
                # Read once: another thread empties it when the broadcast is over.
                together = () if task is None else task.together
                rank = together.index(task) if together else None
                known[number] = name, rank
                if task is not None:
                    task.logged = True
            taken.append(self._take(place, values, step, *place, number, *known[number]))
        self.tracking.take(taken)

    def logged_here(self, values: dict[str, float], step: int | None) -> None:
        """Take numbers that the client has logged."""
        self.tracking.take([self._take(None, values, step, None, None, 0, "", None)], here=True)

    def _take(
        self, place: Place, values: dict[str, float], step: int | None, *about: Any
    ) -> NumbersLogged:
        step = self.curves.add(place, values, step)
        event = NumbersLogged(time.time(), self.events.pool, step, values, *about)
        self.events.pass_on(event)
        return event

    def output(self, written: Written, node: int, worker: int, name: str) -> None:
        """Make an event of each line of a task; the states of a progress bar are none."""
        if self.events.listened and not written.transient:
            for line in written.text.removesuffix("\n").split("\n"):
                self.events.emit(
                    OutputWritten, node, worker, written.task, name, written.stream, line
                )
