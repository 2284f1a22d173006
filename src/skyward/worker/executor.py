"""An executor: the process that runs tasks, one at a time or on threads, for one client."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections import OrderedDict
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import msgspec

from skyward import context
from skyward.errors import PluginError, ProtocolError
from skyward.wire import messages, objects, references
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.identity import PEER, Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import (
    Cancel,
    Credit,
    Define,
    End,
    Failure,
    Fetch,
    Forget,
    Hello,
    Item,
    Message,
    Missing,
    Prepare,
    Prepared,
    Recall,
    Recalled,
    Released,
    Result,
    Run,
    Topology,
    Written,
)
from skyward.worker import failures, hooks, lifeline, limits, rendezvous
from skyward.worker.anteroom import Anteroom
from skyward.worker.config import ExecutorConfig
from skyward.worker.definitions import Definitions
from skyward.worker.inbox import Inbox, Pieces
from skyward.worker.outbox import Outbox, Sendable
from skyward.worker.output import ProcessCapture, ThreadCapture, current_task
from skyward.worker.reader import Reader
from skyward.worker.relay import Relay
from skyward.worker.streams import InputStream, OutputStream

INTERRUPT_AGAIN_SECONDS = 0.005


class Interrupted(KeyboardInterrupt):
    """Raised inside a task that the client cancelled."""


@dataclass(slots=True)
class Job:
    """A task as it waits for its turn."""

    run: Run
    pieces: Pieces
    inputs: list[InputStream]
    output: OutputStream | None = None
    """There once its function has returned a generator."""
    cancelled: bool = False
    thread: int = 0


class Leave(BaseException):
    """Raised on the main thread when the process is to end in good order."""


class Executor:
    """Receives tasks on one thread and runs them on another (or several)."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._channel: Channel | None = None
        self._waiting: OrderedDict[int, Job] = OrderedDict()
        self._running: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._inbox = Inbox(config.blob_cap)
        self._definitions = Definitions(self._inbox)
        objects.find_handles(self._definitions.resolve)
        self._anteroom = Anteroom(self._inbox, self._definitions, self._admit)
        self._outbox = Outbox(config.blob_cap)
        self._hooks = hooks.Entered()
        self._interrupting: Job | None = None
        self._calling: Job | None = None
        """The job whose function is being called, on the main thread."""
        capture = ThreadCapture if config.threads else ProcessCapture
        self._capture = capture(config.output, self._emit)
        credentials = Credentials(*config.credentials) if config.credentials else None
        self._relay = Relay(
            config.pool, credentials, self._inbox.arrivals, settled=self._settle_guests
        )
        self._listener = Listener(config.where, config.pool, credentials, self._accept)
        self._connected = threading.Event()
        self._reader: Reader[Job | Prepare] | None = None
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()

    @property
    def endpoint(self) -> str:
        """Where the client connects."""
        return self._listener.endpoint

    def _accept(self, channel: Channel, hello: Hello) -> None:
        if hello.role == PEER:
            self._relay.serve(channel)
            return
        with self._lock:
            taken = self._channel is not None or hello.role != "data"
            if not taken:
                self._channel = channel
        if taken:
            channel.close()
            return
        # A result that was sent must arrive even if the next task ends this process.
        channel.be_patient()
        self._connected.set()

    # Receiving; never on a thread that is in user code.

    def _read_one(self) -> None:
        channel = self._channel
        assert channel is not None
        try:
            frame = channel.receive()
            self._handle(channel, frame, messages.decode(frame.kind, frame.meta))
        except Exception as problem:
            if isinstance(problem, (EOFError, OSError)) and not isinstance(problem, ProtocolError):
                # The client is gone; the agent decides what becomes of the node.
                os._exit(0)
            self._give_up(problem)

    def _settle_guests(self) -> None:
        try:
            self._anteroom.settle()
        except Exception as problem:
            # On a thread of its own nobody would hear of it, and tasks would wait for ever.
            self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        """End at once: the agent says so, and starts another."""
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
                self._anteroom.enter(channel, message, body)
            case Define():
                body = self._inbox.read(channel, frame, message.payload)
                self._anteroom.define(channel, message, body)
            case Fetch():
                self._relay.fetch(message)
            case Cancel(task=task):
                self._cancel(task)
            case Credit():
                self._grant(message)
            case Item():
                pieces, _ = self._inbox.take(channel, frame, message.payload)
                job = self._job(message.task)
                if job is not None and pieces is not None:
                    job.inputs[message.stream].put(pieces)
            case End():
                self._end_input(channel, frame, message)
            case Forget():
                self._anteroom.forget(message.keys)
                self._inbox.forget(channel, message.segments, message.digests)
            case Released():
                self._outbox.returned(message.segments)
            case Recall():
                self._give_back(channel)
            case Topology():
                os.environ[context.VARIABLE] = message.compute_pool
            case Prepare():
                if self._reader is not None:
                    self._reader.put(message)
                else:
                    self._prepare(message)
            case _:
                raise ProtocolError(f"a client does not send {type(message).__name__}")

    def _admit(self, run: Run, pieces: Pieces) -> None:
        """All that a task needs is here."""
        channel = self._channel
        assert channel is not None
        inputs = [
            InputStream(run.task, index, channel, self._hurry) for index in range(len(run.inputs))
        ]
        job = Job(run, pieces, inputs)
        with self._lock:
            self._waiting[run.task] = job
        if self._reader is not None:
            self._reader.put(job)
        else:
            self._queue.put(job)

    def _hurry(self) -> None:
        """Somebody must listen now. With threads, the main one does nothing else."""
        if self._reader is not None:
            self._reader.hurry()

    def _job(self, task: int) -> Job | None:
        with self._lock:
            return self._waiting.get(task) or self._running.get(task)

    def _grant(self, credit: Credit) -> None:
        job = self._job(credit.task)
        if job is not None and job.output is not None:
            job.output.grant(credit.count)

    def _end_input(self, channel: Channel, frame: Frame, end: End) -> None:
        pieces = None
        if end.payload is not None:
            pieces, _ = self._inbox.take(channel, frame, end.payload)
        job = self._job(end.task)
        if job is not None:
            job.inputs[end.stream].finish(pieces)

    def _give_back(self, channel: Channel) -> None:
        held = self._anteroom.clear()
        with self._lock:
            given = [*self._waiting, *held]
            for job in self._waiting.values():
                job.cancelled = True
            self._waiting.clear()
        channel.send(Recalled(given))

    def _cancel(self, task: int) -> None:
        self._anteroom.leave(task)
        with self._lock:
            job = self._waiting.pop(task, None)
            if job is not None:
                job.cancelled = True
            else:
                job = self._running.get(task)
            if job is not None and task in self._running:
                job.cancelled = True
                # First, so that on a thread it strikes before the ends of streams are noticed.
                self._interrupt(job)
                for stream in job.inputs:
                    stream.finish(None)
                if job.output is not None:
                    job.output.close()
                return
        # Also for one that never came or is done: it holds no place here.
        self._reply(Failure(task, 0.0, "", "cancelled before it started", [], None, True))

    def _interrupt(self, job: Job) -> None:
        if self._config.threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(job.thread), ctypes.py_object(Interrupted)
            )
        else:
            # A signal also ends a blocking system call; the handler looks who is meant.
            self._interrupting = job
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_signal(self, _: int, frame: types.FrameType | None) -> None:
        """Raise in the cancelled job, and only while it is in user code."""
        job, self._interrupting = self._interrupting, None
        if job is None or job is not self._calling:
            return
        if _in_our_code(frame):
            # A frame half sent, or memory not given back, would harm the tasks to come.
            retry = threading.Timer(INTERRUPT_AGAIN_SECONDS, self._interrupt, (job,))
            retry.daemon = True
            retry.start()
            return
        self._calling = None
        raise Interrupted

    # Running.

    def serve(self) -> None:
        """Run tasks until the process is ended from outside."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(lifeline.LEAVE, self._on_leave)
        try:
            self._connected.wait()
            self._serve()
        except Leave:
            try:
                self._hooks.leave()
            except Exception:
                traceback.print_exc()

    def _serve(self) -> None:
        if not self._config.threads:
            self._reader = Reader(self._read_one, lambda: self._anteroom.occupied)
            while True:
                job = self._reader.next()
                if isinstance(job, Prepare):
                    self._prepare(job)
                else:
                    self._run_job(job)
        for number in range(self._config.threads):
            threading.Thread(
                target=self._serve_thread, name=f"skyward-task-{number}", daemon=True
            ).start()
        while True:
            self._read_one()

    def _on_leave(self, *_: object) -> None:
        signal.signal(lifeline.LEAVE, signal.SIG_IGN)
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
        self._reply(Prepared(problem))

    def _serve_thread(self) -> None:
        while True:
            copy_context().run(self._run_job, self._queue.get())

    def _run_job(self, job: Job) -> None:
        try:
            with self._lock:
                if job.cancelled or self._waiting.pop(job.run.task, None) is None:
                    return
                job.thread = threading.get_ident()
                self._running[job.run.task] = job
            try:
                outcome = self._run(job)
            finally:
                self._running.pop(job.run.task, None)
            self._reply(*outcome)
        except Interrupted:
            # On a thread, the interrupt may strike after the function has returned.
            self._reply(Failure(job.run.task, 0.0, "", "cancelled", [], None, True))

    def _run(self, job: Job) -> tuple[Message, Sendable | None]:
        token = current_task.set(job.run.task)
        inside = context.inside.set(True)
        self._capture.begin(job.run.task)
        started = time.perf_counter()
        try:
            try:
                value, streamed = self._call(job)
                references.settle()
                ran = time.perf_counter() - started
                outcome: tuple[Message, Sendable | None]
                if streamed:
                    outcome = End(job.run.task, -1, None), None
                else:
                    sendable = self._pack(value, f"the result of {job.run.name}")
                    outcome = Result(job.run.task, ran, sendable[0]), sendable
            except Leave:
                raise
            except references.UnreachableError:
                outcome = Missing(job.run.task, [], [], True), None
            except BaseException as problem:
                self._calling = None
                with contextlib.suppress(Exception):
                    references.settle()
                outcome = self._failure(job, problem, time.perf_counter() - started)
        finally:
            self._capture.end()
            context.inside.reset(inside)
            current_task.reset(token)
        return outcome

    def _call(self, job: Job) -> tuple[Any, bool]:
        """The function's value, and whether it was an iterator that has been streamed already."""
        function = self._definitions.resolve(job.run.code)
        args, kwargs = objects.decode(*job.pieces)
        if job.inputs:
            args, kwargs = _with_streams(args, kwargs, job.inputs)
        job.pieces = (memoryview(b""), [], [])
        self._calling = job
        if job.cancelled:
            raise Interrupted
        value = self._hooks.decorated(function)(*args, **kwargs)
        del args, kwargs
        if isinstance(value, types.CoroutineType):
            value = asyncio.run(value)
        if isinstance(value, types.AsyncGeneratorType):
            value = _drained(value)
        if not isinstance(value, types.GeneratorType):
            self._calling = None
            return value, False
        self._stream(job, value)
        self._calling = None
        return None, True

    def _stream(self, job: Job, generator: Any) -> None:
        output = job.output = OutputStream(self._hurry)
        if job.cancelled:
            output.close()
        self._reply(Result(job.run.task, 0.0, None))
        with contextlib.closing(generator):
            for item in generator:
                if not output.take():
                    # Its cleaning up is not to be interrupted.
                    self._calling = None
                    return
                references.settle()
                sendable = self._pack(item, f"an item of {job.run.name}")
                del item
                self._reply(Item(job.run.task, -1, sendable[0]), sendable)

    def _failure(
        self, job: Job, problem: BaseException, ran: float
    ) -> tuple[Message, Sendable | None]:
        cancelled = job.cancelled and isinstance(problem, (Interrupted, GeneratorExit))
        name, text = failures.type_name(problem), failures.text(problem)
        frames = failures.frames(problem)
        sendable: Sendable | None = None
        if isinstance(problem, Exception) and not cancelled:
            # First with the exceptions it came from, else alone, else only in words.
            for depth in (0, failures.CHAIN_DEPTH):
                with contextlib.suppress(Exception):
                    sendable = self._pack(failures.portable(problem, depth))
                    break
        payload = sendable[0] if sendable is not None else None
        return Failure(job.run.task, ran, name, text, frames, payload, cancelled), sendable

    def _reply(self, message: Message, sendable: Sendable | None = None) -> None:
        channel = self._channel
        assert channel is not None
        _, body, segments = sendable or (None, [], [])
        descriptors = [segment.descriptor for segment in segments] if segments else ()
        try:
            self._inbox.send_releases(channel)
            channel.send(message, body, descriptors)
        except OSError:
            # The client is gone, which the reader notices.
            pass
        if segments:
            self._outbox.sent(segments)

    def _pack(self, value: Any, what: str = "the value") -> Sendable:
        assert self._channel is not None
        return self._outbox.pack(objects.encode(value, what=what), self._channel.shares_memory)

    def _emit(self, task: int, stream: str, text: str, transient: bool) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(Written(task, stream, text, transient))
                # Cut off from the client, a task that prints and prints must wait at some point.
                self._channel.wait_for_room()


def _with_streams(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[InputStream]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def filled(value: Any) -> Any:
        return inputs[value.index] if isinstance(value, objects.StreamRef) else value

    return tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()}


def _drained(items: Any) -> Any:
    """An async generator as a plain one."""
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


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_BETWEEN = {ssl.__file__, socket.__file__, threading.__file__}
"""What our code waits in; whether it is ours that does shows further out."""


def _in_our_code(frame: types.FrameType | None) -> bool:
    """Whether a step of ours is under way there: sending, printing, giving memory back."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    # Memory is given back by finalizers.
    return file.startswith(_OURS) or file == weakref.__file__


def main() -> None:
    """Read the configuration, announce the endpoint, run tasks."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ExecutorConfig)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    lifeline.hold(config.lifeline)
    limits.raise_descriptors()
    sys.path[:] = config.search_path
    # PyTorch works without it, and a script that needs it finds out by itself.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    executor = Executor(config)
    is_head = config.node == config.worker == config.slot == 0
    port = rendezvous.reserve() if is_head else 0
    announcement = msgspec.json.encode({"endpoint": executor.endpoint, "port": port})
    os.write(config.status, announcement + b"\n")
    os.close(config.status)
    executor.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
