"""Nested tasks: tasks start other tasks on their own pool, through the client of this executor.

A task that waits for others gives its place up: the executor runs another task on another thread.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import os
import queue
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from skyward.classes import Making
from skyward.errors import (
    ConfigurationError,
    PoolClosedError,
    RemoteError,
    SerializationError,
    TaskCancelledError,
)
from skyward.functions import Future, Pending, checked
from skyward.objects import encoding
from skyward.objects.encoding import Code, Encoded
from skyward.objects.exceptions import add_note
from skyward.objects.handles import opened
from skyward.objects.payloads import Pieces
from skyward.staff import Staff
from skyward.wire.messages import (
    CODE_KEPT,
    Cancel,
    Closed,
    Credit,
    Define,
    End,
    Failure,
    Item,
    Payload,
    Result,
    Start,
)
from skyward.worker.client import ClientConnection
from skyward.worker.interrupts import Interrupted, await_other
from skyward.worker.places import ReadyTask, TaskPlaces
from skyward.worker.streams import InputStream

_callbacks = Staff("skyward-callback", 64)
_keys: contextvars.ContextVar[dict[int, bytes]] = contextvars.ContextVar("skyward_argument_keys")
"""The keys of futures in the call that is being encoded: the client keeps values for each call."""
_NOTHING = Payload(0)
_NONE: Mapping[bytes, Encoded] = {}


class NestedPool:
    """The pool that runs this task, as the task uses it: `g(x) >> sky`."""

    def __init__(
        self,
        client: ClientConnection,
        places: TaskPlaces,
        current: Callable[[], ReadyTask | None],
        hurry: Callable[[], None],
    ) -> None:
        """`current` finds the task that asks; `hurry` has another thread read now."""
        self._client, self._places, self._current, self._hurry = client, places, current, hurry
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._calls: dict[int, NestedFuture] = {}
        """The calls that have no answer yet, and streams that have not ended."""
        self._streams: weakref.WeakValueDictionary[int, NestedStream] = (
            weakref.WeakValueDictionary()
        )
        """Only the user holds a stream: it ends when it is dropped."""
        self._opening = threading.Lock()
        """For `_streams`."""
        self._defined: OrderedDict[bytes, None] = OrderedDict()
        """The functions that the client knows; it forgets the oldest, as here."""
        self._sending = threading.Lock()

    # What the operators ask for.

    def run(self, pending: Pending[Any], on: None = None) -> Any:
        """Run on one node, wait."""
        return self._awaited(self._start(pending))

    def submit(self, pending: Pending[Any], on: None = None) -> Future[Any]:
        """Run on one node, don't wait."""
        return self._start(pending)

    def broadcast(self, pending: Pending[Any], on: None = None) -> list[Any]:
        """Run on every worker at once."""
        found: list[Any] = self._awaited(self._start(pending, everywhere=True))
        return found

    def run_all(self, pendings: Sequence[Pending[Any]]) -> list[Any]:
        """Run different calls in parallel and wait for all; the first failure is raised."""
        futures = [self._start(pending) for pending in pendings]
        try:
            first = concurrent.futures.FIRST_EXCEPTION
            done, _ = concurrent.futures.wait(futures, return_when=first)
            for future in futures:
                if future in done and future.exception() is not None:
                    future.result()
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def stream_all(self, pendings: Sequence[Pending[Any]], *, ordered: bool) -> Iterator[Any]:
        """Run different calls in parallel, yielding results as they come or in order."""
        futures = [self._start(pending) for pending in pendings]
        return _results(futures, ordered=ordered)

    def call_object(
        self, key: str, what: str, encoded: Encoded, made: Callable[[Future[Any]], object]
    ) -> Any:
        """Have the client call a method of an object that this process does not reach.

        `made` gets the call's future before it is waited for.
        """
        future, start = self._new_start(what, b"")
        start.object = key
        self._send(start, None, encoded)
        made(future)
        return self._awaited(future)

    def note_closed(self, key: str) -> None:
        """Tell the client that a task has closed an object."""
        self._client.send(Closed(key))

    def _awaited(self, future: NestedFuture) -> Any:
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _start(self, pending: Pending[Any], *, everywhere: bool = False) -> NestedFuture:
        """Start the client for a call."""
        _check(pending)
        function = pending.use().function
        code = function.code()
        if code.encoded.handles:
            raise SerializationError(
                f"{function.name}, called in a task, uses {code.encoded.handles[0]!r} by its "
                "name; pass it as an argument"
            )
        encoded, awaited = _encoded(pending)
        future, start = self._new_start(function.name, code.key)
        start.handles, start.everywhere = list(awaited), everywhere
        start.timeout, start.retries = function.timeout or 0.0, function.retries
        start.fail_fast = function.fail_fast
        if awaited:
            # Now, since the caller may change them before the last future is done.
            encoded.buffers = [memoryview(bytes(buffer)) for buffer in encoded.buffers]
            send = functools.partial(self._send_awaited, start, code, encoded, awaited)
            _when_done(awaited.values(), send)
        else:
            self._send(start, code, encoded)
        return future

    def _new_start(self, name: str, code: bytes) -> tuple[NestedFuture, Start]:
        """A call that the client can be asked for, and its future."""
        task = self._current()
        future = NestedFuture(self, -next(self._numbers), task)
        number = future.number
        start = Start(number, 0 if task is None else task.run.task, name, code, _NOTHING)
        # Not the future, which would refer to itself then.
        future._bind(
            lambda: self._drop(number),
            lambda: number in self._calls and start.payload is not _NOTHING,
        )
        self._calls[number] = future
        return future, start

    def _send(
        self,
        start: Start,
        code: Code | None,
        encoded: Encoded,
        values: Mapping[bytes, Encoded] = _NONE,
    ) -> None:
        """Ask the client for a call, whose arguments refer to values."""
        sendable = self._client.lay_out(encoded)
        start.payload = sendable[0]
        with self._sending:
            if code is not None and code.key not in self._defined:
                self._defined[code.key] = None
                if len(self._defined) > CODE_KEPT:
                    self._defined.popitem(last=False)
                body = self._client.lay_out(code.encoded)
                self._client.send(Define(code.key, body[0], False), body)
            for key, value in values.items():
                body = self._client.lay_out(value)
                self._client.send(Define(key, body[0], True, True), body)
            self._client.send(start, sendable)

    def _send_awaited(
        self, start: Start, code: Code, encoded: Encoded, awaited: Mapping[bytes, Future[Any]]
    ) -> None:
        """Ask for a call once the futures among its arguments are done."""
        future = self._calls.get(start.number)
        if future is None:
            return
        try:
            values = {key: each.encoded for key, each in awaited.items()}
            self._send(start, code, encoded, values)
        except BaseException as problem:
            self._calls.pop(start.number, None)
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(self._why_not(start.name, problem, awaited.values()))

    @staticmethod
    def _why_not(
        name: str, problem: BaseException, arguments: Iterable[Future[Any]]
    ) -> BaseException:
        """Why a call was not made that waited for its arguments."""
        if any(each.cancelled() for each in arguments):
            return TaskCancelledError(
                f"{name} was not run: an argument of it is the result of a call that was cancelled"
            )
        add_note(problem, f"{name} was not run: it needs the result of this call")
        return problem

    def _drop(self, number: int) -> None:
        """Have the client give a call up."""
        if self._calls.pop(number, None) is not None and self.is_here:
            self._client.send(Cancel(number))

    # What the client answers; on the thread that reads.

    def answer(self, message: Result | Failure | Item | End, pieces: Pieces | None) -> None:
        """Take what the client says about a call."""
        number = message.task
        match message:
            case Result():
                self._returned(number, pieces)
            case Failure():
                future = self._calls.pop(number, None)
                if future is not None:
                    future.failed(message, pieces)
            case Item():
                with self._opening:
                    stream = self._streams.get(number)
                if stream is not None and pieces is not None:
                    stream.put(pieces)
            case End():
                with self._opening:
                    stream = self._streams.pop(number, None)
                if stream is not None:
                    stream.finish(pieces)

    def _returned(self, number: int, pieces: Pieces | None) -> None:
        """Take the result of a call; None for an iterator, whose items follow."""
        future = self._calls.pop(number, None)
        if future is None:
            return
        if pieces is not None:
            future.arrived(pieces)
            return
        stream = NestedStream(self, number, future.task, self._client.channel, self._hurry)
        with self._opening:
            self._streams[number] = stream
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
            future.set_result(stream)

    # What becomes of the tasks that ask.

    def wake(self, task: ReadyTask) -> None:
        """Interrupt the waits of a task that is cancelled, on all its threads."""
        for future in list(self._calls.values()):
            if future.task is task:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    future.set_exception(Interrupted())
        for stream in self._streams_of(task):
            stream.interrupt()

    def give_up(self, task: ReadyTask) -> None:
        """Have the client give up the calls of a task that has failed."""
        for future in list(self._calls.values()):
            if future.task is task:
                self._drop(future.number)
        for stream in self._streams_of(task):
            stream.close()

    def _streams_of(self, task: ReadyTask) -> list[NestedStream]:
        with self._opening:
            return [stream for stream in self._streams.values() if stream.task is task]

    @contextlib.contextmanager
    def waiting(self, wake: Callable[[], object] | None) -> Iterator[None]:
        """Give the place of the task that asks up for the time that it waits.

        `wake` ends the wait, if this thread does nothing else. Raises `Interrupted` if the task was
        cancelled meanwhile.
        """
        if not self.is_here:
            raise wrong_process()
        task = self._places.begin_wait(self._current(), wake)
        try:
            self._hurry()
            yield
        finally:
            if task is not None and self._places.end_wait(task):
                raise Interrupted

    @property
    def is_here(self) -> bool:
        """False in a process that a task has forked: the connection is not its own."""
        return os.getpid() == self._pid


