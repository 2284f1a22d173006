"""Dispatch: calls become tasks, executors get them and callers the answers, also after losses.

The dispatcher tells the pool's listeners what becomes of calls, finds the calls that would wait for
ever, and has a thread that uses results: futures get their values, and tasks whose arguments are
futures are sent once these are done.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import io
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from skyward.calls import spans
from skyward.calls.debuggers import DEBUG_KEY, ENVIRONMENT, DebuggerDesk, debug_mode
from skyward.calls.device_tensors import BroadcastTensors, CallDevices, DeviceTensors
from skyward.calls.flow import Crowd, Flow
from skyward.calls.kept import KeptResult, ResultTensors, node_of_result
from skyward.calls.lane import Lane, Lanes, Sending, Timeouts
from skyward.calls.loop import Borrower, Loop
from skyward.calls.nested import Broadcast, NestedCalls
from skyward.calls.packer import HEAVY_BYTES, Packer
from skyward.calls.scheduler import Load, Prospects
from skyward.calls.streams import RemoteIterator
from skyward.calls.task import (
    WINDOW,
    Answer,
    Failed,
    Streaming,
    StreamItems,
    Task,
    Value,
    not_the_end,
    remote_failure,
    timeout_error,
)
from skyward.console import Console
from skyward.errors import (
    ConfigurationError,
    DeadlockError,
    InstanceLostError,
    NodeLostError,
    PoolClosedError,
    ProtocolError,
    SkywardError,
    TaskCancelledError,
)
from skyward.events import (
    CallCancelled,
    CallFailed,
    CallFinished,
    CallRetried,
    CallStarted,
    CallSubmitted,
    Curves,
    EventStream,
    NumbersLogged,
    OutputWritten,
    Place,
    Tracking,
    Transferred,
)
from skyward.functions import Function, Future, Pending
from skyward.objects.exceptions import add_note
from skyward.objects.payloads import Pieces
from skyward.spec import Options
from skyward.staff import Staff
from skyward.wire import messages
from skyward.wire.frames import Frame
from skyward.wire.messages import (
    AT_BREAKPOINTS,
    AT_FAILURES,
    KEEPING_FRAMES,
    Called,
    Cancel,
    Closed,
    Credit,
    DebuggerSays,
    Define,
    End,
    Evicted,
    Failure,
    Item,
    Logged,
    Missing,
    Payload,
    Prepared,
    Recall,
    Recalled,
    Released,
    Result,
    Room,
    Start,
    Waits,
    Written,
)

CANCEL_GRACE = 1.0
"""How long a cancelled task may take to end before its process is killed."""
CANCEL_LOOK_SECONDS = 0.005
UNFINISHED_MAX = 256 << 20
"""How many characters of a line are kept; if it has not ended by then, they are shown as a line."""
MAKE_AGAIN = "the object is gone with it: make it again, or have @sky.cls(restart=True) do that"
CLOSED = "this pool is closed; run functions inside its `with sky.Compute()` block"


@dataclass(slots=True)
class Counts:
    """What a pool has done since it was made."""

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

    def __str__(self) -> str:
        return (
            f"{self.succeeded} of {self.submitted} calls succeeded"
            + (f", {self.failed} failed" if self.failed else "")
            + (f", {self.cancelled} cancelled" if self.cancelled else "")
            + f" in {time.monotonic() - self.started:.1f} s"
        )


class Dispatcher:
    """Owns the tasks of a pool and the lanes they run on."""

    def __init__(
        self,
        loop: Loop,
        console: Console,
        packer: Packer,
        prospects: Prospects,
        events: EventStream,
        options: Options,
        devices: CallDevices,
        broadcast: Broadcast,
    ) -> None:
        """`broadcast` makes the broadcasts that tasks ask for."""
        self.pool = events.pool
        """The pool's name."""
        self.counts = Counts()
        self.teller = CallTeller(events, Tracking(console.note))
        self.lanes = Lanes()
        self.packer = packer
        self.closed = False
        self._why_closed = CLOSED
        self._owner = os.getpid()
        self._prospects = prospects
        self._loop = loop
        self._options, self._devices = options, devices
        self.default_timeout = options.default_timeout
        self.offered: dict[str, Any] = {}
        """The objects whose handles were sent somewhere, by key: nobody knows when the last copy of
        one is gone, so they live until they are closed, or the pool is."""
        self._ids = itertools.count(1)
        self._held = HeldWorkers(self.lanes, console)
        self.timeouts = Timeouts(loop, self.lanes, self.cancel)
        self.debuggers = DebuggerDesk(console, self.timeouts)
        self._sending = Sending()
        self._nested = NestedCalls(self, broadcast)
        self.results = ResultThread(packer, self.cancel)
        """Uses the results of tasks, on a thread of its own."""
        self._console = console
        self._told_left_out = False
        self.failed: tuple[int, int] | None = None
        """The worker whose task failed last, if it may be looked at in a debugger."""
        self._unfinished: dict[tuple[Lane, int, str], io.StringIO] = {}
        """For each task and stream, the beginning of a long line whose rest has not come yet."""
        self._releasing: deque[Lane] = deque()
        """Lanes whose executor can get memory back; finalizers append to this."""
        self._inside: set[int] = set()
        """The threads that hand a task over, or take an answer, and do not wait for it."""
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

    def lose(
        self, lane: Lane, problem: Callable[[Task], SkywardError], *, all_read: bool = False
    ) -> None:
        """Give a lane up: its running tasks fail or are retried.

        Those that were sent ahead are requeued if the process has ended and all that it sent has
        been read; else they may have run, and fail or are retried as well.
        """
        self._show_unfinished(lane)
        self.packer.recipients.discard(lane)
        started, unstarted = self.lanes.remove(lane)
        if not all_read:
            started, unstarted = [*started, *unstarted], []
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
            # Its node may be leaving the pool, and a task may run nowhere else.
            self.fail_unrunnable()
        for task in (*started, *unstarted):
            self._release(task)

    def _retry_or_fail(self, task: Task, problem: SkywardError) -> None:
        """Retry or fail a task whose executor was lost."""
        if task.pinned is not None:
            self._fail(task, InstanceLostError(f"{problem}; {MAKE_AGAIN}"))
            return
        if task.done or not task.retries or task.inputs:
            self._fail(task, problem)
            return
        task.retries -= 1
        self.counts.retried += 1
        self.teller.retried(task, str(problem))
        self.lanes.requeue([task])

    # Calls become tasks.

    def prepare(
        self,
        pending: Pending[Any],
        *,
        keep: bool,
        on: int | None = None,
        worker: tuple[int, int] | None = None,
        like: Task | None = None,
        copies: BroadcastTensors | None = None,
        pinned: Load[Task] | None = None,
    ) -> Task:
        """Encode a call; `keep` copies arguments that the caller may change before they are sent.

        `like` is a task of the same call, whose parcel is used again. Unless a worker is given, the
        call goes to the node of its device tensors, and the tensors stay there. With `copies`, the
        worker gets copies of them.
        """
        if self.closed or os.getpid() != self._owner:
            self.check_open()
        function = pending.use().function
        if pinned is None and (seat := function.seat) is not None:
            pinned = self._check_seat(function, seat, free=on is None and worker is None)
        if pinned is not None:
            on = pinned.node
        code = function.code()
        inputs: list[Iterator[Any]] = []
        tensors = None
        if worker is None and "torch" in sys.modules:
            tensors = DeviceTensors(self._devices, on)
        if like is not None and not like.inputs:
            parcel = self.packer.shared(like.parcel)
        else:
            refer = tensors if copies is None or worker is None else copies.refer(worker)
            parcel, inputs = self.packer.call(
                pending, keep=keep, for_many=worker is not None, refer=refer
            )
        if tensors is not None and tensors.holder is not None:
            on = tensors.holder[0]
            worker = None if tensors.holder[1] is None else (on, tensors.holder[1])
        kept = None
        if function.kept_on is not None:
            node = on if worker is None else worker[0]
            on = node_of_result(function.name, function.kept_on, node, self._devices.holder)
            device = functools.partial(self._devices.for_result, function.kept_on)
            kept = KeptResult(device, parcel.encoded.referred)
        handles = (*code.encoded.handles, *parcel.encoded.handles)
        awaits = [each for each in handles if isinstance(each, Future)] if handles else ()
        number = next(self._ids)
        task = Task(
            number,
            function.name,
            self.packer.code(code),
            parcel,
            [self.packer.handle(each) for each in handles if each not in awaits] if handles else [],
            inputs,
        )
        task.on, task.worker, task.pinned, task.apart = on, worker, pinned, function.apart
        task.timeout = self.default_timeout if function.timeout is None else function.timeout
        task.retries = function.retries or self._options.retries
        task.kept, task.awaits = kept, awaits
        if spans.MODULE in sys.modules:
            task.trace = spans.begin(function.name, number, self.pool)
        if self._console.shell is not None:
            task.cell = self._console.cell()
        task.debugged = debug_mode() if DEBUG_KEY in ENVIRONMENT else AT_BREAKPOINTS
        return task

    def check_open(self) -> None:
        """Raise `PoolClosedError` if the pool is closed, or belongs to another process."""
        if self.closed:
            raise PoolClosedError(self._why_closed)
        if os.getpid() != self._owner:
            raise PoolClosedError(
                "this pool belongs to the process that made it; a forked child must make its own"
            )

    def _check_seat(self, function: Function[..., Any], seat: Any, *, free: bool) -> Load[Task]:
        """The executor of an object whose method is called."""
        if seat.dispatcher is not self:
            raise ConfigurationError(
                f"{function.name} belongs to an object on another pool ({seat.dispatcher.pool}); "
                "call it there, or make an object on this one"
            )
        if not free:
            raise ConfigurationError(
                f"{function.name} runs where its object is, on {seat.where}; leave `on` out, and "
                "use `>>` or `>`, not `@`"
            )
        load: Load[Task] = seat.load
        return load

    def copies(self, workers: Sequence[tuple[int, int]]) -> BroadcastTensors:
        """Copies of the device tensors of one call, for each of these workers."""
        return BroadcastTensors(self._devices, workers)

    # Tasks go out.

    def run(self, task: Task) -> Any:
        """Submit a task and wait for its result; an exception meanwhile cancels the task."""
        try:
            if task.awaits:
                self.submit(task)
            else:
                self._hand_over(task, reads=True)
            return self.result(task)
        except BaseException:
            if task.cancellable:
                self.cancel(task)
                self._find_slots()
            raise

    def result(self, task: Task) -> Any:
        """Wait for a task, until all that it printed is shown; its result, or its exception."""
        answer = task.wait()
        if task.wrote or task.logged:
            self.flush_output(task)
        return answer.get()

    def _hand_over(self, task: Task, reads: bool = False) -> None:
        """Send a task to an executor with a free slot, or queue it.

        With `reads`, this thread may read the answer. A handler of a signal that runs in the middle
        of all this, on the same thread, holds up what any other call needs. So it cannot make one.
        """
        me = threading.get_ident()
        if me in self._inside:
            raise _called_by_handler(task)
        try:
            self._inside.add(me)
            lane = self._begin(task)
            if lane is not None:
                # Before it is sent: on a busy machine, the answer may be there a moment later.
                channel = lane.channel
                # Over a link, a long transfer needs somebody who reads the other end's counts.
                reads = reads and (channel.shares_memory or not lane.takes_long(task))
                borrower = self._loop.borrow(channel, task) if reads else None
                if borrower is None:
                    self._send(lane, task)
                else:
                    self._send_and_read(lane, task, borrower, me)
        finally:
            self._inside.discard(me)

    def _send_and_read(self, lane: Lane, task: Task, borrower: Borrower, me: int) -> None:
        """Send a task and read its answer on this thread, if nothing else comes before it.

        A Ctrl-C may come after each step here. So all but a plain value stays for the loop's
        thread: the executor tells again, when `cancel` asks, that the task has ended.
        """
        channel, result = lane.channel, None
        try:
            self._send(lane, task)
            task.borrower = borrower
            if not task.done:
                self._inside.discard(me)
                borrower.wait()
                self._inside.add(me)
            with channel.reading:
                if self._loop.lent.get(channel) is task and not task.done:
                    result = channel.take_result(task.id)
        finally:
            task.borrower = None
            self._loop.give_back(channel, borrower)
        if result is not None:
            self._answered(lane, result[0], (result[1], [], []))
            if self.lanes.refillable or self._releasing or self.packer.has_unused:
                self._loop.call_soon(lambda: None)

    def submit(self, task: Task) -> None:
        """Send a task to an executor with a free slot, or queue it, or wait for its arguments."""
        if task.awaits:
            self.results.submit_later([task], lambda: self.submit(task))
        else:
            self._hand_over(task)

    def future(
        self,
        task: Task,
        finish: Callable[[Any], Any] = lambda value: value,
        fail: Callable[[], None] = lambda: None,
    ) -> Future[Any]:
        """Submit a task; its result comes with the future.

        `finish` makes what the caller gets of what the function returned. `fail` is called if there
        will be no result.
        """
        future: Future[Any] = Future()
        future._bind(lambda: self.cancel(task), lambda: task.assigned)
        self.results.after(task, functools.partial(self._settle, task, future, finish, fail))
        try:
            self.submit(task)
        except BaseException:
            self.cancel(task)
            raise
        return future

    def _settle(
        self,
        task: Task,
        future: Future[Any],
        finish: Callable[[Any], Any],
        fail: Callable[[], None],
    ) -> None:
        if future.cancelled():
            fail()
            return
        try:
            value = finish(self.result(task))
        except BaseException as problem:
            fail()
            with contextlib.suppress(Exception):  # cancelled in the meantime
                future.set_exception(not_the_end(problem))
            return
        with contextlib.suppress(Exception):  # likewise
            future.set_result(value)

    def call_soon(self, action: Callable[[], None]) -> None:
        """Have the pool's thread call a function, which must not wait; never waits itself."""
        self._loop.call_soon(action)

    def _begin(self, task: Task) -> Lane | None:
        """Give a task to an executor with a free slot, which it is to be sent to, or queue it."""
        try:
            with self.lanes.lock:
                if self.closed:
                    raise PoolClosedError(self._why_closed)
                self.counts.submitted += 1
                return self._assign(task)
        except KeyboardInterrupt:
            self._find_slots()
            raise

    def _find_slots(self) -> None:
        """Find every free slot again after a Ctrl-C, and fill it."""
        self.lanes.relist()
        self._loop.call_soon(lambda: None)

    def submit_all(self, tasks: list[Task]) -> None:
        """Submit tasks together: no other task comes between them on any worker."""
        if any(task.awaits for task in tasks):
            self.results.submit_later(tasks, lambda: self.submit_all(tasks))
            return
        me = threading.get_ident()
        if me in self._inside:
            raise _called_by_handler(tasks[0])
        try:
            self._inside.add(me)
            self._hand_over_all(tasks)
        finally:
            self._inside.discard(me)

    def _hand_over_all(self, tasks: list[Task]) -> None:
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
        if task.awaits:
            self.results.submit_later([task], lambda: self.submit_nested(task))
            return
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

    def _submit_send(self, lane: Lane, task: Task) -> concurrent.futures.Future[None]:
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
                self._release(task)
            if self.teller.events.listened:
                self.teller.transferred(lane, task, "sent", task.parcel.encoded.size)
            if task.trace is not None:
                task.trace.sent()
        except KeyboardInterrupt:
            if lane.channel.aborted:
                self.drain(lane)
            raise
        except OSError as problem:
            # A handler of a signal raises a TimeoutError, too, but without a number.
            if isinstance(problem, TimeoutError) and problem.errno is None:
                if lane.channel.aborted:
                    self.drain(lane)
                raise
            # The executor is gone; `lose` retries or fails its tasks.
            return
        except SkywardError as problem:
            self.lanes.take_back(lane, task)
            self._finish(task, Failed.because(problem))

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
            self._release(task)

    def recall_stuck(self) -> None:
        """Call back tasks that were sent ahead and now wait behind a slow one."""
        for lane in self.lanes.take_stuck():
            lane.tell(Recall())

    # Executors tell of their tasks.

    def receive(self, lane: Lane, frame: Frame) -> None:
        """Deal with a frame, on the loop's thread, or on a transfer thread for a large body."""
        message = messages.decode(frame.kind, frame.meta)
        match message:
            case Result():
                self._on_result(lane, frame, message)
            case Failure():
                self._on_failure(lane, frame, message)
            case Written():
                self._on_written(lane, message)
            case Logged():
                self.teller.logged(message, lane)
                if message.left_out and not self._told_left_out:
                    self._told_left_out = True
                    self._console.note(
                        f"{lane.where} logs faster than numbers can be sent: {message.left_out} "
                        "calls of sky.log were left out; log every tenth step, for example"
                    )
            case Item():
                pieces = lane.connection.take(frame, message.payload)
                task = lane.tasks.get(message.task)
                if task is not None and task.stream is not None:
                    task.stream.put(pieces, _kept(lane, task))
            case End():
                self._on_end(lane, message)
            case Credit() if message.task < 0:
                self._nested.credit(lane, message.task, message.count)
            case Credit(stream=-1):
                task = lane.tasks.get(message.task)
                if task is not None and task.stream is not None:
                    task.stream.waits_at = message.count
            case Credit():
                lane.grant(message.task, message.stream, message.count)
            case Released():
                lane.released(message.segments)
            case Evicted():
                lane.evicted(message.digests)
            case Missing():
                task = lane.tasks.get(message.task)
                if task is not None:
                    self._resend(lane, task, message)
            case Room():
                task = lane.tasks.get(message.task)
                if task is not None and task.kept is not None:
                    # On its own thread: it may open a device, and waits for one.
                    maker = threading.Thread(
                        target=self._make_room,
                        args=(lane, task, task.kept, message.spans),
                        name="skyward-room",
                        daemon=True,
                    )
                    maker.start()
            case DebuggerSays():
                self.debuggers.heard(lane, lane.tasks.get(message.task), message)
            case Recalled():
                self.lanes.recalled(lane, message.tasks)
            case Prepared():
                lane.prepared(message.problem)
            case Waits():
                if message.waits:
                    self.lanes.lend(lane, message.task)
                else:
                    self.lanes.go_on(lane, message.task)
            case Start():
                pieces = lane.connection.take(frame, message.payload)
                self._nested.start(lane, message, pieces)
            case Define():
                pieces = lane.connection.take(frame, message.payload)
                self._nested.define(lane, message, pieces)
            case Cancel():
                self._nested.drop(lane, message.task)
            case Called():
                with self.lanes.lock:
                    ended = message.succeeded, message.failed, message.cancelled
                    self.counts.submitted += sum(ended)
                self.counts.succeeded += message.succeeded
                self.counts.failed += message.failed
                self.counts.cancelled += message.cancelled
            case Closed():
                instance = self.offered.get(message.key)
                if instance is not None:
                    instance._residence.note_closed()
            case _:
                raise ProtocolError(f"an executor does not send {type(message).__name__}")

    def _on_written(self, lane: Lane, written: Written) -> None:
        task = lane.tasks.get(written.task)
        if task is not None:
            task.wrote = True
        if not written.transient and not self._is_whole(lane, written):
            return
        name = written.name if task is None else task.name
        self._console.output(
            written.text,
            written.stream,
            lane.node,
            lane.worker,
            name,
            written.transient,
            None if task is None else task.cell,
        )
        self.teller.output(written, lane.node, lane.worker, name)

    def _is_whole(self, lane: Lane, written: Written) -> bool:
        """Keep the beginning of a long line until the rest has come, and put it before the rest.

        False if there is nothing to show yet.
        """
        key = lane, written.task, written.stream
        if written.text.endswith("\n") and key not in self._unfinished:
            return True
        beginning = self._unfinished.pop(key, None) or io.StringIO()
        lines, newline, rest = written.text.rpartition("\n")
        if not newline and beginning.tell() + len(rest) > UNFINISHED_MAX:
            lines, newline, rest = rest, "\n", ""
        if newline:
            beginning.write(lines)
            written.text = beginning.getvalue() + newline
            beginning = io.StringIO()
        if rest:
            beginning.write(rest)
            self._unfinished[key] = beginning
        return bool(newline)

    def _show_unfinished(self, lane: Lane) -> None:
        """Show the beginnings of long lines whose rest will not come."""
        for key in [key for key in self._unfinished if key[0] is lane]:
            _, task, stream = key
            self._on_written(lane, Written(task, stream, "\n", False))

    def _on_result(self, lane: Lane, frame: Frame, result: Result) -> None:
        if result.payload is not None:
            self._answered(lane, result, lane.connection.take(frame, result.payload))
            return
        task = lane.tasks.get(result.task)
        if task is not None and not task.done:
            self._open_stream(lane, task)

    def _answered(self, lane: Lane, result: Result, pieces: Pieces) -> None:
        """Give a task its value, on the loop's thread or on that of a caller."""
        task = self._leave(lane, result.task, result.ran)
        if task is not None:
            if self.teller.events.listened and result.payload is not None:
                self.teller.transferred(lane, task, "received", _size(result.payload))
            kept = None if task.kept is None else _kept(lane, task)
            self._finish(task, Value(pieces, task.name, lane.load, kept))

    def _open_stream(self, lane: Lane, task: Task) -> None:
        task.stream = items = StreamItems()
        # Before the caller takes the iterator: a short stream then ends, and frees its slot, early.
        lane.tell(Credit(task.id, -1, WINDOW))
        opened = functools.partial(
            RemoteIterator,
            task.id,
            lane.channel,
            items,
            functools.partial(self._abandon, lane, task),
            functools.partial(self.flush_output, task),
        )
        self._finish(task, Streaming(opened))

    def _on_failure(self, lane: Lane, frame: Frame, failure: Failure) -> None:
        payload = failure.payload
        pieces = lane.connection.take(frame, payload) if payload is not None else None
        task = self._leave(lane, failure.task, failure.ran)
        if task is None:
            return
        if task.debugged in (KEEPING_FRAMES, AT_FAILURES):
            self.failed = lane.node, lane.worker
        answer = remote_failure(failure, pieces, task.name, lane.where)
        self._end_stream(task, answer)
        self._finish(task, answer)

    def _on_end(self, lane: Lane, end: End) -> None:
        task = self._leave(lane, end.task, 1.0)
        if task is not None:
            task.ran = time.monotonic() - task.given if task.given else 0.0
            self._end_stream(task, None)
            self._release(task)

    def _resend(self, lane: Lane, task: Task, missing: Missing) -> None:
        send = functools.partial(lane.resend, task, missing.digests, missing.keys)

        def pack_and_send() -> None:
            if self._pack_by_value(lane, task):
                self._sending.run(lane, send)

        if missing.unreachable and task.parcel.by_value is not None:
            self._sending.aside(pack_and_send)
        else:
            self._sending.run(lane, send)

    def _pack_by_value(self, lane: Lane, task: Task) -> bool:
        """Pack a task with the bytes of its tensors, which its executor cannot fetch."""
        by_value = task.parcel.by_value
        if by_value is None:
            return True
        try:
            parcel = by_value()
        except Exception as problem:
            self.lanes.take_back(lane, task)
            self._finish(task, Failed.because(problem))
            self._loop.call_soon(lambda: None)
            return False
        before, task.parcel = task.parcel, parcel
        self.packer.release(before)
        # The task may have been cancelled, and its parcel released, meanwhile.
        self._release(task)
        return True

    def _make_room(
        self, lane: Lane, task: Task, kept: KeptResult, spans: list[tuple[int, int]]
    ) -> None:
        """Make memory for a kept result, and tell the executor where it is."""
        try:
            lane.tell(kept.make_room(task.id, lane.node, lane.worker, spans))
        except Exception as problem:
            problem.add_note(f"{task.name} has run on {lane.where}, but its result cannot be kept")
            self.cancel(task, problem)
        if task.done and task.stream is None:
            # It was cancelled meanwhile, and the memory that was freed then is here again.
            kept.discard()

    def _leave(self, lane: Lane, task_id: int, ran: float) -> Task | None:
        """Take a task off its lane, which then has room for another."""
        task = self.lanes.leave(lane, task_id, ran)
        if task is None or task.inputs:
            lane.stop_feeding(task_id)
        if task is not None:
            task.ran = ran
            if task.timer is not None:
                task.timer.cancel()
            if task.overdue and not task.done:
                self._fail(task, timeout_error(task))
        return task

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown, and trackers have its numbers."""
        if task.wrote:
            self._console.drain()
        if task.logged:
            self.teller.tracking.drain()

    # A task gets its answer, is counted once, and its memory is freed.

    def _finish(self, task: Task, answer: Answer) -> None:
        """Give a task its answer, and free its memory."""
        if task.finish(answer):
            if not isinstance(answer, Streaming):
                self._count(task, answer if isinstance(answer, Failed) else None)
        elif isinstance(answer, Value):
            answer.discard()
        if task.kept is not None and not isinstance(answer, Streaming):
            task.kept.discard()
        if task.parcel.blobs or task.parcel.by_value is not None:
            self._release(task)

    def _fail(self, task: Task, problem: BaseException) -> None:
        """Give a task a failure of the client's as its answer, and end its stream if it has one."""
        self._end_stream(task, Failed.because(problem))
        self._finish(task, Failed.because(problem))

    def _end_stream(self, task: Task, problem: Failed | None) -> None:
        """End the stream of a task, if the task is a stream."""
        if task.stream is not None:
            task.stream.end(problem)
            self._count(task, problem)

    def _release(self, task: Task) -> None:
        """Free a task's memory if the task is done and no lane may still be sending it."""
        if task.done and not task.on_executor:
            self.packer.release(task.parcel)

    def _count(self, task: Task, failed: Failed | None) -> None:
        if task.counted:
            return
        task.counted = True
        if failed is None:
            self.counts.succeeded += 1
        elif task.cancelled:
            self.counts.cancelled += 1
        else:
            self.counts.failed += 1
        if self.teller.events.listened or task.trace is not None:
            self.teller.ended(task, failed)

    # Cancelling.

    def cancel(self, task: Task, problem: BaseException | None = None) -> None:
        """Give a task up: the caller stops waiting at once, and the remote work is stopped."""
        task.cancelled = problem is None or isinstance(problem, TaskCancelledError)
        reason = problem or TaskCancelledError(f"{task.name} was cancelled")
        with self.lanes.lock:
            self.lanes.drop(task)
            lane = self.lanes.with_task(task)
        self._fail(task, reason)
        if lane is not None:
            self._stop(lane, task)
            if lane.channel.aborted:
                self.drain(lane)

    def _abandon(self, lane: Lane, task: Task) -> None:
        """End a stream whose consumer wants no more items."""
        if task.id in lane.tasks and not self.closed:
            lane.tell(Credit(task.id, -1, -1))
            self._loop.later(CANCEL_GRACE, lambda: self._stop_if_running(lane, task))

    def _stop_if_running(self, lane: Lane, task: Task) -> None:
        if task.id in lane.tasks and not lane.lost:
            task.cancelled = True
            self._stop(lane, task)

    def _stop(self, lane: Lane, task: Task) -> None:
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
                self._console.note(
                    f"{task.name} was cancelled and does not end; its process on {lane.where} "
                    f"stays, since {others[0].name}{more} runs there, too"
                )
                # Hearing of it again, the executor no longer counts the task among those that run.
                lane.stop(task)
            self._loop.later(CANCEL_GRACE, lambda: self._kill_if_running(lane, task, told=True))
        else:
            # The cancelled task may end before its executor does; another must not begin then.
            self.lanes.drain(lane)
            lane.kill(f"{task.name} was cancelled and did not end within {CANCEL_GRACE} s")

    def fail_held(self, *, slots: int, may_grow: bool) -> None:
        """Fail calls that would wait for ever, because nobody reads the streams of all workers."""
        for task, problem in self._held.look(slots=slots, may_grow=may_grow):
            self.cancel(task, problem)

    # Ending.

    def fail_unrunnable(self) -> None:
        """Fail the waiting tasks that no node will ever run."""
        unrunnable = self.lanes.take_unrunnable(self._prospects.can_run)
        for task in unrunnable:
            self._finish(task, Failed.because(self._nowhere_to_run(task)))

    def moment(self) -> int:
        """A number between those of the tasks that have come and those that are still to come."""
        return next(self._ids)

    def fail_waiting(self, why: BaseException, moment: int) -> None:
        """Fail every task that waits since before a moment; tasks that came later may wait."""
        for task in self.lanes.take_unrunnable(lambda task: task.id > moment):
            problem = NodeLostError(
                f"{task.name} has no node to run on: {why}; the next call has one started again"
            )
            self._finish(task, Failed.because(problem))

    def _nowhere_to_run(self, task: Task) -> NodeLostError:
        why, node = self._prospects.why_not(), task.on if task.worker is None else task.worker[0]
        if not why and node is not None:
            told = f"node {node} has left the pool; run it on another one"
        else:
            told = f"{why or 'every node it could use is lost'}; enter a new Compute"
        return NodeLostError(f"{task.name} has nowhere to run: {told}")

    def cancel_all(self, why: str, seconds: float) -> None:
        """Cancel every task, and wait for the executors to stop, for so many seconds at most."""
        self.results.give_up(why)
        with self.lanes.lock:
            unfinished = self.lanes.take_all()
        for task in unfinished:
            self.cancel(task, PoolClosedError(f"{task.name} was not done: {why}"))
        deadline = time.monotonic() + seconds
        while any(lane.tasks for lane in self.lanes if not lane.lost):
            if time.monotonic() > deadline:
                return
            time.sleep(CANCEL_LOOK_SECONDS)

    def close(self, why: str = "", refusal: str = "") -> None:
        """Refuse new tasks; tasks that are not done fail, because of `why` if that is given.

        `refusal` says why new tasks are refused.
        """
        self.results.give_up(why or "the pool closed before its arguments came")
        with self.lanes.lock:
            self.closed = True
            self._why_closed = refusal or CLOSED
            unfinished = self.lanes.take_all()
        self.debuggers.close()
        self.offered.clear()
        for task in unfinished:
            # A user who closes the pool does not want the rest of a stream.
            task.cancelled = task.cancelled or task.stream is not None
            problem = PoolClosedError(
                f"{task.name} was not done: {why}"
                if why
                else f"the pool closed before {task.name} was done; wait for its result inside the "
                "`with sky.Compute()` block"
            )
            self._fail(task, problem)

    def end_threads(self) -> None:
        """End what is left when the pool's thread has ended: no result comes any more."""
        self.results.close()
        self.packer.close()

    @property
    def backlog(self) -> int:
        """How many tasks wait for a free slot."""
        return self.lanes.backlog

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from executors, over sockets."""
        lanes = list(self.lanes)
        sent = sum(lane.channel.bytes_sent for lane in lanes)
        received = sum(lane.channel.bytes_received for lane in lanes)
        return self.counts.bytes_sent + sent, self.counts.bytes_received + received


def _size(payload: Payload) -> int:
    return payload.pickle + sum(buffer.length for buffer in payload.buffers)


def _is_wanted(task: Task) -> bool:
    """Whether somebody waits for a task, or reads its stream."""
    return task.cancellable and not task.cancelled


def _kept(lane: Lane, task: Task) -> ResultTensors | None:
    """The tensors of a result that are kept on the device of the worker that ran the task."""
    return None if task.kept is None else task.kept.arrived(lane.node, lane.worker)


def _called_by_handler(task: Task) -> RuntimeError:
    return RuntimeError(
        f"a handler of a signal has called {task.name} while its thread was handing over another "
        "call, and neither can go on before the other; set a flag in the handler, and make the "
        "call where the flag is looked at, or on another thread"
    )


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


ENDLESS_SECONDS = 5.0
"""How long nothing has moved before a call that waits fails."""
NAMED_MAX = 8
"""How many streams a message names."""
WHAT_TO_DO = "read one to its end or close it, or use more nodes or sky.Worker(concurrency=...)"

_lanes_of_pools: weakref.WeakSet[Lanes] = weakref.WeakSet()
"""The lanes of every pool of this process."""
_WAITS: frozenset[CodeType] = frozenset(
    wait.__code__ for wait in (Task.wait, Borrower.wait, Crowd.wait, Flow._pop)
)
_WAITS_FOR_FUTURE = concurrent.futures.Future.result.__code__
_IDLE = frozenset(("IPython", "debugpy", "ipykernel", "pydevd", "pytest_timeout", "tqdm", "zmq"))
"""Packages with threads that never run the user's code."""
_IDLE_LOOPS = ("fsspecIO",)
"""Threads with an event loop that never runs the user's code, by name: the store starts one."""


