"""A lane: how the client uses one executor.

A lane joins the connection to the executor, the executor's holdings, and its load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.calls.connection import Connection
from skyward.calls.holdings import Body, Holdings
from skyward.calls.relays import Neighbor, Relays
from skyward.calls.scheduler import Load
from skyward.calls.standing import Standing
from skyward.calls.streams import Feeder
from skyward.calls.task import Task
from skyward.objects import payloads
from skyward.objects.blobs import BlobStore
from skyward.wire.channel import Channel
from skyward.wire.messages import Cancel, Message, Payload, Run

PROMPT_BYTES = 16 << 10
"""A frame up to this size is sent without waiting, even during an outage of the network."""
LONG_BYTES = 1 << 20
"""A transfer of a larger pickle is cut off when its task is cancelled."""


@dataclass(slots=True)
class Preparation:
    """How far an executor is with the plugins' hooks."""

    begun: bool = False
    """Whether the executor was told to enter the hooks; it can enter them only once."""
    done: bool = False
    """Whether the executor has entered the hooks, or there are none."""
    replaced: bool = False
    """Whether its group of workers is over: the executor gets no new tasks, and ends when idle."""
    group: str = ""
    """The hooks that the executor has entered for an earlier client of a pool that stays."""

    def begin(self) -> bool:
        """Note that the executor is told to prepare; False if it has been told before."""
        before, self.begun = self.begun, True
        return not before

    def finish(self) -> bool:
        """Note that the executor can be given tasks; False if that was known."""
        before, self.done = self.done, True
        return not before

    def replace(self) -> bool:
        """Note that another executor will take this one's place; False if that was known."""
        before, self.replaced = self.replaced, True
        return not before


