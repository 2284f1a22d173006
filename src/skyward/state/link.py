"""The link of a process to shared state: over connections to its owner, or within the process.

Which state a name belongs to is decided here, too: that of a pool, or that of this process alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyward import context, functions
from skyward.errors import ConfigurationError, SkywardError, StateFullError, StateLostError
from skyward.state.owner import FULL, Asked, Owner, Session
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Credentials, connect_peer, node_name
from skyward.wire.messages import Hello, Question, Reply

OWNER = 0
"""The node whose agent has the state."""
COMING_SECONDS = 20.0
"""How long a task waits for an owner that has not started yet."""
BEAT_SECONDS = 5.0
"""How often a process that waits or holds a lock shows that it is there."""
SILENT_SECONDS = 30.0
"""After so long without a word, an end with something open takes the other for lost."""
SLICE_SECONDS = 0.5
"""A waiting thread looks up so often: only then can its task be interrupted."""
SETTLE_SECONDS = 2.0
"""How long an interrupted operation waits to learn whether it was performed."""


Undo = Callable[[Any], tuple[str, tuple[Any, ...]] | None]
"""From the answer to an operation, the operation that takes it back."""


# Not frozen: that would take a tenth of the time of an increment.
@dataclass(slots=True)
class StateOperation:
    """What a handle asks for."""

    kind: str
    name: str
    what: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None
    waits: bool = False
    timeout: float | None = None
    undo: Undo | None = None


class Slot:
    """An operation whose answer has not come yet."""

    __slots__ = ("_told", "code", "lost", "over", "parts", "problem", "value")

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.over = False
        """Whether the answer has come, or will not come."""
        self.value: Any = None
        self.problem = ""
        self.code = ""
        self.lost = ""
        """Why there will be no answer."""
        self.parts: list[Any] | None = None

    def fill(self, value: Any, problem: str, *, more: bool) -> None:
        """Note an answer, or a part of it."""
        if problem:
            self.problem, self.code = problem, str(value)
        elif more:
            self.parts = [*(self.parts or ()), *value]
            return
        else:
            self.value = value if self.parts is None else [*self.parts, *value]
        self.over = True
        self._told.put(None)

    def lose(self, why: str) -> None:
        """Note that no answer will come."""
        self.lost = why
        self.over = True
        self._told.put(None)

    def wake(self) -> None:
        """Have the waiting thread look around: it may have to read the answers now."""
        self._told.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the answer, or to be woken; in slices, so that a task can be interrupted."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.over:
            left = SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                self._told.get(timeout=min(SLICE_SECONDS, max(0.0, left)))
                return self.over
            except queue.Empty:
                if left <= 0:
                    return False
        return True


def wait_readable(poll: select.poll, seconds: float) -> bool:
    """Wait until there is something to read; a task may be interrupted here."""
    while not poll.poll(1000 * min(seconds, SLICE_SECONDS)):
        seconds -= SLICE_SECONDS
        if seconds <= 0:
            return False
    return True


def answered(slot: Slot) -> Any:
    """The value of an answer; raises the error that it tells of."""
    if not slot.problem:
        return slot.value
    raise (StateFullError if slot.code == FULL else ConfigurationError)(slot.problem)


@dataclass(slots=True, eq=False)
class StateConnection:
    """One connection to an owner: any thread asks, and one thread at a time reads the answers."""

    channel: Channel
    who: str
    threaded: bool
    """Whether a thread of its own reads the answers, so that interrupts reach no thread that
    reads; else that is so only while the process holds locks."""
    process: str = ""
    """Names this process to the owner, so that a second connection keeps the locks of the first."""
    direct: bool = False
    """Whether nothing is between this process and the owner that can end the connection alone."""
    held: set[tuple[str, int]] = field(default_factory=set)
    """The locks that the process holds, by name and token."""
    epoch: str = field(init=False, default="")
    lost: str = field(init=False, default="")
    """Why the connection is of no more use; empty if it is."""
    _slots: dict[int, Slot] = field(init=False, default_factory=dict)
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _reader: threading.Thread | None = field(init=False, default=None)
    _reading: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held by the thread that reads."""
    _poll: select.poll = field(init=False, default_factory=select.poll)
    _heard: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        try:
            self.channel.set_timeout(BEAT_SECONDS)
            about = {"who": self.who, "process": self.process, "direct": self.direct}
            self.channel.send(Question("begin", about))
            frame = self.channel.receive()
            reply = messages.decode_as(Reply, frame.kind, frame.meta)
            if reply.problem:
                raise StateLostError(reply.problem)
            self.epoch = str(reply.value)
        except BaseException:
            self.channel.close()
            raise
        # Only poll() reads from now on: it does not wait.
        self.channel.set_blocking(False)
        self._poll.register(self.channel.fileno(), select.POLLIN)
        if self.threaded or self.held:
            self._start_reader()

    def perform(self, operation: StateOperation) -> Any:
        """The owner's answer to an operation."""
        slot = Slot()
        number = next(self._numbers)
        arguments: dict[str, Any] = {
            "of": (operation.kind, operation.name),
            "with": operation.arguments,
        }
        if operation.options:
            arguments["options"] = operation.options
        if operation.waits:
            arguments["waits"] = operation.timeout
        try:
            self._ask(slot, Question(operation.what, arguments, number))
            self._await(slot)
            if operation.kind == "lock":
                self._note_lock(operation, slot)
        except BaseException:
            self._settle(number, slot, operation)
            raise
        if slot.lost:
            raise StateLostError(slot.lost)
        return answered(slot)

    def _note_lock(self, operation: StateOperation, slot: Slot) -> None:
        """Note a lock that the process holds now, or holds no more."""
        if operation.what == "acquire" and slot.value:
            with self._lock:
                self.held.add((operation.name, slot.value[0]))
            # From now on, the owner must hear of this process while it does other things.
            self._start_reader()
        elif operation.what == "release":
            with self._lock:
                self.held.discard((operation.name, operation.arguments[0]))

    def _ask(self, slot: Slot, question: Question) -> None:
        with self._lock:
            if self.lost:
                raise StateLostError(self.lost)
            if not self._slots:
                # Before, nobody listened.
                self._heard = time.monotonic()
            self._slots[question.number] = slot
        try:
            self.channel.send(question)
        except OSError as problem:
            # Perhaps in the middle of a frame: nothing can follow.
            self._lose(f"the connection to it was lost ({problem})")

    def _settle(self, number: int, slot: Slot, operation: StateOperation) -> None:
        """Cancel an operation whose caller was interrupted, or take back what it has done."""
        if operation.undo is None and not operation.waits:
            with self._lock:
                self._slots.pop(number, None)
            return
        with contextlib.suppress(StateLostError, OSError):
            cancelling, other = Slot(), next(self._numbers)
            self._ask(cancelling, Question("cancel", {"with": (number,)}, other))
            # The owner answers in order: an answer to the operation has come before this one.
            self._await(cancelling, SETTLE_SECONDS)
            with self._lock:
                is_open = self._slots.pop(number, None) is not None
            undone = None
            if not is_open and operation.undo is not None and not (slot.problem or slot.lost):
                undone = operation.undo(slot.value)
            if undone is not None:
                what, arguments = undone
                self.perform(StateOperation(operation.kind, operation.name, what, arguments))

    def _await(self, slot: Slot, seconds: float | None = None) -> None:
        """Wait for an answer.

        Without a thread that reads, one of the waiting threads does: two threads that wake each
        other for every answer would take twice the processor time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not slot.over:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if self._reader is not None or not self._reading.acquire(blocking=False):
                # Not for longer: the thread that is to read next may have been interrupted.
                slot.wait(SLICE_SECONDS if left is None else min(left, SLICE_SECONDS))
                continue
            try:
                while not slot.over and not self.lost and (left is None or left > 0):
                    self._read_some(left)
                    left = None if deadline is None else deadline - time.monotonic()
            finally:
                self._reading.release()
                if self._slots:
                    self._pass_on()

    def _pass_on(self) -> None:
        """Have another waiting thread read, if there is one."""
        with self._lock:
            following = next(iter(self._slots.values()), None)
        if following is not None:
            following.wake()

    def _start_reader(self) -> None:
        """Have a thread of its own read from now on."""
        with self._lock:
            if self._reader is not None or self.lost:
                return
            self._reader = threading.Thread(target=self._read, name="skyward-state", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        with self._reading:
            while not self.lost:
                self._read_some(None)

    def _read_some(self, seconds: float | None) -> None:
        """Wait for answers, for so long and at most until the next beat, and hand them out."""
        pause = BEAT_SECONDS if seconds is None else min(BEAT_SECONDS, seconds)
        if not wait_readable(self._poll, pause):
            if pause == BEAT_SECONDS:
                self._beat()
            return
        try:
            for frame in self.channel.poll():
                self._take(messages.decode_as(Reply, frame.kind, frame.meta))
        except (EOFError, OSError, SkywardError, TypeError, ValueError) as problem:
            self._lose(f"the connection to it was lost ({problem})")

    def _take(self, reply: Reply) -> None:
        self._heard = time.monotonic()
        with self._lock:
            get = self._slots.get if reply.more else self._slots.pop
            slot = get(reply.number, None)
        if slot is not None:
            slot.fill(reply.value, reply.problem, more=reply.more)

    def _beat(self) -> None:
        """Show the owner that this process is there, if that matters, and ask the same of it."""
        if not self._slots and not self.held:
            self._heard = time.monotonic()
            return
        silent = time.monotonic() - self._heard
        if silent > SILENT_SECONDS:
            self._part("keep")
            self._lose(f"it has not answered for {silent:.0f} s")
            return
        try:
            self.channel.send(Question("beat"))
        except OSError as problem:
            self._lose(f"the connection to it was lost ({problem})")

    def _part(self, what: str) -> None:
        """Tell the owner, if it hears it, whether the locks of this process are free now."""
        if self.held and not self.lost:
            with contextlib.suppress(OSError):
                self.channel.send(Question(what))

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = why
            slots, self._slots = self._slots, {}
        self.channel.abort()
        for slot in slots.values():
            slot.lose(why)

    def close(self) -> None:
        """End the connection; what still waits is told so, and locks of this process are free."""
        self._part("bye")
        self._lose("the pool of this state is closed")
        reader = self._reader
        if reader is not None and threading.current_thread() is not reader:
            reader.join()
        # A thread that reads looks up when the connection ends, and lets go.
        with self._reading:
            self.channel.close()


class RemoteLink:
    """A link over a connection, which is made when it is first needed, and again after a loss."""

    def __init__(
        self,
        dial: Callable[[], Channel],
        who: str,
        *,
        threaded: bool = True,
        direct: bool = False,
    ) -> None:
        """`dial` connects to the owner; `who` is this process, in words.

        `threaded` and `direct` are those of `StateConnection`; a connection to a socket of this
        machine is direct in any case.
        """
        self._dial, self._who, self._threaded, self._direct = dial, who, threaded, direct
        self._process = secrets.token_hex(8)
        self._held: set[tuple[str, int]] = set()
        """The locks that this process holds, over one connection after the other."""
        self._lock = threading.Lock()
        self._connection: StateConnection | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether there is a connection."""
        connection = self._connection
        return connection is not None and not connection.lost

    def epoch(self) -> str:
        """Names the owner that is there now; `StateLostError` if there is none."""
        return self._connected().epoch

    def _connected(self) -> StateConnection:
        connection = self._connection
        if connection is not None and not connection.lost:
            return connection
        with self._lock:
            lost = self._connection
            if lost is not None:
                if not lost.lost:
                    return lost
                lost.close()
                self._connection = None
            if self._closed:
                raise StateLostError("the pool of this state is closed")
            try:
                channel = self._dial()
                direct = self._direct or channel.is_to_a_socket_here
                self._connection = StateConnection(
                    channel, self._who, self._threaded, self._process, direct, self._held
                )
            except StateLostError:
                raise
            except (OSError, EOFError, SkywardError) as problem:
                raise StateLostError(str(problem)) from problem
            return self._connection

    def perform(self, operation: StateOperation, epoch: str) -> Any:
        """The answer of the owner of that epoch; `StateLostError` if it is lost."""
        connection = self._connected()
        if connection.epoch != epoch:
            raise StateLostError("its owner was lost, and another one has taken its place")
        return connection.perform(operation)

    def close(self) -> None:
        """End the link."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class LocalLink(Session):
    """The way to state of this process alone, for functions that run outside of any pool."""

    def __init__(self) -> None:
        super().__init__()
        self.who = "this process"
        self._owner = Owner()
        self._slots: dict[int, Slot] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def epoch(self) -> str:
        """Names the owner."""
        return self._owner.epoch

    def perform(self, operation: StateOperation, epoch: str) -> Any:
        """The owner's answer to an operation."""
        slot = Slot()
        number = next(self._numbers)
        try:
            with self._lock:
                self._slots[number] = slot
                self._perform(
                    Asked(self, number, operation.waits, operation.timeout),
                    operation,
                    operation.what,
                    operation.arguments,
                )
            slot.wait(operation.timeout if operation.waits else None)
            while not slot.over:
                with self._lock:
                    self._owner.expire()
                slot.wait(0.0)
            return answered(slot)
        except BaseException:
            with self._lock:
                self._slots.pop(number, None)
                self._owner.cancel(self, number)
                self._take_back(operation, slot)
            raise

    def _perform(
        self, asked: Asked, operation: StateOperation, what: str, arguments: tuple[Any, ...]
    ) -> None:
        self._owner.perform(
            asked, operation.kind, operation.name, what, [*arguments], operation.options
        )

    def _take_back(self, operation: StateOperation, slot: Slot) -> None:
        """Take back what an operation has done whose caller was interrupted."""
        if operation.undo is None or not slot.over or slot.problem:
            return
        undone = operation.undo(slot.value)
        if undone is not None:
            self._perform(Asked(self, next(self._numbers)), operation, *undone)

    def answer(
        self, number: int, value: Any = None, problem: str = "", *, more: bool = False
    ) -> None:
        slot = self._slots.get(number) if more else self._slots.pop(number, None)
        if slot is not None:
            slot.fill(value, problem, more=more)


