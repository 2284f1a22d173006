"""The state of a pool as the page shows it, and what has changed since it was last asked.

A pool may make a hundred thousand calls a second, and a page shows a few hundred: what comes in one
moment is counted, and only a part of it is told call by call.
"""

from __future__ import annotations

import bisect
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyward.curves import News, Told
from skyward.events import (
    CallCancelled,
    CallFailed,
    CallFinished,
    CallRetried,
    CallStarted,
    DeviceClosed,
    DeviceOpened,
    Event,
    NodeChanged,
    NodeFailed,
    NodeLost,
    NodeReady,
    NodeStarting,
    NodeStopped,
    OutputWritten,
    as_dict,
    in_json,
)
from skyward.nodes.fleet import Fleet
from skyward.worker.task_board import BUCKETS

CALLS_KEPT = 1000
LINES_KEPT = 500
NOTES_KEPT = 100
CALLS_A_TIME = 300
"""How many calls that ended are told one by one at a time; the others are only counted."""
LINES_A_TIME = 200
EVENTS_WAITING = 50_000
LINE_MOST = 2000
"""How many characters of a line of output are told."""

Call = list[Any]
"""A call that ended: number, name, node, worker, start, end, and how it ended."""


def key_of(fleet: Fleet) -> str:
    """What names a pool of this process on a page; several processes may be clients of one pool."""
    return f"{fleet.id}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class MissedCalls:
    """The calls that ran when events were found lost, and those that were over by then."""

    running: dict[int, Call]
    over: list[int]


def number_row(news: News) -> list[Any]:
    """What has come of a curve: name, node, worker, first point that is new, points, last point.

    The client's own numbers have no node and no worker.
    """
    name, place, start, points, last = news
    rows = [[step, in_json(value)] for step, value in (*points, last)]
    return [name, *(place or (None, None)), start, rows[:-1], rows[-1]]


