"""The items of generators that were called by name: fetched while they are asked for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from skyward.compute.named import outcomes, problems
from skyward.errors import NodeLostError
from skyward.objects import stored
from skyward.objects.payloads import Pieces
from skyward.wire.asking import ServiceConnection
from skyward.worker.kept_jobs import JobView

AGAIN_SECONDS = 30.0
"""How long a client tries to reach the head again before it takes the calls for lost."""
PAUSE_SECONDS = 0.2

Asking = Callable[[], contextlib.AbstractContextManager[ServiceConnection]]


class ItemStreams:
    """The streams that one client reads; any thread may read one."""

    def __init__(self, asking: Asking) -> None:
        """`asking` connects to the pool's calls."""
        self._asking = asking
        # An iterator may be collected, and so ended, in a thread that holds it.
        self._lock = threading.RLock()
        self._reading: set[ServiceConnection] = set()
        self._open: set[Generator[tuple[Any, Pieces]]] = set()
        self._left = False

    def leave(self) -> None:
        """Read nothing any more: the client leaves."""
        with self._lock:
            self._left = True
            reading, unread = list(self._reading), list(self._open)
        for agent in reading:
            agent.channel.abort()
        # Not when the user's iterators go: modules may be torn down by then.
        for objects in unread:
            _end(objects)

    def items(self, view: JobView, stream: int) -> Iterator[Any]:
        """The items of a call's stream, then its exception; waits for those that are to come."""
        objects = self._objects(view, stream)
        with self._lock:
            self._open.add(objects)
        try:
            # Not decoded where they are received: an error of the user's is none of the connection.
            for told, pieces in objects:
                if self._left:
                    _end(objects)  # `leave` found it at work
                is_item, item = outcomes.read_item(told, pieces)
                if not is_item:
                    return
                yield item
            # Only `leave` ends them without an exception.
            raise problems.left(view.id)
        finally:
            with self._lock:
                self._open.discard(objects)
            if not self._left:
                _end(objects)

    def _objects(self, view: JobView, stream: int) -> Generator[tuple[Any, Pieces]]:
        position, deadline = 0, 0.0
        ended: list[JobView] = []
        while True:
            try:
                with self._reading_from(view.id) as agent:
                    # Already now: the next item of a slow generator may come after many cuts.
                    deadline = 0.0
                    agent.send(
                        "stream", name=view.id, began=view.began, stream=stream, position=position
                    )
                    begin = position
                    for told, pieces, end in stored.arriving(_parts(agent, ended)):
                        position = begin + end
                        yield told, pieces
            except NodeLostError:
                # The way there may be cut for a moment.
                deadline = deadline or time.monotonic() + AGAIN_SECONDS
                if self._left:
                    raise problems.left(view.id) from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_SECONDS)
            else:
                # Not inside: `_asking` takes a `PoolError` for a refusal.
                raise problems.without_result(ended[0])

    @contextlib.contextmanager
    def _reading_from(self, name: str) -> Iterator[ServiceConnection]:
        if self._left:
            raise problems.left(name)
        with self._asking() as agent:
            with self._lock:
                self._reading.add(agent)
            try:
                if self._left:
                    raise EOFError("the client leaves")
                yield agent
            finally:
                with self._lock:
                    self._reading.discard(agent)


def _end(objects: Generator[tuple[Any, Pieces]]) -> None:
    with contextlib.suppress(ValueError):  # another thread is at work with them, and ends them
        objects.close()


def _parts(agent: ServiceConnection, ended: list[JobView]) -> Iterator[bytearray]:
    """What the agent sends of a stream, until the call has ended; then `ended` has the call."""
    while True:
        reply, data = agent.next_part()
        if not reply.more:
            ended.append(msgspec.convert(reply.value, JobView))
            return
        yield data