StateLink = RemoteLink | LocalLink


class WorkerState:
    """The way from a process of a node to the state of its pool."""

    def __init__(self) -> None:
        self.credentials: Credentials | None = None
        """What this process proves its identity with; None if it is no worker."""
        self.threaded = True
        """Whether threads run the tasks of this process."""
        self._lock = threading.Lock()
        self._where = ""
        """Where the owner is that the link leads to."""
        self._link: RemoteLink | None = None
        self._inherited: list[RemoteLink] = []
        """The links of the process that this one was forked from: not this one's to close."""

    def prepare(self, credentials: Credentials | None, *, threads: bool) -> None:
        """Set what this process proves its identity with, and whether threads run its tasks.

        A worker does so when it starts. On its main thread, tasks are never interrupted in code of
        ours that reads, so that it can read by itself.
        """
        self.credentials, self.threaded = credentials, threads

    def link(self) -> StateLink | None:
        """The link; None if this process belongs to no pool."""
        link = self._link
        if link is not None and link.alive:
            return link
        if context.VARIABLE not in os.environ:
            return None
        return self._follow()

    def _follow(self) -> StateLink:
        """Go to where the owner is now."""
        with self._lock:
            where = context.instance_info().state
            if self._link is None or where != self._where:
                old, self._where = self._link, where
                self._link = RemoteLink(self._dial, _who(), threaded=self.threaded, direct=True)
                if old is not None:
                    old.close()
            return self._link

    def _dial(self) -> Channel:
        info = _await_owner()
        hello = Hello(info.job_id, f"{PEER}-service-state", pid=os.getpid())
        try:
            return connect_peer(info.state, hello, self.credentials, node_name(info.job_id, OWNER))
        except OSError as problem:
            why = f" ({problem})" if str(problem) else ""
            raise StateLostError(f"node {OWNER}, which has it, does not answer{why}") from problem

    def forked(self) -> None:
        """Forget the connection of the parent process; the child makes its own."""
        if self._link is not None:
            self._inherited.append(self._link)
        self._lock = threading.Lock()
        self._link, self._where = None, ""


