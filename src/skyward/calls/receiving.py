"""Receiving: what executors send about their tasks, brought to those who wait for it."""

from __future__ import annotations

import functools
import io
import threading
import time
from collections.abc import Callable

from skyward.calls.answers import Failed, Streaming, Value, remote_failure
from skyward.calls.debuggers import DebuggerDesk
from skyward.calls.finishing import Finisher
from skyward.calls.lane import Lane
from skyward.calls.lanes import Lanes
from skyward.calls.loop import Loop
from skyward.calls.nesting import NestedCalls
from skyward.calls.packing import Packer
from skyward.calls.sending import Sending
from skyward.calls.staying import ArrivedTensors, Staying
from skyward.calls.streams import WINDOW, RemoteIterator, StreamItems
from skyward.calls.task import Task
from skyward.calls.telling import CallTeller
from skyward.calls.timeouts import timeout_error
from skyward.console import Console
from skyward.errors import ProtocolError
from skyward.wire import messages
from skyward.wire.frames import Frame
from skyward.wire.messages import (
    AT_FAILURES,
    KEEPING_FRAMES,
    Cancel,
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
    Recalled,
    Released,
    Result,
    Room,
    Start,
    Waits,
    Written,
)

UNFINISHED_MAX = 256 << 20
"""How many characters of a line are kept; if it has not ended by then, they are shown as a line."""