class PoolState:
    """What the page knows of one pool; `take` may be called on any thread, the rest on one."""

    def __init__(self, fleet: Fleet, wake: Callable[[], None]) -> None:
        """`wake` has somebody ask for the changes before there are too many."""
        self.fleet, self._wake = fleet, wake
        self._woken = False
        self._dropped = False
        """Whether events were lost, because nobody asked in time."""
        self._events: deque[Event] = deque(maxlen=EVENTS_WAITING)
        self._running: dict[int, Call] = {}
        self._told: set[int] = set()
        """The running calls that have been told."""
        self._ended: deque[Call] = deque(maxlen=CALLS_KEPT)
        self._lines: deque[list[Any]] = deque(maxlen=LINES_KEPT)
        self._notes: deque[dict[str, Any]] = deque(maxlen=NOTES_KEPT)
        self._phases: dict[int, str] = {}
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._numbers_told: Told = {}

    def take(self, event: Event) -> None:
        """Take an event, on the thread that made it."""
        events = self._events
        if len(events) >= EVENTS_WAITING:
            self._dropped = True
        events.append(event)
        if len(events) >= EVENTS_WAITING // 2 and not self._woken:
            self._woken = True
            self._wake()

    def begin(self, now: float) -> None:
        """Begin with the calls that run already; when they started is not known."""
        for number, name, node, worker in self.fleet.dispatcher.running():
            self._running[number] = [number, name, node, worker, now]
            self._told.add(number)

    def changes(self) -> dict[str, Any] | None:
        """What has changed since this was last asked; None if nothing has."""
        numbers = self.fleet.dispatcher.teller.curves.news(self._numbers_told)
        if not self._events and not numbers:
            return None
        ended: list[Call] = []
        lines: list[list[Any]] = []
        notes: list[dict[str, Any]] = []
        nodes: set[int] = set()
        missed = self._missed() if self._dropped else None
        self._woken = False
        while self._events:
            match event := self._events.popleft():
                case CallStarted():
                    self._running[event.call] = [
                        event.call,
                        event.name,
                        event.node,
                        event.worker,
                        event.time,
                    ]
                case CallFinished() | CallFailed() | CallCancelled():
                    call = self._end(event)
                    if call is not None:
                        ended.append(call)
                    if isinstance(event, CallFailed):
                        notes.append(as_dict(event))
                case OutputWritten():
                    lines.append(
                        [
                            event.time,
                            event.node,
                            event.worker,
                            event.stream,
                            event.text[:LINE_MOST],
                            event.name,
                        ]
                    )
                case NodeStarting():
                    self._phases[event.node] = event.phase
                    nodes.add(event.node)
                case NodeReady() | NodeLost() | NodeFailed() | NodeStopped() | NodeChanged():
                    self._phases.pop(event.node, None)
                    nodes.add(event.node)
                    notes.append(as_dict(event))
                case CallRetried():
                    call = self._running.pop(event.call, None)
                    if call is not None:
                        ended.append([*call, event.time, "lost"])
                    notes.append(as_dict(event))
                case DeviceOpened() | DeviceClosed():
                    notes.append(as_dict(event))
                case _:
                    pass
        if missed is not None:
            self._make_up(missed, ended)
        self._ended.extend(ended)
        self._lines.extend(lines)
        self._notes.extend(notes)
        # A call that was told as running must be told as ended.
        known = [call for call in ended if call[0] in self._told]
        others = [call for call in ended if call[0] not in self._told]
        skipped, others = max(0, len(others) - CALLS_A_TIME), others[-CALLS_A_TIME:]
        started = [call for number, call in self._running.items() if number not in self._told]
        self._told = set(self._running)
        return {
            "type": "changes",
            "pool": key_of(self.fleet),
            "started": started,
            "ended": known + others,
            "skipped": skipped,
            "lines": lines[-LINES_A_TIME:],
            "notes": notes[-NOTES_KEPT:],
            "nodes": self._nodes(nodes),
            "numbers": [number_row(each) for each in numbers],
        }

    def _missed(self) -> MissedCalls:
        """What may have to be put right once the events that are left have been taken.

        Asked before: the end of a call that ends from now on is among the events.
        """
        self._dropped = False
        now = time.time()
        running = {call[0]: [*call, now] for call in self.fleet.dispatcher.running()}
        return MissedCalls(running, [call for call in self._running if call not in running])

    def _make_up(self, missed: MissedCalls, ended: list[Call]) -> None:
        """End calls whose end was lost, and begin those whose start was."""
        for number in missed.over:
            call = self._running.pop(number, None)
            if call is not None:
                ended.append([*call, time.time(), "ok"])
        known = {call[0] for call in ended}
        for number, call in missed.running.items():
            if number not in known:
                self._running.setdefault(number, call)

    def _end(self, event: CallFinished | CallFailed | CallCancelled) -> Call | None:
        """The call that has ended; None if no worker had it."""
        known = self._running.pop(event.call, None)
        if event.node is None or event.worker is None:
            return None
        how = {CallFinished: "ok", CallFailed: "failed"}.get(type(event), "cancelled")
        seconds = 0.0 if isinstance(event, CallCancelled) else event.seconds
        if how != "cancelled":
            self._buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds
        # A call that was sent ahead of its turn has run for less time than its worker had it.
        began = event.time - seconds if seconds or known is None else known[4]
        return [event.call, event.name, event.node, event.worker, began, event.time, how]

    def durations(self) -> dict[str, Any]:
        """How long calls ran: how many in each bucket, and the seconds of all."""
        return {"buckets": list(self._buckets), "call_seconds": self._seconds}

    def snapshot(self) -> dict[str, Any]:
        """All that is known, for a page that has just been opened; after `changes`."""
        spec, fleet = self.fleet.spec, self.fleet
        return {
            "type": "pool",
            "pool": key_of(fleet),
            "name": spec.name,
            "provider": spec.provider.name,
            "workers": sorted(fleet.workers()),
            "nodes": self._nodes(None),
            "running": list(self._running.values())[-CALLS_KEPT:],
            "ended": list(self._ended),
            "lines": list(self._lines),
            "notes": list(self._notes),
            "numbers": [number_row(each) for each in fleet.dispatcher.teller.curves.news({})],
        }

    def _nodes(self, wanted: set[int] | None) -> list[list[Any]]:
        """Number, state, address, accelerator, how many of it and phase, of each node."""
        if wanted is not None and not wanted:
            return []
        return [
            [
                view.node,
                view.state,
                view.address,
                view.accelerator,
                view.accelerators,
                self._phases.get(view.node, "") if view.state == "starting" else "",
            ]
            for view in self.fleet.views()
            if wanted is None or view.node in wanted
        ]
