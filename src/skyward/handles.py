"""Handles in tasks: an object of a `@cls` class is called from a task, through its client.

The task puts its call into a shared queue of the pool. The client that made the object takes it
from there, makes the call as one of its own, and puts the result into a queue of that call.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from skyward import instances
from skyward.errors import InstanceLostError, StateLostError
from skyward.future import Future
from skyward.state.locks import SharedLock
from skyward.state.queues import SharedQueue
from skyward.state.values import decode, encode

LOOK_SECONDS = (0.5, 5.0)
"""After how long a call that waits first looks whether the client is there, and how often later."""
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
        HandleCall(self, "close", (), {}).result()

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (self._desk, self._key, self._name)

    def __repr__(self) -> str:
        return f"<{self._name} on a node of the pool>"


class TaskMethod:
    """A method of an object on a node, as a task has it."""

    def __init__(self, handle: TaskHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._handle._key
        if instances.has(key):
            # In this very process, which would wait for itself otherwise.
            return instances.call(key, self._name, *args, **kwargs)
        return HandleCall(self._handle, self._name, args, kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call without waiting."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self(*args, **kwargs))
            except BaseException as problem:
                future.set_exception(problem)

        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(run,), name="skyward-handle", daemon=True
        ).start()
        return future

    def __reduce__(self) -> tuple[Any, ...]:
        return method_of, (self._handle, self._name)


class HandleCall:
    """One call that a task asks the client for."""

    def __init__(
        self, handle: TaskHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._handle, self._what = handle, f"{handle._name}.{method}"
        payload = encode((args, kwargs), f"the arguments of {self._what}, called in a task,")
        self._requests: SharedQueue[Any] = SharedQueue(handle._desk)
        self._replies: SharedQueue[Any] = SharedQueue(f"{handle._desk}.{uuid.uuid4().hex}", WINDOW)
        self._requests.put(("call", self._replies.name, handle._key, method, payload))

    def result(self) -> Any:
        """Wait for the result; an iterator for a generator."""
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
                self._cancel()
            else:
                with contextlib.suppress(StateLostError):
                    self._replies.delete()

    def _next(self) -> tuple[str, Any]:
        """Wait for the client's next word; if that is in vain, the call is cancelled."""
        is_gone = False
        pause, longest = LOOK_SECONDS
        try:
            while True:
                try:
                    kind, payload = self._replies.get(timeout=pause)
                    return kind, decode(payload)
                except queue.Empty:
                    pause = min(2 * pause, longest)
                    # Twice in a row: after a loss of the state, the client has to begin anew.
                    was_gone, is_gone = is_gone, not SharedLock(self._handle._desk).locked()
                    if was_gone and is_gone:
                        raise InstanceLostError(
                            f"{self._what} cannot be called: the client that made the object has "
                            "left the pool, and the object is gone with it; make another one"
                        ) from None
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        """Have the client end the call, and take away what it has put for it."""
        with contextlib.suppress(StateLostError):
            self._requests.put(("cancel", self._replies.name))


class TaskHandleGroup:
    """One object in every worker, as a task has them; a method runs in all at once."""

    def __init__(self, members: tuple[TaskHandle, ...]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, rank: int) -> TaskHandle:
        return self._members[rank]

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(member, name) for member in vars(self).get("_members", ())]

        def call(*args: Any, **kwargs: Any) -> list[Any]:
            calls = [method.submit(*args, **kwargs) for method in methods]
            return [each.result() for each in calls]

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskHandleGroup, (self._members,)