class HeldWorkers:
    """Tells which streams keep calls from running, and which calls would wait for ever."""

    def __init__(self, lanes: Lanes, console: Console) -> None:
        self._lanes, self._console = lanes, console
        _lanes_of_pools.add(lanes)
        self._told: frozenset[int] = frozenset()
        """The streams that were named last."""
        self._seen: list[tuple[int, int]] = []
        """Of each of these streams, its number and how many of its items nobody has read."""
        self._since = 0.0
        """When they were first seen so."""
        self._collected = False
        """Whether garbage was collected since then."""

    def look(self, *, slots: int, may_grow: bool) -> list[tuple[Task, DeadlockError]]:
        """Tell about calls that wait; those that would wait for ever. Called at every beat.

        `slots` is how many calls the pool can run at once; `may_grow` says whether it can get more.
        """
        waiting, streams, alone = self._lanes.held()
        if not waiting:
            self._told = frozenset()
            return []
        numbers = frozenset(task.id for task in streams)
        seen = [(task.id, task.stream.unread) for task in streams if task.stream is not None]
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since, self._collected = seen, now, False
        if numbers != self._told:
            self._told = numbers
            self._console.note(f"{_calls(waiting)} for a worker: {_told(streams)}; {WHAT_TO_DO}")
        if not alone or may_grow or len(streams) < slots or now - self._since < ENDLESS_SECONDS:
            return []
        # Such a stream ends by itself; and a thread may wait for a call of another pool.
        others = [lanes for lanes in list(_lanes_of_pools) if lanes is not self._lanes]
        if any(task.timer is not None for task in streams) or any(map(_is_busy, others)):
            return []
        if _somebody_can_read():
            return []
        if not self._collected:
            # A stream that only garbage refers to ends now, and the next look finds it gone.
            self._collected = True
            gc.collect()
            return []
        why = (
            f"would wait for ever for a worker: {_told(streams)}, and all threads that could read "
            f"them wait, too; {WHAT_TO_DO}"
        )
        return [(task, DeadlockError(f"{task.name} {why}")) for task in waiting]


