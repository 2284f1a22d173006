"""The output of a pool's tasks, as its nodes have kept it and as it comes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import msgspec

from skyward.closing import Closing
from skyward.compute.workbench import Reachable
from skyward.errors import NodeLostError, PoolError
from skyward.worker.task_output import TaskLine


class PoolOutput(Closing):
    """What the tasks of several nodes write, node by node as it comes.

    >>> with PoolOutput(pool, [0, 1], tail=10, follow=True) as output:
    ...     for node, line in output.lines(): ...
    """

    def __init__(
        self, pool: Reachable, nodes: Sequence[int], *, tail: int | None = None, follow: bool
    ) -> None:
        self._connections = {}
        self._found: queue.Queue[tuple[int, list[TaskLine] | Exception | None]] = queue.Queue(100)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        try:
            for node in nodes:
                connection = self._connections[node] = pool.service(node, "output")
                connection.send("show", tail=tail, follow=follow)
        except BaseException:
            self.close()
            raise
        for node in nodes:
            thread = threading.Thread(
                target=self._read, args=(node,), name="skyward-output", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def lines(self) -> Iterator[tuple[int, TaskLine]]:
        """Lines with their nodes; what is kept comes in the order of time, then what is new."""
        kept: list[tuple[int, TaskLine]] = []
        left = set(self._connections)
        while left:
            node, found = self._found.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left.discard(node)
            else:
                kept += [(node, line) for line in found]
            if self._found.empty() or len(kept) > 10_000:
                yield from sorted(kept, key=lambda each: each[1].when)
                kept = []
        yield from sorted(kept, key=lambda each: each[1].when)

    def _read(self, node: int) -> None:
        try:
            while True:
                reply, _ = self._connections[node].next_part()
                if not reply.more:
                    break
                self._put(node, msgspec.convert(reply.value, list[TaskLine]))
            self._put(node, None)
        except (EOFError, OSError) as problem:
            self._put(
                node,
                NodeLostError(
                    f"node {node} is gone: {problem}; `sky ps` shows the pools that are there"
                ),
            )
        except PoolError as problem:
            self._put(node, problem)

    def _put(self, node: int, found: list[TaskLine] | Exception | None) -> None:
        while not self._closed.is_set():
            try:
                self._found.put((node, found), timeout=0.2)
                return
            except queue.Full:
                continue

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            thread.join()
