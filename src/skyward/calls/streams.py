"""Streams: results that arrive item by item, and arguments that are sent item by item."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from skyward.calls.task import WINDOW, Answer, StreamItem, StreamItems
from skyward.closing import Closing
from skyward.errors import SkywardError
from skyward.functions import apart
from skyward.objects import encoding, payloads
from skyward.objects.exceptions import PortableException
from skyward.wire.channel import Channel
from skyward.wire.messages import Credit, End, Item


class RemoteIterator(Closing, Iterator[Any]):
    """Iterates over the items of a remote generator, which may run only `WINDOW` items ahead.

    Both `for` and `async for` take the items. To stop the remote generator, close this iterator,
    leave its `with` block, or drop it.
    """

    def __init__(
        self,
        task_id: int,
        channel: Channel,
        items: StreamItems,
        abandon: Callable[[], None],
        flush_output: Callable[[], None],
    ) -> None:
        self._task_id, self._channel, self._items = task_id, channel, items
        self._abandon, self._flush_output = abandon, flush_output
        self._owed = WINDOW
        self._done = False

    def _grant(self, count: int) -> None:
        self._owed += count
        self._items.granted += count
        with contextlib.suppress(OSError):
            self._channel.send(Credit(self._task_id, -1, count))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._value(self.next_item())

    @staticmethod
    def _value(item: StreamItem | Answer | None) -> Any:
        if isinstance(item, tuple):
            pieces, kept = item
            return encoding.decode(*pieces, kept)
        if item is None:
            raise StopIteration
        return item.get()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._done:
            raise StopAsyncIteration
        await self._items.arrive()
        item = self._pop()
        if not isinstance(item, tuple):
            try:
                await apart(self._flush_output)
            except BaseException:
                # The end comes again: it may be an exception.
                self._done = False
                self._items.end(item)
                raise
        try:
            return self._value(item)
        except StopIteration:
            raise StopAsyncIteration from None

    def next_item(self) -> StreamItem | Answer | None:
        """The next item as it came, or the end of the stream: its exception, or None."""
        if self._done:
            return None
        item = self._pop()
        if not isinstance(item, tuple):
            self._flush_output()
        return item

    def _pop(self) -> StreamItem | Answer | None:
        item = self._items.get()
        if isinstance(item, tuple):
            self._owed -= 1
            if self._owed <= WINDOW // 2:
                self._grant(WINDOW - self._owed)
        else:
            self._done = True
        return item

    def close(self) -> None:
        """Stop the remote generator; iterating further ends at once."""
        if not self._done:
            self._done = True
            self._items.wanted = False
            self._abandon()

    def __del__(self) -> None:
        self.close()


class Feeder:
    """Sends the items of a caller's iterator as the worker asks for them, on its own thread."""

    def __init__(self, task_id: int, index: int, channel: Channel, source: Iterator[Any]) -> None:
        self._task_id, self._index, self._channel, self._source = task_id, index, channel, source
        self._wanted = threading.Semaphore(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="skyward-feeder", daemon=True)
        self._thread.start()

    def grant(self, count: int) -> None:
        """Send so many more items: the worker has asked for them."""
        self._wanted.release(max(1, count))

    def stop(self) -> None:
        """Stop sending: the task has ended."""
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
                    packed = payloads.pack(encoding.encode(item, own_modules=True), None)
                except StopIteration:
                    self._channel.send(End(self._task_id, self._index, None))
                    return
                except BaseException as problem:
                    # Whatever it is, the function that waits for the item must be told.
                    self._send_problem(problem)
                    return
                message = Item(self._task_id, self._index, packed.payload)
                self._channel.send(message, packed.body)
        except OSError:
            # The executor is gone; losing its lane decides what becomes of the task.
            return
        finally:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()

    def _send_problem(self, problem: BaseException) -> None:
        try:
            if not isinstance(problem, Exception):
                raise SkywardError("only exceptions proper are raised in other processes")
            portable = PortableException.of(problem, {})
            encoded = encoding.encode(portable, own_modules=True)
        except SkywardError:
            replacement = SkywardError(f"the argument stream failed: {problem!r}")
            encoded = encoding.encode(PortableException.of(replacement, {}))
        packed = payloads.pack(encoded, None)
        with contextlib.suppress(OSError):
            self._channel.send(End(self._task_id, self._index, packed.payload), packed.body)
