"""The hub: gives every viewer of this process's pools a snapshot, and then what changes.

While nobody is there, the hub has no thread, the pools make no events, and no node is measured.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from skyward.nodes.fleet import Fleet
from skyward.page.sampling import Sampler, Samples
from skyward.page.state import PoolState, key_of
from skyward.staff import Staff

TICK_SECONDS = 0.1
SAMPLE_SECONDS = 2.0
IDLE_SAMPLE_SECONDS = 10.0
"""How often pools are measured for a page that nobody looks at, but that is served."""
BATCHES_WAITING = 100
"""So many batches may wait for a viewer, which is 10 s; one that is slower is dropped."""

Messages = list[dict[str, Any]]


class Viewer:
    """One who looks: a queue of batches, each a line of JSON; None ends it."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.dropped = False
        """Whether the viewer was too slow, or the hub has ended."""

    def put(self, batch: str | None) -> bool:
        """Give the viewer a batch; False if too many wait already."""
        if batch is not None and self._batches.qsize() >= BATCHES_WAITING:
            self.dropped, batch = True, None
        self._batches.put(batch)
        return batch is not None

    def next(self, seconds: float) -> str | None:
        """Wait for the next batch; "" after so many seconds without one, None at the end."""
        if self.dropped:
            return None
        try:
            return self._batches.get(timeout=seconds)
        except queue.Empty:
            return ""


class Watched:
    """One pool, while anybody looks."""

    def __init__(self, fleet: Fleet, wake: Callable[[], None]) -> None:
        self.fleet = fleet
        self.state = PoolState(fleet, wake)
        self.sampler = Sampler(fleet)
        self.sampling: Future[dict[str, Any]] | None = None
        self.next_sample = 0.0


class Hub:
    """The pools of this process and those who look at them; any thread may call the methods."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._fleets: list[Fleet] = []
        self._watched: dict[str, Watched] = {}
        self._samples: dict[str, Samples] = {}
        """The last samples of each pool: a page that is opened again has its curves again."""
        self._viewers: list[Viewer] = []
        self._held = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._staff = Staff("skyward-page", most=8)

    @property
    def fleets(self) -> list[Fleet]:
        """The open pools of this process."""
        with self._lock:
            return list(self._fleets)

    def add(self, fleet: Fleet) -> None:
        """Show a pool from now on."""
        with self._lock:
            self._fleets.append(fleet)
            if self._is_watched:
                self._tell([self._watch(fleet)])

    def remove(self, fleet: Fleet) -> None:
        """Show a pool no longer: it is closed. Its last events are told first."""
        with self._lock:
            if fleet in self._fleets:
                self._fleets.remove(fleet)
            watched = self._watched.pop(fleet.id, None)
            self._samples.pop(fleet.id, None)
            if watched is not None:
                fleet.events.remove(watched.state.take)
                last = watched.state.changes()
                gone = {"type": "gone", "pool": key_of(fleet), "time": time.time()}
                self._tell([gone] if last is None else [last, gone])

    # Those who look.

    def join(self) -> Viewer:
        """A new viewer, whose first batch has everything that is known; `leave` ends it."""
        viewer = Viewer()
        with self._lock:
            self._begin()
            self._tell_changes()
            self._viewers.append(viewer)
            every: Messages = []
            for watched in self._watched.values():
                every += [watched.state.snapshot(), *self._samples.get(watched.fleet.id, ())]
                watched.next_sample = 0.0
            hello: Messages = [{"type": "hello", "time": time.time(), "pid": os.getpid()}]
            viewer.put(json.dumps(hello + every))
        self._wake.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Give a viewer nothing more; after the last one, the hub ends its thread."""
        with self._lock:
            if viewer in self._viewers:
                self._viewers.remove(viewer)
            viewer.put(None)
            self._end_if_alone()

    def hold(self) -> None:
        """Remember what happens for viewers that come later, until `release`."""
        with self._lock:
            self._held += 1
            self._begin()

    def release(self) -> None:
        """End one `hold`."""
        with self._lock:
            self._held -= 1
            self._end_if_alone()

    def measure(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The snapshot and a sample of every pool, for metrics."""
        with self._lock:
            self._tell_changes()
            every = [
                (watched.fleet, watched.state.snapshot(), watched.state.durations())
                for watched in self._watched.values()
            ]
        return [
            (snapshot, Sampler(fleet).sample(every_node=True) | durations)
            for fleet, snapshot, durations in every
        ]

    @property
    def _is_watched(self) -> bool:
        return bool(self._viewers or self._held)

    def _begin(self) -> None:
        if self._thread is None:
            for fleet in self._fleets:
                self._watch(fleet)
            self._wake.clear()
            self._thread = threading.Thread(target=self._run, name="skyward-page", daemon=True)
            self._thread.start()

    def _watch(self, fleet: Fleet) -> dict[str, Any]:
        watched = self._watched[fleet.id] = Watched(fleet, self._wake.set)
        fleet.events.add(watched.state.take)
        watched.state.begin(time.time())
        return watched.state.snapshot()

    def _end_if_alone(self) -> None:
        if self._is_watched:
            return
        for watched in self._watched.values():
            watched.fleet.events.remove(watched.state.take)
        self._watched.clear()
        self._thread = None
        self._wake.set()

    # The thread: ten times a second it tells what has changed, if anybody looks.

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            with self._lock:
                if self._thread is not me:
                    return
                self._tell_changes()
                self._sample(SAMPLE_SECONDS if self._viewers else IDLE_SAMPLE_SECONDS)
                looked_at = bool(self._viewers)
            if looked_at:
                time.sleep(TICK_SECONDS)
            else:
                # To take events, and to measure: a viewer that comes wakes the thread.
                self._wake.wait(SAMPLE_SECONDS)
                self._wake.clear()

    def _tell_changes(self) -> None:
        changes = [watched.state.changes() for watched in self._watched.values()]
        self._tell([each for each in changes if each is not None])

    def _sample(self, seconds: float) -> None:
        now = time.monotonic()
        for watched in list(self._watched.values()):
            if watched.sampling is not None and watched.sampling.done():
                problem = watched.sampling.exception()
                if problem is None:
                    sample = watched.sampling.result() | watched.state.durations()
                    self._samples.setdefault(watched.fleet.id, Samples()).add(sample)
                    self._tell([sample])
                elif not watched.fleet.closed:
                    # A defect of ours: the page goes on without this sample.
                    traceback.print_exception(problem, file=sys.stderr)
                watched.sampling = None
            if watched.sampling is None and now >= watched.next_sample:
                watched.next_sample = now + seconds
                watched.sampling = self._staff.submit(watched.sampler.sample)

    def _tell(self, messages: Messages) -> None:
        if messages and self._viewers:
            batch = json.dumps(messages)
            self._viewers = [viewer for viewer in self._viewers if viewer.put(batch)]
            self._end_if_alone()


hub = Hub()
"""The hub of this process."""


def _forget() -> None:
    """Forget the parent's pools and viewers in a forked child."""
    hub._reset()


os.register_at_fork(after_in_child=_forget)
