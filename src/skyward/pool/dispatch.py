"""Dispatch: brings tasks to lanes and results to callers, whatever is lost between."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyward.console import Console
from skyward.errors import (
    NodeLostError,
    PoolClosedError,
    ProtocolError,
    SkywardError,
    TaskCancelledError,
    TaskTimeoutError,
)
from skyward.pool.lane import Lane
from skyward.pool.loop import Loop
from skyward.pool.parcels import Packer
from skyward.pool.scheduler import Scheduler
from skyward.pool.streams import Arrivals, Feeder, RemoteIterator
from skyward.pool.task import Failed, Outcome, Streaming, Task, Value, remote_failure
from skyward.wire import messages
from skyward.wire.frames import Frame
from skyward.wire.messages import (
    Credit,
    End,
    Evicted,
    Failure,
    Item,
    Missing,
    Recall,
    Recalled,
    Released,
    Result,
    Written,
)

CANCEL_GRACE = 1.0
"""Seconds a cancelled task has to end by itself before its process is killed."""
RECALL_SECONDS = 0.05
"""After so long without a result, tasks sent ahead are called back for others to take."""


@dataclass(slots=True)
class Counts:
    """What a pool has done so far."""

    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    workers_died: int = 0
    nodes_lost: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    started: float = field(default_factory=time.monotonic)


class Dispatcher:
    """Owns the tasks of a pool and the lanes they run on."""

    def __init__(self, loop: Loop, console: Console) -> None:
        self.counts = Counts()
        self.lanes: set[Lane] = set()
        self.packer: Packer
        self.closed = False
        self.has_hope: Callable[[Task], bool] = lambda task: True
        """Whether some node may still come to run a task."""
        self.why_hopeless: Callable[[], str] = lambda: ""
        """What became of the nodes."""
        self._loop = loop
        self._console = console
        self._lock = threading.RLock()
        self._scheduler: Scheduler[Task] = Scheduler()
        self._dirty: set[Lane] = set()
        self.releasing: deque[Lane] = deque()
        """Lanes whose executor can have memory back; appended to from finalizers."""
        loop.between = self._between

    # Lanes come and go.

    def add(self, lane: Lane, *, usable: bool) -> None:
        """A lane is there; its frames arrive from now on at `receive`."""
        with self._lock:
            self.lanes.add(lane)
            lane.open = usable
            if usable:
                self._scheduler.add(lane)
            self._dirty.add(lane)

    def drain(self, lane: Lane) -> None:
        """Give a lane nothing new."""
        with self._lock:
            lane.paused = False
            if lane.open:
                self._scheduler.remove(lane)

    def pause(self, lane: Lane) -> None:
        """Give a lane nothing new for now: it is cut off. What it has been sent stays there."""
        with self._lock:
            if lane.open:
                self._scheduler.remove(lane)
                lane.paused = True

    def resume(self, lane: Lane) -> None:
        """A lane is connected again."""
        with self._lock:
            lane.back_since = time.monotonic()
            if lane.paused and not lane.lost:
                lane.paused, lane.open = False, True
                self._scheduler.add(lane)
                self._dirty.add(lane)

    def lose(self, lane: Lane, problem: Callable[[Task], SkywardError]) -> None:
        """A lane is gone for good: what ran on it is struck, what only waited there goes on."""
        with self._lock:
            self.drain(lane)
            self.lanes.discard(lane)
            started, unstarted = lane.started(), lane.unstarted()
            lane.tasks.clear()
            self.counts.bytes_sent += lane.channel.bytes_sent
            self.counts.bytes_received += lane.channel.bytes_received
        lane.close()
        for task in started:
            self._strike(task, problem(task))
        with self._lock:
            for task in reversed(unstarted):
                self._requeue(task)
            self._dirty.update(self.lanes)
        for task in (*started, *unstarted):
            self._let_go(task)

    def _strike(self, task: Task, problem: SkywardError) -> None:
        """A task lost its place through no fault of its own: again, or the error."""
        self._end_stream(task, Failed.because(problem))
        if task.done:
            return
        if task.retries > 0 and not task.inputs:
            task.retries -= 1
            self.counts.retried += 1
            with self._lock:
                self._requeue(task)
            return
        self._finish(task, Failed.because(problem))

    def _requeue(self, task: Task) -> None:
        if task.done:
            return
        task.lane = None
        task.waiting = True
        self._scheduler.queue(task, first=True)

    # Tasks go out.

    def submit(self, task: Task) -> None:
        """Send a task to a free place, or queue it."""
        try:
            with self._lock:
                if self.closed:
                    raise PoolClosedError("this pool is closed")
                self.counts.submitted += 1
                lane = self._assign(task)
        except KeyboardInterrupt:
            self._mend()
            raise
        if lane is not None:
            self._send(lane, task)

    def _mend(self) -> None:
        """A Ctrl-C may have come between two steps: no free place may be forgotten over it."""
        with self._lock:
            for lane in self.lanes:
                self._scheduler.relist(lane)
            self._dirty.update(self.lanes)
        self._loop.soon(lambda: None)

    def submit_all(self, tasks: list[Task]) -> None:
        """Submit tasks such that no other comes between them on any worker."""
        sends = []
        try:
            with self._lock:
                if self.closed:
                    raise PoolClosedError("this pool is closed")
                for task in tasks:
                    self.counts.submitted += 1
                    lane = self._assign(task)
                    if lane is not None:
                        sends.append((lane, task))
        except KeyboardInterrupt:
            self._mend()
            raise
        if len(sends) == 1 or not any(task.parcel.heavy for _, task in sends):
            for lane, task in sends:
                self._send(lane, task)
            return
        # Several large transfers share the way out; none waits for the others.
        senders = [threading.Thread(target=self._send, args=pair, daemon=True) for pair in sends]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()

    def _assign(self, task: Task) -> Lane | None:
        place = self._scheduler.pick(task)
        if place is None:
            if not self.has_hope(task):
                task.finish(Failed.because(self._nowhere_to_run(task)))
                return None
            task.waiting = True
            self._scheduler.queue(task)
            return None
        assert isinstance(place, Lane)
        # In this order, so that a task on a lane knows it, whatever interrupts us.
        task.lane = place
        self._scheduler.begin(place, task)
        return place

    def _send(self, lane: Lane, task: Task) -> None:
        if task.timeout is not None and task.timer is None and not task.done:
            task.timer = self._loop.later(task.timeout, lambda: self._time_out(task))
        if task.inputs:
            lane.feeders[task.id] = [
                Feeder(task, index, lane, source) for index, source in enumerate(task.inputs)
            ]
        try:
            if not lane.send(task):
                self._drop(lane, task)
        except KeyboardInterrupt:
            if lane.channel.aborted:
                self.drain(lane)
            raise
        except OSError:
            # The executor is gone; losing the lane decides what becomes of its tasks.
            return
        except SkywardError as problem:
            with self._lock:
                self._scheduler.end(lane, task.id)
            self._finish(task, Failed.because(problem))

    def _drop(self, lane: Lane, task: Task) -> None:
        """A task was cancelled before it was sent."""
        with self._lock:
            self._scheduler.end(lane, task.id)
            self._dirty.add(lane)
        self._let_go(task)

    # What comes back: on the loop's thread, or on a transfer thread for a large body.

    def receive(self, lane: Lane, frame: Frame) -> None:
        """Deal with a frame from an executor."""
        message = messages.decode(frame.kind, frame.meta)
        match message:
            case Result():
                self._on_result(lane, frame, message)
            case Failure():
                self._on_failure(lane, frame, message)
            case Written():
                task = lane.tasks.get(message.task)
                if task is not None:
                    task.wrote = True
                name = task.name if task is not None else ""
                self._console.output(
                    message.text, message.stream, lane.node, lane.worker, name, message.transient
                )
            case Item():
                pieces = lane.take(frame, message.payload)
                task = lane.tasks.get(message.task)
                if task is not None and task.stream is not None:
                    task.stream.arrived(pieces)
            case End():
                self._on_end(lane, message)
            case Credit():
                for feeder in lane.feeders.get(message.task, [])[message.stream :][:1]:
                    feeder.grant(message.count)
            case Released():
                lane.let_go(message.segments)
            case Evicted():
                lane.evicted(message.digests)
            case Missing():
                task = lane.tasks.get(message.task)
                if task is not None:
                    sender = threading.Thread(
                        target=self._resend, args=(lane, task, message), daemon=True
                    )
                    sender.start()
            case Recalled():
                self._on_recalled(lane, message)
            case _:
                raise ProtocolError(f"an executor does not send {type(message).__name__}")

    def _on_result(self, lane: Lane, frame: Frame, result: Result) -> None:
        if result.payload is None:
            task = lane.tasks.get(result.task)
            if task is not None and not task.done:
                task.stream = arrivals = Arrivals(task, lane)
                opened = functools.partial(
                    RemoteIterator, task, lane, arrivals, self._abandon, self.flush_output
                )
                self._finish(task, Streaming(opened))
            return
        pieces = lane.take(frame, result.payload)
        task = self._leave(lane, result.task, result.ran)
        if task is not None:
            self._finish(task, Value(pieces, f"{task.name} on {lane.where}"))

    def _on_failure(self, lane: Lane, frame: Frame, failure: Failure) -> None:
        pieces = lane.take(frame, failure.payload) if failure.payload is not None else None
        task = self._leave(lane, failure.task, failure.ran)
        if task is None:
            return
        outcome = remote_failure(failure, pieces, task.name, lane.where)
        self._end_stream(task, outcome)
        self._finish(task, outcome)

    def _on_end(self, lane: Lane, end: End) -> None:
        task = self._leave(lane, end.task, 1.0)
        if task is not None:
            self._end_stream(task, None)
            self._let_go(task)

    def _on_recalled(self, lane: Lane, recalled: Recalled) -> None:
        with self._lock:
            lane.recalling = False
            lane.average, lane.window = 1.0, lane.capacity
            for task_id in reversed(recalled.tasks):
                task = self._scheduler.end(lane, task_id)
                if task is not None and not task.done:
                    self._requeue(task)
        with self._lock:
            self._dirty.update(self.lanes)

    def _resend(self, lane: Lane, task: Task, missing: Missing) -> None:
        by_value = task.parcel.by_value
        if missing.unreachable and by_value is not None:
            try:
                parcel = by_value()
            except Exception as problem:
                with self._lock:
                    self._scheduler.end(lane, task.id)
                    self._dirty.add(lane)
                self._finish(task, Failed.because(problem))
                self._loop.soon(lambda: None)
                return
            before, task.parcel = task.parcel, parcel
            self.packer.release(before)
            # It may have been cancelled, and let go of, meanwhile.
            self._let_go(task)
        lane.resend(task, missing.digests, missing.keys)

    def _leave(self, lane: Lane, task_id: int, ran: float) -> Task | None:
        """A task is no longer on its lane, which can take another."""
        with self._lock:
            task = self._scheduler.end(lane, task_id)
            lane.note(ran)
            lane.last_result = time.monotonic()
            self._dirty.add(lane)
        for feeder in lane.feeders.pop(task_id, ()):
            feeder.stop()
        if task is not None and task.timer is not None:
            task.timer.cancel()
        return task

    def _finish(self, task: Task, outcome: Outcome[Any]) -> None:
        if task.finish(outcome) and not isinstance(outcome, Streaming):
            self._count(task, failed=isinstance(outcome, Failed))
        self._let_go(task)

    def _end_stream(self, task: Task, problem: Outcome[Any] | None) -> None:
        """If the task is a stream, there is no more of it."""
        if task.stream is not None:
            task.stream.ended(problem)
            self._count(task, failed=problem is not None)

    def _count(self, task: Task, *, failed: bool) -> None:
        if task.counted:
            return
        task.counted = True
        if not failed:
            self.counts.succeeded += 1
        elif task.cancelled:
            self.counts.cancelled += 1
        else:
            self.counts.failed += 1

    def _let_go(self, task: Task) -> None:
        """Free what a task holds, once it is done and no lane may still be sending it."""
        if task.done and (task.lane is None or task.id not in task.lane.tasks):
            self.packer.release(task.parcel)

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown."""
        if task.wrote:
            self._console.drain()

    # Between rounds of the loop: refill lanes, pass on what was let go.

    def _between(self) -> None:
        if self._dirty:
            with self._lock:
                dirty, self._dirty = self._dirty, set()
            for lane in dirty:
                self._fill(lane)
        retired, forgotten = self.packer.take_retired(), self.packer.take_forgotten()
        if retired or forgotten:
            for lane in list(self.lanes):
                lane.forget(segments=retired, keys=forgotten)
        while self.releasing:
            self.releasing.popleft().flush_releases()

    def tell_stale(self, digests: list[bytes], segments: list[int]) -> None:
        """These contents have been replaced where they came from; workers can drop them."""
        for lane in list(self.lanes):
            lane.forget(digests=digests, segments=segments)

    def _fill(self, lane: Lane) -> None:
        light: list[Task] = []
        while True:
            with self._lock:
                task = self._scheduler.next_for(lane)
                if task is None:
                    break
                task.waiting = False
                task.lane = lane
                self._scheduler.begin(lane, task)
            if lane.takes_long(task):
                threading.Thread(target=self._send, args=(lane, task), daemon=True).start()
            elif task.inputs or task.timeout is not None or task.parcel.encoded.buffers:
                lane.soon(functools.partial(self._send, lane, task))
            else:
                light.append(task)
        if light:
            lane.soon(lambda: self._send_light(lane, light))

    def _send_light(self, lane: Lane, tasks: list[Task]) -> None:
        try:
            unsent = lane.send_small(tasks)
        except OSError:
            return
        for task in unsent:
            self._drop(lane, task)

    def recall_stuck(self) -> None:
        """Call back tasks that were sent ahead and now wait behind a slow one."""
        now = time.monotonic()
        for lane in list(self.lanes):
            ahead = len(lane.tasks) > lane.capacity
            if ahead and not lane.recalling and now - lane.last_result > RECALL_SECONDS:
                lane.recalling = True
                lane.tell(Recall())

    # Cancelling.

    def cancel(self, task: Task, problem: BaseException | None = None) -> None:
        """Give a task up: the caller is released at once, the remote work is stopped."""
        task.cancelled = problem is None
        reason = problem or TaskCancelledError(f"{task.name} was cancelled")
        with self._lock:
            task.waiting = False
            lane = task.lane
            on_lane = lane is not None and task.id in lane.tasks
        self._finish(task, Failed.because(reason))
        self._end_stream(task, Failed.because(reason))
        if on_lane and lane is not None:
            self._stop_remote(lane, task)
            if lane.channel.aborted:
                self.drain(lane)

    def _stop_remote(self, lane: Lane, task: Task) -> None:
        lane.stop(task)
        self._loop.later(CANCEL_GRACE, lambda: self._insist(lane, task))

    def _insist(self, lane: Lane, task: Task) -> None:
        """The grace is over: if the task still holds its place, its process has to go."""
        if task.id not in lane.tasks or lane.lost:
            return
        back_for = time.monotonic() - lane.back_since
        if not lane.channel.connected or back_for < CANCEL_GRACE:
            # The cancellation has not reached it, or only just.
            self._loop.later(CANCEL_GRACE, lambda: self._insist(lane, task))
        else:
            lane.kill(f"{task.name} was cancelled and did not end within {CANCEL_GRACE} s")

    def _abandon(self, task: Task) -> None:
        """The consumer of a stream wants no more of it."""
        lane = task.lane
        if lane is None or task.id not in lane.tasks or self.closed:
            return
        lane.tell(Credit(task.id, -1, -1))
        self._loop.later(CANCEL_GRACE, lambda: self._stop_if_there(lane, task))

    def _stop_if_there(self, lane: Lane, task: Task) -> None:
        if task.id in lane.tasks and not lane.lost:
            task.cancelled = True
            self._stop_remote(lane, task)

    def _time_out(self, task: Task) -> None:
        if task.done and task.stream is None:
            return
        lane = task.lane
        where = f" on {lane.where}" if lane is not None else ""
        self.cancel(
            task,
            TaskTimeoutError(
                f"{task.name} ran longer than its timeout of {task.timeout:g} s{where}; the remote "
                "work was cancelled"
            ),
        )

    # Ending.

    def fail_stranded(self) -> None:
        """Waiting tasks that no node will ever take must not wait for ever."""
        with self._lock:
            stranded = [t for t in self._scheduler.queued() if not self.has_hope(t)]
            for task in stranded:
                task.waiting = False
        for task in stranded:
            self._finish(task, Failed.because(self._nowhere_to_run(task)))

    def _nowhere_to_run(self, task: Task) -> NodeLostError:
        why = self.why_hopeless()
        return NodeLostError(
            f"{task.name} has nowhere to run: "
            + (f"{why}; " if why else "every node it could use is lost; ")
            + "enter a new Compute"
        )

    def close(self) -> None:
        """Take nothing more; whoever waits is told."""
        with self._lock:
            self.closed = True
            stranded = self._scheduler.forget_queue()
            stranded += [task for lane in self.lanes for task in lane.tasks.values()]
        for task in stranded:
            problem = PoolClosedError(f"the pool closed before {task.name} was done")
            if task.stream is not None:
                # Whoever closed the pool did not want the rest of it.
                task.cancelled = True
                self._end_stream(task, Failed.because(problem))
            self._finish(task, Failed.because(problem))

    @property
    def backlog(self) -> int:
        """How many tasks wait for a place."""
        with self._lock:
            return self._scheduler.backlog

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from executors, over sockets."""
        lanes = list(self.lanes)
        sent = sum(lane.channel.bytes_sent for lane in lanes)
        received = sum(lane.channel.bytes_received for lane in lanes)
        return self.counts.bytes_sent + sent, self.counts.bytes_received + received
