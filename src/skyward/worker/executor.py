"""An executor: the process that runs tasks, one at a time or on threads, for one client."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import msgspec

from skyward import context
from skyward.errors import ProtocolError, SerializationError
from skyward.wire import blobs, memory, messages, objects
from skyward.wire.blobs import Blob, BlobStore, Mapped
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.identity import Credentials, Listener
from skyward.wire.messages import (
    SEGMENT,
    STREAMED,
    Buffer,
    Cancel,
    Credit,
    Define,
    End,
    Evicted,
    Failure,
    Forget,
    Hello,
    Item,
    Message,
    Missing,
    Payload,
    Recall,
    Recalled,
    Released,
    Result,
    Run,
    Topology,
    Written,
)
from skyward.worker.config import ExecutorConfig
from skyward.worker.output import ProcessCapture, ThreadCapture, current_task
from skyward.worker.streams import InputStream, OutputStream

CHAIN_DEPTH = 8
"""How many causes of an exception travel with it."""

Pieces = tuple[memoryview, list[memoryview], list[tuple[int, int]]]


class Interrupted(KeyboardInterrupt):
    """Raised inside a task that the client cancelled."""


@dataclass(slots=True)
class Definition:
    """An object the client defined under a key; decoded when first used."""

    pieces: Pieces | None
    frozen: bool
    value: Any = None


@dataclass(slots=True)
class Job:
    """A task as it waits for its turn."""

    run: Run
    pieces: Pieces
    inputs: list[InputStream]
    output: OutputStream
    cancelled: bool = False
    thread: int = 0


class Executor:
    """Receives tasks on one thread and runs them on another (or several)."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self._channel: Channel | None = None
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: OrderedDict[int, Job] = OrderedDict()
        self._running: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._definitions: dict[bytes, Definition] = {}
        self._mapped = Mapped()
        self._cache = BlobStore(config.blob_cap)
        self._results = memory.Arena(config.blob_cap)
        self._lent: dict[int, memory.Segment] = {}
        self._interrupting: Job | None = None
        capture = ThreadCapture if config.threads else ProcessCapture
        self._capture = capture(config.output, self._emit)
        credentials = Credentials(*config.credentials) if config.credentials else None
        self._listener = Listener(config.where, config.pool, credentials, self._accept)
        self._connected = threading.Event()

    @property
    def endpoint(self) -> str:
        """Where the client connects."""
        return self._listener.endpoint

    def _accept(self, channel: Channel, hello: Hello) -> None:
        with self._lock:
            taken = self._channel is not None
            if not taken:
                self._channel = channel
        if taken:
            channel.close()
            return
        self._connected.set()
        self._receive_forever(channel)

    # Receiving: one thread, never blocked by user code.

    def _receive_forever(self, channel: Channel) -> None:
        try:
            while True:
                frame = channel.receive()
                self._handle(channel, frame, messages.decode(frame.kind, frame.meta))
        except (EOFError, OSError):
            # The client is gone; the agent decides what becomes of the node.
            os._exit(0)
        except ProtocolError as problem:
            print(
                f"executor {self._config.worker}.{self._config.slot}: {problem}",
                file=sys.__stderr__,
            )
            os._exit(70)

    def _handle(self, channel: Channel, frame: Frame, message: Message) -> None:
        match message:
            case Run():
                self._take_task(channel, frame, message)
            case Define():
                pieces, _ = self._take_payload(channel, frame, message.payload)
                self._definitions[message.key] = Definition(pieces, message.frozen)
            case Cancel(task=task):
                self._cancel(task)
            case Credit():
                self._grant(message)
            case Item():
                pieces, _ = self._take_payload(channel, frame, message.payload)
                job = self._job(message.task)
                if job is not None and pieces is not None:
                    job.inputs[message.stream].put(pieces)
            case End():
                self._end_input(channel, frame, message)
            case Forget():
                for key in message.keys:
                    self._definitions.pop(key, None)
                for segment in message.segments:
                    self._mapped.drop(segment)
                self._send_releases()
            case Released():
                for segment_id in message.segments:
                    segment = self._lent.pop(segment_id, None)
                    if segment is not None:
                        self._results.recycle(segment)
            case Recall():
                self._give_back(channel)
            case Topology():
                os.environ[context.VARIABLE] = message.compute_pool
            case _:
                raise ProtocolError(f"a client does not send {type(message).__name__}")

    def _take_task(self, channel: Channel, frame: Frame, run: Run) -> None:
        pieces, missing = self._take_payload(channel, frame, run.payload)
        keys = [
            key
            for key in (run.code, *run.handles)
            if key not in self._definitions
            or (self._definitions[key].pieces is None
            and self._definitions[key].value is None)
        ]
        if pieces is None or keys:
            channel.send(Missing(run.task, missing, keys))
            return
        inputs = [InputStream(run.task, index, channel) for index in range(len(run.inputs))]
        job = Job(run, pieces, inputs, OutputStream())
        with self._lock:
            self._waiting[run.task] = job
        self._queue.put(job)

    def _take_payload(
        self, channel: Channel, frame: Frame, payload: Payload
    ) -> tuple[Pieces | None, list[bytes]]:
        """Read the body, keep what is to be kept; None with what is missing if that cannot be."""
        for (segment, size), descriptor in zip(payload.segments, frame.descriptors, strict=True):
            self._mapped.add(segment, size, descriptor)
        body = self._take_body(channel, frame, payload)
        missing: list[bytes] = []

        def find(ref: Buffer) -> memoryview:
            if ref.where == SEGMENT:
                return self._mapped.view(ref.segment, ref.offset, ref.length)
            blob = self._cache.find(ref.digest)
            if blob is None or blob.length != ref.length:
                missing.append(ref.digest)
                return memoryview(b"")
            segment = blob.segment.id
            return memory.map_private(
                blob.segment.descriptor,
                blob.offset,
                blob.length,
                lambda: self._cache.unpin(segment),
            )

        pieces = blobs.unpack(payload, body, find)
        return (None, missing) if missing else (pieces, [])

    def _take_body(self, channel: Channel, frame: Frame, payload: Payload) -> bytearray:
        streamed = [ref for ref in payload.buffers if ref.where == STREAMED]
        if payload.inline + sum(ref.length for ref in streamed) != frame.body_length:
            raise ProtocolError("a payload that does not account for its body")
        body = bytearray(payload.inline) if frame.body is None else frame.body
        if not streamed:
            if frame.body is None:
                channel.read_body(frame, [memoryview(body)])
            return body
        offsets, size = memory.aligned([ref.length for ref in streamed])
        segment = self._cache.arena.allocate(size)
        whole = memoryview(segment.shared())
        places = [whole[at : at + ref.length] for at, ref in zip(offsets, streamed, strict=True)]
        if frame.body is None:
            channel.read_body(frame, [memoryview(body), *places])
        else:
            at = payload.inline
            for place in places:
                place[:] = frame.body[at : at + len(place)]
                at += len(place)
        self._cache.pin(segment)
        for at, ref in zip(offsets, streamed, strict=True):
            self._cache.add(Blob(ref.digest, segment, at, ref.length))
        self._cache.unpin(segment.id)
        self._cache.trim()
        evicted = _emptied(self._cache.evicted)
        if evicted:
            channel.send(Evicted(evicted))
        self._cache.retired.clear()
        return body

    def _job(self, task: int) -> Job | None:
        with self._lock:
            return self._waiting.get(task) or self._running.get(task)

    def _grant(self, credit: Credit) -> None:
        job = self._job(credit.task)
        if job is not None:
            job.output.grant(credit.count)

    def _end_input(self, channel: Channel, frame: Frame, end: End) -> None:
        pieces = None
        if end.payload is not None:
            pieces, _ = self._take_payload(channel, frame, end.payload)
        job = self._job(end.task)
        if job is not None:
            job.inputs[end.stream].finish(pieces)

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            given = list(self._waiting)
            for job in self._waiting.values():
                job.cancelled = True
            self._waiting.clear()
        channel.send(Recalled(given))

    def _cancel(self, task: int) -> None:
        with self._lock:
            job = self._waiting.pop(task, None)
            if job is not None:
                job.cancelled = True
            else:
                job = self._running.get(task)
                if job is None:
                    return
                job.cancelled = True
                for stream in job.inputs:
                    stream.finish(None)
                job.output.close()
                self._interrupt(job)
                return
        self._send(Failure(task, 0.0, "", "cancelled before it started", [], None, True))

    def _interrupt(self, job: Job) -> None:
        if self._config.threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(job.thread), ctypes.py_object(Interrupted)
            )
        else:
            # A signal also ends a blocking system call; the handler looks who is meant.
            self._interrupting = job
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_signal(self, *_: object) -> None:
        job = self._interrupting
        if job is not None and job.run.task in self._running:
            self._interrupting = None
            raise Interrupted

    # Running.

    def serve(self) -> None:
        """Run tasks until the process is ended from outside."""
        signal.signal(signal.SIGINT, self._on_signal)
        if not self._config.threads:
            while True:
                self._run_next()
        for number in range(self._config.threads):
            threading.Thread(
                target=self._serve_thread, name=f"skyward-task-{number}", daemon=True
            ).start()
        while True:
            signal.pause()

    def _serve_thread(self) -> None:
        while True:
            copy_context().run(self._run_next)

    def _run_next(self) -> None:
        try:
            job = self._queue.get()
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
            # It came too late for its task; whoever waits is told by the outcome already made.
            return

    def _run(self, job: Job) -> tuple[Message, list[bytes | memoryview], list[int]]:
        token = current_task.set(job.run.task)
        inside = context.inside.set(True)
        self._capture.begin(job.run.task)
        started = time.perf_counter()
        try:
            try:
                value, streamed = self._call(job)
                ran = time.perf_counter() - started
                if streamed:
                    outcome: tuple[Message, list[bytes | memoryview], list[int]] = (
                        End(job.run.task, -1, None),
                        [],
                        [],
                    )
                else:
                    payload, body, descriptors = self._pack(objects.encode(value))
                    outcome = Result(job.run.task, ran, payload), body, descriptors
            except BaseException as problem:
                outcome = self._failure(job, problem, time.perf_counter() - started)
        finally:
            self._capture.end()
            context.inside.reset(inside)
            current_task.reset(token)
        return outcome

    def _call(self, job: Job) -> tuple[Any, bool]:
        """The function's value, and whether it was an iterator that has been streamed already."""
        with objects.handle_source(self._resolve):
            function = self._resolve(job.run.code)
            args, kwargs = objects.decode(*job.pieces)
        if job.inputs:
            args, kwargs = _with_streams(args, kwargs, job.inputs)
        job.pieces = (memoryview(b""), [], [])
        value = function(*args, **kwargs)
        del args, kwargs
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if inspect.isasyncgen(value):
            value = _drained(value)
        if not inspect.isgenerator(value):
            return value, False
        self._stream(job, value)
        return None, True

    def _stream(self, job: Job, generator: Any) -> None:
        self._send(Result(job.run.task, 0.0, None))
        with contextlib.closing(generator):
            for item in generator:
                if not job.output.take():
                    return
                payload, body, descriptors = self._pack(objects.encode(item))
                del item
                self._reply(Item(job.run.task, -1, payload), body, descriptors)

    def _resolve(self, key: bytes) -> Any:
        definition = self._definitions.get(key)
        if definition is None:
            raise SerializationError("a handle from sky.put that this worker was not given")
        pieces = definition.pieces
        if pieces is not None:
            data, buffers, storages = pieces
            if definition.frozen:
                # Shared by every task here: numpy at least can refuse to write to it.
                plain = len(buffers) - len(storages)
                buffers = [b.toreadonly() for b in buffers[:plain]] + buffers[plain:]
            definition.value = objects.decode(data, buffers, storages)
            definition.pieces = None
        return definition.value

    def _failure(
        self, job: Job, problem: BaseException, ran: float
    ) -> tuple[Message, list[bytes | memoryview], list[int]]:
        cancelled = job.cancelled and isinstance(problem, (Interrupted, GeneratorExit))
        name = f"{type(problem).__module__}.{type(problem).__qualname__}".removeprefix("builtins.")
        text = _text(problem)
        frames = _frames(problem)
        payload: Payload | None = None
        body: list[bytes | memoryview] = []
        descriptors: list[int] = []
        if isinstance(problem, Exception) and not cancelled:
            # First with the exceptions it came from, else alone, else only in words.
            for depth in (0, CHAIN_DEPTH):
                with contextlib.suppress(Exception):
                    encoded = objects.encode(_portable(problem, depth))
                    payload, body, descriptors = self._pack(encoded)
                    break
        return (
            Failure(job.run.task, ran, name, text, frames, payload, cancelled),
            body,
            descriptors,
        )

    def _pack(
        self, encoded: objects.Encoded
    ) -> tuple[Payload, list[bytes | memoryview], list[int]]:
        channel = self._channel
        assert channel is not None
        segments: list[memory.Segment] = []
        streamed: list[memoryview] = []

        def large(buffers: list[memoryview]) -> list[Buffer]:
            if not channel.shares_memory:
                streamed.extend(buffers)
                return [Buffer(len(buffer), STREAMED) for buffer in buffers]
            offsets, size = memory.aligned([len(buffer) for buffer in buffers])
            segment = self._results.allocate(size)
            segment.write(list(zip(offsets, buffers, strict=True)))
            segments.append(segment)
            return [
                Buffer(len(buffer), SEGMENT, b"", segment.id, at)
                for at, buffer in zip(offsets, buffers, strict=True)
            ]

        packed = blobs.pack(encoded, large if encoded.buffers else None)
        for segment in segments:
            self._lent[segment.id] = segment
            packed.payload.segments.append((segment.id, segment.size))
        return packed.payload, packed.body + streamed, [s.descriptor for s in segments]

    def _reply(
        self, message: Message, body: list[bytes | memoryview], descriptors: list[int]
    ) -> None:
        channel = self._channel
        assert channel is not None
        with contextlib.suppress(OSError):
            if self._mapped.released:
                self._send_releases()
            channel.send(message, body, descriptors)

    def _send(self, message: Message) -> None:
        self._reply(message, [], [])

    def _send_releases(self) -> None:
        released = _emptied(self._mapped.released)
        if released and self._channel is not None:
            self._channel.send(Released(released))

    def _emit(self, task: int, stream: str, text: str, transient: bool) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(Written(task, stream, text, transient))


