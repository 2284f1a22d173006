"""Serving: the client makes the calls that tasks ask for, of objects whose handles they have."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any

from skyward import handles
from skyward.classes import Instance, RemoteMethod
from skyward.errors import ConfigurationError, InstanceLostError, RemoteError, SkywardError
from skyward.future import Future
from skyward.pool import Pool
from skyward.staff import Staff
from skyward.state.link import StateLink
from skyward.state.locks import SharedLock
from skyward.state.queues import SharedQueue
from skyward.state.values import decode, encode

PAUSE_SECONDS = 0.2
"""After a loss of the shared state, the next attempt."""
BEGIN_SECONDS = 5.0
"""How long the first handle that is sent waits until calls are taken."""
ROOM_SECONDS = 5.0
"""How often an item that waits for room looks whether its call was cancelled."""

_staff = Staff("skyward-handles", 64)


class HandleDesk:
    """Takes the calls that tasks of one pool ask for, on a thread of its own."""

    def __init__(self, pool: Pool) -> None:
        self.name = f"skyward.objects.{uuid.uuid4().hex}"
        self._pool = pool
        self._keys: set[str] = set()
        self._running: dict[str, Future[Any] | None] = {}
        """The calls, by the queue of their answers; None before a call has been made."""
        self._begun = threading.Event()
        threading.Thread(target=self._run, name="skyward-handles", daemon=True).start()

    def offer(self, instance: Instance, key: str) -> str:
        """Let tasks call an object; returns the queue in which their calls go."""
        handles.offered[key] = instance
        self._keys.add(key)
        self._begun.wait(BEGIN_SECONDS)
        return self.name

    def state_link(self) -> StateLink:
        """The way to the pool's shared state."""
        return self._pool.state

    def _run(self) -> None:
        try:
            while not self._pool.closed:
                # The state may be lost and be there again.
                with contextlib.suppress(SkywardError, OSError):
                    self._serve()
                time.sleep(PAUSE_SECONDS)
        finally:
            for key in self._keys:
                handles.offered.pop(key, None)
            with _lock:
                _desks.pop(self._pool, None)

    def _serve(self) -> None:
        # Tasks see in it whether this client is there. After a new connection, it is still held.
        SharedLock(self.name, on=self).acquire(blocking=False)
        self._begun.set()
        requests: SharedQueue[Any] = SharedQueue(self.name, on=self)
        while True:
            what, reply, *details = requests.get()
            if what == "cancel":
                self._cancel(reply)
            else:
                self._running[reply] = None
                _staff.submit(self._call, reply, *details)

    def _cancel(self, reply: str) -> None:
        future = self._running.pop(reply, None)
        if future is not None:
            future.cancel()
        SharedQueue(reply, handles.WINDOW, on=self).delete()

    def _call(self, reply: str, key: str, method: str, payload: bytes) -> None:
        try:
            args, kwargs = decode(payload)
            instance = handles.offered.get(key)
            if instance is None:
                raise InstanceLostError(f"this {key.split()[0]} was closed; make another one")
            if method == "close":
                instance.close()
                self._answer(reply, None)
                return
            future = RemoteMethod(instance._function(method)).submit(*args, **kwargs)
        except Exception as problem:
            self._fail(reply, problem)
            return
        self._running[reply] = future
        future.add_done_callback(lambda done: _staff.submit(self._settle, reply, done))

    def _settle(self, reply: str, done: Any) -> None:
        if done.cancelled():
            return
        problem = done.exception()
        if problem is not None:
            self._fail(reply, problem)
        elif hasattr(done.result(), "__next__"):
            self._stream(reply, done.result())
        else:
            self._answer(reply, done.result())

    def _answer(self, reply: str, value: Any) -> None:
        try:
            self._put(reply, "value", value)
        except ConfigurationError as problem:
            self._fail(reply, problem)
        self._running.pop(reply, None)

    def _stream(self, reply: str, items: Any) -> None:
        with contextlib.closing(items):
            try:
                self._put(reply, "stream", None)
                for item in items:
                    if not self._put(reply, "item", item):
                        return
                self._put(reply, "end", None)
            except Exception as problem:
                self._fail(reply, problem)
        self._running.pop(reply, None)

    def _fail(self, reply: str, problem: BaseException) -> None:
        with contextlib.suppress(SkywardError, OSError):
            try:
                self._put(reply, "error", problem)
            except ConfigurationError:
                words = f"{type(problem).__name__}: {problem}"
                self._put(reply, "error", RemoteError(words, type_name=type(problem).__name__))
        self._running.pop(reply, None)

    def _put(self, reply: str, kind: str, value: Any) -> bool:
        """Give the task a word; False if it does not wait any more."""
        payload = encode(value, "the result of a call from a task")
        replies: SharedQueue[Any] = SharedQueue(reply, handles.WINDOW, on=self)
        while reply in self._running:
            with contextlib.suppress(TimeoutError):
                replies.put((kind, payload), timeout=ROOM_SECONDS)
                return True
        return False


_desks: dict[Pool, HandleDesk] = {}
"""Of the pools that are open and whose tasks have handles."""
_lock = threading.Lock()


def offer(pool: Pool, instance: Instance, key: str) -> str:
    """Let tasks of a pool call an object; returns the queue in which their calls go."""
    with _lock:
        desk = _desks.get(pool)
        if desk is None:
            desk = _desks[pool] = HandleDesk(pool)
    return desk.offer(instance, key)