class Lane:
    """One executor process."""

    __slots__ = (
        "_feeders",
        "_kill",
        "_look",
        "_sending",
        "channel",
        "connection",
        "end_reason",
        "holdings",
        "load",
        "neighbor",
        "on_prepared",
        "pid",
        "port",
        "preparation",
        "tasks",
    )

    def __init__(
        self,
        load: Load[Task],
        channel: Channel,
        store: BlobStore,
        *,
        pid: int = 0,
        port: int = 0,
        neighbor: Neighbor | None = None,
        relays: Relays | None = None,
        kill: Callable[[Lane, str], None] = lambda lane, reason: None,
        look: Callable[[Lane, Task], Standing | None] = lambda lane, task: None,
        on_release: Callable[[Lane], None] = lambda lane: None,
        on_prepared: Callable[[Lane, str], None] = lambda lane, problem: None,
    ) -> None:
        """`port` is kept free on the head's first worker.

        `kill` has the agent end the executor and start a new one; `look` asks the agent where a
        task is. `on_release` is called, also from finalizers, when the executor can get memory
        back. `on_prepared` is called when the executor has entered the plugins' hooks, with the
        problem if a hook failed.
        """
        self.load = load
        self.tasks = load.tasks
        self.channel = channel
        self.connection = Connection(channel, lambda: on_release(self))
        self.neighbor = neighbor or Neighbor()
        self.holdings = Holdings(channel, store, load.tasks, self.neighbor, relays)
        self.preparation = Preparation()
        self._feeders: dict[int, list[Feeder]] = {}
        """For each task with streamed arguments, the feeders that send the items."""
        self.pid, self.port = pid, port
        self.end_reason = ""
        """Why the process ended, after the agent has reported it; empty until then."""
        self._kill, self._look = kill, look
        self.on_prepared = on_prepared
        self._sending: Task | None = None
        """The task that a thread is sending, or whose definitions it is sending."""

    @property
    def node(self) -> int:
        """The node the executor is on."""
        return self.load.node

    @property
    def worker(self) -> int:
        """The worker of the node that the executor belongs to."""
        return self.load.worker

    @property
    def slot(self) -> int:
        """The executor's number among the processes of its worker."""
        return self.load.slot

    @property
    def where(self) -> str:
        """The executor's node and worker, in words."""
        return self.load.where

    @property
    def lost(self) -> bool:
        """Whether the executor is gone for good."""
        return self.connection.closed

    def tell(self, message: Message) -> None:
        """Send a small message; if the executor is gone, only its watcher reports that."""
        self.connection.tell(message)

    def kill(self, reason: str) -> None:
        """Have the agent end the executor and start a new one."""
        self._kill(self, reason)

    def look(self, task: Task) -> Standing | None:
        """Where a task is in its code; waits for the agent."""
        return self._look(self, task)

    def process_ended(self, reason: str) -> None:
        """Note why the process ended; the agent has reported it."""
        self.end_reason = reason

    def takes_long(self, task: Task) -> bool:
        """Whether sending a task may take long enough that the loop must not wait for it."""
        parcel = task.parcel
        if parcel.heavy or self.channel.shares_memory:
            return parcel.heavy
        return parcel.encoded.size > PROMPT_BYTES or any(
            named.parcel.heavy and not self.holdings.has(named)
            for named in (task.code, *task.handles)
        )

    def send(self, task: Task, *, again: bool = False, pending: bool = False) -> bool:
        """Send a task and the objects that the executor lacks, unless the task was cancelled.

        The executor is told to get large buffers from other executors if it can; with `again`,
        those that did not come from another executor. With `pending`, the executor has the task,
        which lacks something; if the executor has given the task back meanwhile, it ignores this.
        """
        with self.connection.lock:
            if self.connection.closed:
                raise BrokenPipeError("the executor is gone")
            # In this order: `cancel` first marks the task as done, then checks whether it is sent.
            self._sending = task
            try:
                return not task.done and self._send(task, again, pending)
            finally:
                self._sending = None

    def _send(self, task: Task, again: bool, pending: bool) -> bool:
        holdings = self.holdings
        holdings.define(task.code, again=again)
        for named in task.handles:
            holdings.define(named, again=again)
        try:
            payload, body, descriptors = holdings.pack(task.parcel, again=again)
        except KeyboardInterrupt:
            # `holdings` may say that the executor has memory which it will not get.
            if task.parcel.digests:
                self.channel.abort()
            raise
        names = [str(index) for index in range(len(task.inputs))] if task.inputs else []
        task.sent = holdings.count_task()
        self.channel.send(_run(task, payload, names, pending), body, descriptors)
        return True

    def send_small(self, tasks: list[Task]) -> list[Task]:
        """Send several light tasks in one write; returns those that were cancelled, unsent."""
        with self.connection.lock:
            unsent = [task for task in tasks if task.done]
            batch: list[tuple[Message, Body]] = []
            for task in tasks:
                if task in unsent:
                    continue
                for named in (task.code, *task.handles):
                    self.holdings.define(named)
                packed = payloads.pack(task.parcel.encoded, None)
                task.sent = self.holdings.count_task()
                batch.append((_run(task, packed.payload, []), packed.body))
            self.channel.send_many(batch)
            return unsent

    def resend(self, task: Task, digests: list[bytes], keys: list[bytes]) -> None:
        """Send a task again, with the objects that the executor has reported missing."""
        with self.connection.lock:
            self.holdings.lacks(task, digests, keys)
            # If the executor is gone, the loss of the lane retries or fails the task.
            with contextlib.suppress(OSError):
                self.send(task, again=True, pending=bool(digests or keys))

    def feed(self, task: Task) -> None:
        """Send the items of a task's streamed arguments, as the executor asks for them."""
        self._feeders[task.id] = [
            Feeder(task.id, index, self.channel, source) for index, source in enumerate(task.inputs)
        ]

    def grant(self, task_id: int, stream: int, count: int) -> None:
        """Send so many more items of a streamed argument: the executor has asked for them."""
        for feeder in self._feeders.get(task_id, [])[stream:][:1]:
            feeder.grant(count)

    def stop_feeding(self, task_id: int) -> None:
        """Stop sending the items of a task's streamed arguments."""
        for feeder in self._feeders.pop(task_id, ()):
            feeder.stop()

    def stop(self, task: Task) -> None:
        """Have a task stopped; during a long transfer, by ending the connection.

        The transfer may read the caller's own memory, which the caller may change after `stop`.
        """
        parcel = task.parcel
        if self._sending is task and (parcel.large or parcel.encoded.pickle_length > LONG_BYTES):
            self.channel.abort()
            return
        # The executor may not read, so that another thread waits to send to it. The loop must not
        # wait, too: the loop has the executor killed if necessary.
        connection = self.connection
        run = connection.on_own_thread if self.channel.shares_memory else connection.when_free
        run(lambda: self.tell(Cancel(task.id)))

    def evicted(self, digests: list[bytes]) -> None:
        """Note that the executor dropped these buffers to stay within its cache's limit."""
        self.connection.when_free(lambda: self.holdings.drop_digests(digests))

    def released(self, segments: list[int]) -> None:
        """Note that the executor no longer maps these segments of the client's."""
        with self.connection.lock:
            self.holdings.released(segments)

    def forget(
        self,
        *,
        segments: Sequence[int] = (),
        keys: Sequence[bytes] = (),
        digests: Sequence[bytes] = (),
    ) -> None:
        """Tell the executor which objects and segments no task will refer to again."""

        def tell() -> None:
            message = self.holdings.forget(segments, keys, digests)
            if message is not None:
                self.tell(message)

        self.connection.when_free(tell)

    def disconnected(self) -> None:
        """Note that the executor is out of reach for now."""
        self.neighbor.connected = False

    def reconnected(self) -> None:
        """Note that the executor is within reach again."""
        self.neighbor.connected = True
        self.connection.reconnected()

    def close(self) -> None:
        """Close the connection: the executor is gone for good."""
        self.neighbor.connected = False
        self.connection.close()
        with self.connection.lock:
            self.holdings.clear()
        for task_id in list(self._feeders):
            self.stop_feeding(task_id)


def _run(task: Task, payload: Payload, inputs: list[str], pending: bool = False) -> Run:
    """The message that gives an executor a task."""
    keys = [named.key for named in task.handles] if task.handles else []
    stays = task.staying is not None
    trace = {} if task.trace is None else task.trace.carrier
    code, mode = task.code.key, task.debugged
    name, apart = task.name, task.apart
    return Run(task.id, name, code, payload, keys, inputs, stays, trace, mode, apart, pending)