def _calls(waiting: Sequence[Task]) -> str:
    if len(waiting) == 1:
        return f"{waiting[0].name} waits"
    return f"{waiting[0].name} and {len(waiting) - 1} more calls wait"


def _told(streams: Sequence[Task]) -> str:
    named = [f"{task.name} on {task.load.where}" for task in streams if task.load is not None]
    more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
    held = ", ".join(named[:NAMED_MAX]) + more
    return f"streams that are not read hold all of them ({held})"


def _is_busy(lanes: Lanes) -> bool:
    return any(lane.tasks for lane in lanes)


def _somebody_can_read() -> bool:
    """Whether a thread of this program may still read or close a stream: one that does not wait.

    In doubt, a thread may: only threads of Skyward, and some that are known to be idle, may not.
    """
    main = threading.main_thread().ident
    timers = {
        each.ident
        for each in threading.enumerate()
        if isinstance(each, threading.Timer) and _package(each.function.__module__) not in _IDLE
    }
    idle = {each.ident for each in threading.enumerate() if each.name in _IDLE_LOOPS}
    for thread, frame in sys._current_frames().items():
        if thread in idle or _waits_for_a_call(frame):
            continue
        if thread == main or thread in timers:
            return True
        modules = set(map(_module, _outwards(frame)))
        packages = set(map(_package, modules))
        if packages & _IDLE:
            continue
        # An event loop that is idle now may run code of the user's later.
        is_loop = "asyncio.base_events" in modules and "skyward" not in packages
        if is_loop or packages - sys.stdlib_module_names - {"skyward"}:
            return True
    return False


def _waits_for_a_call(frame: FrameType) -> bool:
    """Whether a thread does nothing until a call is done."""
    for each in _outwards(frame):
        if each.f_code is _WAITS_FOR_FUTURE and isinstance(each.f_locals.get("self"), Future):
            return each.f_locals.get("timeout") is None
        if _package(_module(each)) not in sys.stdlib_module_names:
            return each.f_code in _WAITS
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]


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
