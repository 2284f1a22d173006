"""Senders: the threads that send what is too large for the caller or the loop to wait for.

A pool has threads of its own, and a lane has one of them at a time. A send that has begun when its
executor is cut off waits for as long as the outage: its thread does not count among those that the
other lanes share. A send that has not begun waits without a thread.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from skyward.calls.lane import Lane
from skyward.staff import Staff

MOST = 64
"""How many threads send at the same time to executors that are within reach."""


@dataclass(slots=True, eq=False)
class Queue:
    """What is to be sent on one lane."""

    actions: deque[Callable[[], None]] = field(default_factory=deque)
    busy: bool = False
    """Whether a thread sends on the lane, or is about to."""
    cut_off: bool = False


class Sending:
    """Runs the large sends of a pool, in order for each lane."""

    def __init__(self) -> None:
        self._staff = Staff("skyward-send", MOST)
        self._queues: dict[Lane, Queue] = {}
        """The lanes that something is to be sent on, or that are cut off."""
        self._stuck: set[Lane] = set()
        """The lanes that are cut off in the middle of a send."""
        self._lock = threading.Lock()

    def run(self, lane: Lane, action: Callable[[], None]) -> None:
        """Send on a lane after what is sent there now."""
        with self._lock:
            queue = self._queues.setdefault(lane, Queue())
            queue.actions.append(action)
            self._go_on(lane, queue)

    def submit(self, lane: Lane, action: Callable[[], None]) -> Future[None]:
        """Send on a lane like `run`; the future says when that is done."""
        future: Future[None] = Future()

        def send() -> None:
            try:
                action()
            except BaseException as problem:
                future.set_exception(problem)
            else:
                future.set_result(None)

        self.run(lane, send)
        return future

    def aside(self, action: Callable[[], None]) -> None:
        """Run an action that prepares a send, and may wait for sends on any lane."""
        self._staff.run(action)

    def cut_off(self, lane: Lane) -> None:
        """Begin no send on a lane that is out of reach."""
        with self._lock:
            if lane.lost:
                return
            queue = self._queues.setdefault(lane, Queue())
            queue.cut_off = True
            self._count_stuck(lane, queue)

    def release(self, lane: Lane) -> None:
        """Begin the sends on a lane that is back within reach, or lost: then they fail."""
        with self._lock:
            queue = self._queues.get(lane)
            if queue is not None:
                queue.cut_off = False
                self._count_stuck(lane, queue)
                self._go_on(lane, queue)

    def _go_on(self, lane: Lane, queue: Queue) -> None:
        if queue.busy or queue.cut_off:
            return
        if queue.actions:
            queue.busy = True
            self._staff.run(functools.partial(self._send_next, lane, queue))
        else:
            del self._queues[lane]

    def _send_next(self, lane: Lane, queue: Queue) -> None:
        with self._lock:
            action = None if queue.cut_off else queue.actions.popleft()
        try:
            if action is not None:
                action()
        finally:
            with self._lock:
                queue.busy = False
                self._count_stuck(lane, queue)
                self._go_on(lane, queue)

    def _count_stuck(self, lane: Lane, queue: Queue) -> None:
        before = len(self._stuck)
        if queue.busy and queue.cut_off:
            self._stuck.add(lane)
        else:
            self._stuck.discard(lane)
        if len(self._stuck) != before:
            self._staff.allow(MOST + len(self._stuck))
