"""Handles in tasks: an object of a `@cls` class is called from a task, straight in its process.

The task connects to the worker process that has the object. All threads of the task's process share
the connection; when it ends, the calls end. A process that cannot be reached may still be reached
by the client, which then makes the call as one of its own, and which makes a lost object again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import itertools
import math
import os
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from skyward import context, instances
from skyward.errors import (
    ConfigurationError,
    InstanceLostError,
    SkywardError,
    TaskCancelledError,
    TaskTimeoutError,
)
from skyward.functions import Future
from skyward.objects import encoding, payloads
from skyward.objects.encoding import Encoded
from skyward.objects.handles import opened
from skyward.staff import Staff
from skyward.state.link import worker_link
from skyward.wire.handshake import PEER, connect_peer
from skyward.wire.line import Line, LineRequest
from skyward.wire.messages import (
    OBJECT_CALLS,
    Cancel,
    Credit,
    End,
    Failure,
    Hello,
    Item,
    Payload,
    Result,
    Run,
)

WINDOW = 16
"""How many items of a generator may wait for the task."""

_closings = Staff("skyward-stream", 8)

offered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The handles of this client that have been sent somewhere, by the keys of their objects."""


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """Where tasks find an object."""

    pool: str
    """The pool, as its processes name it to each other."""
    endpoints: str
    """Where its process listens; empty if that was lost before the handle was sent."""
    certified: str
    """The name in the certificate of its node."""
    where: str
    """Its node and worker, in words."""


def arrived(key: str, name: str, place: ObjectPlace, timeouts: dict[str, float | None]) -> Any:
    """A handle that has been sent here: the client's own one, or one that calls the object."""
    return offered.get(key) or TaskHandle(key, name, place, timeouts)


def method_of(handle: Any, name: str) -> Any:
    """A method of a handle that has been sent here."""
    return getattr(handle, name)


