"""Dispatch: brings tasks to executors and answers to callers, also when executors are lost."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from skyward.calls.answers import Answer, Failed
from skyward.calls.cancelling import Canceller
from skyward.calls.counts import Counts
from skyward.calls.debuggers import DebuggerDesk
from skyward.calls.finishing import Finisher
from skyward.calls.held import HeldWorkers
from skyward.calls.lane import Lane
from skyward.calls.lanes import Lanes
from skyward.calls.loop import Loop
from skyward.calls.nesting import NestedCalls
from skyward.calls.packing import Packer
from skyward.calls.prospects import Prospects
from skyward.calls.receiving import Receiver
from skyward.calls.sending import Sending
from skyward.calls.task import Task
from skyward.calls.telling import CallTeller
from skyward.calls.timeouts import Timeouts
from skyward.console import Console
from skyward.errors import (
    InstanceLostError,
    NodeLostError,
    PoolClosedError,
    ProtocolError,
    SkywardError,
    TaskCancelledError,
)
from skyward.events import EventStream
from skyward.listeners import Tracking
from skyward.wire import messages
from skyward.wire.frames import Frame
from skyward.wire.messages import Recall, Result

CANCEL_LOOK_SECONDS = 0.005
MAKE_AGAIN = "the object is gone with it: make it again, or have @sky.cls(restart=True) do that"
CLOSED = "this pool is closed; run functions inside its `with sky.Compute()` block"


class Dispatcher:
    """Owns the tasks of a pool and the lanes they run on."""

    def __init__(
        self,
        loop: Loop,
        console: Console,
        packer: Packer,
        prospects: Prospects,
        events: EventStream,
        nested: NestedCalls,
    ) -> None:
        """`nested` makes the calls that tasks ask for."""
        self.counts = Counts()
        self.teller = CallTeller(events, Tracking(console.note))
        self.lanes = Lanes()
        self.packer = packer
        self.closed = False
        self._why_closed = CLOSED
        self._prospects = prospects
        self._loop = loop
        self._finisher = Finisher(packer, self.counts, self.teller)
        self._canceller = Canceller(loop, self.lanes.drain, console.note)
        self.held = HeldWorkers(self.lanes, console, self.cancel)
        self.timeouts = Timeouts(loop, self.lanes, self.cancel)
        self.debuggers = DebuggerDesk(console, self.timeouts)
        self._sending = Sending()
        self._nested = nested
        self.receiver = Receiver(
            loop,
            self.lanes,
            packer,
            console,
            self._sending,
            self._finisher,
            self.debuggers,
            self.teller,
            nested,
            cancel=self.cancel,
            abandon=self._abandon,
        )
        self._releasing: deque[Lane] = deque()
        """Lanes whose executor can get memory back; finalizers append to this."""
        loop.after_each_round(self._after_round)

    # Lanes come and go.

    def add(self, lane: Lane, *, usable: bool) -> None:
        """Add a lane; unless it is `usable`, it gets no tasks yet."""
        self.packer.recipients.add(lane)
        self.lanes.add(lane, usable=usable)

    def drain(self, lane: Lane, *, nested: bool = False) -> None:
        """Give a lane no new tasks; with `nested`, only those that a task which waits may need."""
        self.lanes.drain(lane, nested=nested)
        if nested:
            self._loop.call_soon(lambda: None)

    def recall(self, lane: Lane) -> None:
        """Call back the tasks that a lane has not begun; others may run them."""
        with self.lanes.lock:
            ahead = lane.load.overfull and not lane.load.recalling
            lane.load.recalling = lane.load.recalling or ahead
        if ahead:
            lane.tell(Recall())

    def pause(self, lane: Lane) -> None:
        """Give a lane that is out of reach no new tasks for now; it keeps the tasks it has."""
        self.lanes.pause(lane)
        self._sending.cut_off(lane)

    def resume(self, lane: Lane) -> None:
        """Use a lane again that is back within reach."""
        self.lanes.resume(lane)
        self._sending.release(lane)

    def lose(self, lane: Lane, problem: Callable[[Task], SkywardError]) -> None:
        """Give a lane up: its running tasks fail or are retried, its other tasks are requeued."""
        self.receiver.lost(lane)
        self.packer.recipients.discard(lane)
        started, unstarted = self.lanes.remove(lane)
        self.counts.bytes_sent += lane.channel.bytes_sent
        self.counts.bytes_received += lane.channel.bytes_received
        lane.close()
        self.debuggers.lost(lane)
        self._nested.lose(lane)
        self._sending.release(lane)
        for task in started:
            self._retry_or_fail(task, problem(task))
        self.lanes.requeue(reversed(unstarted))
        if started or unstarted:
            self.lanes.refill_all()
        for task in (*started, *unstarted):
            self._finisher.release(task)

    def _retry_or_fail(self, task: Task, problem: SkywardError) -> None:
        """Retry or fail a task whose executor was lost."""
        if task.pinned is not None:
            self._finisher.fail(task, InstanceLostError(f"{problem}; {MAKE_AGAIN}"))
            return
        if task.done or not task.retries or task.inputs:
            self._finisher.fail(task, problem)
            return
        task.retries -= 1
        self.counts.retried += 1
        self.teller.retried(task, str(problem))
        self.lanes.requeue([task])

    # Tasks go out.

    def run(self, task: Task) -> Answer:
        """Submit a task and wait for its answer; after an exception, `cancel` gives the task up."""
        lane = self.submit(task)
        if lane is not None and lane.channel.shares_memory:
            try:
                self._read_answer(lane, task)
            except BaseException:
                self._find_slots()
                raise
        return task.wait()

    def _read_answer(self, lane: Lane, task: Task) -> None:
        """Read the answer of a task on this thread, if nothing else comes before it.

        A Ctrl-C may come after each step here. So all but a plain value stays for the loop's
        thread: the executor tells again, when `cancel` asks, that the task has ended.
        """
        channel = lane.channel
        waiter = self._loop.borrow(channel, task)
        if waiter is None:
            return
        task.waiter = waiter
        if not task.done:
            waiter.wait()
        task.waiter = None
        with channel.reading:
            frame = channel.peek() if self._loop.lends(channel, task) and not task.done else None
            result = None if frame is None else _plain_result(task, frame)
            if frame is not None and result is not None:
                channel.take(frame)
        self._loop.give_back(channel, waiter)
        if frame is not None and result is not None:
            self.receiver.answered(lane, frame, result)
            if self.lanes.refillable or self._releasing or self.packer.has_unused:
                self._loop.call_soon(lambda: None)

    def submit(self, task: Task) -> Lane | None:
        """Send a task to an executor with a free slot, or queue it; returns that executor."""
        try:
            with self.lanes.lock:
                if self.closed:
                    raise PoolClosedError(self._why_closed)
                self.counts.submitted += 1
                lane = self._assign(task)
        except KeyboardInterrupt:
            self._find_slots()
            raise
        if lane is not None:
            self._send(lane, task)
        return lane

    def _find_slots(self) -> None:
        """Find every free slot again after a Ctrl-C, and fill it."""
        self.lanes.relist()
        self._loop.call_soon(lambda: None)

    def submit_all(self, tasks: list[Task]) -> None:
        """Submit tasks together: no other task comes between them on any worker."""
        sends = []
        try:
            with self.lanes.lock:
                if self.closed:
                    raise PoolClosedError(self._why_closed)
                for task in tasks:
                    self.counts.submitted += 1
                    lane = self._assign(task)
                    if lane is not None:
                        sends.append((lane, task))
        except KeyboardInterrupt:
            self._find_slots()
            raise
        if len(sends) == 1 or not any(task.parcel.heavy for _, task in sends):
            for lane, task in sends:
                self._send(lane, task)
            return
        # Several large transfers go at the same time. Most executors only get a small message that
        # says where to fetch the large buffers.
        for sending in [self._submit_send(lane, task) for lane, task in sends]:
            sending.result()

    def submit_nested(self, task: Task) -> None:
        """Queue a task that another task has started; never waits."""
        with self.lanes.lock:
            if self.closed:
                raise PoolClosedError(self._why_closed)
            self.counts.submitted += 1
            if self.teller.events.listened:
                self.teller.submitted(task)
            if not self._fails_at_once(task):
                self.lanes.queue_nested(task)
        # Its end fills the lane that has room.
        self._loop.call_soon(lambda: None)

    def _submit_send(self, lane: Lane, task: Task) -> Future[None]:
        self.timeouts.start(task)
        return self._sending.submit(lane, functools.partial(self._send, lane, task))

    def _assign(self, task: Task) -> Lane | None:
        if self.teller.events.listened:
            self.teller.submitted(task)
        lane = self.lanes.assign(task)
        if lane is None:
            self._queue(task)
        elif self.teller.events.listened or task.trace is not None:
            self.teller.started(lane, task)
        return lane

    def _queue(self, task: Task) -> None:
        if not self._fails_at_once(task):
            self.lanes.queue(task)

    def _fails_at_once(self, task: Task) -> bool:
        """Fail a task that can never run."""
        problem = self._why_not(task)
        if problem is None:
            return False
        nowhere = Failed.because(problem)
        task.finish(nowhere)
        self.teller.ended(task, nowhere)
        return True

    def _why_not(self, task: Task) -> SkywardError | None:
        """Why a task can never run; None if it can."""
        if task.pinned is not None and not self.lanes.has(task.pinned):
            return InstanceLostError(
                f"{task.name} has lost its worker on {task.pinned.where}; {MAKE_AGAIN}"
            )
        return None if self._prospects.can_run(task) else self._nowhere_to_run(task)

    def _send(self, lane: Lane, task: Task) -> None:
        if task.timeout is not None:
            self.timeouts.start(task)
        if task.inputs:
            lane.feed(task)
        try:
            if not lane.send(task):
                self.lanes.take_back(lane, task)
                self._finisher.release(task)
            if self.teller.events.listened:
                self.teller.transferred(lane, task, "sent", task.parcel.encoded.size)
            if task.trace is not None:
                task.trace.sent()
        except KeyboardInterrupt:
            if lane.channel.aborted:
                self.drain(lane)
            raise
        except OSError:
            # The executor is gone; `lose` retries or fails its tasks.
            return
        except SkywardError as problem:
            self.lanes.take_back(lane, task)
            self._finisher.finish(task, Failed.because(problem))

    # After every round of the loop: refill lanes, tell executors what nobody uses any more.

    def _after_round(self) -> None:
        for lane in self.lanes.take_refillable():
            self._fill(lane)
        self.packer.tell_unused()
        while self._releasing:
            self._releasing.popleft().connection.flush_releases()

    def note_release(self, lane: Lane) -> None:
        """Have a lane's executor told which memory it gets back; a finalizer may call this."""
        self._releasing.append(lane)

    def _fill(self, lane: Lane) -> None:
        light: list[Task] = []
        while (task := self.lanes.assign_next(lane)) is not None:
            self.teller.started(lane, task)
            if lane.takes_long(task):
                self.timeouts.start(task)
                self._sending.run(lane, functools.partial(self._send, lane, task))
            elif task.inputs or task.timeout is not None or task.parcel.encoded.buffers:
                lane.connection.when_free(functools.partial(self._send, lane, task))
            else:
                light.append(task)
        if light:
            lane.connection.when_free(lambda: self._send_light(lane, light))

    def _send_light(self, lane: Lane, tasks: list[Task]) -> None:
        try:
            unsent = lane.send_small(tasks)
        except OSError:
            return
        for task in tasks:
            if task.trace is not None:
                task.trace.sent()
        for task in unsent:
            self.lanes.take_back(lane, task)
            self._finisher.release(task)

    def recall_stuck(self) -> None:
        """Call back tasks that were sent ahead and now wait behind a slow one."""
        for lane in self.lanes.take_stuck():
            lane.tell(Recall())

    # Cancelling.

    def cancel(self, task: Task, problem: BaseException | None = None) -> None:
        """Give a task up: the caller stops waiting at once, and the remote work is stopped."""
        task.cancelled = problem is None or isinstance(problem, TaskCancelledError)
        reason = problem or TaskCancelledError(f"{task.name} was cancelled")
        with self.lanes.lock:
            task.waiting = False
            lane = self.lanes.with_task(task)
        self._finisher.fail(task, reason)
        if lane is not None:
            self._canceller.stop(lane, task)
            if lane.channel.aborted:
                self.drain(lane)

    def _abandon(self, lane: Lane, task: Task) -> None:
        """End a stream whose consumer wants no more items."""
        if task.id in lane.tasks and not self.closed:
            self._canceller.end_stream(lane, task)

    # Ending.

    def fail_unrunnable(self) -> None:
        """Fail the waiting tasks that no node will ever run."""
        unrunnable = self.lanes.take_unrunnable(self._prospects.can_run)
        for task in unrunnable:
            self._finisher.finish(task, Failed.because(self._nowhere_to_run(task)))

    def fail_waiting(self, why: BaseException) -> None:
        """Fail every task that waits; tasks that come later may wait again."""
        for task in self.lanes.take_unrunnable(lambda _: False):
            problem = NodeLostError(
                f"{task.name} has no node to run on: {why}; the next call has one started again"
            )
            self._finisher.finish(task, Failed.because(problem))

    def _nowhere_to_run(self, task: Task) -> NodeLostError:
        why = self._prospects.why_not()
        return NodeLostError(
            f"{task.name} has nowhere to run: "
            + (f"{why}; " if why else "every node it could use is lost; ")
            + "enter a new Compute"
        )

    def cancel_all(self, why: str, seconds: float) -> None:
        """Cancel every task, and wait for the executors to stop, for so many seconds at most."""
        with self.lanes.lock:
            unfinished = self.lanes.take_all()
        for task in unfinished:
            self.cancel(task, PoolClosedError(f"{task.name} was not done: {why}"))
        deadline = time.monotonic() + seconds
        while any(lane.tasks for lane in self.lanes if not lane.lost):
            if time.monotonic() > deadline:
                return
            time.sleep(CANCEL_LOOK_SECONDS)

    def close(self, why: str = "") -> None:
        """Refuse new tasks; tasks that are not done fail, because of `why` if that is given."""
        with self.lanes.lock:
            self.closed = True
            self._why_closed = why or CLOSED
            unfinished = self.lanes.take_all()
        self.debuggers.close()
        for task in unfinished:
            # A user who closes the pool does not want the rest of a stream.
            task.cancelled = task.cancelled or task.stream is not None
            problem = PoolClosedError(
                f"{task.name} was not done: {why}"
                if why
                else f"the pool closed before {task.name} was done; wait for its result inside the "
                "`with sky.Compute()` block"
            )
            self._finisher.fail(task, problem)

    @property
    def backlog(self) -> int:
        """How many tasks wait for a free slot."""
        return self.lanes.backlog

    def running(self) -> list[tuple[int, str, int, int]]:
        """The number, name, node and worker of every task that an executor runs."""
        with self.lanes.lock:
            return [
                (task.id, task.name, lane.node, lane.worker)
                for lane in self.lanes
                for task in lane.load.started()
            ]

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from executors, over sockets."""
        lanes = list(self.lanes)
        sent = sum(lane.channel.bytes_sent for lane in lanes)
        received = sum(lane.channel.bytes_received for lane in lanes)
        return self.counts.bytes_sent + sent, self.counts.bytes_received + received


def _plain_result(task: Task, frame: Frame) -> Result | None:
    """The message of a frame that is the value of a task, and all of it."""
    if frame.kind != Result.KIND:
        return None
    try:
        result = messages.decode_as(Result, frame.kind, frame.meta)
    except ProtocolError:
        return None
    payload = result.payload
    if payload is None or payload.buffers or payload.pickle != frame.body_length:
        return None
    return result if result.task == task.id else None
