"""An executor: the process that runs a client's tasks, one at a time or on threads."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import msgspec

from skyward import context, functions, handles, instances, kernel
from skyward.errors import PluginError, PoolError, ProtocolError
from skyward.objects import encoding, payloads, references, tensors
from skyward.objects.encoding import Encoded
from skyward.objects.kept import ResultBook
from skyward.objects.payloads import Pieces
from skyward.plugins import rendezvous
from skyward.state.link import worker_link
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.handshake import PEER, Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import (
    OBJECT_CALLS,
    POST_MORTEM,
    Called,
    Cancel,
    Credit,
    DebuggerHears,
    Define,
    Detach,
    End,
    Failure,
    Fetch,
    Forget,
    Hello,
    Item,
    Message,
    Missing,
    Places,
    Prepare,
    Prepared,
    Recall,
    Recalled,
    Released,
    Result,
    Room,
    Run,
    Share,
    Topology,
)
from skyward.worker import failures, hooks, process
from skyward.worker.client import ClientConnection
from skyward.worker.config import ExecutorConfig
from skyward.worker.debuggers import Debuggers
from skyward.worker.inbox import Inbox
from skyward.worker.inspection import Inspection
from skyward.worker.interrupts import Interrupted, Interrupts
from skyward.worker.outbox import Outbox, Sendable
from skyward.worker.output import NumberLog, ProcessCapture, ThreadCapture, current_task
from skyward.worker.pending import PendingTasks
from skyward.worker.places import ObjectCaller, ReadyTask, TaskPlaces
from skyward.worker.reader import TaskReader
from skyward.worker.relay import Relay
from skyward.worker.streams import InputStream, OutputStream
from skyward.worker.task_board import SPARE, TaskBoard, TaskRing
from skyward.worker.task_output import TaskOutput

if TYPE_CHECKING:
    from skyward.worker.nested import NestedPool

STOP_LOOKS, LOOK_SECONDS = 4, 0.5
"""How often, and after how long each time, a call of an object that was cancelled may still run
before that costs its process: several looks, since the whole machine may have stood still."""


class Leave(BaseException):
    """Raised on the main thread when the process must leave its hooks and end."""


class Executor:
    """Receives tasks on one thread and runs them on another, or on several."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._pid = os.getpid()
        self._places = TaskPlaces(
            config.threads or 1, lambda message: self._client.send(message), self._run_in_place
        )
        self._credentials = Credentials(*config.credentials) if config.credentials else None
        self._await_client()
        self._hooks = hooks.Entered()
        self._interrupts = Interrupts(threads=bool(config.threads))
        self._board = TaskBoard(config.board, config.threads or 1, config.changes)
        os.close(config.board)
        self._kept_output: TaskOutput | None = None
        if config.kept_output:
            self._kept_output = TaskOutput(config.kept_output, config.worker, config.slot)
        self._spare = self._board.rings[-SPARE:]
        self._capture: ProcessCapture | ThreadCapture = ProcessCapture(config.output, self._emit)
        if config.threads:
            self._capture = ThreadCapture(self._capture, self._emit)
        self._debuggers = Debuggers(
            self._running_task,
            lambda message: self._client.send(message),
            self._hurry,
            self._capture.flush,
            lambda task: self._interrupts.raise_in(task, KeyboardInterrupt),
        )
        self._log = NumberLog(self._asking_task, lambda message: self._client.tell(message))
        functions.install_taker(self._log)
        self._listener = Listener(config.where, config.pool, self._credentials, self._accept)
        self._reader: TaskReader[Prepare | None] | None = None
        self._woken, self._waking = socket.socketpair()
        self._wakes = False
        """Whether there is a byte between the two."""
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A token for each task; a helper may run the task before the token is taken."""

    def _await_client(self) -> None:
        """Make all that belongs to one client, empty, for the client that comes."""
        config = self._config
        self._nested: NestedPool | None = None
        """The pool, for tasks that start others; None before one does."""
        self._inbox = Inbox(config.blob_cap)
        self._pending = PendingTasks(self._inbox, self._admit)
        encoding.find_handles(self._pending.resolve)
        self._client = ClientConnection(self._inbox, Outbox(config.blob_cap))
        self._offered = False
        """Whether tasks elsewhere may call objects of this process, at any time."""
        self._watched: select.poll | None = None
        """If so: the client's connection, and what says that such a task has called one; None if
        the main thread cannot wait for both."""
        self._relay = Relay(
            config.pool, self._credentials, self._inbox.arrivals, settled=self._settle_pending
        )

    @property
    def endpoint(self) -> str:
        """Where the client connects."""
        return self._listener.endpoint

    def _emit(self, number: int, stream: str, text: str, transient: bool) -> None:
        task = self._places.running.get(number)
        name = "" if task is None else task.run.name
        unknown = task is not None and task.caller is not None
        self._client.emit(number, stream, text, transient, name if unknown else "")
        if self._kept_output is not None and text and not transient:
            self._kept_output.write(stream, text, name)
            self._board.rings[0].wrote()

    def _accept(self, channel: Channel, hello: Hello) -> None:
        if hello.role == PEER:
            self._relay.serve(channel)
            return
        if hello.role == f"{PEER}-objects":
            self._serve_objects(channel)
            return
        if hello.role != "data" or not self._client.connect(channel):
            channel.close()

    # Calls of objects by tasks elsewhere; on a thread for each process that has such tasks.

    def _serve_objects(self, channel: Channel) -> None:
        """Take the calls of one process until it is gone; those that it has left then end."""
        caller = ObjectCaller(channel)
        try:
            while True:
                frame = channel.receive()
                match messages.decode(frame.kind, frame.meta):
                    case Run() as run:
                        body = payloads.read_body(channel, frame, run.payload, [])
                        self._take_object_call(caller, run, body)
                    case Cancel(task=number) if number in caller.calls:
                        self._stop_object_call(number)
                    case Credit(count=-1, task=number) if number in caller.calls:
                        self._stop_object_call(number, closes=True)
                    case Credit() as credit if credit.task in caller.calls:
                        self._grant(credit)
                    case Cancel() | Credit():
                        # It has ended meanwhile.
                        pass
                    case other:
                        raise ProtocolError(f"a task does not send {type(other).__name__}")
        except (OSError, EOFError, ProtocolError):
            pass
        finally:
            channel.close()
            for number in list(caller.calls):
                self._stop_object_call(number)

    def _take_object_call(self, caller: ObjectCaller, run: Run, body: bytearray) -> None:
        if run.task < OBJECT_CALLS:
            raise ProtocolError(f"a call of an object has the number {run.task}")
        if run.kept or run.inputs or run.debugged:
            raise ProtocolError("a call of an object is a plain one")
        key = run.code.decode(errors="replace")
        caller.calls.add(run.task)
        if not instances.has(key):
            # Not as a task: without a client, nobody runs any.
            problem = instances.lost(key, run.name)
            caller.send(*failures.report(problem, run.task, 0.0, caller.pack, cancelled=False))
            return
        run.apart = key if instances.is_apart(key) else ""
        self._admit(run, payloads.unpack(run.payload, body, payloads.nowhere), caller)

    def _stop_object_call(self, number: int, *, closes: bool = False) -> None:
        """Cancel a call that nobody waits for, or close its stream; if it goes on, go further."""
        task = self._places.find(number)
        if task is None:
            return
        if closes and task.output is not None:
            task.output.close()
        else:
            self._cancel(number)
        threading.Thread(
            target=self._look_after_stopped, args=(task,), name="skyward-stopped", daemon=True
        ).start()

    def _look_after_stopped(self, task: ReadyTask) -> None:
        """Do as the client does with a task that does not end when it is cancelled."""
        number, running = task.run.task, self._places.running
        for _ in range(STOP_LOOKS):
            time.sleep(LOOK_SECONDS)
            if running.get(number) is not task:
                return
        if task.cancelled and len(running) == 1:
            self._give_up(PoolError(f"{task.run.name} was cancelled and did not end"))
        self._stop_object_call(number)

    # Receiving; never on a thread that runs user code.

    def _read_one(self) -> None:
        channel = self._client.channel
        try:
            if self._watched is None:
                frame = channel.receive()
                self._handle(channel, frame, messages.decode(frame.kind, frame.meta))
            else:
                self._read_watched(channel, self._watched)
        except Exception as problem:
            if isinstance(problem, (EOFError, OSError)) and not isinstance(problem, ProtocolError):
                # The client is gone; the agent decides what becomes of the node.
                os._exit(0)
            self._give_up(problem)

    def _read_watched(self, channel: Channel, watched: select.poll) -> None:
        """Read what the client sends, or note that another thread has put a task.

        To leave the client to a second thread meanwhile would take calls of it a third longer.
        """
        frames = channel.buffered()
        if not frames:
            for descriptor, _ in watched.poll():
                if descriptor == self._woken.fileno():
                    self._wakes = False
                    self._woken.recv(1)
                else:
                    frames = channel.poll()
        for frame in frames:
            self._handle(channel, frame, messages.decode(frame.kind, frame.meta))

    def _offer(self) -> None:
        """Let tasks elsewhere call objects of this process, from now on."""
        self._offered = True
        channel = self._client.channel
        # A link may lose its connection, and OpenSSL may hold bytes that no poll sees.
        if self._reader is not None and channel.shares_memory:
            self._watched = select.poll()
            self._watched.register(channel.fileno(), select.POLLIN)
            self._watched.register(self._woken.fileno(), select.POLLIN)

    def _settle_pending(self) -> None:
        try:
            self._pending.settle()
        except Exception as problem:
            # An exception on this thread would be lost, and the tasks would wait for ever.
            self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        """End this process at once: the agent reports the end, and starts another executor."""
        print(
            f"executor {self._config.worker}.{self._config.slot}: {problem!r}",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(70)

    def _handle(self, channel: Channel, frame: Frame, message: Message) -> None:
        match message:
            case Run():
                body = self._inbox.read(channel, frame, message.payload)
                self._pending.add(channel, message, body)
            case Define():
                body = self._inbox.read(channel, frame, message.payload)
                self._pending.define(channel, message, body)
            case Fetch():
                self._relay.fetch(message)
            case Cancel(task=number):
                self._cancel(number)
            case Credit():
                self._grant(message)
            case Item() if message.task > 0:
                pieces, _ = self._inbox.take(channel, frame, message.payload)
                task = self._places.find(message.task)
                if task is not None and pieces is not None:
                    task.inputs[message.stream].put(pieces)
            case End() if message.task > 0:
                self._end_input(channel, frame, message)
            case Result() | Failure() | Item() | End():
                self._answer(channel, frame, message)
            case Forget():
                self._pending.forget(message.keys)
                self._inbox.forget(channel, message.segments, message.digests)
            case Released():
                self._client.outbox.returned(message.segments)
            case Places(task=number):
                task = self._places.find(number)
                if task is not None and task.places is not None:
                    task.places.put(message)
            case Recall():
                self._give_back(channel)
            case DebuggerHears():
                self._debuggers.hear(message)
            case Topology():
                os.environ[context.VARIABLE] = message.compute_pool
            case Prepare():
                if self._reader is not None:
                    self._reader.put(message)
                else:
                    self._prepare(message)
            case Detach():
                self._part_from_client()
            case Share():
                self._offer()
            case _:
                raise ProtocolError(f"a client does not send {type(message).__name__}")

    def _answer(
        self, channel: Channel, frame: Frame, message: Result | Failure | Item | End
    ) -> None:
        """Give a task what the client says about a call that the task has asked for."""
        pieces = None
        if message.payload is not None:
            pieces, _ = self._inbox.take(channel, frame, message.payload)
        if self._nested is not None:
            self._nested.answer(message, pieces)

    def _part_from_client(self) -> None:
        """Forget the client and all that it has sent, and wait for the next client.

        What the process itself has stays: modules, memory, the plugins' hooks.
        """
        with self._places.lock:
            places = self._places
            if places.running or places.waiting or places.waiting_apart:
                # Its result would reach the next client. The agent starts another executor.
                os._exit(0)
        before = self._client
        instances.free_all()
        self._places.objects_freed()
        self._await_client()
        # Only now: for the client, this is the sign that another one may come.
        before.channel.close()
        self._client.wait()

    def _admit(self, run: Run, pieces: Pieces, caller: ObjectCaller | None = None) -> None:
        """Queue a task whose buffers and definitions are all here."""
        task = ReadyTask(run, pieces, [], caller=caller)
        if run.inputs:
            channel, streams = self._client.channel, range(len(run.inputs))
            task.inputs = [InputStream(run.task, each, channel, self._hurry) for each in streams]
        if run.kept:
            task.places = queue.SimpleQueue()
        if run.apart:
            if isinstance(self._capture, ProcessCapture):
                self._capture.share()
            self._places.add_apart(task)
            return
        helps = self._places.add(task)
        if self._reader is not None:
            self._reader.put(None)
            if caller is not None and self._watched is not None and not self._wakes:
                self._wakes = True
                self._waking.send(b"\0")
        else:
            self._queue.put(None)
        if helps:
            self._places.help()

    def _hurry(self) -> None:
        """Have another thread read now. With threads, the main thread does nothing else."""
        if self._reader is not None:
            self._reader.hurry()

    def _running_task(self, number: int) -> ReadyTask | None:
        """A task that runs; with 0, the one that runs alone."""
        with self._places.lock:
            if not number and not self._config.threads:
                return next(iter(self._places.running.values()), None)
            return self._places.running.get(number)

    def _grant(self, credit: Credit) -> None:
        task = self._places.find(credit.task)
        if task is not None and task.output is not None:
            task.output.grant(credit.count)

    def _end_input(self, channel: Channel, frame: Frame, end: End) -> None:
        pieces = None
        if end.payload is not None:
            pieces, _ = self._inbox.take(channel, frame, end.payload)
        task = self._places.find(end.task)
        if task is not None:
            task.inputs[end.stream].finish(pieces)

    def _give_back(self, channel: Channel) -> None:
        held = self._pending.clear()
        with self._places.lock:
            waiting = self._places.waiting
            given = [number for number, task in waiting.items() if task.caller is None]
            for number in given:
                waiting.pop(number).cancelled = True
        channel.send(Recalled([*given, *held]))

    def _cancel(self, number: int) -> None:
        self._pending.cancel(number)
        places = self._places
        with places.lock:
            task = places.take_waiting(number)
            if task is not None:
                task.cancelled = True
            else:
                task = places.running.get(number)
            runs = task is not None and number in places.running
            again = task is not None and runs and task.cancelled
            if task is not None and runs and not again:
                task.cancelled = True
                # Before the streams are closed, so that the task is interrupted before it sees
                # them end.
                if task.wake is None:
                    self._interrupts.raise_in(task)
                else:
                    task.woken = True
                    task.wake()
                self._debuggers.cancel(number)
                if task.places is not None:
                    task.places.put(None)
                for stream in task.inputs:
                    stream.finish(None)
                if task.output is not None:
                    task.output.close()
        if task is not None and runs:
            if again:
                # The client does not end this process because of tasks of others, which must not
                # wait for this one.
                with contextlib.suppress(PoolError):
                    self._places.begin_wait(task, None)
            elif self._nested is not None:
                self._nested.wake(task)
            return
        if number >= OBJECT_CALLS:
            return
        # The client also gets this answer for a task that never arrived, or is done.
        self._client.send(Failure(number, 0.0, "", "cancelled before it started", [], None, True))

    # Running.

    def serve(self) -> None:
        """Run tasks until the agent ends the process."""
        signal.signal(signal.SIGINT, self._interrupts.on_signal)
        signal.signal(process.LEAVE, self._on_leave)
        try:
            self._client.wait()
            self._serve()
        except Leave:
            try:
                self._hooks.leave()
            except Exception:
                traceback.print_exc()

    def _serve(self) -> None:
        if not self._config.threads:
            self._reader = TaskReader(
                self._read_one,
                lambda: (self._offered and self._watched is None) or bool(self._pending),
            )
            while True:
                prepare = self._reader.next()
                if prepare is not None:
                    self._prepare(prepare)
                elif (begun := self._places.begin_next()) is not None:
                    self._run_task(begun, self._board.rings[0])
        for number in range(self._config.threads):
            threading.Thread(
                target=self._serve_thread,
                args=(number,),
                name=f"skyward-task-{number}",
                daemon=True,
            ).start()
        while True:
            self._read_one()

    def _on_leave(self, *_: object) -> None:
        signal.signal(process.LEAVE, signal.SIG_IGN)
        raise Leave

    def _prepare(self, prepare: Prepare) -> None:
        """Enter the plugins' hooks; before any task, and on the main thread."""
        os.environ[context.VARIABLE] = prepare.compute_pool
        self._capture.begin(0)
        problem = ""
        try:
            self._hooks.enter(prepare.hooks, context.instance_info())
        except PluginError as failure:
            problem = str(failure)
        finally:
            self._capture.end()
        self._client.send(Prepared(problem))

    def _serve_thread(self, slot: int) -> None:
        while True:
            self._queue.get()
            if (task := self._places.begin_next()) is not None:
                copy_context().run(self._run_task, task, self._board.rings[slot])

    def _run_in_place(self, task: ReadyTask) -> None:
        """Run a task on a helper, in the place of one that waits."""
        ring = self._spare.pop() if self._spare else None
        try:
            copy_context().run(self._run_task, task, ring)
        finally:
            if ring is not None:
                self._spare.append(ring)

    def _run_task(self, task: ReadyTask, ring: TaskRing | None) -> None:
        try:
            if ring is not None:
                ring.begin(task.run.task, task.run.name)
            answer: Message | None = None
            try:
                outcome = self._outcome(task, task.caller or self._client)
                answer = outcome[0]
            finally:
                places, number = self._places, task.run.task
                if not task.waits and not task.run.apart:
                    places.running.pop(number, None)
                if places.awaited or number in places.running:
                    places.free(task)
                if ring is not None:
                    ring.end(answer)
                if self._nested is not None and not isinstance(answer, (Result, End)):
                    self._nested.give_up(task)
            if any(handles.lines.ended):
                self._client.tell(Called(*handles.lines.take_ended()))
            (task.caller or self._client).send(*outcome)
        except Interrupted:
            # On a thread, the interrupt may be raised after the function has returned.
            cancelled = Failure(task.run.task, 0.0, "", "cancelled", [], None, True)
            (task.caller or self._client).send(cancelled)

    def _outcome(
        self, task: ReadyTask, client: ClientConnection | ObjectCaller
    ) -> tuple[Message, Sendable | None]:
        """Call the function of a task, and return the last message about it."""
        token = current_task.set(task.run.task)
        inside = context.inside.set(True)
        self._capture.begin(task.run.task)
        started = time.perf_counter()
        if self._debuggers.used:
            self._debuggers.begin(task)
        try:
            try:
                if task.run.trace:
                    with below(task.run.trace):
                        value, streamed = self._call(task, client)
                else:
                    value, streamed = self._call(task, client)
                references.settle()
                ran = time.perf_counter() - started
                outcome: tuple[Message, Sendable | None]
                if streamed:
                    outcome = End(task.run.task, -1, None), None
                else:
                    what = f"the result of {task.run.name}"
                    sendable = (
                        self._pack(task, client, value, what)
                        if task.run.kept
                        else client.pack(value, what)
                    )
                    outcome = Result(task.run.task, ran, sendable[0]), sendable
            except Leave:
                raise
            except references.CannotOpenError:
                outcome = Missing(task.run.task, [], [], True), None
            except BaseException as problem:
                self._interrupts.calling.pop(task.thread, None)
                with contextlib.suppress(Exception):
                    references.settle()
                self._debuggers.failed(task, problem)
                outcome = self._failure(task, client, problem, time.perf_counter() - started)
        finally:
            if self._debuggers.used:
                self._debuggers.end(task)
            self._capture.end()
            if self._log.rows:
                self._log.flush()
            context.inside.reset(inside)
            current_task.reset(token)
        return outcome

    def _call(self, task: ReadyTask, client: ClientConnection | ObjectCaller) -> tuple[Any, bool]:
        """The function's value; the flag says whether its items have been streamed already."""
        if task.run.debugged == POST_MORTEM:
            self._interrupts.calling[task.thread] = task
            self._debuggers.look_back(task)
            self._interrupts.calling.pop(task.thread, None)
            return None, False
        function = self._pending.resolve(task.run.code) if task.caller is None else instances.called
        if not task.run.kept:
            args, kwargs = encoding.decode(*task.pieces)
        else:
            tensors.watch_opened(task.opened)
            try:
                args, kwargs = encoding.decode(*task.pieces)
            finally:
                tensors.watch_opened(None)
        if task.inputs:
            args, kwargs = _with_streams(args, kwargs, task.inputs)
        task.pieces = (memoryview(b""), [], [])
        self._interrupts.calling[task.thread] = task
        if task.cancelled:
            raise Interrupted
        if self._hooks.decorators:
            function = self._hooks.decorated(function)
        value = function(*args, **kwargs)
        del args, kwargs
        if isinstance(value, types.CoroutineType):
            # Imported here: few functions need it, and it takes an executor 25 ms.
            import asyncio

            value = asyncio.run(value)
        if isinstance(value, types.AsyncGeneratorType):
            value = _drained(value)
        if not isinstance(value, types.GeneratorType):
            self._interrupts.calling.pop(task.thread, None)
            return value, False
        self._stream(task, client, value)
        self._interrupts.calling.pop(task.thread, None)
        return None, True

    def _pack(
        self, task: ReadyTask, client: ClientConnection | ObjectCaller, value: Any, what: str
    ) -> Sendable:
        if not task.run.kept:
            return client.pack(value, what)
        return client.lay_out(self._encode_kept(task, client, value, what))

    def _encode_kept(
        self, task: ReadyTask, client: ClientConnection | ObjectCaller, value: Any, what: str
    ) -> Encoded:
        """Encode a result and leave its tensors on the device; if that cannot be, send the bytes.

        The client makes memory for them there, and this process copies them.
        """
        book = ResultBook(task.opened)
        encoded = encoding.encode(value, what=what, keep=book)
        if not any(last for _, last in book.spans):
            return encoded
        client.send(Room(task.run.task, book.spans))
        self._hurry()
        assert task.places is not None
        room = task.places.get()
        if room is None:
            raise Interrupted
        if room.pieces:
            try:
                book.fill(room.pieces, room.places)
                return encoded
            except references.CannotOpenError:
                pass
        return encoding.encode(value, what=what, keep=ResultBook(task.opened, by_value=True))

    def _stream(
        self, task: ReadyTask, client: ClientConnection | ObjectCaller, generator: Any
    ) -> None:
        output = task.output = OutputStream(
            self._hurry, lambda permitted: client.send(Credit(task.run.task, -1, permitted))
        )
        if task.cancelled:
            output.close()
        client.send(Result(task.run.task, 0.0, None))
        with contextlib.closing(generator):
            for item in generator:
                if not output.take():
                    # No interrupt may reach the generator while it cleans up.
                    self._interrupts.calling.pop(task.thread, None)
                    return
                references.settle()
                sendable = self._pack(task, client, item, f"an item of {task.run.name}")
                del item
                client.send(Item(task.run.task, -1, sendable[0]), sendable)

    def _failure(
        self,
        task: ReadyTask,
        client: ClientConnection | ObjectCaller,
        problem: BaseException,
        ran: float,
    ) -> tuple[Message, Sendable | None]:
        cancelled = task.cancelled and isinstance(problem, (Interrupted, GeneratorExit))
        return failures.report(problem, task.run.task, ran, client.pack, cancelled=cancelled)

    def _nested_pool(self) -> NestedPool:
        """The pool of the tasks of this process, for a task that starts others."""
        # Imported here: most executors never need it.
        from skyward.worker.nested import NestedPool, wrong_process

        if os.getpid() != self._pid:
            raise wrong_process()
        with self._places.lock:
            if self._nested is None:
                self._nested = NestedPool(
                    self._client, self._places, self._asking_task, self._hurry
                )
                if isinstance(self._capture, ProcessCapture):
                    self._capture.share()
            return self._nested

    def _asking_task(self) -> ReadyTask | None:
        """The task that this thread belongs to; without a context, the only one that runs."""
        number = current_task.get()
        with self._places.lock:
            running = self._places.running
            if number:
                return running.get(number)
            return next(iter(running.values())) if len(running) == 1 else None