class NestedFuture(Future[Any]):
    """The result of a task that a task has started."""

    def __init__(self, pool: NestedPool, number: int, task: ReadyTask | None) -> None:
        super().__init__()
        self.pool, self.number, self.task = pool, number, task
        self._pieces: Pieces | None = None
        self._done_callbacks: list[Any]
        self._decoding = threading.Lock()
        # `concurrent.futures.wait` and `as_completed` note here who waits.
        self._waiters: Any = _Waiters(pool)

    def arrived(self, pieces: Pieces) -> None:
        """Take the result, which is decoded by the one who asks for it."""
        self._pieces = pieces
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
            self.set_result(None)

    def failed(self, failure: Failure, pieces: Pieces | None) -> None:
        """Take the exception."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # likewise
            self.set_exception(_exception(failure, pieces))

    @property
    def key(self) -> bytes:
        """What stands for the result in the arguments of the call that is being encoded."""
        keys = _keys.get(None)
        if keys is None:
            raise SerializationError(
                "the future of a call that a task has started cannot leave the task, nor can a "
                "function use it by its name; use its result(), or pass it as an argument"
            )
        return keys.setdefault(id(self), uuid.uuid4().bytes)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Have a function called when the future is done, on a thread of its own."""
        # Not on the thread that reads, which must not wait for what the function does.
        context = contextvars.copy_context()

        def call(done: Any) -> None:
            context.run(fn, done)

        super().add_done_callback(lambda done: _callbacks.run(functools.partial(call, done)))

    def _await(self, timeout: float | None) -> None:
        """Wait until the future is done; only in `await_other` an interrupt can end that."""
        if self.done():
            return
        # Not a condition: an interrupt could leave its lock taken.
        tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()
        told = tokens.put
        super().add_done_callback(told)
        with self.pool.waiting(lambda: told(None)), contextlib.suppress(queue.Empty):
            await_other(tokens.get, timeout)
        if not self.done():
            with self._condition, contextlib.suppress(ValueError):
                self._done_callbacks.remove(told)

    def result(self, timeout: float | None = None) -> Any:
        """The result; waits for it, and gives the task's place up meanwhile."""
        self._await(timeout)
        super().result(0)
        with self._decoding:
            if self._pieces is not None:
                self._result = encoding.decode(*self._pieces)
                self._pieces = None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The exception, or None; waits like `result`."""
        self._await(timeout)
        return super().exception(0)

    def __await__(self) -> Generator[Any, None, Any]:
        with self.pool.waiting(None):
            yield from super().__await__()
        return self.result()


class _Waiters(list[Any]):
    """Those who wait for a future with `concurrent.futures.wait` or `as_completed`."""

    def __init__(self, pool: NestedPool) -> None:
        self._pool = pool

    def append(self, waiter: Any) -> None:
        # Nobody knows the event yet: the caller holds the locks of all futures that it waits for.
        if not isinstance(waiter.event, _Event):
            waiter.event = _Event(self._pool)
        super().append(waiter)


class _Event(threading.Event):
    """An event; a task that waits for it gives its place up."""

    def __init__(self, pool: NestedPool) -> None:
        super().__init__()
        self._pool = pool

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        with self._pool.waiting(self.set):
            return await_other(super().wait, timeout)


class NestedStream(InputStream):
    """The items of a generator that a task has started."""

    def __init__(
        self,
        pool: NestedPool,
        number: int,
        task: ReadyTask | None,
        channel: Any,
        hurry: Callable[[], None],
    ) -> None:
        super().__init__(number, -1, channel, hurry)
        self._pool, self.task = pool, task
        self._over = self._interrupted = False

    def __next__(self) -> Any:
        if not self._pool.is_here:
            raise wrong_process()
        return super().__next__()

    def _take(self) -> tuple[bool, Any]:
        while not self._interrupted:
            if not self._items.empty():
                found = self._items.get()
            else:
                with self._pool.waiting(lambda: self._items.put(None)):
                    found = await_other(self._items.get, None)
            if found is not None:
                return found
        raise Interrupted

    def interrupt(self) -> None:
        """Give the task no more items: it is cancelled."""
        self._interrupted = True
        self._items.put(None)

    def finish(self, problem: Any) -> None:
        """End the stream, as the client says."""
        self._over = True
        super().finish(problem)

    def close(self) -> None:
        """Stop the generator."""
        self._done = True
        if not self._over and self._pool.is_here:
            self._over = True
            # Not here: a finalizer may run wherever this thread is, also where it sends.
            stop = functools.partial(self._channel.send, Credit(self._task, -1, -1))
            _callbacks.run(stop)

    def __del__(self) -> None:
        self.close()


def wrong_process() -> PoolClosedError:
    """The error of a process that a task has forked."""
    return PoolClosedError(
        "a process that a task has started cannot use the task's pool; start tasks in the "
        "task's own process"
    )


def _results(futures: list[NestedFuture], *, ordered: bool) -> Iterator[Any]:
    left = set(futures)
    try:
        for future in futures if ordered else concurrent.futures.as_completed(futures):
            left.discard(future)
            yield future.result()
    finally:
        for future in left:
            future.cancel()


def _is_here(handle: Any) -> bool:
    """Whether data can be sent now: that of `put`, or of a call that has succeeded."""
    if not isinstance(handle, Future):
        return True
    return handle.done() and not handle.cancelled() and handle.exception() is None


def _when_done(futures: Collection[Future[Any]], action: Callable[[], None]) -> None:
    """Run an action when all futures are done, on a thread of its own."""
    left = itertools.count(len(futures) - 1, -1)

    def one_done(_: Any) -> None:
        if not next(left):
            _callbacks.run(action)

    for future in futures:
        future.add_done_callback(one_done)


def _check(pending: Any) -> None:
    if isinstance(pending, Making):
        raise ConfigurationError(
            f"{pending.name}(...) >> sky in a task: an object lives with the client that made it; "
            "make it on the client, and pass it to the task"
        )
    if checked(pending).function.kept_on is not None:
        raise ConfigurationError(
            f"{pending.function.name} is to leave its result on a device, which only the client "
            "can take; call the plain function in a task"
        )


def _encoded(pending: Pending[Any]) -> tuple[Encoded, dict[bytes, Future[Any]]]:
    """The arguments, and the futures among them by their keys."""
    args, kwargs = pending.whole_arguments()
    function = pending.function
    call = encoding.Arguments(
        function.name, function.parameter_names, opened(args, _is_here), opened(kwargs, _is_here)
    )
    token = _keys.set({})
    try:
        encoded = encoding.encode(call, own_modules=True)
        return encoded, {each.key: each for each in encoded.handles}
    finally:
        _keys.reset(token)


def _exception(failure: Failure, pieces: Pieces | None) -> BaseException:
    """The exception of a call, as the client has told it."""
    with contextlib.suppress(Exception):
        if pieces is not None:
            problem: BaseException = encoding.decode(*pieces).rebuild()
            return problem
    return RemoteError(f"{failure.type_name}: {failure.text}", type_name=failure.type_name)
