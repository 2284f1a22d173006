"""The client's ends of streams: results that arrive item by item, arguments that leave likewise."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from skyward.errors import SkywardError
from skyward.wire import blobs, objects
from skyward.wire.messages import Credit, End, Item

if TYPE_CHECKING:
    from skyward.pool.lane import Lane
    from skyward.pool.task import Outcome, Pieces, Task

WINDOW = 16
"""Items the worker may be ahead of the consumer."""


class Arrivals:
    """What has come of a stream; its task holds this and not the iterator, which may be dropped."""

    def __init__(self, task: Task, lane: Lane) -> None:
        self.items: queue.SimpleQueue[Pieces | Outcome[Any] | None] = queue.SimpleQueue()
        # Before anybody takes the iterator: a short stream is over by then, and its slot free.
        lane.tell(Credit(task.id, -1, WINDOW))

    def arrived(self, pieces: Pieces) -> None:
        """An item came in."""
        self.items.put(pieces)

    def ended(self, problem: Outcome[Any] | None) -> None:
        """There are no more; with a problem, this is why."""
        self.items.put(problem)


class RemoteIterator(Iterator[Any]):
    """Iterates over what a remote generator yields, letting it run only so far ahead.

    Closing it, leaving a `with` block, or dropping it stops the remote generator.
    """

    def __init__(
        self,
        task: Task,
        lane: Lane,
        arrivals: Arrivals,
        abandon: Callable[[Task], None],
        flush_output: Callable[[Task], None],
    ) -> None:
        self._task, self._lane = task, lane
        self._abandon, self._flush_output = abandon, flush_output
        self._items = arrivals.items
        self._owed = WINDOW
        self._done = False

    def _grant(self, count: int) -> None:
        self._owed += count
        with contextlib.suppress(OSError):
            self._lane.channel.send(Credit(self._task.id, -1, count))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._done:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, tuple):
            self._owed -= 1
            if self._owed <= WINDOW // 2:
                self._grant(WINDOW - self._owed)
            return objects.decode(*item)
        self._done = True
        self._flush_output(self._task)
        if item is None:
            raise StopIteration
        return item.get()

    def close(self) -> None:
        """Stop the remote generator; iterating further ends at once."""
        if not self._done:
            self._done = True
            self._abandon(self._task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Feeder:
    """Sends the items of a caller's iterator as the worker asks for them, on its own thread."""

    def __init__(self, task: Task, index: int, lane: Lane, source: Iterator[Any]) -> None:
        self._task, self._index, self._lane, self._source = task, index, lane, source
        self._wanted = threading.Semaphore(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="skyward-feeder", daemon=True)
        self._thread.start()

    def grant(self, count: int) -> None:
        """The worker wants so many more."""
        self._wanted.release(max(1, count))

    def stop(self) -> None:
        """The task is over."""
        self._stopped = True
        self._wanted.release()

    def _run(self) -> None:
        try:
            while True:
                self._wanted.acquire()
                if self._stopped:
                    return
                try:
                    item = next(self._source)
                    packed = blobs.pack(objects.encode(item, own_modules=True), None)
                except StopIteration:
                    self._lane.channel.send(End(self._task.id, self._index, None))
                    return
                except BaseException as problem:
                    # Whatever it is, the function waits for it.
                    self._send_problem(problem)
                    return
                message = Item(self._task.id, self._index, packed.payload)
                self._lane.channel.send(message, packed.body)
        except OSError:
            # The lane is gone, and the task is told so by those who watch it.
            return
        finally:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()

    def _send_problem(self, problem: BaseException) -> None:
        try:
            if not isinstance(problem, Exception):
                raise SkywardError("only exceptions proper are raised in other processes")
            portable = objects.PortableException(problem, {}, False)
            encoded = objects.encode(portable, own_modules=True)
        except SkywardError:
            replacement = SkywardError(f"the argument stream failed: {problem!r}")
            encoded = objects.encode(objects.PortableException(replacement, {}, False))
        packed = blobs.pack(encoded, None)
        with contextlib.suppress(OSError):
            self._lane.channel.send(End(self._task.id, self._index, packed.payload), packed.body)