def _with_streams(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[InputStream]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with input streams in place of the references to them."""

    def filled(value: Any) -> Any:
        return inputs[value.index] if isinstance(value, encoding.StreamRef) else value

    return tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()}


def _drained(items: Any) -> Any:
    """An async generator as a plain one."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(items.aclose())
        loop.close()


@contextlib.contextmanager
def below(carrier: dict[str, str]) -> Iterator[None]:
    """Make the call's span the current one, if the worker has OpenTelemetry."""
    try:
        # Imported here: only calls of programs with traces need it.
        from opentelemetry import context, propagate
    except ImportError:
        yield
        return
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)


def main() -> None:
    """Read the configuration, announce the endpoint, run tasks."""
    gc.freeze()  # what was imported, for good
    gc.enable()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ExecutorConfig)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    process.hold_lifeline(config.lifeline, Inspection(config.stacks).answer)
    kernel.raise_descriptors()
    sys.path[:] = config.search_path
    # PyTorch works without numpy, and a script that needs numpy fails when it imports numpy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    executor = Executor(config)
    credentials = Credentials(*config.credentials) if config.credentials else None
    worker_link.prepare(credentials, threads=bool(config.threads))
    context.own_pool = executor._nested_pool
    is_head = config.node == config.worker == config.slot == 0
    port = rendezvous.reserve() if is_head else 0
    announcement = msgspec.json.encode({"endpoint": executor.endpoint, "port": port})
    os.write(config.status, announcement + b"\n")
    os.close(config.status)
    executor.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