worker_state = WorkerState()
os.register_at_fork(after_in_child=worker_state.forked)
_local = LocalLink()


def link_for(on: Any) -> StateLink:
    """The way to the state of `on`, or of the current pool; that of this process if it has none."""
    if on is not None:
        if not hasattr(on, "state_link"):
            raise ConfigurationError(f"on={on!r} has no shared state; give a sky.Compute")
        target: Any = on
    else:
        target = functions.active_compute()
    if target is None:
        return worker_state.link() or _local
    link: StateLink = target.state_link()
    return link


def _await_owner() -> context.InstanceInfo:
    """This process's place in the pool, once the owner of the state is known."""
    deadline = time.monotonic() + COMING_SECONDS
    while not (info := context.instance_info()).state:
        if not info.peers and info.node != OWNER:
            raise StateLostError(
                f"node {info.node} cannot reach node {OWNER}, which has it, because this pool has "
                "Options(cluster=False); use it from the client, or leave that option out"
            )
        if time.monotonic() > deadline:
            raise StateLostError(f"node {OWNER}, which has it, is not there")
        time.sleep(0.05)
    return info


def _who() -> str:
    info = context.instance_info()
    return f"worker {info.worker} of node {info.node} (process {os.getpid()})"


def worker_count(on: Any) -> int:
    """How many workers the pool has whose state `link_for` finds."""
    target: Any = on or functions.active_compute()
    if target is None:
        return context.instance_info().total_workers
    return int(target.worker_count())