class TaskHandle:
    """An object on a node, as a task has it; its methods are called as on the client."""

    def __init__(
        self, key: str, name: str, place: ObjectPlace, timeouts: dict[str, float | None]
    ) -> None:
        """`name` is that of the class; `timeouts` has those of methods, and "" that of others."""
        self._key, self._name, self._place, self._timeouts = key, name, place, timeouts

    def _method(self, name: str) -> TaskMethod:
        if name.startswith("_") and name != "__call__":
            raise AttributeError(
                f"{name!r} of {vars(self).get('_name')} is the object's own, and not reachable "
                "from outside; write a method without an underscore"
            )
        return TaskMethod(self, name)

    def __getattr__(self, name: str) -> TaskMethod:
        return self._method(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("__call__")(*args, **kwargs)

    def close(self) -> None:
        """Call the object's own `close`, if it has one, and free the object."""
        try:
            if instances.has(self._key):
                # In this very process, which would wait for itself otherwise.
                instances.close(self._key)
            else:
                HandleCall(self, "close").run((), {})
        finally:
            if context.own_pool is not None:
                with contextlib.suppress(SkywardError):  # a process that the task has forked
                    context.own_pool().note_closed(self._key)

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (self._key, self._name, self._place, self._timeouts)

    def __repr__(self) -> str:
        return f"<{self._name} on {self._place.where}>"


class TaskMethod:
    """A method of an object on a node, as a task has it."""

    def __init__(self, handle: TaskHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._make(HandleCall(self._handle, self._name), args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call without waiting."""
        future: Future[Any] = Future()
        call = HandleCall(self._handle, self._name)
        future._bind(call.cancel, lambda: call.sent)

        def run() -> None:
            try:
                result = self._make(call, args, kwargs)
            except BaseException as problem:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
                    future.set_exception(problem)
                return
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # likewise
                future.set_result(result)

        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(run,), name="skyward-handle", daemon=True
        ).start()
        return future

    def _make(self, call: HandleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._handle._key
        if instances.has(key):
            # In this very process, which would wait for itself otherwise.
            return instances.call(key, self._name, *args, **kwargs)
        return call.run(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return method_of, (self._handle, self._name)


class ObjectLines:
    """The connections of this process to those that have objects."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._lock = threading.Lock()
        self.ended = [0, 0, 0]
        """How many calls have succeeded, failed and were cancelled since the client was told."""
        self.new_numbers()

    def new_numbers(self) -> None:
        """Begin with numbers that no other process uses."""
        self.numbers = itertools.count(OBJECT_CALLS + secrets.randbits(60))

    def to(self, place: ObjectPlace) -> Line:
        """The connection to a process; `OSError` if it cannot be reached."""
        line = self._lines.get(place.endpoints)
        if line is not None and not line.lost:
            return line
        # Without the lock: a process that cannot be reached delays no call of another.
        hello = Hello(place.pool, f"{PEER}-objects", pid=os.getpid())
        channel = connect_peer(place.endpoints, hello, worker_link.credentials, place.certified)
        with self._lock:
            for each in self._lines.values():
                # Processes whose objects nobody calls any more may have ended unseen.
                each.check()
            self._lines = {at: each for at, each in self._lines.items() if not each.lost}
            line = self._lines.get(place.endpoints)
            if line is not None:
                # Another thread was faster.
                channel.close()
                return line
            line = self._lines[place.endpoints] = Line(channel, threaded=worker_link.threaded)
            return line

    def note_ended(self, how: int) -> None:
        """Note that a call has succeeded, 0, or failed, 1, or was cancelled, 2."""
        with self._lock:
            self.ended[how] += 1

    def take_ended(self) -> list[int]:
        """How calls have ended that the client is told of now."""
        with self._lock:
            ended, self.ended = self.ended, [0, 0, 0]
            return ended

    def forked(self) -> None:
        """Forget the connections of the parent process; the child makes its own."""
        self._lines, self._lock = {}, threading.Lock()
        self.new_numbers()


lines = ObjectLines()
os.register_at_fork(after_in_child=lines.forked)


class HandleCall(LineRequest):
    """One call that a task makes of an object in another process."""

    __slots__ = ("_due", "_handle", "_line", "_method", "_through_client", "_timeout", "cancelled")

    def __init__(self, handle: TaskHandle, method: str) -> None:
        super().__init__(next(lines.numbers))
        self._handle, self._method = handle, method
        self._timeout = handle._timeouts.get(method, handle._timeouts.get(""))
        self._due = math.inf
        self._line: Line | None = None
        self._through_client: Future[Any] | None = None
        self.cancelled = False

    @property
    def _what(self) -> str:
        return f"{self._handle._name}.{self._method}"

    @property
    def sent(self) -> bool:
        """Whether the call has been sent."""
        return self._line is not None or self._through_client is not None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call and wait for the result; an iterator for a generator."""
        key, method = self._handle._key, self._method
        encoded = encoding.encode_small((key, method, *args), kwargs)
        if encoded is None:
            what = f"the arguments of {self._what}, called in a task,"
            given = (key, method, *opened(args)), opened(kwargs)
            encoded = encoding.encode(given, own_modules=True, what=what)
        if self._timeout is not None:
            self._due = time.monotonic() + self._timeout
        try:
            self._begin(encoded)
        except OSError as problem:
            self._check_wanted()
            return self._ask_client(encoded, str(problem))
        how = 1
        try:
            message, body = self.next_answer()
            how = 0
        except (concurrent.futures.CancelledError, TaskCancelledError, KeyboardInterrupt):
            how = 2
            raise
        finally:
            lines.note_ended(how)
        if message.payload is not None:
            self.end()
            return decoded(message.payload, body)
        assert self._line is not None
        # The other end must never wait until somebody here reads.
        self._line.start_reader()
        return ObjectStream(self)

    def _begin(self, encoded: Encoded) -> None:
        """Send the call; `OSError` if the process of the object cannot be reached."""
        packed = payloads.pack(encoded, None)
        code = self._handle._key.encode()
        run = Run(self.number, self._what, code, packed.payload, [], [])
        while True:
            # A connection may have been lost since it was used last: once more, with a new one.
            line = lines.to(self._handle._place)
            self._check_wanted()
            self._line = line
            if line.ask(self, run, packed.body):
                return

    def _ask_client(self, encoded: Encoded, problem: str) -> Any:
        """Have the client of this task call the object."""
        if context.own_pool is None:
            if worker_link.credentials is None and "tcp:" in self._handle._place.endpoints:
                raise ConfigurationError(
                    f"{self._what} cannot be called from here: over a network, an object is called "
                    "by the client that has made it, and by tasks of its pool; give the handle to "
                    "a function that calls it, and run that function on the pool"
                )
            why = f" ({problem})" if problem else ""
            raise InstanceLostError(
                f"{self._what} cannot be called from here: its worker on "
                f"{self._handle._place.where} cannot be reached{why}; if it is lost, make the "
                "object again"
            )

        def made(future: Future[Any]) -> None:
            self._through_client = future
            if self.cancelled:
                future.cancel()

        return context.own_pool().call_object(self._handle._key, self._what, encoded, made)

    def cancel(self) -> None:
        """End the call; whoever waits for it gets a `CancelledError`."""
        self.cancelled = True
        if self._through_client is not None:
            self._through_client.cancel()
        self.end(Cancel(self.number))
        self.wake()

    def _check_wanted(self) -> None:
        if self.cancelled:
            raise concurrent.futures.CancelledError(f"{self._what} was cancelled")

    def next_answer(self) -> tuple[Result | Item | End, bytearray]:
        """Wait for the next answer; if that is in vain, the call is cancelled."""
        line = self._line
        assert line is not None
        try:
            while not self.answers:
                self._check_wanted()
                if line.lost:
                    raise InstanceLostError(
                        f"{self._what} lost its worker on {self._handle._place.where}: "
                        f"{line.lost}; if the object is gone with it, make it again, or have "
                        "@sky.cls(restart=True) do that"
                    )
                left = self._due - time.monotonic() if self._timeout is not None else math.inf
                if left <= 0:
                    raise TaskTimeoutError(
                        f"{self._what} ran longer than its timeout of {self._timeout:g} s on "
                        f"{self._handle._place.where}; the remote work was cancelled"
                    )
                line.wait(self, left)
        except BaseException:
            self.end(Cancel(self.number))
            raise
        message, body = self.answers.popleft()
        if isinstance(message, Failure):
            self.end()
            pieces = None
            if message.payload is not None:
                pieces = payloads.unpack(message.payload, body, payloads.nowhere)
            raise payloads.raised(message, pieces, self._what, self._handle._place.where)
        return message, body

    def grant(self, count: int) -> None:
        """Let the other end send so many more items."""
        self._say(Credit(self.number, -1, count))

    def end(self, word: Cancel | Credit | None = None) -> None:
        """Forget the call; `word` tells the other end that nobody waits for it any more."""
        line = self._line
        if line is None or line.asked.pop(self.number, None) is None or word is None:
            return
        self._say(word)
        # An answer may still come: the other end must never wait until somebody here reads.
        line.start_reader()

    def _say(self, word: Cancel | Credit) -> None:
        if self._line is not None and not self._line.lost:
            with contextlib.suppress(OSError):
                self._line.channel.send(word)


def decoded(payload: Payload, body: bytearray) -> Any:
    """The value that has come."""
    return encoding.decode(*payloads.unpack(payload, body, payloads.nowhere))


class ObjectStream:
    """The items of a generator that a method has returned."""

    def __init__(self, call: HandleCall) -> None:
        self._call = call
        self._owed = 0
        self._over = False

    def __iter__(self) -> ObjectStream:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._owed <= WINDOW // 2:
            self._call.grant(WINDOW - self._owed)
            self._owed = WINDOW
        try:
            message, body = self._call.next_answer()
        except BaseException:
            self._over = True
            raise
        if isinstance(message, Item):
            self._owed -= 1
            return decoded(message.payload, body)
        self._over = True
        self._call.end()
        raise StopIteration

    def close(self) -> None:
        """Stop the generator."""
        if not self._over:
            self._over = True
            self._call.end(self._stop)

    @property
    def _stop(self) -> Credit:
        return Credit(self._call.number, -1, -1)

    def __del__(self) -> None:
        if not self._over:
            # Not here: a finalizer may run wherever this thread is, also where it sends.
            _closings.run(functools.partial(self._call.end, self._stop))