class Receiver:
    """Takes the frames of all executors of a pool."""

    def __init__(
        self,
        loop: Loop,
        lanes: Lanes,
        packer: Packer,
        console: Console,
        sending: Sending,
        finisher: Finisher,
        debuggers: DebuggerDesk,
        teller: CallTeller,
        nested: NestedCalls,
        cancel: Callable[[Task, BaseException], None],
        abandon: Callable[[Lane, Task], None],
    ) -> None:
        """`cancel` gives a task up; `abandon` ends a stream whose consumer wants no more."""
        self._loop, self._lanes, self._packer, self._console = loop, lanes, packer, console
        self._sending, self._finisher = sending, finisher
        self._debuggers, self._teller, self._nested = debuggers, teller, nested
        self._cancel, self._abandon = cancel, abandon
        self._told_left_out = False
        self.failed: tuple[int, int] | None = None
        """The worker whose task failed last, if it may be looked at in a debugger."""
        self._unfinished: dict[tuple[Lane, int, str], io.StringIO] = {}
        """For each task and stream, the beginning of a long line whose rest has not come yet."""

    def receive(self, lane: Lane, frame: Frame) -> None:
        """Deal with a frame, on the loop's thread, or on a transfer thread for a large body."""
        message = messages.decode(frame.kind, frame.meta)
        match message:
            case Result():
                self.answered(lane, frame, message)
            case Failure():
                self._on_failure(lane, frame, message)
            case Written():
                self._on_written(lane, message)
            case Logged():
                self._teller.logged(message, lane)
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
                    task.stream.put(pieces, _stayed(lane, task))
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
                if task is not None and task.staying is not None:
                    # On its own thread: it may open a device, and waits for one.
                    maker = threading.Thread(
                        target=self._make_room,
                        args=(lane, task, task.staying, message.spans),
                        name="skyward-room",
                        daemon=True,
                    )
                    maker.start()
            case DebuggerSays():
                self._debuggers.heard(lane, lane.tasks.get(message.task), message)
            case Recalled():
                self._lanes.recalled(lane, message.tasks)
            case Prepared():
                lane.on_prepared(lane, message.problem)
            case Waits():
                if message.waits:
                    self._lanes.lend(lane, message.task)
                else:
                    self._lanes.go_on(lane, message.task)
            case Start():
                pieces = lane.connection.take(frame, message.payload)
                self._nested.start(lane, message, pieces)
            case Define():
                pieces = lane.connection.take(frame, message.payload)
                self._nested.define(lane, message, pieces)
            case Cancel():
                self._nested.drop(lane, message.task)
            case _:
                raise ProtocolError(f"an executor does not send {type(message).__name__}")

    def _on_written(self, lane: Lane, written: Written) -> None:
        task = lane.tasks.get(written.task)
        if task is not None:
            task.wrote = True
        if not written.transient and not self._is_whole(lane, written):
            return
        name = "" if task is None else task.name
        self._console.output(
            written.text,
            written.stream,
            lane.node,
            lane.worker,
            name,
            written.transient,
            None if task is None else task.cell,
        )
        self._teller.output(written, lane.node, lane.worker, name)

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

    def lost(self, lane: Lane) -> None:
        """Show the beginnings of long lines whose rest will not come."""
        for key in [key for key in self._unfinished if key[0] is lane]:
            _, task, stream = key
            self._on_written(lane, Written(task, stream, "\n", False))

    def answered(self, lane: Lane, frame: Frame, result: Result) -> None:
        """Deal with the value of a task; also on the thread of a caller that waits for it."""
        if result.payload is None:
            task = lane.tasks.get(result.task)
            if task is not None and not task.done:
                self._open_stream(lane, task)
            return
        pieces = lane.connection.take(frame, result.payload)
        task = self._leave(lane, result.task, result.ran)
        if task is not None:
            if self._teller.events.listened:
                self._teller.transferred(lane, task, "received", _size(result.payload))
            stayed = None if task.staying is None else _stayed(lane, task)
            self._finisher.finish(task, Value(pieces, task.name, lane.load, stayed))

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
        self._finisher.finish(task, Streaming(opened))

    def _on_failure(self, lane: Lane, frame: Frame, failure: Failure) -> None:
        payload = failure.payload
        pieces = lane.connection.take(frame, payload) if payload is not None else None
        task = self._leave(lane, failure.task, failure.ran)
        if task is None:
            return
        if task.debugged in (KEEPING_FRAMES, AT_FAILURES):
            self.failed = lane.node, lane.worker
        answer = remote_failure(failure, pieces, task.name, lane.where)
        self._finisher.end_stream(task, answer)
        self._finisher.finish(task, answer)

    def _on_end(self, lane: Lane, end: End) -> None:
        task = self._leave(lane, end.task, 1.0)
        if task is not None:
            task.ran = time.monotonic() - task.given if task.given else 0.0
            self._finisher.end_stream(task, None)
            self._finisher.release(task)

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
            self._lanes.take_back(lane, task)
            self._finisher.finish(task, Failed.because(problem))
            self._loop.call_soon(lambda: None)
            return False
        before, task.parcel = task.parcel, parcel
        self._packer.release(before)
        # The task may have been cancelled, and its parcel released, meanwhile.
        self._finisher.release(task)
        return True

    def _make_room(
        self, lane: Lane, task: Task, staying: Staying, spans: list[tuple[int, int]]
    ) -> None:
        """Make memory for a result that stays, and tell the executor where it is."""
        try:
            lane.tell(staying.make_room(task.id, lane.node, lane.worker, spans))
        except Exception as problem:
            problem.add_note(f"{task.name} has run on {lane.where}, but its result cannot stay")
            self._cancel(task, problem)
        if task.done and task.stream is None:
            # It was cancelled meanwhile, and the memory that was freed then is here again.
            staying.discard()

    def _leave(self, lane: Lane, task_id: int, ran: float) -> Task | None:
        """Take a task off its lane, which then has room for another."""
        task = self._lanes.leave(lane, task_id, ran)
        if task is None or task.inputs:
            lane.stop_feeding(task_id)
        if task is not None:
            task.ran = ran
            if task.timer is not None:
                task.timer.cancel()
            if task.overdue and not task.done:
                self._finisher.fail(task, timeout_error(task))
        return task

    def flush_output(self, task: Task) -> None:
        """Wait until everything the task printed has been shown, and trackers have its numbers."""
        if task.wrote:
            self._console.drain()
        if task.logged:
            self._teller.tracking.drain()


def _size(payload: Payload) -> int:
    return payload.pickle + sum(buffer.length for buffer in payload.buffers)


def _stayed(lane: Lane, task: Task) -> ArrivedTensors | None:
    """The tensors of a result that stay on the device of the worker that ran the task."""
    return None if task.staying is None else task.staying.arrived(lane.node, lane.worker)
