"""Handles in tasks: an object of a `@cls` class is called from a task, through its client.

The task puts its call into a shared queue of the pool. The client that made the object takes it
from there, makes the call as one of its own, and puts the result into a queue of that call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from skyward import instances
from skyward.errors import ConfigurationError, InstanceLostError, StateLostError
from skyward.functions import Future
from skyward.state.locks import SharedLock
from skyward.state.queues import SharedQueue
from skyward.state.reaching import link_for
from skyward.state.values import decode, encode

LOOK_SECONDS = (0.5, 5.0)
"""After how long a call that waits first looks whether the client is there, and how often later."""
RETURN_SECONDS = 2.0
"""How long a call waits for a client that is not there: the state may have been lost before."""
CALLER_LEASE_SECONDS = 120.0
"""After so long without contact, the client takes a process that calls for lost."""
WINDOW = 16
"""How many items of a generator may wait for the task."""

offered: dict[str, Any] = {}
"""The handles of this client that have been sent somewhere, by the keys of their objects.

The client holds them: nobody knows when the last copy of one is gone.
"""


def arrived(desk: str, key: str, name: str) -> Any:
    """A handle that has been sent here: the client's own one, or one that asks the client."""
    return offered.get(key) or TaskHandle(desk, key, name)


def method_of(handle: Any, name: str) -> Any:
    """A method of a handle that has been sent here."""
    return getattr(handle, name)


class TaskHandle:
    """An object on a node, as a task has it; its methods are called as on the client."""

    def __init__(self, desk: str, key: str, name: str) -> None:
        """`desk` is the queue from which the client takes calls; `name` is that of the class."""
        self._desk, self._key, self._name = desk, key, name

    def __getattr__(self, name: str) -> TaskMethod:
        if name.startswith("_"):
            raise AttributeError(
                f"{name!r} of {vars(self).get('_name')} is the object's own, and not reachable "
                "from outside; write a method without an underscore"
            )
        return TaskMethod(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return TaskMethod(self, "__call__")(*args, **kwargs)

    def close(self) -> None:
        """Call the object's own `close`, if it has one, and free the object."""
        if not instances.has(self._key):
            HandleCall(self, "close").run((), {})
            return
        # In this very process, which would wait for itself otherwise.
        try:
            instances.close(self._key)
        finally:
            requests: SharedQueue[Any] = SharedQueue(self._desk)
            requests.put(("closed", self._key))

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (self._desk, self._key, self._name)

    def __repr__(self) -> str:
        return f"<{self._name} on a node of the pool>"


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


class Presence:
    """Shows clients that this process is there: the process holds a lock of each state it uses."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """The locks, by the owner of the state."""
        self._lock = threading.Lock()

    def name(self) -> str:
        """The lock that this process holds in the state of the current pool."""
        epoch = link_for(None).epoch()
        with self._lock:
            if epoch not in self._names:
                name = f"skyward.callers.{uuid.uuid4().hex}"
                SharedLock(name, lease=CALLER_LEASE_SECONDS).acquire(blocking=False)
                self._names[epoch] = name
            return self._names[epoch]

    def check(self, name: str) -> None:
        """`StateLostError` if clients take this process for lost."""
        if SharedLock(name).locked():
            return
        with self._lock:
            self._names = {epoch: each for epoch, each in self._names.items() if each != name}
        raise StateLostError(
            f"contact to this process was lost for longer than {CALLER_LEASE_SECONDS:g} s, so that "
            "the client has given the call up; call again"
        )


presence = Presence()


def _forked() -> None:
    global presence
    presence = Presence()


os.register_at_fork(after_in_child=_forked)


class HandleCall:
    """One call that a task asks the client for."""

    def __init__(self, handle: TaskHandle, method: str) -> None:
        self._handle, self._method = handle, method
        self._what = f"{handle._name}.{method}"
        self._requests: SharedQueue[Any] = SharedQueue(handle._desk)
        self._replies: SharedQueue[Any] = SharedQueue(f"{handle._desk}.{uuid.uuid4().hex}", WINDOW)
        self._caller = ""
        self._cancelled = self._is_gone = False
        self.sent = False
        """Whether the client has been asked."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ask the client and wait for the result; an iterator for a generator."""
        payload = encode((args, kwargs), f"the arguments of {self._what}, called in a task,")
        self._await_client()
        self._caller = presence.name()
        self._check_wanted()
        self._requests.put(
            ("call", self._replies.name, self._caller, self._handle._key, self._method, payload)
        )
        self.sent = True
        if self._cancelled:
            self._end()
            self._check_wanted()
        return self._result()

    def cancel(self) -> None:
        """End the call; whoever waits for it gets a `CancelledError`."""
        self._cancelled = True
        if self.sent:
            self._end()

    def _check_wanted(self) -> None:
        if self._cancelled:
            raise concurrent.futures.CancelledError(f"{self._what} was cancelled")

    def _await_client(self) -> None:
        """Wait for a client that is not there; after that, nothing is put that it never takes."""
        deadline = time.monotonic() + RETURN_SECONDS
        while not SharedLock(self._handle._desk).locked():
            self._check_wanted()
            if time.monotonic() > deadline:
                problem = self._gone()
                self._end()
                raise problem
            time.sleep(RETURN_SECONDS / 10)

    def _result(self) -> Any:
        kind, value = self._next()
        if kind == "stream":
            return self._items()
        with contextlib.suppress(StateLostError):
            self._replies.delete()
        if kind == "error":
            raise value
        return value

    def _items(self) -> Iterator[Any]:
        kind = ""
        try:
            while True:
                kind, value = self._next()
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                yield value
        finally:
            if kind == "item":
                self._end()
            else:
                with contextlib.suppress(StateLostError):
                    self._replies.delete()

    def _next(self) -> tuple[str, Any]:
        """Wait for the client's next word; if that is in vain, the call is cancelled."""
        pause, longest = LOOK_SECONDS
        was_gone = False
        try:
            while True:
                try:
                    kind, payload = self._replies.get(timeout=pause)
                    return kind, decode(payload)
                except queue.Empty:
                    pause = min(2 * pause, longest)
                    was_gone = self._look(was_gone)
        except ConfigurationError:
            # The client has deleted the queue: because of `cancel`, or since it leaves.
            self._check_wanted()
            problem = None if SharedLock(self._handle._desk).locked() else self._gone()
            self._end()
            if problem is not None:
                raise problem from None
            raise
        except BaseException:
            self._end()
            raise

    def _look(self, was_gone: bool) -> bool:
        """Whether the client is gone; raises if it was before, or if nobody works on the call."""
        self._check_wanted()
        # Twice in a row: after a loss of the state, the client has to begin anew.
        is_gone = not SharedLock(self._handle._desk).locked()
        if was_gone and is_gone:
            raise self._gone()
        presence.check(self._caller)
        return is_gone

    def _gone(self) -> InstanceLostError:
        self._is_gone = True
        return InstanceLostError(
            f"{self._what} cannot be called: the client that made the object has left the pool, "
            "and the object is gone with it; make another one"
        )

    def _end(self) -> None:
        """Have the client end the call, and take away what it has put for it."""
        with contextlib.suppress(StateLostError):
            if not self._is_gone:
                self._requests.put(("cancel", self._replies.name))
                return
            # Nobody else deletes what is left of the client.
            self._requests.delete()
            self._replies.delete()