def _emptied(items: Any) -> list[Any]:
    taken = []
    while items:
        taken.append(items.popleft())
    return taken


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


def _text(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception as worse:
        return f"<its str() failed: {type(worse).__name__}>"


def _frames(problem: BaseException) -> list[tuple[str, int, str, str]]:
    """The traceback below our own frames."""
    here = os.path.dirname(os.path.dirname(__file__))
    frames = traceback.extract_tb(problem.__traceback__)
    while frames and frames[0].filename.startswith(here):
        frames.pop(0)
    return [(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames[:200]]


def _portable(problem: Exception, depth: int) -> objects.PortableException:
    chain = {}
    if depth < CHAIN_DEPTH:
        for link in ("__cause__", "__context__"):
            other = getattr(problem, link)
            if isinstance(other, Exception):
                chain[link] = _portable(other, depth + 1)
    return objects.PortableException(problem, chain, problem.__suppress_context__)


def _die_with_parent() -> None:
    """Linux: be killed when the agent is; the lifeline pipe covers everything else."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _watch_lifeline(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Read the configuration, announce the endpoint, run tasks."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ExecutorConfig)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    _die_with_parent()
    threading.Thread(
        target=_watch_lifeline, args=(config.lifeline,), name="skyward-lifeline", daemon=True
    ).start()
    _raise_descriptor_limit()
    sys.path[:] = config.search_path
    executor = Executor(config)
    announcement = msgspec.json.encode({"endpoint": executor.endpoint, "pid": os.getpid()})
    os.write(config.status, announcement + b"\n")
    os.close(config.status)
    executor.serve()


def _raise_descriptor_limit() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
