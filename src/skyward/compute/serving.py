"""Serving: the client makes the calls that tasks ask for, of objects whose handles they have."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import uuid
from typing import Any

from skyward import handles
from skyward.classes import Instance, RemoteMethod
from skyward.errors import (
    InstanceLostError,
    RemoteError,
    SerializationError,
    SkywardError,
    StateLostError,
)
from skyward.functions import Future
from skyward.nodes.fleet import Fleet
from skyward.staff import Staff
from skyward.state.link import StateLink
from skyward.state.locks import SharedLock
from skyward.state.queues import SharedQueue
from skyward.state.values import decode, encode

PAUSE_SECONDS = 0.2
"""After a loss of the shared state, the next attempt."""
BEGIN_SECONDS = 20.0
"""How long the first handle that is sent waits until calls are taken."""
ROOM_SECONDS = 5.0
"""How often an item that waits for room looks whether its call was cancelled."""
LOOK_SECONDS = 5.0
"""How often the client looks whether the processes that call are there."""
TAKEN_LOOKS = 3
"""A process that is there at so many looks after the end of a call has taken its result."""

_staff = Staff("skyward-handles", 64)


class HandleDesk:
    """Takes the calls that tasks of one pool ask for, on a thread of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.name = f"skyward.objects.{uuid.uuid4().hex}"
        self._fleet = fleet
        self._keys: set[str] = set()
        self._running: dict[str, Future[Any] | None] = {}
        """The calls, by the queue of their answers; None before a call has been made."""
        self._lock = threading.Lock()
        """For `_running`."""
        self._callers: dict[str, dict[str, int]] = {}
        """The calls of each process, also those that have just ended, and since how many looks."""
        self._begun = threading.Event()
        self._left = False
        threading.Thread(target=self._run, name="skyward-handles", daemon=True).start()

    def offer(self, instance: Instance, key: str) -> str:
        """Let tasks call an object; returns the queue in which their calls go."""
        handles.offered[key] = instance
        self._keys.add(key)
        if not self._begun.wait(BEGIN_SECONDS):
            handles.offered.pop(key, None)
            raise StateLostError(
                f"{instance!r} cannot be sent: calls of it go through the pool's shared state, "
                f"which did not answer for {BEGIN_SECONDS:g} s; send it again"
            )
        return self.name

    def state_link(self) -> StateLink:
        """The way to the pool's shared state."""
        return self._fleet.state

    def _run(self) -> None:
        try:
            self._fleet.state.before_close(self._leave)
            while not self._fleet.closed and not self._left:
                # The state may be lost and be there again.
                with contextlib.suppress(SkywardError, OSError):
                    self._serve()
                time.sleep(PAUSE_SECONDS)
        finally:
            for key in self._keys:
                handles.offered.pop(key, None)
            with _lock:
                if _desks.get(self._fleet) is self:
                    del _desks[self._fleet]

    def _leave(self) -> None:
        """Take away what tasks have put for this client: nobody else does."""
        self._left = True
        # First: tasks that wait for the others see then that the client is gone.
        SharedLock(self.name, on=self).delete()
        for reply in list(self._running):
            SharedQueue(reply, handles.WINDOW, on=self).delete()
        SharedQueue(self.name, on=self).delete()

    def _serve(self) -> None:
        # Tasks see in it whether this client is there. After a new connection, it is still held.
        SharedLock(self.name, on=self).acquire(blocking=False)
        self._begun.set()
        requests: SharedQueue[Any] = SharedQueue(self.name, on=self)
        looked = time.monotonic()
        while not self._left:
            with contextlib.suppress(queue.Empty):
                self._take(*requests.get(timeout=LOOK_SECONDS))
            if time.monotonic() - looked >= LOOK_SECONDS:
                self._look_after_callers()
                looked = time.monotonic()

    def _take(self, what: str, name: str, *details: Any) -> None:
        """Do what a task asks for; `name` is that of its call or, for "closed", the object's."""
        if what == "cancel":
            self._cancel(name)
        elif what == "closed":
            instance = handles.offered.get(name)
            if instance is not None:
                instance._residence.note_closed()
        else:
            caller, *call = details
            self._callers.setdefault(caller, {})[name] = 0
            self._running[name] = None
            _staff.run(functools.partial(self._call, name, *call))

    def _look_after_callers(self) -> None:
        """End the calls of processes that are gone, and delete the results they have not taken."""
        for caller, replies in list(self._callers.items()):
            lock = SharedLock(caller, on=self)
            if not lock.locked():
                for reply in replies:
                    self._cancel(reply)
                lock.delete()
                replies.clear()
            for reply, looks in list(replies.items()):
                replies[reply] = 0 if reply in self._running else looks + 1
                if looks >= TAKEN_LOOKS:
                    del replies[reply]
            if not replies:
                del self._callers[caller]

    def _cancel(self, reply: str) -> None:
        with self._lock:
            future = self._running.pop(reply, None)
        if future is not None and not future.cancel():
            _close_stream(future)
        SharedQueue(reply, handles.WINDOW, on=self).delete()

    def _call(self, reply: str, key: str, method: str, payload: bytes) -> None:
        if reply not in self._running:
            return
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
        with self._lock:
            is_wanted = reply in self._running
            if is_wanted:
                self._running[reply] = future
        if not is_wanted:
            future.cancel()
        future.add_done_callback(
            lambda done: _staff.run(functools.partial(self._settle, reply, done))
        )

    def _settle(self, reply: str, done: Any) -> None:
        if done.cancelled():
            return
        problem = done.exception()
        if problem is not None:
            self._fail(reply, problem)
        elif hasattr(done.result(), "__next__"):
            # Not on the staff: a task may take its time, and others wait for the staff.
            threading.Thread(
                target=self._stream,
                args=(reply, done.result()),
                name="skyward-handle-stream",
                daemon=True,
            ).start()
        else:
            self._answer(reply, done.result())

    def _answer(self, reply: str, value: Any) -> None:
        try:
            self._put(reply, "value", value)
        except Exception as problem:
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
            except (StateLostError, OSError):
                raise
            except Exception:
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
                if reply in self._running:
                    return True
                # Cancelled meanwhile, so that the queue may have been made anew.
                replies.delete()
        return False


def _close_stream(future: Future[Any]) -> None:
    """End the generator that a call has returned, if it has."""
    if future.done() and not future.cancelled() and future.exception() is None:
        items = future.result()
        if hasattr(items, "__next__"):
            items.close()


_desks: dict[Fleet, HandleDesk] = {}
"""Of the pools that are open and whose tasks have handles."""
_lock = threading.Lock()


def offer(fleet: Fleet, instance: Instance, key: str) -> str:
    """Let tasks of a pool call an object; returns the queue in which their calls go."""
    with _lock:
        if fleet.closed:
            raise SerializationError(
                f"{instance!r} cannot be sent: its client has left the pool; make another one"
            )
        desk = _desks.get(fleet)
        if desk is None:
            desk = _desks[fleet] = HandleDesk(fleet)
    return desk.offer(instance, key)
