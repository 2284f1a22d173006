"""Nested calls: tasks ask the client for calls, which it makes as its own and answers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skyward import handles, instances
from skyward.calls.lane import PROMPT_BYTES, Lane, Sending
from skyward.calls.packer import PackedCall, PackedFunction, PackedHandle, encoded_of
from skyward.calls.streams import RemoteIterator
from skyward.calls.task import Answer, Failed, Streaming, Task, Value
from skyward.errors import PoolClosedError, PoolError, RemoteError
from skyward.functions import Pending
from skyward.objects import encoding, payloads
from skyward.objects.encoding import Encoded
from skyward.objects.exceptions import PortableException
from skyward.objects.payloads import Pieces
from skyward.staff import Staff
from skyward.wire.messages import CODE_KEPT, Define, End, Item, Message, Payload, Result, Start
from skyward.worker import failures
from skyward.worker.outbox import Sendable

_staff = Staff("skyward-nested", 64)
"""Opens and reports failures, which takes time but never waits."""


class NestedRunner(Protocol):
    """What makes the calls: the dispatcher."""

    def prepare(self, pending: Pending[Any], *, keep: bool) -> Task:
        """Encode a call."""

    def submit_nested(self, task: Task) -> None:
        """Queue a task that another one has started; never waits."""

    def cancel(self, task: Task) -> None:
        """Give a task up."""


Broadcast = Callable[[Pending[Any], Callable[[list[Task]], None]], list[Any]]
"""Makes a call on every worker of a pool; the second is told of the tasks, which go out next."""


@dataclass(slots=True, eq=False)
class NestedCall:
    """One call that a task has asked for."""

    lane: Lane
    number: int
    depth: int
    """How many tasks have started one another to ask for it."""
    tasks: list[Task] = field(default_factory=list)
    dropped: bool = False
    """Whether nobody wants the answer any more."""
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """The items of a stream that the task has asked for."""

    def goes_on_as(self, tasks: list[Task]) -> None:
        """Be a broadcast of these tasks, which are cancelled with the call."""
        self.tasks += tasks
        for task in tasks:
            task.depth = self.depth
        if self.dropped:
            raise PoolClosedError("the task that asked for this broadcast is gone")


@dataclass(slots=True)
class Asker:
    """What an executor has asked for."""

    code: OrderedDict[bytes, Pieces] = field(default_factory=OrderedDict)
    """The functions that it has defined; the oldest is forgotten, as the executor knows."""
    values: dict[bytes, Pieces] = field(default_factory=dict)
    """What it has defined for its next call."""
    calls: dict[int, NestedCall] = field(default_factory=dict)


class NestedCalls:
    """Makes the calls that the tasks of a pool ask for; all but the work goes on here."""

    def __init__(self, runner: NestedRunner, broadcast: Broadcast) -> None:
        self._runner, self._broadcast = runner, broadcast
        self._askers: dict[Lane, Asker] = {}
        self._sending = Sending()

    # What executors say; the caller must not wait.

    def define(self, lane: Lane, define: Define, pieces: Pieces) -> None:
        """Take a function that the executor is about to refer to, or a value for its next call."""
        asker = self._asker(lane)
        if define.fresh:
            asker.values[define.key] = pieces
            return
        asker.code[define.key] = pieces
        if len(asker.code) > CODE_KEPT:
            asker.code.popitem(last=False)

    def start(self, lane: Lane, start: Start, pieces: Pieces) -> None:
        """Begin a call."""
        asker = self._asker(lane)
        asking = lane.tasks.get(start.task)
        depth = 1 if asking is None else asking.depth + 1
        call = asker.calls[start.number] = NestedCall(lane, start.number, depth)
        try:
            values, asker.values = asker.values, {}
            if start.object:
                # Not here: the object may have to be made again first, which waits.
                _run_aside(functools.partial(self._call_object, call, start, pieces))
                return
            given = [
                PackedHandle(key, encoded_of(*values[key], ()), fresh=True) for key in start.handles
            ]
            function = PackedFunction(
                start.code,
                encoded_of(*asker.code[start.code], ()),
                name=start.name,
                timeout=start.timeout or None,
                retries=start.retries,
                fail_fast=start.fail_fast,
            )
            pending = PackedCall(function, encoded_of(*pieces, given))
            if start.everywhere:
                if lane.preparation.replaced:
                    raise group_is_over(start.name)
                # Not the staff: broadcasts may wait for others, as long as they like.
                _run_aside(functools.partial(self._run_everywhere, call, pending))
                return
            self._begin(call, pending)
        except Exception as problem:
            self._fail(call, problem)

    def _begin(self, call: NestedCall, pending: Pending[Any]) -> None:
        task = self._runner.prepare(pending, keep=True)
        task.depth = call.depth
        call.tasks.append(task)
        task.when_done(functools.partial(self._done, call))
        self._runner.submit_nested(task)

    def _call_object(self, call: NestedCall, start: Start, pieces: Pieces) -> None:
        """Call a method of an object that the task cannot reach by itself."""
        try:
            instance = handles.offered.get(start.object)
            if instance is None:
                raise instances.client_has_left(start.name)
            function = instance._function(start.name.rpartition(".")[2])
            self._begin(call, PackedCall(function, encoded_of(*pieces, ())))
            if call.dropped:
                self._drop(call)
        except Exception as problem:
            self._fail(call, problem)

    def drop(self, lane: Lane, number: int) -> None:
        """Cancel a call whose answer nobody wants any more."""
        call = self._asker(lane).calls.pop(number, None)
        if call is not None:
            self._drop(call)

    def credit(self, lane: Lane, number: int, count: int) -> None:
        """Let a stream send so many more items; none any more with -1."""
        call = self._asker(lane).calls.get(number)
        if call is None:
            return
        if count < 0:
            self.drop(lane, number)
        else:
            call.wanted.release(max(1, count))

    def lose(self, lane: Lane) -> None:
        """Cancel what the tasks of an executor that is gone have asked for."""
        asker = self._askers.pop(lane, None)
        for call in list(asker.calls.values()) if asker is not None else ():
            self._drop(call)

    def _asker(self, lane: Lane) -> Asker:
        found = self._askers.get(lane)
        if found is None:
            found = Asker()
            if not lane.lost:
                self._askers[lane] = found
        return found

    def _drop(self, call: NestedCall) -> None:
        call.dropped = True
        call.wanted.release()
        for task in list(call.tasks):
            if task.cancellable:
                self._runner.cancel(task)

    # Answers.

    def _done(self, call: NestedCall, task: Task) -> None:
        """Answer a call; on the thread that has finished the task, which must not wait."""
        answer = task.answer
        assert answer is not None
        if call.dropped:
            return
        if isinstance(answer, Value):
            self._return(call, encoded_of(*answer.pieces, ()), task.ran)
        elif isinstance(answer, Streaming):
            iterator = answer.get()
            _run_aside(functools.partial(self._stream, call, iterator))
        elif isinstance(answer, Failed):
            _staff.run(functools.partial(self._fail_with, call, answer))

    def _return(self, call: NestedCall, encoded: Encoded, ran: float) -> None:
        packed = payloads.pack(encoded, None)
        self._tell(call, Result(call.number, ran, packed.payload), packed.body)

    def _fail_with(self, call: NestedCall, answer: Answer) -> None:
        try:
            answer.get()
        except BaseException as problem:
            self._fail(call, problem)

    def _fail(self, call: NestedCall, problem: BaseException) -> None:
        message, sendable = failures.report(problem, call.number, 0.0, _packed, cancelled=False)
        self._tell(call, message, [] if sendable is None else sendable[1])

    def _run_everywhere(self, call: NestedCall, pending: Pending[Any]) -> None:
        try:
            found = self._broadcast(pending, call.goes_on_as)
            encoded = encoding.encode(found, own_modules=True, what="the results of a broadcast")
        except BaseException as problem:
            self._fail(call, problem)
        else:
            self._return(call, encoded, 0.0)

    def _stream(self, call: NestedCall, items: RemoteIterator) -> None:
        """Send the items of a stream as the task asks for them, on a thread of its own."""
        send = call.lane.channel.send
        with contextlib.closing(items), contextlib.suppress(OSError):
            send(Result(call.number, 0.0, None))
            while call.wanted.acquire() and not call.dropped:
                item = items.next_item()
                if not isinstance(item, tuple):
                    self._forget(call)
                    payload, body = _reason(item) if item is not None else (None, [])
                    send(End(call.number, -1, payload), body)
                    return
                packed = payloads.pack(encoded_of(*item[0], ()), None)
                send(Item(call.number, -1, packed.payload), packed.body)

    def _forget(self, call: NestedCall) -> None:
        asker = self._askers.get(call.lane)
        if asker is not None:
            asker.calls.pop(call.number, None)

    def _tell(self, call: NestedCall, message: Message, body: Sequence[bytes | memoryview]) -> None:
        """Send the executor the answer to a call, without waiting for a large one."""
        lane = call.lane
        if call.dropped:
            return
        self._forget(call)

        def send() -> None:
            # If the executor is gone, losing its lane ends its tasks.
            with contextlib.suppress(OSError):
                lane.channel.send(message, body)

        if sum(map(len, body)) > PROMPT_BYTES:
            self._sending.run(lane, send)
        else:
            lane.connection.when_free(send)


def group_is_over(name: str) -> PoolError:
    """The error for a broadcast that a task of a former group has asked for."""
    return PoolError(
        f"{name} cannot run on every worker: the group of this task is over, because a worker was "
        "lost, a broadcast failed or the number of nodes changed; a new group forms when this task "
        "has ended, and runs broadcasts of the client and of new tasks"
    )


def _run_aside(action: Callable[[], None]) -> None:
    """Run what may take any time on a thread of its own."""
    threading.Thread(target=action, name="skyward-nested", daemon=True).start()


def _packed(value: Any) -> Sendable:
    packed = payloads.pack(encoding.encode(value, own_modules=True), None)
    return packed.payload, packed.body, []


def _reason(answer: Answer) -> tuple[Payload | None, list[bytes | memoryview]]:
    """The exception that ended a stream, as it is sent."""
    try:
        answer.get()
    except BaseException as problem:
        message, sendable = failures.report(problem, 0, 0.0, _packed, cancelled=False)
        if sendable is None:
            told = RemoteError(f"{message.type_name}: {message.text}", type_name=message.type_name)
            sendable = _packed(PortableException.of(told, {}))
        return sendable[0], sendable[1]
    return None, []
