"""The runner: a task's function is called, and its value, items or failure become messages."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from skyward import context, instances
from skyward.objects import encoding, references, tensors
from skyward.objects.encoding import Encoded
from skyward.objects.kept import ResultBook
from skyward.wire.messages import POST_MORTEM, Credit, End, Item, Message, Missing, Result, Room
from skyward.worker import failures
from skyward.worker.client import ClientConnection
from skyward.worker.debuggers import Debuggers
from skyward.worker.definitions import Definitions
from skyward.worker.hooks import Entered
from skyward.worker.interrupts import Interrupted, Interrupts
from skyward.worker.outbox import Sendable
from skyward.worker.output import NumberLog, ProcessCapture, ThreadCapture, current_task
from skyward.worker.places import ObjectCaller, ReadyTask
from skyward.worker.streams import InputStream, OutputStream


class Leave(BaseException):
    """Raised on the main thread when the process must leave its hooks and end."""


class TaskRunner:
    """Runs tasks, each on the thread that asks for it."""

    def __init__(
        self,
        hooks: Entered,
        interrupts: Interrupts,
        capture: ProcessCapture | ThreadCapture,
        log: NumberLog,
        debuggers: Debuggers,
        hurry: Callable[[], None],
    ) -> None:
        """`hurry` has another thread read what the client sends, while a task waits for it."""
        self._hooks, self._interrupts, self._capture = hooks, interrupts, capture
        self._log, self._debuggers, self._hurry = log, debuggers, hurry

    def run(
        self, job: ReadyTask, client: ClientConnection | ObjectCaller, definitions: Definitions
    ) -> tuple[Message, Sendable | None]:
        """Run a task, and return the last message about it."""
        token = current_task.set(job.run.task)
        inside = context.inside.set(True)
        self._capture.begin(job.run.task)
        started = time.perf_counter()
        if self._debuggers.used:
            self._debuggers.begin(job)
        try:
            try:
                if job.run.trace:
                    with below(job.run.trace):
                        value, streamed = self._call(job, client, definitions)
                else:
                    value, streamed = self._call(job, client, definitions)
                references.settle()
                ran = time.perf_counter() - started
                outcome: tuple[Message, Sendable | None]
                if streamed:
                    outcome = End(job.run.task, -1, None), None
                else:
                    what = f"the result of {job.run.name}"
                    sendable = (
                        self._pack(job, client, value, what)
                        if job.run.kept
                        else client.pack(value, what)
                    )
                    outcome = Result(job.run.task, ran, sendable[0]), sendable
            except Leave:
                raise
            except references.CannotOpenError:
                outcome = Missing(job.run.task, [], [], True), None
            except BaseException as problem:
                self._interrupts.calling.pop(job.thread, None)
                with contextlib.suppress(Exception):
                    references.settle()
                self._debuggers.failed(job, problem)
                outcome = self._failure(job, client, problem, time.perf_counter() - started)
        finally:
            if self._debuggers.used:
                self._debuggers.end(job)
            self._capture.end()
            if self._log.rows:
                self._log.flush()
            context.inside.reset(inside)
            current_task.reset(token)
        return outcome

    def _call(
        self, job: ReadyTask, client: ClientConnection | ObjectCaller, definitions: Definitions
    ) -> tuple[Any, bool]:
        """The function's value; the flag says whether its items have been streamed already."""
        if job.run.debugged == POST_MORTEM:
            self._interrupts.calling[job.thread] = job
            self._debuggers.look_back(job)
            self._interrupts.calling.pop(job.thread, None)
            return None, False
        function = definitions.resolve(job.run.code) if job.caller is None else instances.called
        if not job.run.kept:
            args, kwargs = encoding.decode(*job.pieces)
        else:
            tensors.watch_opened(job.opened)
            try:
                args, kwargs = encoding.decode(*job.pieces)
            finally:
                tensors.watch_opened(None)
        if job.inputs:
            args, kwargs = _with_streams(args, kwargs, job.inputs)
        job.pieces = (memoryview(b""), [], [])
        self._interrupts.calling[job.thread] = job
        if job.cancelled:
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
            self._interrupts.calling.pop(job.thread, None)
            return value, False
        self._stream(job, client, value)
        self._interrupts.calling.pop(job.thread, None)
        return None, True

    def _pack(
        self, job: ReadyTask, client: ClientConnection | ObjectCaller, value: Any, what: str
    ) -> Sendable:
        if not job.run.kept:
            return client.pack(value, what)
        return client.lay_out(self._encode_kept(job, client, value, what))

    def _encode_kept(
        self, job: ReadyTask, client: ClientConnection | ObjectCaller, value: Any, what: str
    ) -> Encoded:
        """Encode a result and leave its tensors on the device; if that cannot be, send the bytes.

        The client makes memory for them there, and this process copies them.
        """
        book = ResultBook(job.opened)
        encoded = encoding.encode(value, what=what, keep=book)
        if not any(last for _, last in book.spans):
            return encoded
        client.send(Room(job.run.task, book.spans))
        self._hurry()
        assert job.places is not None
        room = job.places.get()
        if room is None:
            raise Interrupted
        if room.pieces:
            try:
                book.fill(room.pieces, room.places)
                return encoded
            except references.CannotOpenError:
                pass
        return encoding.encode(value, what=what, keep=ResultBook(job.opened, by_value=True))

    def _stream(
        self, job: ReadyTask, client: ClientConnection | ObjectCaller, generator: Any
    ) -> None:
        output = job.output = OutputStream(
            self._hurry, lambda permitted: client.send(Credit(job.run.task, -1, permitted))
        )
        if job.cancelled:
            output.close()
        client.send(Result(job.run.task, 0.0, None))
        with contextlib.closing(generator):
            for item in generator:
                if not output.take():
                    # No interrupt may reach the generator while it cleans up.
                    self._interrupts.calling.pop(job.thread, None)
                    return
                references.settle()
                sendable = self._pack(job, client, item, f"an item of {job.run.name}")
                del item
                client.send(Item(job.run.task, -1, sendable[0]), sendable)

    def _failure(
        self,
        job: ReadyTask,
        client: ClientConnection | ObjectCaller,
        problem: BaseException,
        ran: float,
    ) -> tuple[Message, Sendable | None]:
        cancelled = job.cancelled and isinstance(problem, (Interrupted, GeneratorExit))
        return failures.report(problem, job.run.task, ran, client.pack, cancelled=cancelled)


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
